"""Train every arm of the comparison that has no result yet.

    python -m benchmarks.objectives.study main long --jobs 2

Each run has one core to itself (runs repeat bit for bit with one thread). A run that is interrupted
is made again; results that are there stay. Tables and figures are `summary.py`'s and `trl-qurl
report`'s.
"""

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from benchmarks.objectives.arms import EXPERIMENTS, RETIRED, Arm

RESULTS = Path(__file__).parent / "runs"
PRELOADED = [
    "trl.trainer.grpo_trainer",
    "vllm",
    "trl_qurl.trainers.grpo",
    "trl_qurl.lab.demo.record",
    __name__,
]


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; returns the number of runs that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "experiments",
        nargs="*",
        metavar="EXPERIMENT",
        help=f"of {', '.join(EXPERIMENTS)}; default: all",
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="only these seeds")
    parser.add_argument("--arms", nargs="+", help="only arms with one of these in their name")
    parser.add_argument(
        "--rollouts", type=int, help="shorten every run to so many, to try the script out"
    )
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at once, one core each"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument("--list", action="store_true", help="name what is missing, and stop")
    args = parser.parse_args(argv)
    names = args.experiments or list(EXPERIMENTS)
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        parser.error(
            f"unknown experiment {', '.join(unknown)}; choose from {', '.join(EXPERIMENTS)}"
        )
    known = {arm.name for name in names for arm in EXPERIMENTS[name].arms}
    for part in args.arms or ():
        if not any(part in name for name in known):
            parser.error(f"no arm has {part} in its name; there are {', '.join(sorted(known))}")
    missing = missing_runs(names, args.output, args.seeds, args.arms)
    print(f"{len(missing)} runs to make")
    if args.list:
        print("\n".join(str(place.relative_to(args.output)) for _, _, place in missing))
        return 0
    if any(arm.scheme for arm, _, _ in missing):
        from benchmarks.provenance import require_exact_int8

        require_exact_int8()
    return run_all(missing, args.jobs, args.rollouts)


def missing_runs(
    experiments: list[str], output: Path, seeds: list[int] | None, names: list[str] | None
) -> list[tuple[Arm, int, Path]]:
    """Arm, seed and place of every result that is not there, seeds outermost: a table is complete
    early.
    """
    runs = [
        (arm, seed, output / experiment / f"{arm.name}-seed{seed}.jsonl.gz")
        for experiment in experiments
        for seed in sorted({seed for arm in EXPERIMENTS[experiment].arms for seed in arm.seeds})
        for arm in EXPERIMENTS[experiment].arms
        if seed in arm.seeds and arm.changed.get("objective") not in RETIRED
    ]
    return [
        (arm, seed, place)
        for arm, seed, place in runs
        if not place.exists()
        and (seeds is None or seed in seeds)
        and (not names or any(n in arm.name for n in names))
    ]


def run_all(missing: list[tuple[Arm, int, Path]], jobs: int, rollouts: int | None) -> int:
    """Make the runs, `jobs` at a time, each on a separate core, and return how many failed."""
    from trl_qurl.lab.demo.run import ENVIRONMENT

    # Before the server that all runs are forked from imports anything: it then imports vLLM, TRL
    # and torch once.
    for name, value in {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}.items():
        os.environ.setdefault(name, value)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    cores: Queue[int] = Queue()
    for core in sorted(os.sched_getaffinity(0))[:jobs]:
        cores.put(core)
    policy_dir, provenance = prepare()

    def make(numbered: tuple[int, tuple[Arm, int, Path]]) -> bool:
        number, (arm, seed, place) = numbered
        if rollouts is not None:
            arm = Arm(**{**vars(arm), "rollouts": rollouts})
        core = cores.get()
        started = time.monotonic()
        process = context.Process(
            target=child, args=(arm, seed, policy_dir, provenance, place, core)
        )
        process.start()
        process.join()
        cores.put(core)
        outcome = (
            ""
            if place.exists()
            else f"  FAILED, exit status {process.exitcode}, see {place.with_suffix('.log')}"
        )
        seconds = time.monotonic() - started
        print(
            f"{number}/{len(missing)}  {place.parent.name}/{arm.name} seed {seed}  {seconds:.0f} "
            f"s{outcome}",
            flush=True,
        )
        return place.exists()

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(make, enumerate(missing, start=1))).count(False)


def prepare() -> tuple[Path, dict[str, Any]]:
    """The policy that every run starts from, and where and with what the study runs."""
    import torch

    from benchmarks.provenance import provenance
    from trl_qurl.lab.demo.run import prepare_policy

    found = provenance(torch.device("cpu"), measured="trl_qurl")
    return prepare_policy(), {
        name: found[name] for name in ("date", "commit", "hardware", "kind", "versions")
    }


def child(
    arm: Arm, seed: int, policy_dir: Path, provenance: dict[str, Any], place: Path, core: int
) -> None:
    """One run in a separate process, on one core; its output is kept only if it fails."""
    os.sched_setaffinity(0, {core})
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
    log = place.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    from benchmarks.objectives.one_run import train_arm

    torch.set_num_threads(1)
    train_arm(arm, seed, policy_dir, provenance, place)
    log.unlink()
    os._exit(0)  # an engine in this process takes seconds to wind down


if __name__ == "__main__":
    sys.exit(main())
