"""Everything private that trl_qurl relies on in TRL, vLLM, transformers, accelerate, torch and
llm-compressor.

Most of it is data: `DEFINITIONS` with their parameters, `ATTRIBUTES`, `ASSIGNED` attributes and
lines of `SOURCE`. Two tests compare the file with the package: a private name that is not listed
fails, and so does an import that a library no longer has. Sources are read, not imported, so this
file needs no engine and is the first to run after an upgrade (`pytest tests/test_trl_contract.py`).
"""

import ast
import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from conftest import needs_avx512, needs_trl_1_16
from packaging.requirements import Requirement

import trl_qurl
from trl_qurl.config import CLIPPED_LOSS_TYPES, TAKEN_ENGINE_ARGUMENTS
from trl_qurl.config.checks import HARMLESS, NEUTRAL
from trl_qurl.config.refusals import SAMPLING_PARAMETERS
from trl_qurl.trainers.arguments import NOT_PASSED, REWARD_KEYWORDS

GRPO = "trl.trainer.grpo_trainer"
RLOO = "trl.trainer.rloo_trainer"
GENERATION = "trl.generation.vllm_generation"
CLIENT = "trl.generation.vllm_client"
TRAINER = "transformers.trainer"
INPLACE = "vllm.model_executor.model_loader.reload.inplace"

OTHER_TRAINERS = [
    "trl.trainer.distillation_trainer",
    *(f"trl.experimental.{name}.{name}_trainer" for name in ("sdpo", "sdft", "gold", "iw_opd")),
]
"""Where docs/architecture.md says that `QuantizedEngineMixin` works."""

