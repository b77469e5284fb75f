"""A bench from start to end: check, let one process per format measure, compare."""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.bench.costs import Measurement
from trl_qurl.lab.bench.prediction import Comparison, Step, compare, predict_step
from trl_qurl.lab.bench.workload import Job, Workload
from trl_qurl.lab.processes import ENGINE_ENVIRONMENT, last_lines, run_child

if TYPE_CHECKING:
    from trl_qurl.quantization import QuantizationScheme

BASELINE = "none"
BUDGETS = {True: 6.0, False: 60.0}
"""Seconds that each kind of measurement may take; quick, or not."""


@dataclass(frozen=True)
class Bench:
    """What was measured and what follows from it.

    Attributes:
        model: As it was named.
        workload: The step that is predicted.
        baseline: That step with 16-bit rollouts.
        measurements: By format, `"none"` for 16 bits.
        comparisons: By quantized format.
        failures: By format, why there is no measurement.
        seconds: How long it all took.
    """

    model: str
    workload: Workload
    baseline: Step
    measurements: dict[str, Measurement]
    comparisons: dict[str, Comparison]
    failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def bench(
    model: str,
    workload: Workload,
    schemes: Sequence[str] | None = None,
    quick: bool = False,
    ignore: Sequence[str] = ("lm_head",),
    engine_kwargs: dict[str, Any] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Bench:
    """Measure what steps with 16-bit and with quantized rollouts cost on this machine.

    Args:
        model: Name on the Hub, or directory with a `config.json`. No weights are needed.
        workload: The step to predict.
        schemes: Names of formats; by default those that this machine has kernels for.
        quick: Whether to measure for a few seconds only and extrapolate more.
        ignore: Modules kept in full precision.
        engine_kwargs: Further arguments of `vllm.LLM`.
        report: Called with a line about what is being measured.

    Returns:
        What was measured and what follows from it.

    Raises:
        ValueError: If arguments do not fit, or the model cannot be quantized.
        ImportError: If vLLM is missing.
        ChildProcessError: If 16-bit rollouts could not be measured; what the process printed says why.
    """
    started = time.monotonic()
    import torch

    from trl_qurl.quantization.schemes import available_schemes, get_scheme
    from trl_qurl.rollout.engine.launch import require_vllm

    chosen = available_schemes() if schemes is None else [get_scheme(name) for name in schemes]
    schemes = [scheme.name for scheme in chosen]

    require_vllm()
    eager = {} if torch.cuda.is_available() else {"enforce_eager": True}  # on a CPU, vLLM would compile for minutes
    measurements: dict[str, Measurement] = {}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        save_config(model, workload, chosen, ignore, directory)
        for scheme in (BASELINE, *schemes):
            job = Job(
                directory,
                None if scheme == BASELINE else scheme,
                workload,
                BUDGETS[quick],
                tuple(ignore),
                measures_training=scheme == BASELINE,
                engine_kwargs=eager | (engine_kwargs or {}),
            )
            report(f"Measuring {'16-bit' if scheme == BASELINE else scheme.upper()} rollouts")
            try:
                measurements[scheme] = run_job(job, Path(directory))
            except ChildProcessError as error:
                if scheme == BASELINE:
                    raise
                failures[scheme] = str(error)
    baseline, training = measurements[BASELINE].engine, measurements[BASELINE].training
    assert training is not None, "it was asked for"
    return Bench(
        model,
        workload,
        predict_step(baseline, training, workload),
        measurements,
        {
            scheme: compare(baseline, measurements[scheme].engine, training, workload)
            for scheme in schemes
            if scheme in measurements
        },
        failures,
        time.monotonic() - started,
    )


def save_config(
    model: str, workload: Workload, schemes: Sequence[QuantizationScheme], ignore: Sequence[str], directory: str
) -> None:
    """Check that the model can be measured, and write its config to a directory.

    Raises:
        ValueError: If the context is too short for the workload, or there is nothing to quantize.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trl_qurl.quantization.layers import quantized_layer_names

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
    for scheme in schemes:
        quantized_layer_names(empty, ignore, scheme)
    config.save_pretrained(directory)


def run_job(job: Job, directory: Path) -> Measurement:
    """Measure in a process of its own, because an engine's memory is freed only when its process ends.

    Raises:
        ChildProcessError: If it failed; the last lines that it printed are on the standard error then.
    """
    name = job.scheme or BASELINE
    source, result, log = (directory / f"{name}.{kind}" for kind in ("job", "result", "log"))
    source.write_bytes(pickle.dumps(job))
    command = [sys.executable, "-m", "trl_qurl.lab.bench.worker", str(source), str(result)]
    try:
        run_child(command, log, environment=ENGINE_ENVIRONMENT | os.environ)
    except ChildProcessError as error:
        print(last_lines(log, 25), file=sys.stderr)
        raise ChildProcessError(
            f"Measuring {'16-bit' if job.scheme is None else job.scheme.upper()} rollouts failed; the last lines that "
            "were printed are above. A smaller --batch or shorter completions need less memory."
        ) from error
    return pickle.loads(result.read_bytes())


def write_bench(result: Bench, path: Path) -> None:
    """Write all figures as JSON."""
    content = asdict(result)
    for scheme, comparison in result.comparisons.items():
        content["comparisons"][scheme]["advice"] = comparison.advice
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
