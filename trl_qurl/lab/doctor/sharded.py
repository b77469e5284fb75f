"""The lines that need two processes: training with FSDP2, whose parameters must be gathered for every sync."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.doctor.lines import Line, ok
from trl_qurl.lab.doctor.policy import build_trainer, is_main
from trl_qurl.lab.doctor.servers import SMALL, build, serve
from trl_qurl.lab.doctor.training import KEPT, describe_probe, describe_training
from trl_qurl.quantization.formats import parse_scheme

if TYPE_CHECKING:
    from trl_qurl import QuRLGRPOTrainer


def train_colocated(scheme: str) -> Iterator[Line]:
    """Two processes, each with an engine of its own."""
    trainer = build_trainer(parse_scheme(scheme))
    KEPT.append(trainer)
    yield _trained("fsdp2", trainer)


def train_served(argument: str) -> Iterator[Line]:
    """Two processes and a server on a third GPU: they gather in one order, or wait for each other for ever."""
    scheme, _, device = argument.partition("@")
    with serve(scheme, device, SMALL) if is_main() else nullcontext() as url:
        [url] = _from_main(url)
        yield _trained("fsdp2-stream", build(scheme, url, weight_sync="stream"))


def _from_main(value: Any) -> list[Any]:
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    PartialState()
    return broadcast_object_list([value], from_process=0)


def _trained(line: str, trainer: QuRLGRPOTrainer) -> Line:
    """Train, save, and load on one process what all have saved."""
    from transformers import AutoModelForCausalLM

    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    rows = [row for row in trainer.state.log_history if "time/sync_s" in row]
    trained, probed = describe_training(line, rows, len(rows)), describe_probe(line, rows)
    processes, way = trainer.accelerator.num_processes, trainer.accelerator.distributed_type.value
    if is_main():
        AutoModelForCausalLM.from_pretrained(trainer.args.output_dir)  # an error if there is nothing, or only shards
    text = f"{processes} processes ({way}), {trained.text}; probe {probed.text}; the saved policy loads"
    return ok(line, text, **trained.data, **probed.data)
