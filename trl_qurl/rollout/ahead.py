"""Rollouts one step ahead: a server generates rollout k + 1 while the trainer learns from k.

With `rollouts_ahead=1`, two calls of TRL's at the start of rollout k do more than usual:

1. `sync_weights` first collects rollout k, which the server began after the previous sync. The
   engine is idle then, and the policy's current weights θ_k are sent and checked as always.
2. `generate` returns the collected rollout, and lets the server begin rollout k + 1, which θ_k
   samples.

Both go through TRL's own code, which gathers the prompts of all processes, asks the client in the
main process to `generate`, and gives each process its part of the answer. While a rollout begins or
is collected, the client's `begin` or `collect` stands in for its `generate`.

The trainer scores rollout k and learns from it in the meantime, so the weights that sample a
rollout are always one rollout old. Only the HTTP request runs on a thread of its own; every
collective operation stays on the main thread.

Nothing changes in the loss. TRL scores a rollout when it begins to learn from it, so π_prox is θ_k,
and ρ = π_prox/π_behav covers rounding and staleness together.

Each fault has one way out. If the server is lost while a rollout is out, collecting it fails, and
it is generated again from the current weights, as after any other fault (`recovery`). A checkpoint
holds the collected rollout. Evaluation collects it first and uses the engine in between. When
training ends early, `drop` aborts the request.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from trl.trainer.utils import RepeatSampler

from trl_qurl.rollout.backend import QuantizedVLLMGeneration, Samples, Tokens
from trl_qurl.rollout.background import in_background
from trl_qurl.rollout.engine.served import ServedEngine
from trl_qurl.rollout.errors import ServerError
from trl_qurl.rollout.results import Completions, named
from trl_qurl.rollout.substitution import substitute

logger = get_logger(__name__)  # of the main process

ABORT_SECONDS = 30.0  # for a server to abort a rollout


@dataclass
class Begun:
    """A request to generate that the server has begun to answer."""

    future: Future  # of the answer, and the seconds that it took
    seconds: float | None = None  # `None` before the answer, and if there is none


class AheadEngine(ServedEngine):
    """[`ServedEngine`] that can generate in the background."""

    begun: Begun | None = None  # until it is collected

    def begin(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Send a request as `generate` does, and answer that there is nothing yet."""
        self.begun = Begun(in_background(_timed, super().generate, *args, **kwargs))
        return {"prompt_ids": [], "completion_ids": [], "logprobs": None}

    def collect(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the answer to what was begun; generate, if a fault has ended that."""
        begun = self.begun
        if begun is None:
            return super().generate(*args, **kwargs)
        wait([begun.future])  # an interrupt leaves it to `drop`
        self.begun = None
        output, begun.seconds = begun.future.result()
        return output

    def reconnect(self, total_timeout: float) -> None:
        """Reconnect as the parent does, without what was begun before the fault."""
        self.begun = None
        super().reconnect(total_timeout)

    def drop(self) -> None:
        """Abort what was begun, so that neither a thread nor a request is left."""
        if self.begun is None:
            return
        future = self.begun.future
        self.begun = None
        failure = self._failure
        deadline = time.monotonic() + ABORT_SECONDS
        # The request may not have reached the engine when the first abort does.
        while not future.done() and time.monotonic() < deadline:
            with suppress(ServerError):
                self._post("/abort_requests", json={})
            wait([future], timeout=0.2)
        self._failure = failure  # an aborted request is no fault


def _timed(call: Callable, *args: Any, **kwargs: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    return call(*args, **kwargs), time.perf_counter() - started


@dataclass
class Rollout:
    """A rollout that was begun or collected."""

    prompts: Tokens  # of this process, one per completion
    group_size: int  # completions per prompt
    step: int  # optimizer steps when the weights that sample it were sent
    result: Completions | None = None  # for this process, once it is collected
    waited_s: float = 0.0  # that the trainer has waited for it


class AheadVLLMGeneration(QuantizedVLLMGeneration):
    """[`QuantizedVLLMGeneration`] that generates one rollout ahead, on a server."""

    _engine_class = AheadEngine

    upcoming: Tokens | None = None  # prompts to begin next, empty for none; None in evaluation
    _next: Rollout | None = None  # from when it begins until it is returned

    def sync_weights(self) -> None:
        """Collect the rollout that was begun, then send the weights as the parent does."""
        self.collect()
        super().sync_weights()

    def generate(
        self, prompts: Tokens, images: Any, num_generations: int, **kwargs: Any
    ) -> Completions:
        """Return these prompts' rollout, generated ahead if it was, and begin the upcoming one."""
        self.collect()
        step = self._global_step()
        rollout = Rollout(prompts, num_generations, step)
        if self.upcoming is not None and self._next is not None:
            rollout.waited_s = self._next.waited_s
            if all(gather_object([self._next.prompts == prompts])):
                rollout = self._next
            self._next = None
        if rollout.result is None:  # the first rollout, or an evaluation
            rollout.result = super().generate(
                prompts=prompts, images=images, num_generations=num_generations, **kwargs
            )
        if self.upcoming is not None:
            self.cost.metrics["time/wait_for_rollout_s"] = rollout.waited_s
            self.cost.metrics["rollout/staleness"] = float(step - rollout.step)
        if self.upcoming:
            self._next = Rollout(self.upcoming, num_generations, step)
            with self._asking_to("begin"):
                self._sample(self._next.prompts, None, num_generations)
        result = rollout.result
        has_images = images is not None
        self.samples = Samples.of(result, prompts, has_images)
        return result

    def collect(self) -> None:
        """Wait for the rollout that was begun; if it is lost, generate it again. Collective."""
        rollout = self._next
        if rollout is None or rollout.result is not None:
            return
        begun = self.vllm_client.begun if self.accelerator.is_main_process else None
        started = time.perf_counter()
        version = self.sync.version
        generated_before = self.cost.generate_s
        with self._asking_to("collect"):
            rollout.result = self.generate_from_sent(
                prompts=rollout.prompts, images=None, num_generations=rollout.group_size
            )
        rollout.waited_s += time.perf_counter() - started
        if begun is not None and begun.seconds is not None:
            self.cost.generate_s = generated_before + begun.seconds
        if self.sync.version != version:
            rollout.step = self._global_step()

    def _asking_to(self, method: str) -> AbstractContextManager[None]:
        """Inside the block, TRL's code calls this method where it calls the client's `generate`."""
        if not self.accelerator.is_main_process:
            return nullcontext()
        return substitute(self.vllm_client, "generate", getattr(self.vllm_client, method))

    def state(self) -> dict[str, Any] | None:
        """Return the rollout generated ahead, for a checkpoint. A collective operation."""
        self.collect()
        if self._next is None:
            return None
        return vars(self._next) | {"result": tuple(self._next.result or ())}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Continue with a checkpoint's rollout."""
        self._next = None
        if state is not None:
            result = named(Completions, state["result"])
            self._next = Rollout(**state | {"result": result})

    def drop(self) -> None:
        """Give up the rollout that is out."""
        self._next = None
        if self.accelerator.is_main_process:
            self.vllm_client.drop()


class UpcomingRows:
    """The dataset's rows of each rollout, in the order of TRL's sampler, to look one rollout ahead.

    Args:
        sampler: A sampler of its own, as TRL builds one.
        dataset: The dataset that it samples from.
        accelerator: Accelerator of the processes that share the rollouts.
    """

    def __init__(self, sampler: RepeatSampler, dataset: Any, accelerator: Accelerator) -> None:
        # completions per rollout, over all processes
        size = sampler.batch_size * sampler.mini_repeat_count
        self._dataset = dataset
        self._accelerator = accelerator
        self._limit = len(sampler) // (size * sampler.repeat_count) + 1  # rollouts of an epoch
        self._rollouts = _rollouts(sampler, size)
        self._following = next(self._rollouts)

    def after(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return this process's rows of the rollout after the one with `rows`.

        There are none if that is not found. A resumed run finds its place by its rows. Collective.
        """
        for _ in range(self._limit):
            current = self._following
            self._following = next(self._rollouts)
            prompts = [row["prompt"] for row in self._of_this_process(current)]
            is_found = prompts == [row["prompt"] for row in rows]
            if all(gather_object([is_found])):
                return self._of_this_process(self._following)
        self._limit = 0
        logger.warning_once(
            "rollouts_ahead has no effect: the dataset's rows differ from those that TRL's sampler "
            "draws, as with a random transform, so the next prompts are not known."
        )
        return []

    def _of_this_process(self, indices: list[int]) -> list[dict[str, Any]]:
        size = len(indices) // self._accelerator.num_processes
        start = self._accelerator.process_index * size
        return [self._dataset[index] for index in indices[start : start + size]]


def _rollouts(sampler: RepeatSampler, size: int) -> Iterator[list[int]]:
    """Yield the rows of each rollout, epoch after epoch.

    The sampler repeats them for every micro-batch.
    """
    while True:
        indices = iter(sampler)
        while rollout := list(islice(indices, size)):
            yield rollout
            deque(islice(indices, size * (sampler.repeat_count - 1)), maxlen=0)
