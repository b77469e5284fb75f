"""Lines that say what a run is doing: one while it works, rewritten on a terminal, and one for each
step.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any

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
def live_line(trainer: Any) -> Iterator[None]:
    """Say what the trainer does while the block runs: every 10 s on one line of a terminal, else
    once a minute.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_report, args=(weakref.proxy(trainer), ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        print(CLEAR * sys.stdout.isatty(), end="", flush=True)


def _report(trainer: Any, ended: threading.Event) -> None:
    every, step, before = 10 if sys.stdout.isatty() else 60, trainer.state.global_step, 0
    tokens: dict[str, int] = {}  # of the rollout's answers, by request
    shown = started = time.monotonic()
    while not ended.wait(1) and trainer.is_world_process_zero():
        # the engine's state changes meanwhile, and a report must not end a run
        with suppress(Exception):
            now, state, limit = time.monotonic(), trainer.state, trainer.args.max_completion_length
            llm = getattr(trainer.vllm_generation, "llm", None)  # a server has none
            unfinished = (
                list(llm.llm_engine.output_processor.request_states.values()) if llm else []
            )
            # others are a sync's probe
            requests = [each for each in unfinished if each.max_tokens_param == limit]
            if state.global_step != step:
                step, started = state.global_step, now
            if bool(requests) != bool(tokens):
                tokens, shown, before = {}, now, 0
            tokens |= {each.request_id: each.detokenizer.num_output_tokens() for each in requests}
            if now < shown + every:
                continue
            total, done, elapsed, shown = (
                sum(tokens.values()),
                len(tokens) - len(requests),
                now - shown,
                now,
            )
            rate, before = (total - before) / elapsed, total
            if requests:
                line = (
                    f"generating: {done} of {len(tokens)} answers, {total:,} tokens, {rate:.0f} "
                    "tok/s"
                )
                allowed = sum(limit - tokens[each.request_id] for each in requests)
                line += f", at most {clock(allowed / rate)} left" if rate else ""
            else:
                took = [
                    row["time/generate_s"] for row in state.log_history if "time/generate_s" in row
                ]
                line = f"step {step + 1}/{state.max_steps}: {clock(now - started)} so far"
                line += f", generating took {took[-1]:.0f} s last time" if took else ""
            show_in_place(line)


def show_in_place(line: str, is_last: bool = False) -> None:
    """Print a line that the next one replaces on a terminal, unless it is the last; in a log, with
    its date.
    """
    if sys.stdout.isatty():
        end = "\n" if is_last else "\r"
        # cut off at the terminal's width
        print(f"{CLEAR}\x1b[?7l{line}\x1b[?7h", end=end, flush=True)
    else:
        print(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}", flush=True)


def step_line(
    logs: Mapping[str, Any], step: int, steps: int, step_s: float | None = None, widths: Any = None
) -> str:
    """Format a logged row as one line: `METRICS` and the pace, or all numbers of a row without any
    of `METRICS`.

    `step` of `steps` are done, each in `step_s` seconds, if known. `widths` of columns, by metric,
    are updated.
    """
    if "train_runtime" in logs:
        return f"{step}/{steps}  trained for {clock(logs['train_runtime'])}"
    numbers = {
        name: value
        for name, value in logs.items()
        if isinstance(value, int | float) and name != "epoch"
    }
    fields = [
        f"{name} {numbers[name]}" for name in ALARMS if not math.isfinite(numbers.get(name, 0.0))
    ]
    fields += ["eval"] * any(name.startswith("eval_") for name in numbers)
    numbers = {name.removeprefix("eval_"): value for name, value in numbers.items()}
    known = {name: form.format(numbers[name]) for name, form in METRICS.items() if name in numbers}
    if widths is not None and "loss" in logs:  # not of evaluations, which have other columns
        widths |= {name: max(len(text), widths.get(name, 0)) for name, text in known.items()}
        known = {
            name: known.get(name, "").ljust(widths[name]) for name in METRICS if name in widths
        }
    fields += known.values() or [f"{name} {value:.5g}" for name, value in numbers.items()]
    if step_s is not None and "loss" in logs:
        fields += [f"{step_s:.3g} s/step", f"left {clock(step_s * (steps - step))}"]
    place = f"{step:>{len(str(steps))}}/{steps}" if steps else "before training"
    return "  ".join((place, *fields)).rstrip()


def clock(seconds: float) -> str:
    """Format a duration."""
    return str(timedelta(seconds=round(seconds)))