CALLED = """
trl.trainer.grpo_trainer
    GRPOTrainer.__init__(model reward_funcs args callbacks peft_config): trainers/engine.py sets them
    GRPOTrainer._generate_and_score_completions(inputs): trainers/grpo.py measures the mismatch after it
    GRPOTrainer._tokenize_prompts(prompts): trainers/rollouts.py finds the images in it
    GRPOTrainer._prepare_inputs(generation_batch): trainers/engine.py times the rollouts in it
    GRPOTrainer._get_per_token_logps_and_entropies(model): trainers/rollouts.py scores rollouts and losses with it
    GRPOTrainer._compute_loss(model inputs): trainers/grpo.py computes every objective through it
    GRPOTrainer._save_checkpoint(model trial): trainers/engine.py writes it whole, with the rollout in progress
    GRPOTrainer._load_optimizer_and_scheduler(checkpoint): trainers/rollouts.py restores the rollout there
    GRPOTrainer._get_train_sampler(dataset): trainers/rollouts.py skips past epochs in it on resuming
    GRPOTrainer._calculate_rewards(inputs prompts completions completion_ids_list): dynamic sampling, trainers/ppo.py
    GRPOTrainer._generate(prompts): trainers/dynamic_sampling.py generates its rounds with it
    GRPOTrainer.training_step(model inputs): the critic of trainers/ppo.py learns after it
trl.trainer.rloo_trainer
    RLOOTrainer.__init__(model reward_funcs args callbacks peft_config): trainers/engine.py sets them
    RLOOTrainer._generate_and_score_completions(inputs): trainers/rloo.py adds the objective to its batch
    RLOOTrainer._tokenize_prompts(prompts): trainers/rollouts.py finds the images in it
    RLOOTrainer._prepare_inputs(generation_batch): trainers/engine.py times the rollouts in it
    RLOOTrainer._get_per_token_logps_and_entropies(model): trainers/rollouts.py gives the loss its result
    RLOOTrainer._compute_loss(model inputs): trainers/rloo.py computes every objective through it
    RLOOTrainer._save_checkpoint(model trial): trainers/engine.py writes it whole, with the rollout in progress
trl.trainer.utils
    RepeatSampler.__init__(shuffle seed): trainers/saving.py skips epochs in it
    create_model_from_path(model_id architecture): trainers/critic.py loads the critic with it
    disable_dropout_in_model(model): trainers/critic.py
    get_config_model_id(config): trainers/engine.py and trainers/critic.py find the policy's start with it
trl.trainer.base_trainer
    _BaseTrainer.create_model_card(model_name dataset_name tags): trainers/engine.py adds to the card
trl.distributed
    DistributedBackend.is_zero3(): WeightSync reads it, and `fsdp_version`
trl.import_utils
    is_vllm_available(): trainers/arguments.py names the extra that brings vLLM
trl.generation.vllm_generation
    VLLMGeneration.__init__(model accelerator processing_class): QuantizedVLLMGeneration passes them
    VLLMGeneration._init_vllm(): QuantizedVLLMGeneration starts the engine through it
    VLLMGeneration.sync_weights(): QuantizedVLLMGeneration replaces it
    VLLMGeneration.generate(prompts images num_generations): QuantizedVLLMGeneration counts its seconds and tokens
    empty_cache(): QuantizedVLLMGeneration calls it before waking the engine
trl.generation.vllm_client
    VLLMClient.__init__(base_url connection_timeout): ServedEngine is built with the same arguments
    VLLMClient.check_server(total_timeout retry_interval): ServedEngine waits instead
    VLLMClient.init_communicator(device): ServedEngine opens NCCL with it, or skips it
    VLLMClient.close_communicator(): ServedEngine frees the port of its rendezvous with it
    VLLMClient.image_features(images): ServedEngine turns its errors into faults of the server
    VLLMClient._post(url): ServedEngine overrides it to bound every request in time
    VLLMClient._get(url): ServedEngine overrides it to bound every request in time
transformers.trainer
    Trainer.create_scheduler(num_training_steps optimizer): trainers/ppo.py prepares the critic there
    Trainer._save_optimizer_and_scheduler(output_dir): trainers/ppo.py adds the critic before old checkpoints go
    Trainer.create_optimizer(model): trainers/ppo.py builds the critic's optimizer like the policy's
    Trainer._load_from_checkpoint(resume_from_checkpoint model): trainers/engine.py loads what it would miss
    Trainer._load_best_model(): trainers/engine.py loads what it would miss, trainers/ppo.py the critic
    Trainer._get_output_dir(trial): trainers/engine.py finds the checkpoint with it
    Trainer._load_rng_state(checkpoint): a resumed run continues to sample where it stopped
transformers.initialization
    no_init_weights(): quantization/checkpoint.py copies a model inside it
transformers.core_model_loading
    revert_weight_conversion(model state_dict): quantization/checkpoint_form.py gets a checkpoint's names from it
accelerate.accelerator
    Accelerator.__init__(gradient_accumulation_plugin): trainers/critic.py has a separate accelerator
    Accelerator.save_state(output_dir): trainers/critic.py saves the critic with it
    Accelerator.load_state(input_dir): trainers/critic.py resumes the critic with it
accelerate.utils.modeling
    is_peft_model(model): rollout/backend.py recognizes adapters with it
accelerate.utils.operations
    gather_object(object): dynamic sampling moves groups with it
    broadcast_object_list(object_list from_process): processes share a directory
compressed_tensors.utils.match
    is_match(name module targets): quantization/layers.py ignores layers with it
    match_targets(name module targets): quantization/plan.py reads groups of layers with it
compressed_tensors.quantization.quant_scheme
    preset_name_to_scheme(name targets): quantization/plan.py writes vLLM's config.json from it
llmcompressor.entrypoints.oneshot
    oneshot(model recipe): CheckpointWriter passes both and no data
vllm.entrypoints.llm
    LLM.generate(lora_request): engine/colocated.py names the adapter there
    LLM.sleep(level): engine/colocated.py keeps the base there
    LLM.collective_rpc(method kwargs): QuantizedVLLMGeneration sends weights through it
    LLM.reset_prefix_cache(): QuantizedVLLMGeneration drops what old weights cached
    LLM.wake_up(tags): QuantizedVLLMGeneration wakes the weights before loading
vllm.entrypoints.openai.models.serving
    OpenAIServingModels.load_lora_adapter(request): engine/served.py replaces an adapter with it
vllm.v1.engine.async_llm
    AsyncLLM.errored(): repairs/dead_engine.py ends requests by it
vllm.v1.engine.llm_engine
    LLMEngine.reset_encoder_cache(): ColocatedEngine drops the features of images that old weights computed
vllm.v1.worker.gpu_worker
    Worker.add_lora(lora_request): engine/colocated.py loads an adapter with it
    Worker.reload_weights(): RolloutWorker.load_rollout_weights calls it
    Worker.sleep(level): repairs/cache_scales.py restores what it discards
    Worker.get_model(): RolloutWorker repairs the model it returns
vllm.v1.worker.cpu_worker
    CPUWorker(): RolloutWorker is mixed into it
vllm.v1.worker.gpu_model_runner
    GPUModelRunner.reload_weights(weights_iterator): RolloutWorker.load_rollout_weights passes it
vllm.lora.worker_manager
    LRUCacheWorkerLoRAManager.add_adapter(lora_request): vLLM replaces an adapter
vllm.lora.model_manager
    LoRAModelManager.list_adapters(): engine/worker.py compares what it lists
vllm.lora.lora_model
    LoRAModel.__init__(loras): engine/worker.py compares its matrices
vllm.distributed.device_communicators.pynccl
    PyNcclCommunicator.broadcast(tensor src stream): both ends of engine/broadcast.py send a tensor with it
    PyNcclCommunicator.destroy(): ServedEngine aborts a broadcast to dead workers with it
vllm.model_executor.model_loader.base_loader
    BaseModelLoader.load_model(): repairs/cpu_adapters.py repairs a model after it
vllm.model_executor.model_loader.reload.layerwise
    initialize_layerwise_reload(): a reload accepts checkpoint tensors any number of times
vllm.model_executor.models.registry
    _BaseRegisteredModel.load_model_cls(): engine/colocated.py asks it which model runs an architecture
vllm.model_executor.models.transformers.base
    Base._decorate_for_torch_compile(): repairs/compiled_class.py overrides it to leave the trainer's class unchanged
vllm.model_executor.layers.linear
    ColumnParallelLinear.weight_loader(param loaded_weight): repairs/bias_loader.py gives it to a bias again
vllm.model_executor.layers.vocab_parallel_embedding
    ParallelLMHead(): repairs/cpu_tied_head.py packs its weight again
    UnquantizedEmbeddingMethod.process_weights_after_loading(layer): repairs/cpu_tied_head.py packs the head's weight with it
vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
    CompressedTensorsConfig.__init__(config): starting_fingerprint reads its groups
vllm.model_executor.kernels.linear.scaled_mm.cpu
    CPUInt8ScaledMMLinearKernel.process_weights_for_onednn(layer): ReloadableCPUInt8Kernel keeps the scales
"""
"""Modules, and below each `name(parameters): who relies on it`."""


