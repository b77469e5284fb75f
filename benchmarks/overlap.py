"""Time rollouts one step ahead of the trainer: a server on one core, the trainer on the other.

    python benchmarks/overlap.py MODEL [--scheme none|int8] [--dtype float32] [--rollouts 8] [--longest 16]

Trains the chat model of `real_model.py` on one-digit arithmetic, each mode in a process of its own, one after the
other: with a server and `rollouts_ahead` 0 and 1, and with a colocated engine on both cores. Each mode is timed with
the reward as it is, and with one that takes three seconds more. Prints medians of seconds per rollout, without the
first two.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
MODES = {
    "server": {"vllm_mode": "server", "rollouts_ahead": 0},
    "server, one rollout ahead": {"vllm_mode": "server", "rollouts_ahead": 1},
    "colocated, both cores": {"vllm_mode": "colocate"},
}
PORT = 8017
SKIPPED = 2  # rollouts before the first that counts: the start, and the first one ahead
COLUMNS = {
    "generation": "time/generate_s",
    "waiting": "time/wait_for_rollout_s",
    "sync": "time/sync_s",
    "scoring": "time/logps_s",
}


def main() -> None:
    """Time all modes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("--scheme", default="int8", help="format of the rollouts, or none (default: int8)")
    parser.add_argument("--dtype", default="bfloat16", help="of the engines (default: bfloat16)")
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=32, help="per rollout (default: 32)")
    parser.add_argument("--longest", type=int, default=16, help="tokens of a completion (default: 16)")
    parser.add_argument("--one", nargs=2, metavar=("MODE", "SECONDS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("RECORD " + json.dumps(train(args, MODES[args.one[0]], float(args.one[1]))))
        return
    print(f"{'':<28} {'reward':>7} {'rollout':>8} " + " ".join(f"{name:>10}" for name in COLUMNS))
    for delay in (0.0, 3.0):
        for mode, settings in MODES.items():
            is_served = settings["vllm_mode"] == "server"
            with server(args) if is_served else nothing():
                found = run_child(mode, delay, cores="1" if is_served else "0,1")
            columns = " ".join(f"{found[name]:>10.1f}" if name in found else f"{'':>10}" for name in COLUMNS)
            print(f"{mode:<28} {f'+{delay:.0f} s':>7} {found['rollout']:>8.1f} {columns}", flush=True)


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a process with this many threads."""
    from trl_qurl.lab.demo.run import ENVIRONMENT

    own = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_API_KEY": "benchmark"}
    return {**ENVIRONMENT, **os.environ, **own, "PYTHONPATH": str(ROOT)}


@contextmanager
def nothing() -> Any:
    """Stand in for a server."""
    yield


@contextmanager
def server(args: argparse.Namespace) -> Any:
    """Run a server on the first core."""
    command = ["taskset", "-c", "0", sys.executable, "-m", "trl_qurl", "serve", args.model, "--port", str(PORT)]
    command += ["--scheme", args.scheme, "--dtype", args.dtype, "--enforce-eager", "--max-model-len", "256"]
    process = subprocess.Popen(
        command,
        env=environment(1),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while process.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5)
                break
            time.sleep(1)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def run_child(mode: str, delay: float, cores: str) -> dict[str, float]:
    """Train in a process bound to these cores."""
    command = ["taskset", "-c", cores, sys.executable, *sys.argv, "--one", mode, str(delay)]
    done = subprocess.run(command, env=environment(cores.count(",") + 1), capture_output=True, text=True, check=False)
    records = [line for line in done.stdout.splitlines() if line.startswith("RECORD ")]
    if not records:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(records[0].removeprefix("RECORD "))


def train(args: argparse.Namespace, settings: dict[str, Any], delay: float) -> dict[str, float]:
    """Train, and return medians over the rollouts."""
    sys.path.insert(0, str(ROOT))
    from datasets import Dataset
    from transformers import TrainerCallback

    from benchmarks.chat_tasks import TASKS
    from trl_qurl import QuRLGRPOTrainer
    from trl_qurl.lab.demo.chat import build_chat_config
    from trl_qurl.lab.device import keep_freed_memory

    keep_freed_memory()
    task, began = TASKS["arithmetic"], []

    def reward(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
        time.sleep(delay)
        return [task.reward(turns[0]["content"], right) for turns, right in zip(completions, answer, strict=True)]

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % args.steps_per_generation == 0:
                began.append(time.perf_counter())

    changed = {"max_completion_length": args.longest, "vllm_max_model_length": 256, **settings}
    changed["per_device_train_batch_size"] = args.completions // 4
    if settings["vllm_mode"] == "server":
        changed |= {"vllm_server_base_url": f"http://127.0.0.1:{PORT}", "vllm_engine_kwargs": {}}
        changed |= {"vllm_server_timeout": 600.0}
    else:
        changed["vllm_engine_kwargs"] = {"enforce_eager": True, "dtype": args.dtype}
    scheme = None if args.scheme == "none" else args.scheme
    with tempfile.TemporaryDirectory() as directory:
        config = build_chat_config(scheme, Path(directory), args.rollouts, seed=0, **changed)
        prompts, answers = zip(*task.learned, strict=True)
        data = Dataset.from_dict({"prompt": list(prompts), "answer": list(answers)})
        trainer = QuRLGRPOTrainer(
            model=args.model, reward_funcs=reward, args=config, train_dataset=data, callbacks=[Clock()]
        )
        trainer.train()
    began.append(time.perf_counter())
    seconds = [end - start for start, end in zip(began, began[1:], strict=False)]
    rows = [row for row in trainer.state.log_history if "time/generate_s" in row]
    found = {"rollout": median(seconds[SKIPPED:])}
    for name, metric in COLUMNS.items():
        if metric in rows[-1]:
            found[name] = median(row[metric] for row in rows[SKIPPED:])
    return found


if __name__ == "__main__":
    main()
