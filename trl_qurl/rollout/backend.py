"""TRL's generation backend with quantized weights: it starts the engine, syncs it, and generates.

Three things differ from the parent: the engine starts from a quantized checkpoint, every sync sends
quantized tensors (`sync`), and vLLM loads them with its own reload, which accepts checkpoint-format
tensors any number of times. The parent's code still generates completions.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from trl_qurl.quantization.checkpoint import CheckpointWriter
from trl_qurl.quantization.checkpoint_form import plain_model
from trl_qurl.quantization.layers import check_recurrent_layers
from trl_qurl.quantization.merging import Tensors, model_parameters
from trl_qurl.quantization.plan import format_name
from trl_qurl.rollout.adapter import adapter_obstacle, adapter_rank, check_rounding, engine_rank
from trl_qurl.rollout.directory import CheckpointFolder
from trl_qurl.rollout.engine import colocated
from trl_qurl.rollout.engine.randomness import EngineNoise
from trl_qurl.rollout.engine.served import ServedEngine
from trl_qurl.rollout.images import as_plain, check_seen
from trl_qurl.rollout.preparation import (
    RolloutSettings,
    choose_adapter,
    choose_route,
    prepare_weights,
)
from trl_qurl.rollout.prompts import check_room, check_tokens
from trl_qurl.rollout.recovery import raise_everywhere, recover
from trl_qurl.rollout.routes import ROUTES, Route, stream_metadata
from trl_qurl.rollout.substitution import substitute
from trl_qurl.rollout.sync import RolloutCost, WeightSync
from trl_qurl.rollout.wire import COMPILING, Engine

logger = get_logger(__name__)  # of the main process

Tokens = list[list[int]]


@dataclass
class RolloutContext:
    """What belongs to one rollout of this process, and what TRL has no arguments for."""

    cost: RolloutCost = field(default_factory=RolloutCost)  # since the last rollout
    used_engine: bool = False  # whether it has synced or generated

    # Before it is generated
    # prompts of the next rollout, to begin ahead; empty if none follows
    upcoming: Tokens | None = None
    # without the tokens of images
    plain_prompts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    # what TRL's `_generate` returns, if dynamic sampling has generated it before
    generated: tuple | None = None

    # Afterwards
    # of the latest completions, as the engine returned
    behavior_logps: list[list[list[float | None]]] | None = None
    # (B · processes, functions)
    rewards: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class QuantizedVLLMGeneration(VLLMGeneration):
    """[`VLLMGeneration`] with an engine that holds a quantized copy of the model.

    `global_step` and `prompts` must not keep the trainer alive, or the engine is never freed.
    """

    _engine_class = ServedEngine  # of a server

    sync: WeightSync  # keeps the engine at the policy's weights
    _folder: CheckpointFolder | None = None  # of files that an engine starts from or loads
    # of a colocated engine; a server gets its noise with each sync
    _noise: EngineNoise | None = None
    context: int  # tokens of a prompt and its completion that the engine holds

    def __init__(
        self,
        *args: Any,
        rollout: RolloutSettings,
        global_step: Callable[[], int],
        prompts: Callable[[], list[list[int]]],
        **kwargs: Any,
    ) -> None:
        self.rollout = rollout
        self._prompts = prompts  # returns the tokens of a few
        self._global_step = global_step  # optimizer steps so far; part of each version name
        self.current, self._seconds_in_syncs = RolloutContext(), 0.0
        # RLOO requests no log-probabilities, but the mismatch metrics need them. 0 returns only the
        # sampled token's.
        super().__init__(*args, **{**kwargs, "logprobs": kwargs.get("logprobs") or 0})

    @contextmanager
    def rollout_context(self) -> Iterator[RolloutContext]:
        """Yield the context of what is generated inside the block; it takes over costs that nobody
        has popped.
        """
        self.current = RolloutContext(self.current.cost)
        try:
            yield self.current
        finally:
            self.current = RolloutContext(self.current.cost)

    def pop_cost(self) -> RolloutCost:
        """Return the cost of rollouts since the last call."""
        cost, self.current.cost = self.current.cost, RolloutCost()
        return cost

    def _init_vllm(self) -> None:
        check_recurrent_layers(plain_model(self.model))
        if self._dist.fsdp_version == 1:
            raise ValueError(
                "FSDP 1 does not expose single matrices to quantize: set fsdp_version to 2."
            )
        self.weights = prepare_weights(self.model, self.rollout, self.accelerator, self._prompts)
        engine, route = self._connect() if self.rollout.is_served else self._start_colocated()
        answer = raise_everywhere(lambda: engine and engine.describe(), route.is_served)
        [description] = broadcast_object_list([answer])
        self.context = description.max_model_len
        route.attach(engine, description.dtype)
        self.sync = WeightSync(route, self.rollout, self._dist, self._global_step)

    def _connect(self) -> tuple[Engine | None, Route]:
        """Connect the main process to the server. Return its engine, and every process's route."""
        client = functools.partial(
            self._engine_class,
            plan=self.weights.plan,
            shapes={name: shape for name, _, shape in stream_metadata(self.weights)},
            request_timeout=self.rollout.request_timeout,
        )
        with substitute(vllm_generation, "VLLMClient", client):
            raise_everywhere(super()._init_vllm, join=self.accelerator.wait_for_everyone)
        engine: ServedEngine | None = self.vllm_client if self.accelerator.is_main_process else None
        [name] = broadcast_object_list(
            [raise_everywhere(lambda: engine and self._choose_route(engine))]
        )
        if name == "stream":
            raise_everywhere(
                lambda: engine.open_stream(self.accelerator.device) if engine else None
            )
        return engine, self._make_route(name)

    def _start_colocated(self) -> tuple[Engine, Route]:
        """Start an engine in this process, from a checkpoint that describes how its layers are
        quantized.
        """
        name = self._choose_route()
        cls: Any = vllm_generation.LLM
        for_adapter: dict[str, Any] = {}
        if name == "adapter":
            cls, for_adapter = colocated.with_adapter(cls, adapter_rank(self.model))
        engine_kwargs = {"seed": self.rollout.seed, **for_adapter, **self.rollout.engine_kwargs}
        self._noise = EngineNoise(
            engine_kwargs["seed"], self.accelerator.process_index // self.tensor_parallel_size
        )
        plan, arguments = self.weights.plan, {"model_impl": self.model_impl, **engine_kwargs}
        colocated.prepare_process(
            plain_model(self.model), self.weights, arguments, self.accelerator.num_processes
        )
        route = self._make_route(name)
        folder, start = self._folder, None
        if folder is not None:
            label = format_name(plan.formats).upper() if plan.schemes else "full-precision"
            logger.info("Writing %s weights for vLLM to %s.", label, folder.path)
            start = folder.write("start", route.starting_tensors())
        logger.info("Starting vLLM%s.", "" if engine_kwargs.get("enforce_eager") else COMPILING)
        build = functools.partial(
            colocated.build_engine, cls, start, engine_kwargs, self.max_completion_length or 0
        )
        with substitute(vllm_generation, "LLM", build):
            super()._init_vllm()
        logger.info("vLLM is ready.")
        if folder is not None and not self.rollout.round_base:
            folder.drop_weights("start")
        colocated.release_when_deleted(self.llm)
        return colocated.ColocatedEngine(self.llm, self.enable_sleep_mode), route

    def _choose_route(self, server: ServedEngine | None = None) -> str:
        """Return how to send weights to the server, or to a colocated engine."""
        requested = "adapter" if self.rollout.round_base else self.rollout.weight_sync
        obstacle = adapter_obstacle(self.model)
        rank = 0 if obstacle else adapter_rank(self.model)
        if obstacle is None and self.weights.smoothing is not None:
            obstacle = (
                "smooth_activations folds scales into whole weights at every sync (remove it)"
            )
        served_rank = server.describe().max_lora_rank if server else None
        restart = server.command(engine_rank(rank)) if server and rank else ""
        is_alone, reason = choose_adapter(requested, obstacle, rank, served_rank, restart)
        if is_peft_model(self.model):
            logger.info(
                "%s: %s.",
                "The adapter is sent alone" if is_alone else "The adapter is merged",
                reason,
            )
        if self.rollout.round_base:
            check_rounding(self.model, self.weights.plan)
        if is_alone:
            return "adapter"
        if server is None:
            return "stream" if requested == "auto" else requested
        is_sharded = self._dist.is_fsdp or self._dist.is_zero3
        name, reason = choose_route(
            requested, self.accelerator.device, server.stream_obstacle, is_sharded
        )
        logger.info("Sending weights to %s by %s: %s.", server.base_url, name, reason)
        return name

    def _make_route(self, name: str) -> Route:
        """Make the route of this name, and the folder of its files, which a colocated engine also
        starts from.
        """
        rollout, weights = self.rollout, self.weights
        starts = not rollout.is_served and (
            weights.plan.schemes or not self.model.name_or_path or name == "adapter"
        )
        # At a time: the base of an adapter; or one that is being written, and one that the engine
        # may still read.
        checkpoints = {"stream": 1, "adapter": int(bool(starts or rollout.round_base))}.get(name, 2)
        if starts or name != "stream":
            writer = CheckpointWriter(plain_model(self.model), self.processing_class, weights.plan)
            place = rollout.checkpoint_dir, checkpoints * weights.nbytes(), rollout.is_served
            self._folder = CheckpointFolder(self.accelerator, writer, *place)
        folder = None if name == "stream" else self._folder
        return ROUTES[name](self.model, weights, rollout.is_served, folder, rollout.round_base)

    def sync_weights(self) -> None:
        """Send the policy's current weights to the engine (`WeightSync.push`). A collective
        operation.
        """
        if self.enable_sleep_mode and not self.rollout.is_served:
            # As the parent does: loading into unmapped memory crashes on some devices.
            vllm_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        self.current.used_engine = True
        started = time.perf_counter()
        recover(functools.partial(self.sync.push, self.current.cost), self._reconnect)
        self._seconds_in_syncs += time.perf_counter() - started

    def loaded_step(self) -> int:
        """Return the current step if the engine has the policy's weights, else -1. A collective
        operation.
        """
        return self.sync.loaded_step(self.current.cost)

    def policy_parameters(self) -> Tensors:
        """Yield what a sync sends, before it is quantized. A
        collective operation: read to the end.
        """
        return model_parameters(self.model, merges=True, grid=self.weights.grid)

    def generate(self, *args: Any, **kwargs: Any) -> tuple:
        """Generate as the parent does, from the weights of this run's last sync, and count seconds
        and tokens.
        """
        return recover(functools.partial(self._generate, args, kwargs), self._reconnect)

    def _generate(self, args: tuple, kwargs: dict[str, Any], is_repeated: bool) -> tuple:
        if is_repeated:
            self.sync.push(self.current.cost, is_repeated=True)
        raise_everywhere(self.sync.require_version, self.rollout.is_served)
        synced_before, started = self._seconds_in_syncs, time.perf_counter()
        output = raise_everywhere(lambda: self._sample(*args, **kwargs), self.rollout.is_served)
        # A server that restarted in the meantime answered from other weights.
        raise_everywhere(self.sync.require_version, self.rollout.is_served)
        cost = self.current.cost
        # sleep mode
        cost.generate_s += time.perf_counter() - started - (self._seconds_in_syncs - synced_before)
        cost.tokens += sum(len(completion) for completion in output[1])
        self.current.used_engine, self.current.behavior_logps = True, output[2]
        return output

    def _check_prompts(self, prompts: list[list[int]], has_images: bool) -> None:
        """Raise `ValueError` in all processes if a prompt of one fills the context; warn if
        completions end early.
        """
        longest = max(gather_object([max(map(len, prompts), default=0)]))
        check_room(longest, self.context, self.max_completion_length or 1)
        if not has_images:  # their placeholders may be no tokens of the model
            for prompt in prompts:
                check_tokens(
                    prompt, self.model.config.get_text_config().vocab_size, self.processing_class
                )

    def _sample(
        self, prompts: list[list[int]], images: list | None, num_generations: int, **kwargs: Any
    ) -> tuple:
        expands = images is not None and not self.rollout.is_served
        self._check_prompts(prompts, images is not None)
        plain = (
            [as_plain(prompt, self.current.plain_prompts) for prompt in prompts]
            if expands
            else prompts
        )
        try:
            with self._noise_of_generation():
                output = super().generate(
                    prompts=plain, images=images, num_generations=num_generations, **kwargs
                )
        except Exception:
            if self.rollout.is_served and self.accelerator.is_main_process:
                # The other processes wait for the completions, inside the parent's method.
                broadcast_object_list([([], [], None, None)], from_process=0)
            raise
        if expands:
            check_seen(prompts, output[0])
        return output

    def _noise_of_generation(self) -> AbstractContextManager[None]:
        if self._noise is None:
            return nullcontext()
        mode = "train" if self.model.training else "eval"
        return self._noise.of_generation(self._global_step(), mode)

    def _reconnect(self) -> None:
        self.current.cost.recoveries += 1
        if self.accelerator.is_main_process:
            self.vllm_client.reconnect(self.server_timeout)
