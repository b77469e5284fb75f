"""What does this project do on your GPU? One command that checks, measures, trains and tests.

    python benchmarks/gpu_hour.py -o gpu-hour              # at most 40 minutes
    python benchmarks/gpu_hour.py -o gpu-hour --minutes 9  # the most valuable parts
    python benchmarks/gpu_hour.py -o rehearsal --rehearse  # tiny sizes, also on a CPU

The most valuable parts come first: the bits of rounded weights, reloads in three formats, rollouts
of 7B in BF16, INT8 and FP8 with the host's time beside the kernels', and steps of plain TRL and of
ours.

Each part is a child process with a log and a time limit. If one fails or hangs, that is recorded,
and the next one starts. The same command with the same directory resumes: it runs all parts that
have not yet succeeded. Parts that need more time than is left are skipped. `results.json` holds all
figures; `results.md` is for people. `--archive` packs everything into one file after each part.

Use a GPU without other jobs. Steps of several formats are taken one format after another, because a
GPU does not hold several trainers. The durations are guesses.
"""

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from gpu_hour_plan import FOLDER, Part, Plan
from gpu_hour_report import publish, read_figures, write_atomically
from provenance import ROOT, commit, provenance

from trl_qurl.lab.processes import ChildFailure, last_lines, run_child

PACKAGES = ("vllm", "peft", "matplotlib", "rich", "pytest")
OK, FAILED, SKIPPED = "ok", "failed", "skipped"
PATIENCE = 2.0  # how many times its estimate a part may take, if there is time
IN_REHEARSALS = 20.0  # the same; the estimates are those of a GPU
LARGEST = 10**6  # bytes of a file in the archive: logs, figures and pictures are smaller


def run_part(part: Part, directory: Path, seconds: float) -> dict[str, Any]:
    """Run a part for at most so many seconds, and return what `results.json` says about it."""
    folder, started = directory / part.name, time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)  # results of a failed attempt
    folder.mkdir()
    shown = shlex.join(["python", *part.command]).replace(f"{ROOT}/", "").replace(FOLDER, part.name)
    result: dict[str, Any] = {"status": OK, "reason": "", "command": shown, "exit_status": 0}
    result |= {"date": date.today().isoformat(), "commit": commit(".")}
    command = [sys.executable, *(word.replace(FOLDER, str(folder)) for word in part.command)]

    def check_time(last_line: str) -> None:
        if time.monotonic() - started > seconds:
            raise TimeoutError

    # Killed processes leave temporary files, and a 7B checkpoint can be one of them.
    with tempfile.TemporaryDirectory(prefix="gpu-hour-", ignore_cleanup_errors=True) as scratch:
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # Killed engines leave semaphores, and that warning would follow the message of an error.
        quiet = {"PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"}
        # trainers would spread over several
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        environment = (
            os.environ
            | quiet
            | {"PYTHONPATH": paths, "TMPDIR": scratch, "CUDA_VISIBLE_DEVICES": first}
        )
        try:
            run_child(command, folder / "log.txt", check_time, every=0.5, environment=environment)
        except TimeoutError:
            result |= {
                "status": FAILED,
                "exit_status": None,
                "reason": f"Killed after {seconds:.0f} seconds.",
            }
        except ChildFailure as error:
            killed = f"Killed by signal {-error.status}. " if error.status < 0 else ""
            reason = f"{killed}{last_lines(folder / 'log.txt', 1) or 'No output.'}"
            result |= {"status": FAILED, "exit_status": error.status, "reason": reason}
    result |= {"seconds": round(time.monotonic() - started, 1), "log": f"{part.name}/log.txt"}
    try:
        result["figures"] = read_figures(part.name.partition("-")[0], folder)
        cells = result["figures"].get("cells", ())
        failures = list(
            dict.fromkeys(
                f"{cell['way']}: {cell['failure']}" for cell in cells if "failure" in cell
            )
        )
    except Exception as error:  # the next part starts in any case
        result["figures"], failures = {}, [f"Wrote no results ({type(error).__name__}: {error})."]
    if failures and result["status"] == OK:
        result |= {"status": FAILED, "reason": "; ".join(failures)}
    return result


