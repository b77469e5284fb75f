"""A stream that a real engine receives, with a stand-in for NCCL: what the engine computes then, and
what a fresh one does.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from child import print_record
from fresh_engine import answer, probe
from support.fake_server import HandedOver, NoStream
from tiny import ENGINE, KEPT, stream_of, tiny_model, tiny_tokenizer
from vllm import LLM

from trl_qurl.quantization import write_checkpoint
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.rollout.background import in_background
from trl_qurl.rollout.checks.tensors import MeteredStream
from trl_qurl.rollout.engine.broadcast import Broadcast
from trl_qurl.rollout.routes import stream_metadata
from trl_qurl.rollout.wire import WORKER_EXTENSION, WeightUpdate


def main(directory, name):
    """Start an engine from one model, stream another into it, and start one from that."""
    for seed in (0, 1):
        model = tiny_model(seed=seed, dtype=torch.bfloat16)
        write_checkpoint(model, tiny_tokenizer(), name, directory / str(seed))
    settings = ENGINE | {"max_model_len": 64, "max_num_seqs": 16}
    engine = LLM(f"{directory}/0", **settings, worker_extension_cls=WORKER_EXTENSION)
    KEPT.append(engine)
    record = {"started": answer(engine)}

    between = HandedOver()
    torch.cuda.Stream = NoStream
    [worker] = engine.collective_rpc(lambda wrapper: wrapper.worker)
    worker.weight_transfer_engine = SimpleNamespace(model_update_group=between.receiver())
    weights = stream_of(model, name)
    update = WeightUpdate("v1", digest=True, metadata=stream_metadata(weights))
    sent = MeteredStream(weights.tensors(model_parameters(model)), {})
    request = in_background(
        engine.collective_rpc, "load_rollout_weights", kwargs={"update": update._asdict()}
    )
    Broadcast(between.sender()).send(sent, request)
    request.result()
    engine.collective_rpc("compare_rollout_digests", kwargs={"sent": sent.digests})

    record["version"] = engine.collective_rpc("rollout_version")
    record["streamed"] = answer(engine)
    record["fresh"] = probe(f"{directory}/1")
    print_record(record)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
