"""A line that says what a run is doing, rewritten on a terminal and repeated in a log."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any

CLEAR = "\x1b[K"  # of a terminal's line


@contextmanager
def live_line(trainer: Any) -> Iterator[None]:
    """Say what the trainer does while the block runs: every 10 s on one line of a terminal, else once a minute."""
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
        with suppress(Exception):  # the engine's state changes meanwhile, and a report must not end a run
            now, state, limit = time.monotonic(), trainer.state, trainer.args.max_completion_length
            llm = getattr(trainer.vllm_generation, "llm", None)  # a server has none
            unfinished = list(llm.llm_engine.output_processor.request_states.values()) if llm else []
            requests = [each for each in unfinished if each.max_tokens_param == limit]  # others are a sync's probe
            if state.global_step != step:
                step, started = state.global_step, now
            if bool(requests) != bool(tokens):
                tokens, shown, before = {}, now, 0
            tokens |= {each.request_id: each.detokenizer.num_output_tokens() for each in requests}
            if now < shown + every:
                continue
            total, done, elapsed, shown = sum(tokens.values()), len(tokens) - len(requests), now - shown, now
            rate, before = (total - before) / elapsed, total
            if requests:
                line = f"generating: {done} of {len(tokens)} answers, {total:,} tokens, {rate:.0f} tok/s"
                allowed = sum(limit - tokens[each.request_id] for each in requests)
                line += f", at most {clock(allowed / rate)} left" if rate else ""
            else:
                took = [row["time/generate_s"] for row in state.log_history if "time/generate_s" in row]
                line = f"step {step + 1}/{state.max_steps}: {clock(now - started)} so far"
                line += f", generating took {took[-1]:.0f} s last time" if took else ""
            show_in_place(line)


def show_in_place(line: str, is_last: bool = False) -> None:
    """Print a line that the next one replaces on a terminal, unless it is the last; in a log, with its date."""
    if sys.stdout.isatty():
        end = "\n" if is_last else "\r"
        print(f"{CLEAR}\x1b[?7l{line}\x1b[?7h", end=end, flush=True)  # cut off at the terminal's width
    else:
        print(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}", flush=True)


def clock(seconds: float) -> str:
    """Format a duration."""
    return str(timedelta(seconds=round(seconds)))