def run_plan(
    parts: Sequence[Part],
    directory: Path,
    minutes: float,
    record: dict[str, Any],
    archive: Path | None = None,
) -> None:
    """Run the remaining parts that fit into the time, and save the results after each one."""
    results = record["parts"]
    deadline = time.monotonic() + 60 * minutes
    patience = IN_REHEARSALS if record["rehearsal"] else PATIENCE
    for part in parts:
        left = max(0.0, deadline - time.monotonic())
        if results.get(part.name, {}).get("status") == OK:
            print(f"{part.name}: done before")
        elif part.memory_gb > record.get("gpu_gb", 0.0):
            _skip(part, f"Needs a GPU with {part.memory_gb:.0f} GB.", results)
        elif part.seconds > left:
            reason = f"Takes about {part.seconds:.0f} s, but {left:.0f} s were left."
            _skip(part, f"{reason} The same command resumes.", results)
        else:
            limit = min(patience * part.seconds, left)
            print(f"{part.name}: {limit:.0f} s at most; {left:.0f} s are left", flush=True)
            result = results[part.name] = run_part(part, directory, limit)
            print(
                f"{part.name}: {result['status']} after {result['seconds']:.0f} s. "
                f"{result['reason'][:300]}",
                flush=True,
            )
        record["parts"] = {
            other.name: results[other.name] for other in parts if other.name in results
        }
        publish(record, directory)
        if archive is not None:
            pack(directory, archive)


def pack(directory: Path, archive: Path) -> None:
    """Pack the files of a directory that are not large, replacing the last archive atomically."""
    tmp = archive.with_name(f".{archive.name}")
    with tarfile.open(tmp, "w:gz") as packed:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and path.stat().st_size <= LARGEST:
                packed.add(path, Path(directory.name, path.relative_to(directory)))
    os.replace(tmp, archive)


def _skip(part: Part, reason: str, results: dict[str, Any]) -> None:
    """Record that a part was skipped, unless it failed before."""
    print(f"{part.name}: skipped. {reason}")
    if results.get(part.name, {}).get("status") != FAILED:
        results[part.name] = {"status": SKIPPED, "reason": reason, "figures": {}}


def open_record(directory: Path, setup: dict[str, Any]) -> dict[str, Any]:
    """Return the results so far, with the provenance of this run.

    Raises:
        ValueError: If the directory holds something else.
    """
    path = directory / "results.json"
    cuda = torch.cuda.is_available()
    record = {
        **provenance(torch.device("cuda" if cuda else "cpu"), measured="."),
        **setup,
        "parts": {},
    }
    if cuda:
        record["gpu_gb"] = round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1)
    if path.exists():
        try:
            before = json.loads(path.read_text())
            record["parts"] = before["parts"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}): choose another -o.") from error
        for name in ("hardware", *setup):
            if (value := before.get(name)) != record[name]:
                raise ValueError(
                    f"{path} has {name} {value!r}, but now it is {record[name]!r}: choose another "
                    "-o."
                )
    elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(
            f"{directory} is neither an empty directory nor one of this command's: choose another "
            "-o."
        )
    return record


def main(argv: Sequence[str] | None = None) -> int:
    """Check the options, run the plan, and return exit status 1 if a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIRECTORY", help="for results and logs"
    )
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="time for all parts (default: %(default)g)"
    )
    parser.add_argument("--archive", type=Path, metavar="FILE", help="a .tgz of everything")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny models, in float32 where there is a choice"
    )
    arguments = parser.parse_args(argv)
    try:
        if not arguments.minutes > 0:
            raise ValueError(f"--minutes is {arguments.minutes:g}: give more than 0.")
        if not torch.cuda.is_available() and not arguments.rehearse:
            raise ValueError(
                "torch sees no GPU (`trl-qurl doctor` says why): pass --rehearse to try this on a "
                "CPU."
            )
        if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
            raise ValueError(
                f"Not installed: {', '.join(missing)}. Run `make setup`, and use .venv/bin/python."
            )
        record = open_record(arguments.output, {"rehearsal": arguments.rehearse})
        arguments.output.mkdir(parents=True, exist_ok=True)
        write_atomically(arguments.output / "results.json", json.dumps(record, indent=2))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        run_plan(
            Plan(arguments.rehearse).parts(),
            arguments.output.resolve(),
            arguments.minutes,
            record,
            arguments.archive,
        )
    except KeyboardInterrupt:
        print("Interrupted. The same command resumes.")
        return 130
    print(f"Written to {arguments.output}: results.md, results.json, pictures and logs")
    return int(any(part["status"] == FAILED for part in record["parts"].values()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, which kills the running part
    sys.exit(main())
