"""Lines that say what a run is doing: one while it works, and one for each step."""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Trainer

CLEAR = "\x1b[K"  # of a terminal's line

METRICS = {
    "expected_accuracy": "accuracy {:.3f}",  # logged by the demo
    "reward": "reward {:.3f}",
    "mismatch/kl_k3": "KL {:.1e}",
    "critic/explained_variance": "critic {:z.2f}",
    "clip_ratio/region_mean": "clip {:.1%}",
    "completions/mean_length": "length {:.0f}",
    "completions/clipped_ratio": "cut {:.0%}",
    "throughput/generated_tokens_per_s": "{:.0f} tok/s",
}
"""Metrics of a line, with their formats."""

ALARMS = ("loss", "grad_norm")  # shown only if they are not finite, which indicates a fault


@contextmanager
def live_line(trainer: Trainer) -> Iterator[None]:
    """Say what the trainer does while the block runs.

    On a terminal, one line is rewritten every 10 s; else a line is printed once a minute.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_report, args=(weakref.proxy(trainer), ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if sys.stdout.isatty():
            print(CLEAR, end="", flush=True)


def _report(trainer: Trainer, ended: threading.Event) -> None:
    watch = _Watch(trainer)
    while not ended.wait(1) and trainer.is_world_process_zero():
        # The engine's state changes meanwhile, and a report must not end a run.
        with suppress(Exception):
            line = watch.next_line()
            if line is not None:
                show_in_place(line)


class _Watch:
    """Watches a trainer and its colocated engine, and counts the tokens of a rollout."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._every = 10 if sys.stdout.isatty() else 60  # seconds between lines
        self._step = trainer.state.global_step
        self._started = time.monotonic()  # of the step
        self._shown = self._started  # of the last line
        self._tokens: dict[str, int] = {}  # of the rollout's answers, by request
        self._tokens_shown = 0

    def next_line(self) -> str | None:
        """Return a line, or nothing if the last one is too recent."""
        now = time.monotonic()
        unfinished = self._unfinished()
        step = self._trainer.state.global_step
        if step != self._step:
            self._step = step
            self._started = now
        if bool(unfinished) != bool(self._tokens):  # a rollout begins, or has ended
            self._tokens = {}
            self._tokens_shown = 0
            self._shown = now
        self._tokens |= unfinished
        elapsed = now - self._shown
        if elapsed < self._every:
            return None
        self._shown = now
        if unfinished:
            return self._rollout_line(unfinished, elapsed)
        return self._update_line(now)

    def _unfinished(self) -> dict[str, int]:
        """Return the tokens of the answers that the engine has not finished, by request."""
        llm = getattr(self._trainer.vllm_generation, "llm", None)  # a server has none
        if llm is None:
            return {}
        states = dict(llm.llm_engine.output_processor.request_states)
        return {name: state.detokenizer.num_output_tokens() for name, state in states.items()}

    def _rollout_line(self, unfinished: dict[str, int], elapsed: float) -> str:
        total = sum(self._tokens.values())
        rate = (total - self._tokens_shown) / elapsed
        self._tokens_shown = total
        answers = len(self._tokens)
        done = answers - len(unfinished)
        line = f"generating: {done} of {answers} answers, {total:,} tokens, {rate:.0f} tok/s"
        if rate:
            limit = self._trainer.args.max_completion_length
            allowed = sum(limit - count for count in unfinished.values())
            line += f", at most {clock(allowed / rate)} left"
        return line

    def _update_line(self, now: float) -> str:
        state = self._trainer.state
        line = f"step {self._step + 1}/{state.max_steps}: {clock(now - self._started)} so far"
        took = [row["time/generate_s"] for row in state.log_history if "time/generate_s" in row]
        if took:
            line += f", generating took {took[-1]:.0f} s last time"
        return line


def show_in_place(line: str, is_last: bool = False) -> None:
    """Print a line that the next one replaces on a terminal, unless it is the last.

    In a log, the line has its date.
    """
    if sys.stdout.isatty():
        end = "\n" if is_last else "\r"
        # cut off at the terminal's width
        print(f"{CLEAR}\x1b[?7l{line}\x1b[?7h", end=end, flush=True)
    else:
        print(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}", flush=True)


def step_line(
    logs: Mapping[str, Any],
    step: int,
    steps: int,
    step_s: float | None = None,
    widths: dict[str, int] | None = None,
) -> str:
    """Format a logged row as one line, with `METRICS` and the pace.

    A row without any of `METRICS` is shown with all its numbers. `step` of `steps` are done, each
    in `step_s` seconds, if known. `widths` of columns, by metric, are updated.
    """
    if "train_runtime" in logs:
        return f"{step}/{steps}  trained for {clock(logs['train_runtime'])}"
    fields = [f"{step:>{len(str(steps))}}/{steps}" if steps else "before training"]
    numbers = {
        name: value
        for name, value in logs.items()
        if isinstance(value, int | float) and name != "epoch"
    }
    for name in ALARMS:
        if not math.isfinite(numbers.get(name, 0.0)):
            fields.append(f"{name} {numbers[name]}")
    if any(name.startswith("eval_") for name in numbers):
        fields.append("eval")
    numbers = {name.removeprefix("eval_"): value for name, value in numbers.items()}
    known = {name: form.format(numbers[name]) for name, form in METRICS.items() if name in numbers}
    is_step = "loss" in logs  # and no evaluation, which has other columns
    if is_step and widths is not None:
        for name, text in known.items():
            widths[name] = max(len(text), widths.get(name, 0))
        shown = [name for name in METRICS if name in widths]
        known = {name: known.get(name, "").ljust(widths[name]) for name in shown}
    fields += known.values() or [f"{name} {value:.5g}" for name, value in numbers.items()]
    if is_step and step_s is not None:
        left = step_s * (steps - step)
        fields += [f"{step_s:.3g} s/step", f"left {clock(left)}"]
    return "  ".join(fields).rstrip()


def clock(seconds: float) -> str:
    """Format a duration."""
    return str(timedelta(seconds=round(seconds)))
