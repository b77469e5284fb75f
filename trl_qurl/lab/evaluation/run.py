"""The whole evaluation: validate, answer with one process per number format, compute results.

All files are in one directory: `eval.json` has the settings, `<format>.jsonl` the graded answers, and `results.json`
the results. Running again with the same arguments generates only the missing answers.
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
    """Generate and grade answers, compute the results, and write `results.json` to `output_dir`.

    Args:
        model: Hub name or directory of a full-precision model (or of a quantized one, for `"none"`).
        tasks: Benchmarks, as for `trl-qurl eval`.
        output_dir: Where to save answers and results.
        sampling: Number of answers and sampling settings.
        schemes: Number formats for the same weights: `"none"` (unchanged), or format names.
        limit: Use only the first N questions of each task.
        ignore: Modules to keep in full precision in the quantized formats.
        engine_kwargs: Extra arguments for `vllm.LLM`.

    Returns:
        One result per task and format.

    Raises:
        ValueError: If an argument is invalid, or `output_dir` contains answers from different settings.
        FileNotFoundError: If the model or a file does not exist.
        ImportError: If vLLM or math-verify is missing.
        ChildProcessError: If an evaluation process failed; its output says why.
    """
    from trl_qurl.quantization.formats import SCHEMES, UNQUANTIZED, get_scheme, parse_scheme
    from trl_qurl.rollout.engine.kernels import kernel_environment
    from trl_qurl.rollout.engine.launch import content_digest, require_vllm, resolve_model, starting_checkpoint

    if not [parse_scheme(scheme) for scheme in schemes] or len(set(schemes)) < len(schemes):
        raise ValueError(
            f"List each format once, from {', '.join([UNQUANTIZED, *SCHEMES])}; got {', '.join(schemes)}."
        )
    require_vllm()
    require("Evaluating", "math_verify", "rich", extra="eval")
    benchmarks = load_tasks(list(tasks), limit)
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
        "tasks": {task.name: task.digest for task in benchmarks},
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
            job = Job(label, checkpoint, benchmarks, sampling, answers, engine_kwargs)
            run_job(job, environments[scheme])
            files[label] = AnswerFile(answers)
        results = summarize(files, benchmarks, sampling)
        write_json({**settings, "results": [asdict(result) for result in results]}, output_dir / RESULTS_NAME)
    return results


def warn_of_other_formats(directory: Path, schemes: Sequence[str]) -> None:
    """Warn if a policy trained with one format's forward pass is evaluated in another: it differs between them."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    training_scheme = config.get("training_forward", {}).get("scheme")
    others = [scheme for scheme in schemes if scheme != training_scheme]
    if training_scheme and others and "quantization_config" not in config:
        warnings.warn(
            f"This model was trained with {training_scheme}'s forward pass (training_forward='quantized') and may be "
            f"much worse in {', '.join(others)}: evaluate it with --schemes {training_scheme}.",
            stacklevel=3,
        )


def only_process(output_dir: Path, patience: float = 10.0) -> BaseFileLock:
    """Lock the directory against other evaluations; the lock is released when this process ends, if not before."""
    try:
        return FileLock(output_dir / ".lock").acquire(timeout=patience).lock
    except Timeout as error:
        message = f"Another evaluation is writing to {output_dir}: wait for it to finish, or use another --output-dir."
        raise ValueError(message) from error


def keep_settings(settings: dict[str, Any], output_dir: Path) -> None:
    """Save the settings; raise `ValueError` if the directory contains answers from different ones."""
    path = output_dir / "eval.json"
    if not path.exists():
        return write_json(settings, path)
    previous = json.loads(path.read_text(encoding="utf-8"))
    if changed := [name for name, value in settings.items() if previous.get(name) != value]:
        raise ValueError(
            f"{output_dir} contains answers from an evaluation with different settings ({', '.join(changed)}): use "
            "another --output-dir, or delete the directory to start over."
        )


def run_job(job: Job, environment: Mapping[str, str]) -> None:
    """Generate the missing answers in a separate process, with extra environment variables."""
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
            f"Evaluation with {job.label} failed with exit status {done.returncode}; see the output above. Answers so "
            "far are saved: run the same command again to continue."
        )


def write_json(content: dict[str, Any], path: Path) -> None:
    """Write a JSON file atomically."""
    tmp = path.with_suffix(".tmp")
    tmp.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(tmp, path)