ATTRIBUTE_TEXT = """
argparse _ActionsContainer: cli/__init__.py
    _option_string_actions
torch.nn.modules.module Module: quantization/checkpoint_form.py
    _buffers
    _non_persistent_buffers_set
torch.nn.modules.module Module: repairs/bias_loader.py
    _parameters
transformers.modeling_utils PreTrainedModel: quantization/layers.py
    _is_stateful
transformers.configuration_utils PreTrainedConfig: quantization/checkpoint.py
    _name_or_path
vllm.distributed.weight_transfer.nccl_engine NCCLWeightTransferEngine: worker.py
    model_update_group
vllm.model_executor.layers.attention.attention set_default_quant_scales: repairs/cache_scales.py
    _k_scale
vllm.lora.worker_manager WorkerLoRAManager: engine/worker.py
    _adapter_manager
vllm.model_executor.model_loader.reload.types LayerReloadingInfo: repairs/incomplete_reload.py
    load_numel
    load_numel_total
"""
"""Modules with a class and who relies on it, and below each, attributes that it has."""

ASSIGNED_TEXT = """
trl.trainer.grpo_trainer GRPOTrainer.__init__: trainers/
    epsilon_high vllm_generation _metrics _step _buffered_inputs _is_vlm _logs _tokenizer
trl.trainer.rloo_trainer RLOOTrainer.__init__: trainers/rollouts.py
    _is_vlm
trl.generation.vllm_generation VLLMGeneration: rollout/backend.py
    model accelerator processing_class mode enable_sleep_mode llm vllm_client _llm_weights_sleeping _dist
vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_int8 CompressedTensorsW8A8Int8.create_weights: repairs/cpu_int8_scales.py exchanges it
    kernel
vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel ScaledMMLinearKernel.__init__: repairs/cpu_int8_scales.py builds a kernel from another's
    config layer_param_names
vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors CompressedTensorsConfig.__init__: RolloutWorker.starting_fingerprint
    config
"""
"""Modules with a definition and who relies on it, and below each, attributes that it assigns to."""

