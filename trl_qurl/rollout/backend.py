"""TRL's generation backend with quantized weights: it starts the engine, syncs it, and generates.

Three things differ from the parent: the engine starts from a quantized checkpoint, every sync sends
quantized tensors (`sync`), and vLLM loads them with its own reload, which accepts checkpoint-format
tensors any number of times. The parent's code still generates completions.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, is_peft_model
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from trl_qurl.quantization.checkpoint import CheckpointWriter
from trl_qurl.quantization.checkpoint_form import plain_model
from trl_qurl.quantization.checks.kv_cache import COARSE_CACHES, LARGE_KEYS, has_large_keys
from trl_qurl.quantization.checks.recurrent import check_recurrent_layers
from trl_qurl.quantization.merging import Tensors, model_parameters
from trl_qurl.quantization.plan import format_name
from trl_qurl.rollout.adapter import adapter_rank
from trl_qurl.rollout.checks.prompts import check_prompts, check_room, longest_of_all
from trl_qurl.rollout.cost import RolloutCost
from trl_qurl.rollout.directory import CheckpointFolder
from trl_qurl.rollout.engine import colocated
from trl_qurl.rollout.engine.randomness import EngineNoise
from trl_qurl.rollout.engine.served import ServedEngine
from trl_qurl.rollout.group import APART, TOGETHER
from trl_qurl.rollout.preparation import (
    RolloutSettings,
    prepare_weights,
    round_frozen_base,
)
from trl_qurl.rollout.repairs.finalizer import release_when_deleted
from trl_qurl.rollout.repairs.image_prompts import as_plain, check_seen
from trl_qurl.rollout.results import Completions
from trl_qurl.rollout.routes import AdapterRoute, Route, StreamRoute, choose, stream_metadata
from trl_qurl.rollout.samples import (
    Samples,
    Tokens,
    read_lists,
    read_outputs,
    sampling_arguments,
)
from trl_qurl.rollout.substitution import substitute
from trl_qurl.rollout.sync import WeightSync
from trl_qurl.rollout.wire import COMPILING, Engine, EngineDescription

logger = get_logger(__name__)  # of the main process


class QuantizedVLLMGeneration(VLLMGeneration):
    """[`VLLMGeneration`] with an engine that holds a quantized copy of the model.

    `global_step` and `prompts` must not keep the trainer alive, or the engine is never freed.
    """

    _engine_class = ServedEngine  # of a server

    sync: WeightSync  # keeps the engine at the policy's weights
    cost: RolloutCost  # since it was last taken
    samples = Samples([], [], [], False)  # the latest
    context: int  # tokens of a prompt and its completion that the engine holds
    runner: str = ""  # vLLM's model runner, "V1" or "V2", once the engine runs
    # Prompts without the tokens that stand for their images, by prompt as the trainer scores it.
    plain_prompts: dict[tuple[int, ...], list[int]]
    _noise: EngineNoise | None = None  # of a colocated engine; a server gets it with each sync

    def __init__(
        self,
        *args: Any,
        rollout: RolloutSettings,
        global_step: Callable[[], int],
        prompts: Callable[[], list[list[int]]],
        **kwargs: Any,
    ) -> None:
        self.rollout = rollout
        self.cost = RolloutCost()
        self.plain_prompts = {}
        self._prompts = prompts  # returns the tokens of a few
        self._global_step = global_step  # optimizer steps so far; part of each version name
        # RLOO requests no log-probabilities, but the mismatch metrics need them. 0 returns only the
        # sampled token's.
        logprobs = max(rollout.listed, kwargs.get("logprobs") or 0)
        super().__init__(*args, **{**kwargs, "logprobs": logprobs})

    def _init_vllm(self) -> None:
        check_recurrent_layers(plain_model(self.model))
        if self._dist.fsdp_version == 1:
            raise ValueError(
                "FSDP 1 does not expose single matrices to quantize: set fsdp_version to 2."
            )
        self.weights = prepare_weights(self.model, self.rollout, self.accelerator, self._prompts)
        self.group = TOGETHER if self.rollout.is_served else APART
        if self.group.is_together:
            engine, route = self._connect()
        else:
            engine, route = self._start_colocated()
        # Not the base of an adapter that is sent alone: a server has codes of the exact one.
        if is_peft_model(self.model) and route.is_merged:
            round_frozen_base(self.model, self.weights.grid)
        description: EngineDescription = self.group.from_main(lambda: engine.describe())
        if description.kv_cache_dtype in COARSE_CACHES and has_large_keys(self.model):
            logger.warning(LARGE_KEYS.format(description.kv_cache_dtype))
        self.context = description.max_model_len
        self.runner = description.runner
        route.attach(engine, description.dtype)
        self.sync = WeightSync(route, self.rollout, self.cost, self._global_step)

    def _connect(self) -> tuple[Any, Route]:
        """Connect the main process to the server. Return its engine, and every process's route."""
        client = functools.partial(
            self._engine_class,
            plan=self.weights.plan,
            shapes={name: shape for name, _, shape in stream_metadata(self.weights)},
            request_timeout=self.rollout.vllm_request_timeout,
        )
        with substitute(vllm_generation, "VLLMClient", client):
            self.group.run(super()._init_vllm, join=self.accelerator.wait_for_everyone)
        engine: Any = self.vllm_client if self.accelerator.is_main_process else None
        is_sharded = self._dist.is_fsdp or self._dist.is_zero3
        kind: type[Route] = self.group.from_main(
            lambda: choose(self.model, self.weights, self.rollout, engine, is_sharded)
        )
        if kind is StreamRoute:
            device = self.accelerator.device
            self.group.from_main(lambda: engine.open_stream(device))
        return engine, self._make_route(kind)

    def _start_colocated(self) -> tuple[Engine, Route]:
        """Start an engine in this process, from a checkpoint with the formats of its layers."""
        kind = choose(self.model, self.weights, self.rollout)
        cls: Any = vllm_generation.LLM
        for_adapter: dict[str, Any] = {}
        if kind is AdapterRoute:
            cls, for_adapter = colocated.with_adapter(cls, adapter_rank(self.model))
        engine_kwargs = {
            "seed": self.rollout.seed,
            **for_adapter,
            **self.rollout.vllm_engine_kwargs,
        }
        if 0 <= engine_kwargs.get("max_logprobs", 0) < self.rollout.listed:  # vLLM's default is 20
            engine_kwargs["max_logprobs"] = self.rollout.listed
        number = self.accelerator.process_index // self.tensor_parallel_size
        self._noise = EngineNoise(engine_kwargs["seed"], number)
        arguments = {"model_impl": self.model_impl, **engine_kwargs}
        colocated.prepare_process(plain_model(self.model), self.weights, arguments)
        route = self._make_route(kind)
        start = self._write_start(route)
        logger.info("Starting vLLM%s.", "" if engine_kwargs.get("enforce_eager") else COMPILING)
        length = self.max_completion_length or 0
        build = functools.partial(colocated.build_engine, cls, start, engine_kwargs, length)
        with (
            colocated.as_launched(self.accelerator.num_processes),
            substitute(vllm_generation, "LLM", build),
        ):
            super()._init_vllm()
        logger.info("vLLM is ready.")
        if route.folder is not None and not self.rollout.round_base:
            route.folder.drop_weights("start")
        release_when_deleted(self.llm)
        return colocated.ColocatedEngine(self.llm), route

    def _write_start(self, route: Route) -> Path | None:
        """Write what a colocated engine starts from, unless that is the model's own checkpoint."""
        folder = route.folder
        if folder is None:
            return None
        plan = self.weights.plan
        label = format_name(plan.formats).upper() if plan.schemes else "full-precision"
        logger.info("Writing %s weights for vLLM to %s.", label, folder.path)
        return folder.write("start", route.starting_tensors())

    def _make_route(self, kind: type[Route]) -> Route:
        """Make a route, and the folder of its files.

        A colocated engine also starts from that folder, unless it can start from the model itself.
        """
        weights = self.weights
        has_start = self.model.name_or_path and not weights.plan.schemes
        folder = None
        if kind.checkpoints or not (self.group.is_together or has_start):
            folder = CheckpointFolder(
                self.accelerator,
                CheckpointWriter(plain_model(self.model), self.processing_class, weights.plan),
                self.rollout.rollout_checkpoint_dir,
                max(1, kind.checkpoints) * weights.nbytes(),
                self.group.is_together,
            )
        return kind(self.model, weights, self.group, folder, self.rollout.round_base)

    def sync_weights(self) -> None:
        """Send the policy's current weights to the engine. A collective operation."""
        if self.enable_sleep_mode and not self.group.is_together:
            # As the parent does: loading into unmapped memory crashes on some devices.
            vllm_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        self.group.recover(self.sync.push, self._reconnect)

    def policy_parameters(self) -> Tensors:
        """Yield what a sync sends, before it is quantized. Collective: read to the end."""
        return model_parameters(self.model, merges=True, grid=self.weights.grid)

    def generate(self, *args: Any, **kwargs: Any) -> Completions:
        """Generate as the parent does, from the policy as it is now.

        TRL syncs once a step. Weights that have changed since then are sent first, and so are those
        of a sync that a subclass or a callback has left out.
        """
        if not self.sync.is_current():
            QuantizedVLLMGeneration.sync_weights(self)
        return self.generate_from_sent(*args, **kwargs)

    def generate_from_sent(self, *args: Any, **kwargs: Any) -> Completions:
        """Generate as the parent does, from the weights of this run's last sync."""
        return self.group.recover(functools.partial(self._generate, args, kwargs), self._reconnect)

    def _generate(self, args: tuple, kwargs: dict[str, Any], is_repeated: bool) -> Completions:
        if is_repeated:
            self.sync.push(is_repeated=True)
        self.group.run(self.sync.require_version)
        synced_before = self.cost.sync_s
        with self.cost.timed("generate_s"):
            result = self.group.run(lambda: self._sample(*args, **kwargs))
            # A server that restarted in the meantime answered from other weights.
            self.group.run(self.sync.require_version)
        self.sync.is_unused = False
        self.cost.generate_s -= self.cost.sync_s - synced_before  # in sleep mode, the parent syncs
        self.cost.tokens += sum(len(completion) for completion in result.completion_ids)
        return result

    def _sample(
        self, prompts: Tokens, images: list | None, num_generations: int, **kwargs: Any
    ) -> Completions:
        has_images = images is not None
        check_room(longest_of_all(prompts), self.context, self.max_completion_length or 1)
        if not has_images:  # whose placeholders may be no tokens of the model
            check_prompts(prompts, self.model.config, self.processing_class)
        expands = has_images and not self.group.is_together
        sent = prompts
        if expands:
            sent = [as_plain(prompt, self.plain_prompts) for prompt in prompts]
        try:
            with self._generating_here():
                values = super().generate(
                    prompts=sent, images=images, num_generations=num_generations, **kwargs
                )
        except Exception:
            if self.group.is_together and self.accelerator.is_main_process:
                # The other processes wait for the completions, inside the parent's method.
                broadcast_object_list([Completions([], [], [], [])], from_process=0)
            raise
        result = Completions(*values)
        if expands:
            check_seen(prompts, result.prompt_ids)
        listings: list[Any] = result.logprobs
        if self.group.is_together:
            listings = read_lists(result, self.rollout.listed)
        self.samples = Samples(prompts, result.completion_ids, listings, has_images)
        # Lists of one for each token, which TRL's IW-OPD looks up by its id.
        logps = [each.logps[:, :1].tolist() for each in listings]
        ids = [each.ids[:, :1].tolist() for each in listings]
        return result._replace(logprobs=logps, logprob_token_ids=ids)

    @contextmanager
    def _generating_here(self) -> Iterator[None]:
        """Let a colocated engine generate inside, with noise of its own and no needless text."""
        if self._noise is None:
            yield
            return
        mode = "train" if self.model.training else "eval"
        with (
            self._noise.of_generation(self._global_step(), mode),
            substitute(self, "generation_kwargs", sampling_arguments(self.generation_kwargs)),
            substitute(vllm_generation, "extract_logprobs", read_outputs),
        ):
            yield

    def _reconnect(self) -> None:
        self.cost.recoveries += 1
        if self.accelerator.is_main_process:
            self.vllm_client.reconnect(self.server_timeout)
