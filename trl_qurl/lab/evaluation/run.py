"""An evaluation from start to end: check, let one process per number format answer, count, and show.

Everything lies in one directory: `eval.json` says what was asked, `<format>.jsonl` holds every answer with its grade,
`results.json` the figures. Started again with the same arguments, it makes only what is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from trl_qurl.lab.evaluation.answers import AnswerFile
from trl_qurl.lab.evaluation.job import Job, Sampling
from trl_qurl.lab.evaluation.results import Result, summarize
from trl_qurl.lab.evaluation.tasks import Task, load_tasks

SETTINGS_NAME, RESULTS_NAME = "eval.json", "results.json"

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine dies with its process, and that with the command
}


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
        model: name on the Hub, or directory of a model in full precision (or of a quantized one, for `"none"`).
        tasks: benchmarks, as for `load_task`.
        output_dir: where answers and results go.
        sampling: how answers are drawn.
        schemes: number formats in which the same weights answer: `"none"` (as they are), or names of formats.
        limit: only the first so many questions of each task.
        ignore: modules kept in full precision by the quantized formats.
        engine_kwargs: further arguments of `vllm.LLM`.

    Returns:
        One result per task and format.

    Raises:
        ValueError: arguments that do not fit, or an `output_dir` with answers to other questions.
        FileNotFoundError: a model or file that is not there.
        ImportError: vLLM or math-verify is missing.
        ChildProcessError: a process of the evaluation failed; what it printed says why.
    """
    check_schemes(schemes)
    loaded = load_tasks(list(tasks), limit)  # before anything slow: a wrong name is found here
    require_packages()
    from trl_qurl.quantization.schemes import UNQUANTIZED
    from trl_qurl.rollout.engine.launch import content_digest, resolve_model, starting_checkpoint

    sixteen_bit, dtype = full_precision()
    labels = {scheme: sixteen_bit if scheme == UNQUANTIZED else scheme.upper() for scheme in schemes}
    engine_kwargs = {"dtype": dtype, **(engine_kwargs or {})}
    directory = resolve_model(model)
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
        for scheme in schemes:
            checkpoint = directory
            if scheme != UNQUANTIZED:
                checkpoint = str(starting_checkpoint(directory, scheme, ignore))
            job = Job(
                labels[scheme],
                checkpoint,
                list(tasks),
                limit,
                sampling,
                str(answers_path(output_dir, scheme)),
                engine_kwargs,
            )
            run_job(job, loaded, output_dir / f"{scheme}.job.json")
        results = summarize(
            {labels[scheme]: AnswerFile(answers_path(output_dir, scheme)) for scheme in schemes}, loaded, sampling
        )
        write_json({**settings, "results": [asdict(result) for result in results]}, output_dir / RESULTS_NAME)
    return results


def check_schemes(schemes: Sequence[str]) -> None:
    """Refuse number formats that there are not."""
    from trl_qurl.quantization.schemes import SCHEMES, UNQUANTIZED, parse_scheme

    for scheme in schemes:
        parse_scheme(scheme)
    if not schemes or len(set(schemes)) < len(schemes):
        raise ValueError(
            f"Name each format once, from {', '.join([UNQUANTIZED, *SCHEMES])}; got {', '.join(schemes) or 'nothing'}."
        )


def full_precision() -> tuple[str, str]:
    """The 16-bit format of this machine, as shown and as vLLM calls it.

    Not vLLM's own choice, which makes FP16 of the float32 weights that training saves.
    """
    import torch

    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "FP16", "float16"
    return "BF16", "bfloat16"


def require_packages() -> None:
    """Fail at once if what generates or grades is missing, and not after an hour."""
    from trl_qurl.rollout.engine.launch import require_vllm

    require_vllm()
    try:
        import math_verify  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        raise ImportError("Evaluating needs math-verify and rich: run `pip install trl-qurl[eval]`.") from error


def answers_path(output_dir: Path, scheme: str) -> Path:
    """File of a format's answers."""
    return output_dir / f"{scheme}.jsonl"


def only_process(output_dir: Path, patience: float = 10.0) -> FileLock:
    """A lock that no two evaluations hold in one directory; it is free again when its process is gone.

    Args:
        output_dir: of the evaluation.
        patience: seconds to wait for one that is about to end.

    Raises:
        ValueError: another one runs there.
    """
    lock = FileLock(output_dir / ".lock")
    try:
        lock.acquire(timeout=patience)
    except Timeout as error:
        raise ValueError(
            f"Another evaluation is writing to {output_dir}: wait for it, or give another --output-dir."
        ) from error
    return lock


def keep_settings(settings: dict[str, Any], output_dir: Path) -> None:
    """Write what was asked, or compare it with what was asked before.

    Raises:
        ValueError: the directory has answers to something else.
    """
    path = output_dir / SETTINGS_NAME
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name, value in settings.items() if before.get(name) != value]
        if differing:
            raise ValueError(
                f"{output_dir} holds answers of an evaluation that differs in {', '.join(differing)}: give another "
                "--output-dir, or delete that one to start again."
            )
        return
    write_json(settings, path)


def run_job(job: Job, tasks: Sequence[Task], path: Path) -> None:
    """Let a process of its own make what is missing of a job.

    Raises:
        ChildProcessError: it failed.
    """
    file = AnswerFile(Path(job.answers))
    wanted = [request for task in tasks for _, requests in job.sampling.requests(task) for request in requests]
    if not file.missing(wanted):
        return
    job.write(path)
    defaults = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    command = [sys.executable, "-m", "trl_qurl.lab.evaluation.worker", str(path)]
    done = subprocess.run(command, env={**os.environ, **defaults}, check=False)
    if done.returncode:
        raise ChildProcessError(
            f"Evaluating with {job.label} ended with exit status {done.returncode}; the lines above say why. What was "
            "answered is kept: the same command goes on from there."
        )
    path.unlink()


def write_json(content: dict[str, Any], path: Path) -> None:
    """Write a file that is complete whenever it is there."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(draft, path)
