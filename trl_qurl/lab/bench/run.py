"""The whole benchmark: validate, measure each format in a separate process, compare."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.bench.costs import EngineCosts, TrainingCosts
from trl_qurl.lab.bench.memory import ENGINE_SHARE, find_device, why_too_large
from trl_qurl.lab.bench.prediction import Comparison, Step, compare, predict_step
from trl_qurl.lab.bench.workload import BASELINE, TRAINING, Job, Workload
from trl_qurl.lab.formats import candidates, fitting_formats
from trl_qurl.lab.processes import ENGINE_ENVIRONMENT, call_in_child

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUDGETS = {True: 6.0, False: 60.0}
"""Time limit in seconds per kind of measurement, with and without `quick`."""

KINDS = 2
"""Number of kinds of measurement in one process: completions and syncs, or scoring and updates."""


@dataclass(frozen=True)
class Bench:
    """Measurements and predictions.

    Attributes:
        model: Name or directory from the command line.
        workload: The step to predict.
        measurements: Costs by format, `"none"` for 16 bits.
        training: Costs of the rest of a step; `None` if not measured.
        baseline: Predicted step with 16-bit rollouts, if those were measured.
        comparisons: Comparison with the baseline by quantized format.
        too_large: Reason for not measuring the rest of a step, if the policy does not fit.
        failures: Reason for a missing measurement, by part (a format or `"training"`).
        seconds: Total run time.
    """

    model: str
    workload: Workload
    measurements: dict[str, EngineCosts] = field(default_factory=dict)
    training: TrainingCosts | None = None
    baseline: Step | None = None
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    too_large: str | None = None
    failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def concluded(self) -> Bench:
        """Return a copy with predictions filled in."""
        before = self.measurements.get(BASELINE)
        if before is None:
            return self
        return replace(
            self,
            baseline=predict_step(before, self.training, self.workload),
            comparisons={
                scheme: compare(before, costs, self.training, self.workload)
                for scheme, costs in self.measurements.items()
                if scheme != BASELINE
            },
        )


def bench(
    model: str,
    workload: Workload,
    schemes: Sequence[str] | None = None,
    quick: bool = False,
    ignore: Sequence[str] = ("lm_head",),
    engine_kwargs: Mapping[str, Any] = MappingProxyType({}),
    report: Callable[[str], None] = lambda line: None,
    output: Path | None = None,
    weight_sync: str = "auto",
) -> Bench:
    """Measure the cost of training steps with 16-bit and with quantized rollouts on this machine.

    Args:
        model: Hub name or directory with a `config.json`. No weights are needed.
        workload: The step to predict.
        schemes: Format names; by default all that this machine and the model support.
        quick: Measure for only a few seconds and extrapolate more.
        ignore: Modules to keep in full precision.
        engine_kwargs: Extra arguments for `vllm.LLM`.
        report: Called with each progress message.
        output: JSON file, rewritten after each measurement.
        weight_sync: `"adapter"` also measures each format with an unmerged adapter in the engine.

    Returns:
        Measurements and predictions.

    Raises:
        ValueError: If an argument is invalid, or the model cannot be quantized.
        ImportError: If vLLM or PEFT is missing.
        ChildProcessError: If no measurement succeeded; the process output says why.
    """
    started = time.monotonic()
    import torch

    from trl_qurl.rollout.engine.launch import require_vllm

    require_vllm()
    if weight_sync == "adapter" and not workload.lora_rank:
        raise ValueError("--weight-sync adapter requires an adapter: set its rank, for example --lora-rank 16.")
    if workload.lora_rank and importlib.util.find_spec("peft") is None:
        raise ImportError("Adapters require PEFT, but it is not installed: run `pip install 'trl-qurl[peft]'`.")
    candidates(schemes)  # report unknown names before any slow work
    # Without enforce_eager, vLLM compiles for minutes on a CPU.
    arguments = {**({} if torch.cuda.is_available() else {"enforce_eager": True}), **engine_kwargs}
    with tempfile.TemporaryDirectory() as directory:
        empty = save_config(model, workload, directory)
        chosen = fitting_formats(empty, schemes, ignore, report)
        share = engine_kwargs.get("gpu_memory_utilization", ENGINE_SHARE)
        result = Bench(model, workload, too_large=why_too_large(empty, workload, find_device(), share))
        holds = result.too_large is None
        job = Job(
            directory, None, workload, BUDGETS[quick], tuple(ignore), holds_policy=holds, engine_kwargs=arguments
        )
        jobs = [
            replace(job, scheme=name, adapter=adapter)
            for name in (None, *(scheme.name for scheme in chosen))
            for adapter in ([False, True] if weight_sync == "adapter" and name else [False])
        ]
        if result.too_large is None:
            jobs.append(replace(job, part=TRAINING))
        else:
            report(result.too_large)
        jobs_started = time.monotonic()
        for number, part in enumerate(jobs):
            name, elapsed = part.name, time.monotonic() - jobs_started
            per_job = elapsed / number if number else KINDS * job.budget
            left = timedelta(seconds=round(per_job * (len(jobs) - number)))
            times = f"{timedelta(seconds=round(elapsed))} so far, about {left} left"
            report(f"Measuring {part.description} ({number + 1} of {len(jobs)}; {times})")
            try:
                costs = run_job(part)
                measurements = result.measurements | ({} if name == TRAINING else {name: costs})
                change = {TRAINING: costs} if name == TRAINING else {"measurements": measurements}
            except ChildProcessError as error:
                if part is jobs[-1] and not result.measurements:
                    raise
                change = {"failures": {**result.failures, name: str(error)}}
            result = replace(result, **change, seconds=time.monotonic() - started).concluded()
            if output is not None:
                write_bench(result, output)
    report(f"Finished in {timedelta(seconds=round(result.seconds))}")
    return result


def save_config(model: str, workload: Workload, directory: str) -> PreTrainedModel:
    """Write the model's config to a directory, and return the model on the meta device.

    Raises:
        ValueError: If the context is too short for the workload.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    needed = workload.prompt_len + workload.completion_len
    if context is not None and needed > context:
        raise ValueError(
            f"Prompts of {workload.prompt_len} and completions of {workload.completion_len} tokens do not fit into "
            f"the model's context of {context}: shorten --prompt-len or --completion-len."
        )
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(directory)
    return empty


def run_job(job: Job) -> Any:
    """Measure in a separate process, because an engine's memory is freed only when its process ends.

    Raises:
        ChildProcessError: If the process failed. Its last output lines go to standard error.
    """
    failure = (
        f"Measuring {job.description} failed; the last output lines are above. If it ran out of memory, lower --batch "
        "or --completion-len."
    )
    return call_in_child("trl_qurl.lab.bench.worker", job, failure, ENGINE_ENVIRONMENT | os.environ)


def write_bench(result: Bench, path: Path) -> None:
    """Write all results as JSON."""
    content = asdict(result)
    for scheme, comparison in result.comparisons.items():
        content["comparisons"][scheme]["advice"] = comparison.advice
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
