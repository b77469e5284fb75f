"""An evaluation from start to end: check, let one process per number format answer, count.

Everything is in one directory: `eval.json` says what was asked, `<format>.jsonl` holds every answer with its grade,
`results.json` the figures. Run again with the same arguments, it generates only what is missing.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from trl_qurl.lab.device import full_precision
from trl_qurl.lab.evaluation.answers import AnswerFile
from trl_qurl.lab.evaluation.job import Job, Sampling
from trl_qurl.lab.evaluation.results import Result, summarize
from trl_qurl.lab.evaluation.tasks import load_tasks
from trl_qurl.lab.packages import require
from trl_qurl.lab.processes import ENGINE_ENVIRONMENT

RESULTS_NAME = "results.json"


def evaluate(
    model: str,
    tasks: Sequence[str],
    output_dir: Path,
    sampling: Sampling,
    schemes: Sequence[str] = ("none",),
    limit: int | None = None,
    ignore: Sequence[str] = ("lm_head",),
    engine_kwargs: dict[str, Any] | None = None,
) -> list[Result]:
    """Answer, grade and count; writes `results.json` to `output_dir`.

    Args:
        model: Name on the Hub, or directory of a model in full precision (or of a quantized one, for `"none"`).
        tasks: Benchmarks, as for `trl-qurl eval`.
        output_dir: Where answers and results go.
        sampling: How answers are drawn.
        schemes: Number formats in which the same weights answer: `"none"` (as they are), or names of formats.
        limit: Only the first N questions of each task.
        ignore: Modules kept in full precision by the quantized formats.
        engine_kwargs: Further arguments of `vllm.LLM`.

    Returns:
        One result per task and format.

    Raises:
        ValueError: If arguments do not fit, or `output_dir` holds answers to other questions.
        FileNotFoundError: If a model or file does not exist.
        ImportError: If vLLM or math-verify is missing.
        ChildProcessError: If a process of the evaluation failed; what it printed says why.
    """
    from trl_qurl.quantization.formats import SCHEMES, UNQUANTIZED, get_scheme, parse_scheme
    from trl_qurl.rollout.engine.kernels import kernel_environment
    from trl_qurl.rollout.engine.launch import content_digest, require_vllm, resolve_model, starting_checkpoint

    if not [parse_scheme(scheme) for scheme in schemes] or len(set(schemes)) < len(schemes):
        raise ValueError(
            f"Name each format once, from {', '.join([UNQUANTIZED, *SCHEMES])}; got {', '.join(schemes)}."
        )
    require_vllm()
    require("Evaluating", "math_verify", "rich", extra="eval")
    loaded = load_tasks(list(tasks), limit)
    sixteen_bit, dtype = full_precision()
    engine_kwargs = {"dtype": dtype, **(engine_kwargs or {})}
    environments = {
        scheme: kernel_environment(None if scheme == UNQUANTIZED else get_scheme(scheme)) for scheme in schemes
    }
    directory = resolve_model(model)
    warn_of_other_formats(Path(directory), schemes)
    output_dir.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": model,
        "model_digest": content_digest(Path(directory)),
        "tasks": {task.name: task.digest for task in loaded},
        "sampling": asdict(sampling),
        "ignore": sorted(ignore),
    }
    with only_process(output_dir):
        keep_settings(settings, output_dir)
        files = {}
        for scheme in schemes:
            label, checkpoint, answers = sixteen_bit, directory, output_dir / f"{scheme}.jsonl"
            if scheme != UNQUANTIZED:
                label, checkpoint = scheme.upper(), str(starting_checkpoint(directory, scheme, ignore))
            job = Job(label, checkpoint, loaded, sampling, answers, engine_kwargs)
            run_job(job, environments[scheme])
            files[label] = AnswerFile(answers)
        results = summarize(files, loaded, sampling)
        write_json({**settings, "results": [asdict(result) for result in results]}, output_dir / RESULTS_NAME)
    return results


def warn_of_other_formats(directory: Path, schemes: Sequence[str]) -> None:
    """Warn that a policy trained in the forward pass of one format is another policy in any other."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    trained = config.get("training_forward", {}).get("scheme")
    others = [scheme for scheme in schemes if scheme != trained]
    if trained and others and "quantization_config" not in config:
        warnings.warn(
            f"This model was trained in the forward pass of {trained} (training_forward='quantized'), and may be much "
            f"worse in {', '.join(others)}: evaluate it with --schemes {trained}.",
            stacklevel=3,
        )


def only_process(output_dir: Path, patience: float = 10.0) -> BaseFileLock:
    """Lock the directory against other evaluations; the lock is free again when its process ends."""
    try:
        return FileLock(output_dir / ".lock").acquire(timeout=patience).lock
    except Timeout as error:
        message = f"Another evaluation is writing to {output_dir}: wait for it, or give another --output-dir."
        raise ValueError(message) from error


def keep_settings(settings: dict[str, Any], output_dir: Path) -> None:
    """Write what was asked, or refuse a directory that has answers to something else."""
    path = output_dir / "eval.json"
    if not path.exists():
        return write_json(settings, path)
    before = json.loads(path.read_text(encoding="utf-8"))
    if differing := [name for name, value in settings.items() if before.get(name) != value]:
        raise ValueError(
            f"{output_dir} holds answers of an evaluation that differs in {', '.join(differing)}: give another "
            "--output-dir, or delete that one to start again."
        )


def run_job(job: Job, environment: Mapping[str, str]) -> None:
    """Let a process of its own, with these further variables, generate what is missing."""
    file = AnswerFile(job.answers)
    if not any(file.missing(requests) for _, _, requests in job.requests):
        return
    path = job.answers.with_suffix(".job")
    path.write_bytes(pickle.dumps(job))
    command = [sys.executable, "-m", "trl_qurl.lab.evaluation.worker", str(path)]
    done = subprocess.run(command, env={**ENGINE_ENVIRONMENT, **os.environ, **environment}, check=False)
    path.unlink()
    if done.returncode:
        raise ChildProcessError(
            f"Evaluating with {job.label} ended with exit status {done.returncode}; the lines above say why. The "
            "answers so far are kept: run the same command again to continue."
        )


def write_json(content: dict[str, Any], path: Path) -> None:
    """Write a file that is complete whenever it is there."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(draft, path)