SOURCE_TEXT = """
trl.generation.vllm_generation VLLMGeneration.generate: our generate counts the tokens of [1], without that sync's time
    once: return (prompt_ids, completion_ids, logprobs, logprob_token_ids)
    once: return
    self.sync_weights()
trl.generation.vllm_generation VLLMGeneration._init_vllm: rollout/substitution.py replaces these names in the module
    once: = LLM(
    once: = VLLMClient(
trl.trainer.grpo_trainer GRPOTrainer.__init__: rollout/substitution.py replaces the name in the module
    once: VLLMGeneration(
trl.trainer.rloo_trainer RLOOTrainer.__init__: rollout/substitution.py replaces the name in the module
    once: VLLMGeneration(
trl.trainer.grpo_trainer GRPOTrainer._generate_single_turn: our property _last_loaded_step decides about the sync
    if self.state.global_step != self._last_loaded_step:
    self.vllm_generation.sync_weights()
    vllm_generation.generate(
trl.trainer.rloo_trainer RLOOTrainer._generate_single_turn: our property _last_loaded_step decides about the sync
    if self.state.global_step != self._last_loaded_step:
    self.vllm_generation.sync_weights()
    vllm_generation.generate(
trl.trainer.grpo_trainer GRPOTrainer._generate_single_turn: config/refusals.py refuses `logprobs`
    lp[0]
trl.trainer.grpo_trainer GRPOTrainer._generate_and_score_completions: _scores_in_update repeats the condition
    generate_every = self.args.steps_per_generation * self.num_iterations
    if self.args.gradient_accumulation_steps % generate_every != 0 or (self.use_vllm and
    (self.use_vllm and self.vllm_importance_sampling_correction):
trl.trainer.grpo_trainer GRPOTrainer._generate_and_score_completions: trainers/dynamic_sampling.py replaces both calls
    prompt_ids_list, completion_ids_list, tool_mask_list, completions, sampling_per_token_logps_list, extra_fields,
    extra_fields, images, tool_images
    = self._generate(prompts)
    self._calculate_rewards(inputs, prompts, completions, completion_ids_list)
    self._pending_extra_logs.get(column
    self._pending_extra_logs.clear()
trl.trainer.grpo_trainer GRPOTrainer._calculate_rewards: dynamic sampling sees the rewards of all processes
    gather(rewards_per_func)
trl.trainer.grpo_trainer GRPOTrainer._log_completion_extra: dynamic sampling selects rows of these columns
    self._pending_extra_logs[column].extend(values)
trl.trainer.grpo_trainer GRPOTrainer._get_per_token_logps_and_entropies: trainers/rollouts.py keeps [0]
    once: return
    return (logps,
trl.trainer.grpo_trainer GRPOTrainer._compute_loss: GroupRolloutsMixin._compute_loss acts after the forward pass
    once: self._get_per_token_logps_and_entropies(
    old_per_token_logps
trl.trainer.grpo_trainer GRPOTrainer._compute_loss: GroupRolloutsMixin._compute_loss acts after the forward pass
    self._get_per_token_logps_and_entropies(
    importance_sampling_ratio
trl.trainer.grpo_trainer GRPOTrainer._compute_loss: objective.surrogate_terms acts through these lines
    if advantages.dim() == 1:
    inputs.get('old_per_token_logps')
    log_ratio = per_token_logps - old_per_token_logps
    coef_1 = torch.exp(log_importance_weights)
    coef_2 = torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)
    per_token_loss = -torch.min(per_token_loss1, per_token_loss2)
    per_token_loss = per_token_loss * inputs['importance_sampling_ratio']
trl.trainer.rloo_trainer RLOOTrainer._generate_and_score_completions: trainers/rloo.py expects the policy's pass first
    old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(self.model,
    old_logps = (old_per_token_logps * completion_mask).sum(1)
    ref_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(self.ref_model,
trl.trainer.rloo_trainer RLOOTrainer._compute_loss: trainers/rloo.py weighs tokens through these lines
    once: self._get_per_token_logps_and_entropies(
    logps = (per_token_logps * completion_mask).sum(1)
    old_logps = inputs['old_logps']
    log_ratio = logps - old_logps
    coef_1 = torch.exp(log_ratio)
    per_sequence_loss = -torch.min(per_sequence_loss1, per_sequence_loss2)
trl.trainer.grpo_trainer GRPOTrainer.__init__: QuantizedEngineMixin._record appends to these lists
    self._metrics = {'train': defaultdict(list), 'eval': defaultdict(list)}
trl.trainer.grpo_trainer GRPOTrainer.log: it logs our metrics
    for key, val in self._metrics[mode].items()
trl.trainer.grpo_trainer GRPOTrainer._prepare_inputs: GroupRolloutsMixin saves _step and _buffered_inputs
    if self._step % generate_every == 0 or self._buffered_inputs is None:
    inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
transformers.trainer Trainer._save_checkpoint: trainers/rollouts.py writes into that directory
    f'{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}'
    self._get_output_dir(
transformers.trainer Trainer._maybe_log_save_evaluate: the guard stops with should_save, without should_evaluate
    if self.control.should_evaluate:
    self.control.should_save = is_new_best_metric
    if self.control.should_save:
transformers.trainer_callback CallbackHandler.on_train_begin: a run that the guard stopped resumes from its checkpoint
    should_training_stop = False
transformers.modeling_utils *: quantization/checkpoint.py silences this warning by its words
    Attempting to save a model with offloaded modules
vllm.v1.worker.worker_base *: RolloutWorker is mixed in by name
    parallel_config.worker_extension_cls
vllm.config.parallel ParallelConfig: ServedEngine recognizes our servers by it
    worker_extension_cls: str
vllm.v1.engine.core EngineCore.shutdown: repairs/finalizer.py calls these itself
    structured_output_manager.clear_backend()
    model_executor.shutdown()
    scheduler.shutdown()
vllm.v1.engine.core EngineCore.shutdown: without this, repairs/finalizer.py can go
    cleanup_dist_env_and_memory()
vllm.model_executor.model_loader.reload.layerwise *: repairs/incomplete_reload.py listens to this logger
    logger = init_logger(__name__)
vllm.model_executor.model_loader.reload.layerwise finalize_layerwise_processing: repairs/incomplete_reload.py raises on it
    logger.warning('%s: Failed to load weights', layer.__class__.__name__)
vllm.model_executor.model_loader.reload.layerwise finalize_layerwise_processing: repairs/incomplete_reload.py raises on it
    logger.debug('%s: Delayed processing', layer.__class__.__name__)
vllm.model_executor.model_loader.reload.layerwise make_online_process_loader: repairs/incomplete_reload.py raises on it
    logger.debug('%s: Excessive loading', layer.__class__.__name__)
vllm.model_executor.kernels.linear.scaled_mm.cpu CPUInt8ScaledMMLinearKernel.process_weights_for_onednn: repairs/cpu_int8_scales.py
    w_q_name, w_s_name, i_s_name, i_zp_name, azp_adj_name = self.layer_param_names
    ops.create_onednn_scaled_mm(weight, getattr(layer, w_s_name)
vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors *: repairs/cpu_int8_scales.py reads it
    layer.scheme =
vllm.model_executor.layers.linear LinearBase.__init__: repairs/incomplete_reload.py skips layers that have it
    self.quant_method
vllm.model_executor.layers.vocab_parallel_embedding VocabParallelEmbedding.__init__: repairs/incomplete_reload.py skips it
    self.quant_method
vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method UnquantizedFusedMoEMethod._setup_kernel: cpu_experts.py
    is_weight_update = self.moe_kernel is not None
    if not is_weight_update:
    fused_experts.process_weights_after_loading(layer)
    process_weights_after_loading
vllm.entrypoints.serve.dev.rpc.api_router *: ServedEngine calls workers through it
    @router.post('/collective_rpc')
vllm.entrypoints.serve.dev.rpc.api_router collective_rpc: ServedEngine finds a worker's report in 'results'
    isinstance(result, dict | list)
    {'results': response}
vllm.entrypoints.serve.dev.rpc.api_router engine_client: repairs/dead_engine.py finds the engine there
    return request.app.state.engine_client
vllm.v1.engine.async_llm AsyncLLM.errored: repairs/dead_engine.py ends requests to an engine whose process has died
    return self.engine_core.resources.engine_dead or
vllm.entrypoints.serve.dev.cache.api_router reset_prefix_cache: rollout/engine/http.py knows its answer by it
    {'success': bool(success)}
vllm.entrypoints.serve.dev.cache.api_router reset_encoder_cache: rollout/engine/http.py knows that its answer is empty
    return Response(status_code=200)
vllm.entrypoints.openai.models.serving OpenAIServingModels.load_lora_adapter: http.py knows its answer, a text, by it
    Success: LoRA adapter
trl.generation.vllm_client VLLMClient.image_features: ServedEngine catches its errors
    self.session.post(f'{self.base_url}/v1/chat/completions/render'
    raise Exception(f'Request failed:
vllm.entrypoints.serve.dev.cache.api_router *: TRL's client drops what old weights cached with it
    @router.post('/reset_prefix_cache')
vllm.entrypoints.serve.dev.cache.api_router *: ServedEngine drops the features of images with it
    @router.post('/reset_encoder_cache')
vllm.entrypoints.serve.dev.server_info.api_router *: ServedEngine finds out why a server cannot load weights
    @router.get('/server_info')
"""
"""Modules with a definition (`*`: the whole module) and who relies on it, and below each, fragments
of its source.

They must first occur in this order, and those with `once:` only once.
"""


Row = tuple[str, str | None, list[str], str]


def parse(text: str) -> list[Row]:
    """The rows of a table: module, definition, what is below them, who relies on it."""
    rows: list[Row] = []
    for line in text.strip().splitlines():
        if line.startswith(" "):
            rows[-1][2].append(line.strip())
        else:
            module, name, user = re.fullmatch(r"(\S+) (\S+): (.+)", line).groups()
            rows.append((module, None if name == "*" else name, [], user))
    return rows


def parse_definitions(text: str) -> list[Row]:
    """The same of `CALLED`, which has a module's definitions and their parameters below it."""
    rows: list[Row] = []
    module = ""
    for line in text.strip().splitlines():
        if line.startswith(" "):
            name, parameters, user = re.fullmatch(r" +(.+?)\((.*?)\): (.+)", line).groups()
            rows.append((module, name, parameters.split(), user))
        else:
            module = line
    return rows


DEFINITIONS = parse_definitions(CALLED)
ATTRIBUTES = parse(ATTRIBUTE_TEXT)
ASSIGNED = parse(ASSIGNED_TEXT)
SOURCE = parse(SOURCE_TEXT)

LIBRARIES = (
    "trl",
    "vllm",
    "transformers",
    "accelerate",
    "peft",
    "compressed_tensors",
    "llmcompressor",
)
NOT_PRIVATE = {"_asdict", "_replace", "_exit"}  # of named tuples and `os`
NOT_PRIVATE |= {"_version"}  # how often a tensor was written to, documented by torch
NOT_PRIVATE |= {"_evaluate"}  # of our callback; a trainer has one too


# Reading sources
# --------------------------------------------------------------------------------------------------


def source_file(module: str) -> Path | None:
    """The source of a module, found without importing its package, or `None`."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    if not spec.submodule_search_locations:
        return Path(spec.origin)  # a module of one file
    path = Path(spec.submodule_search_locations[0], *rest)
    return next(
        (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None
    )


@functools.cache
def tree(module: str) -> ast.Module:
    path = source_file(module)
    assert path is not None, f"The module {module} is gone: this file says what relies on it."
    return ast.parse(path.read_text())


def definition(module: str, name: str | None) -> ast.AST | None:
    """The class or function called `name` (dotted inside classes), also inside an `if` of the
    module.
    """
    node: ast.AST | None = tree(module)
    for part in name.split(".") if name else []:
        kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
        nodes = ast.walk(node) if node is tree(module) else node.body
        node = next(
            (child for child in nodes if isinstance(child, kinds) and child.name == part), None
        )
        if node is None:
            return None
    return node


def body_of(module: str, name: str | None) -> ast.AST:
    node = definition(module, name)
    assert node is not None, f"{module}.{name} is gone: this file says what relies on it."
    return node


@functools.cache
def text_of(module: str, name: str | None) -> str:
    """Source of a definition in one canonical form: single quotes, one space, no comments."""
    return ast.unparse(body_of(module, name))


def calls(node: ast.AST, function: str) -> list[ast.Call]:
    return [
        call
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == function
    ]


def keywords(call: ast.Call) -> dict[str | None, str]:
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}


def each_row(rows: list[Row]) -> pytest.MarkDecorator:
    ids = [
        f"{module.rpartition('.')[2]}.{name or ''}-{found}"[:90] for module, name, found, _ in rows
    ]
    return pytest.mark.parametrize(("module", "name", "found", "user"), rows, ids=ids)


# The tables
# --------------------------------------------------------------------------------------------------


@each_row(DEFINITIONS)
def test_definition_takes_these_parameters(module, name, found, user):
    node = definition(module, name)
    assert node is not None, f"{module}.{name} is gone: {user}"
    if found:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        missing = set(found) - {argument.arg for argument in arguments}
        assert not missing, f"{module}.{name} no longer takes {sorted(missing)}: {user}"


@each_row(ATTRIBUTES)
def test_private_attribute_exists(module, name, found, user):
    for attribute in found:
        is_there = re.search(rf"\b{attribute}\b", text_of(module, name))
        assert is_there, f"{name} no longer has {attribute}: {user}"


@each_row(ASSIGNED)
def test_attributes_are_assigned(module, name, found, user):
    targets = [
        each for node in ast.walk(body_of(module, name)) for each in getattr(node, "targets", ())
    ]
    assigned = {target.attr for target in targets if isinstance(target, ast.Attribute)}
    [attributes] = found
    missing = set(attributes.split()) - assigned
    assert not missing, f"{name} no longer sets {sorted(missing)}: {user}"


@each_row(SOURCE)
def test_source_has_these_lines_in_order(module, name, found, user):
    text = text_of(module, name)
    place = 0
    for fragment in found:
        expected = fragment.removeprefix("once: ")
        assert expected in text, f"{name or module} has no `{expected}` any more: {user}"
        if expected == fragment:
            first = text.index(fragment)
            assert place <= first, f"{name or module} has `{fragment}` in another place: {user}"
            place = first
        else:
            count = len(re.findall(re.escape(expected) + r"\b" * expected[-1].isalnum(), text))
            assert count == 1, f"{name} has `{expected}` {count} times: {user}"


# Compared with the package
# -------------------------------------------------------------------------------------------


@functools.cache
def code() -> list[ast.AST]:
    """Every node of the package's code."""
    files = Path(trl_qurl.__file__).parent.rglob("*.py")
    return [node for path in files for node in ast.walk(ast.parse(path.read_text()))]


def test_every_private_name_is_listed_here():
    """A name is private to a library if it is not ours, or if the classes that we extend have it
    too.
    """
    methods = {node.name for node in code() if isinstance(node, ast.FunctionDef)}
    attributes = [node for node in code() if isinstance(node, ast.Attribute)]
    fields = {ast.unparse(node.target) for node in code() if isinstance(node, ast.AnnAssign)}
    for node in code():
        if isinstance(node, ast.Assign):
            fields |= {ast.unparse(target) for target in node.targets}
    ours = methods | fields | {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    modules = (GRPO, RLOO, GENERATION, CLIENT, "trl.trainer.base_trainer", TRAINER)
    extended = "".join(text_of(module, None) for module in modules)
    theirs = set(re.findall(r"(?:\bdef |\bself\.)(_\w+)", extended))
    used = {node.attr for node in attributes} | methods
    listed = set(re.findall(r"\w+", Path(__file__).read_text()))
    for name in used - NOT_PRIVATE - listed:
        is_private = name.startswith("_") and not name.startswith("__")
        is_theirs = name not in ours or name in theirs
        assert not (is_private and is_theirs), f"{name} is private to a library: list it here"


def imported_names() -> set[tuple[str, str]]:
    """(module, name) of every import from inside a library; `tools/cuda_contract.py` compares them
    in two builds.
    """
    names = set()
    for node in code():
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if "." in module and node.level == 0 and module.split(".")[0] in LIBRARIES:
            names |= {(module, alias.name) for alias in node.names}
    return names


def test_every_import_from_inside_a_library_exists():
    inside = imported_names()
    assert len(inside) > 50
    gone = []
    for module, name in sorted(inside):
        if importlib.util.find_spec(module.split(".")[0]) is None:
            continue  # llm-compressor is optional
        path = source_file(module)
        files = [] if path is None else [path]
        # a package passes on what its modules define
        if path is not None and path.name == "__init__.py":
            files = [*path.parent.rglob("*.py")]
        is_module = source_file(f"{module}.{name}") is not None
        if not is_module and not any(re.search(rf"\b{name}\b", file.read_text()) for file in files):
            gone.append(f"{module}.{name}")
    assert not gone, f"{gone} are gone from where trl_qurl imports them."


def test_vllms_variables_exist():
    texts = [str(node.value) for node in code() if isinstance(node, ast.Constant)]
    ours = {text for text in texts if re.fullmatch(r"VLLM_[A-Z0-9_]+", text)}
    assert len(ours) > 5
    missing = ours - set(re.findall(r"\bVLLM_\w+", source_file("vllm.envs").read_text()))
    assert not missing, f"vLLM no longer reads {sorted(missing)}, which trl_qurl sets or reads."


def test_installed_trl_is_within_the_bounds_of_setup_cfg():
    required = map(Requirement, importlib.metadata.requires("trl-qurl"))
    # extras add to it
    [trl] = [one for one in required if one.name == "trl" and one.marker is None]
    installed = importlib.metadata.version("trl")
    is_inside = trl.specifier.contains(installed, prereleases=True)
    assert is_inside, f"read the changes of TRL {installed} to what this file lists: {trl}"


@needs_trl_1_16
@pytest.mark.parametrize("module", OTHER_TRAINERS)
def test_trainers_of_the_table_have_what_the_engine_needs(module):
    [trainer] = re.findall(r"^class (\w+Trainer)\(", source_file(module).read_text(), re.M)
    body = text_of(module, trainer)
    for extended in (
        "self.vllm_generation = VLLMGeneration(",
        "self._metrics = {'train': defaultdict(list), 'eval': defaultdict(list)}",
        "def _prepare_inputs(self, generation_batch",
        "def compute_loss(self, model, inputs",
    ):
        assert extended in body, trainer
    is_inside = "from ...generation.vllm_generation import VLLMGeneration" in body
    assert is_inside == (trainer in ("SDPOTrainer", "SDFTTrainer"))


def test_engine_arguments_are_those_the_config_reserves():
    [call] = calls(body_of(GENERATION, "VLLMGeneration._init_vllm"), "LLM")
    given = keywords(call)
    assert not call.args and None not in given, "see build_engine"
    ours = {"quantization_config", "worker_extension_cls", "enable_lora", "max_lora_rank"}
    assert given.keys() == TAKEN_ENGINE_ARGUMENTS.keys() - ours | {"seed"}
    expected = {
        "max_num_batched_tokens": "4096",  # as the docstring of the config says
        # as our backend numbers engines
        "seed": "accelerator.process_index // self.tensor_parallel_size",
        "logprobs_mode": "'processed_logprobs'",  # the importance ratio needs these
        "model": "model.name_or_path",  # `_make_route` asks whether it is empty
    }
    assert expected.items() <= given.items()


def test_sampling_parameters_that_the_config_names_exist():
    body = body_of("vllm.sampling_params", "SamplingParams").body
    fields = {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    named = {*HARMLESS, *NEUTRAL, *SAMPLING_PARAMETERS}
    named |= {"min_p", "temperature", "structured_outputs"}
    assert named <= fields, "see config/checks.py and refusals.py"


def test_the_backends_constructor_starts_the_engine_last():
    """Our override of `_init_vllm` needs every attribute."""
    last = body_of(GENERATION, "VLLMGeneration.__init__").body[-1]
    assert ast.unparse(last) == "self._init_vllm()"


def test_clipped_loss_types_are_clamped_by_trl():
    [branch] = [
        node.test
        for node in ast.walk(body_of(GRPO, "GRPOTrainer._compute_loss"))
        if isinstance(node, ast.If)
        and any("coef_2 = torch.clamp" in ast.unparse(line) for line in node.body)
    ]
    clipped = set(ast.literal_eval(branch.comparators[0]))
    assert set(CLIPPED_LOSS_TYPES) <= clipped, f"see config.CLIPPED_LOSS_TYPES; TRL's: {clipped}"


def test_scoring_returns_what_our_trainers_read():
    body = text_of(GRPO, "GRPOTrainer._generate_and_score_completions")
    keys = "old_per_token_logps sampling_per_token_logps completion_mask tool_mask advantages"
    for key in keys.split():
        assert f"'{key}': {key}" in body or f"output['{key}'] = {key}" in body, key


@pytest.mark.parametrize("module, name", [(GRPO, "GRPOTrainer"), (RLOO, "RLOOTrainer")])
def test_reward_functions_get_what_the_constructor_checks_them_for(module, name):
    body = body_of(module, f"{name}._calculate_rewards")
    # others are of models, by position
    [named] = [words for words in map(keywords, calls(body, "reward_func")) if "prompts" in words]
    added = set(re.findall(r"reward_kwargs\['(\w+)'\] =", ast.unparse(body)))
    # the first is optional, the others are for a warning
    added -= {"environments", "prompt", "completion"}
    assert named.keys() - {None} | added == set(REWARD_KEYWORDS), "see trainers/arguments.py"
    assert f"not in {list(NOT_PASSED)}" in ast.unparse(body), "see trainers/arguments.py"


def test_trl_only_warns_about_a_newer_vllm():
    """If it raises, the extra `vllm` in setup.cfg may not go beyond TRL's range."""
    body = body_of("trl.import_utils", "is_vllm_available")
    assert calls(body, "warnings.warn") and "raise " not in ast.unparse(body)


def test_finalizer_of_an_engine_is_the_one_that_we_replace():
    client = text_of("vllm.v1.engine.core_client", "InprocClient.__init__")
    ours = "self._finalizer = weakref.finalize(self, self.engine_core.shutdown)"
    # none before vLLM 0.31
    assert client.count(ours) == client.count("finalize("), "see rollout/repairs/finalizer.py"


def test_a_deleted_engine_does_all_of_vllms_shutdown_but_for_the_process_groups():
    vllms = body_of("vllm.v1.engine.core", "EngineCore.shutdown")
    # in the sources, because on a CPU nothing tells whether a worker was shut down
    names = {ast.unparse(node.func) for node in ast.walk(vllms) if isinstance(node, ast.Call)}
    left_out = {"cleanup_dist_env_and_memory", *(name for name in names if "logger" in name)}
    ours = body_of("trl_qurl.rollout.repairs.finalizer", "_release")
    for name in names - left_out:
        assert calls(ours, re.sub(r"^self\b", "core", name)), name


def test_a_reload_goes_layer_by_layer_through_load_weights():
    body = text_of("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.reload_weights")
    if source_file(INPLACE):  # vLLM 0.32 moved the body there
        assert "reload_weights(self.vllm_config, self.get_model()" in body
        body = text_of(INPLACE, "reload_weights")
    assert "initialize_layerwise_reload(model)" in body
    assert "model.load_weights(weights_iterator)" in body
    assert "finalize_layerwise_reload" in body, "a reload may accept quantized tensors only once"


def test_an_api_key_does_not_guard_the_development_endpoints():
    """If it does, KeyGuard may go."""
    sources = source_file("vllm.entrypoints").parent.rglob("*.py")
    text = "".join(path.read_text() for path in sources)
    [guarded] = re.findall(r"^GUARDED_PREFIX = (.*)", text, re.MULTILINE)
    for path in ("/collective_rpc", "/server_info", "/reset_prefix_cache", "/reset_encoder_cache"):
        assert not path.startswith(ast.literal_eval(guarded))


# Faults of vLLM that we work around
# ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_reload(run_scenario, tmp_path_factory):
    """One reload by vLLM alone, on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("the repairs are for vLLM on CPU")
    return run_scenario("plain_reload.py", tmp_path_factory.mktemp("plain_reload"))


@pytest.mark.vllm
@pytest.mark.xdist_group("plain_reload")
@needs_avx512
def test_vllm_still_leaves_a_tied_head_stale(plain_reload):
    assert plain_reload["started"]["head_error"] < 0.02, "the head is wrong before any reload"
    assert plain_reload["reloaded"]["head_error"] > 0.1, "rollout/repairs/cpu_tied_head.py can go"


@pytest.mark.vllm
@pytest.mark.xdist_group("plain_reload")
@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="with AMX, vLLM uses another INT8 kernel"
)
def test_vllm_still_frees_int8_scales_under_the_primitive(plain_reload):
    # Reading freed memory would depend on luck, so this compares addresses: those of the layers'
    # scales are in use all the time, and any other address belongs to a tensor that only the kernel
    # knew.
    assert plain_reload["started"]["primitives"] == plain_reload["reloaded"]["primitives"] == 8
    assert plain_reload["started"]["dangling"] == 0
    assert plain_reload["reloaded"]["dangling"] == 8, "rollout/repairs/cpu_int8_scales.py can go"
