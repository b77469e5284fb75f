"""Everything private that the code leans on in TRL, vLLM, transformers, accelerate, torch and llm-compressor.

Two tests compare the list with the code: a private name that is not in this file fails, and so does an import that a
library no longer has. Libraries move, and a seam that moved must not be found by a wrong loss. Each entry and each
test names one thing, and its failure says in a sentence what is gone and what in trl_qurl stands on it. Sources are
read, not imported, so this file needs no engine and is the first to run after an upgrade (`pytest
tests/test_trl_contract.py`).
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
from trl_qurl.config.checks import HARMLESS, NEUTRAL, REFUSED
from trl_qurl.trainers.arguments import NOT_PASSED, REWARD_KEYWORDS

GRPO = "trl.trainer.grpo_trainer"
RLOO = "trl.trainer.rloo_trainer"
GENERATION = "trl.generation.vllm_generation"
CLIENT = "trl.generation.vllm_client"
TRANSFER = "vllm.distributed.weight_transfer.base"
PACKED = "vllm.distributed.weight_transfer.packed_tensor"
INPLACE = "vllm.model_executor.model_loader.reload.inplace"
LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
COMPRESSED_TENSORS = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
CPU_KERNELS = "vllm.model_executor.kernels.linear.scaled_mm.cpu"
HEAD = "vllm.model_executor.layers.vocab_parallel_embedding"

OTHER_TRAINERS = [
    "trl.trainer.distillation_trainer",
    *(f"trl.experimental.{name}.{name}_trainer" for name in ("sdpo", "sdft", "gold", "iw_opd")),
]
"""Where docs/architecture.md says that `QuantizedEngineMixin` works."""

# (module, name, parameters it takes, what leans on it)
DEFINITIONS = [
    (
        GRPO,
        "GRPOTrainer.__init__",
        "model reward_funcs args callbacks peft_config",
        "trainers/engine.py sets them",
    ),
    (GRPO, "GRPOTrainer._generate_and_score_completions", "inputs", "trainers/grpo.py measures the mismatch after it"),
    (GRPO, "GRPOTrainer._tokenize_prompts", "prompts", "trainers/rollouts.py learns of pictures by it"),
    (RLOO, "RLOOTrainer._tokenize_prompts", "prompts", "trainers/rollouts.py learns of pictures by it"),
    (
        "transformers.core_model_loading",
        "revert_weight_conversion",
        "model state_dict",
        "quantization/checkpoint_form.py gets a checkpoint's names and cuts by it",
    ),
    (GRPO, "GRPOTrainer._prepare_inputs", "generation_batch", "trainers/engine.py times the rollouts in it"),
    (
        GRPO,
        "GRPOTrainer._get_per_token_logps_and_entropies",
        "model",
        "trainers/rollouts.py scores rollouts and losses by it",
    ),
    (GRPO, "GRPOTrainer._compute_loss", "model inputs", "trainers/grpo.py computes every objective through it"),
    (GRPO, "GRPOTrainer._save_checkpoint", "model trial", "trainers/rollouts.py adds the rollout in progress"),
    (
        RLOO,
        "RLOOTrainer.__init__",
        "model reward_funcs args callbacks peft_config",
        "trainers/engine.py sets them",
    ),
    (
        RLOO,
        "RLOOTrainer._generate_and_score_completions",
        "inputs",
        "trainers/rloo.py adds the objective to its batch",
    ),
    (RLOO, "RLOOTrainer._prepare_inputs", "generation_batch", "trainers/engine.py times the rollouts in it"),
    (
        RLOO,
        "RLOOTrainer._get_per_token_logps_and_entropies",
        "model",
        "trainers/rollouts.py gives the loss what it returns",
    ),
    (RLOO, "RLOOTrainer._compute_loss", "model inputs", "trainers/rloo.py computes every objective through it"),
    (RLOO, "RLOOTrainer._save_checkpoint", "model trial", "trainers/rollouts.py adds the rollout in progress"),
    (
        GRPO,
        "GRPOTrainer._load_optimizer_and_scheduler",
        "checkpoint",
        "trainers/rollouts.py reads the rollout back there",
    ),
    (
        GRPO,
        "GRPOTrainer._get_train_sampler",
        "dataset",
        "trainers/rollouts.py skips past epochs in it on resuming",
    ),
    ("trl.trainer.utils", "RepeatSampler.__init__", "shuffle seed", "trainers/rollouts.py skips epochs in it"),
    (GRPO, "GRPOTrainer._calculate_rewards", "", "trainers/ppo.py keeps the rewards of whole sequences"),
    (GRPO, "GRPOTrainer._generate", "prompts", "trainers/dynamic_sampling.py makes its rounds by it"),
    (
        GRPO,
        "GRPOTrainer._calculate_rewards",
        "inputs prompts completions completion_ids_list",
        "trainers/dynamic_sampling.py scores its rounds by it",
    ),
    (
        "accelerate.utils.operations",
        "gather_object",
        "object",
        "dynamic sampling moves groups by it",
    ),
    (GRPO, "GRPOTrainer.training_step", "model inputs", "trainers/ppo.py lets the critic learn after it"),
    (
        "trl.trainer.utils",
        "create_model_from_path",
        "model_id architecture",
        "trainers/critic.py loads the critic by it",
    ),
    ("trl.trainer.utils", "disable_dropout_in_model", "model", "trainers/critic.py leaves no dropout"),
    (
        "trl.trainer.base_trainer",
        "_BaseTrainer.create_model_card",
        "model_name dataset_name tags",
        "trainers/engine.py adds to the card it writes into output_dir",
    ),
    (
        "trl.trainer.utils",
        "get_config_model_id",
        "config",
        "trainers/engine.py and trainers/critic.py find the policy's start by it",
    ),
    (
        "transformers.trainer",
        "Trainer.create_scheduler",
        "num_training_steps optimizer",
        "trainers/ppo.py prepares the critic there",
    ),
    (
        "transformers.trainer",
        "Trainer._save_optimizer_and_scheduler",
        "output_dir",
        "trainers/ppo.py adds the critic's state before older checkpoints go",
    ),
    (
        "transformers.trainer",
        "Trainer.create_optimizer",
        "model",
        "trainers/ppo.py builds the critic's optimizer of the policy's kind",
    ),
    ("vllm.lora.worker_manager", "LRUCacheWorkerLoRAManager.add_adapter", "lora_request", "vLLM replaces an adapter"),
    (
        "vllm.model_executor.models.transformers.base",
        "Base._decorate_for_torch_compile",
        "",
        "engine/colocated.py overrides it, so that the trainer's class of the model stays as it is",
    ),
    (
        "vllm.model_executor.models.registry",
        "_BaseRegisteredModel.load_model_cls",
        "",
        "engine/colocated.py asks it which model runs an architecture",
    ),
    ("vllm.lora.model_manager", "LoRAModelManager.list_adapters", "", "engine/worker.py compares what it lists"),
    ("vllm.lora.lora_model", "LoRAModel.__init__", "loras", "engine/worker.py compares its matrices"),
    ("vllm.v1.worker.gpu_worker", "Worker.add_lora", "lora_request", "engine/colocated.py loads an adapter by it"),
    (
        "vllm.entrypoints.openai.models.serving",
        "OpenAIServingModels.load_lora_adapter",
        "request",
        "engine/served.py replaces an adapter by it",
    ),
    (
        "vllm.model_executor.model_loader.base_loader",
        "BaseModelLoader.load_model",
        "",
        "engine/cpu.py repairs a model after it",
    ),
    ("vllm.entrypoints.llm", "LLM.generate", "lora_request", "engine/colocated.py names the adapter there"),
    ("vllm.entrypoints.llm", "LLM.sleep", "level", "engine/colocated.py keeps the base there"),
    (
        "accelerate.accelerator",
        "Accelerator.__init__",
        "gradient_accumulation_plugin",
        "trainers/critic.py has a separate accelerator",
    ),
    (
        "accelerate.accelerator",
        "Accelerator.save_state",
        "output_dir",
        "trainers/critic.py saves the critic by it",
    ),
    (
        "accelerate.accelerator",
        "Accelerator.load_state",
        "input_dir",
        "trainers/critic.py resumes the critic by it",
    ),
    (
        "transformers.trainer",
        "Trainer._get_output_dir",
        "trial",
        "trainers/rollouts.py finds the checkpoint by it",
    ),
    ("transformers.trainer", "Trainer._load_rng_state", "checkpoint", "a resumed run samples on where it stopped"),
    (
        "transformers.initialization",
        "no_init_weights",
        "",
        "quantization/checkpoint.py copies a model without it cold",
    ),
    ("accelerate.utils.modeling", "is_peft_model", "model", "rollout/backend.py tells adapters by it"),
    (
        "accelerate.utils.operations",
        "broadcast_object_list",
        "object_list from_process",
        "processes share a directory",
    ),
    ("trl.distributed", "DistributedBackend.is_zero3", "", "WeightSync reads it, and `fsdp_version`"),
    ("trl.import_utils", "is_vllm_available", "", "trainers/arguments.py names the extra that brings vLLM"),
    (
        GENERATION,
        "VLLMGeneration.__init__",
        "model accelerator processing_class",
        "QuantizedVLLMGeneration passes them",
    ),
    (GENERATION, "VLLMGeneration._init_vllm", "", "QuantizedVLLMGeneration starts the engine through it"),
    (GENERATION, "VLLMGeneration.sync_weights", "", "QuantizedVLLMGeneration replaces it"),
    (
        GENERATION,
        "VLLMGeneration.generate",
        "prompts images num_generations",
        "QuantizedVLLMGeneration counts its seconds and tokens",
    ),
    (GENERATION, "empty_cache", "", "QuantizedVLLMGeneration calls it before waking the engine"),
    (CLIENT, "VLLMClient.__init__", "base_url connection_timeout", "ServedEngine is built as it is"),
    (CLIENT, "VLLMClient.check_server", "total_timeout retry_interval", "ServedEngine waits in its place"),
    (CLIENT, "VLLMClient.init_communicator", "device", "ServedEngine opens NCCL by it, or leaves it out"),
    (CLIENT, "VLLMClient.close_communicator", "", "ServedEngine frees the port of its rendezvous by it"),
    (
        "vllm.distributed.device_communicators.pynccl",
        "PyNcclCommunicator.destroy",
        "",
        "ServedEngine aborts a broadcast to dead workers by it",
    ),
    (CLIENT, "VLLMClient._post", "url", "ServedEngine bounds every request in time by overriding it"),
    (CLIENT, "VLLMClient._get", "url", "ServedEngine bounds every request in time by overriding it"),
    (
        "vllm.entrypoints.llm",
        "LLM.collective_rpc",
        "method kwargs",
        "QuantizedVLLMGeneration sends weights through it",
    ),
    ("vllm.entrypoints.llm", "LLM.reset_prefix_cache", "", "QuantizedVLLMGeneration drops what old weights cached"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.reset_encoder_cache", "", "ColocatedEngine drops what old weights saw"),
    ("vllm.v1.worker.gpu_worker", "Worker.sleep", "level", "engine/cuda.py brings back what it discards"),
    (
        "vllm.model_executor.layers.linear",
        "ColumnParallelLinear.weight_loader",
        "param loaded_weight",
        "engine/cuda.py gives it to a bias again",
    ),
    ("vllm.entrypoints.llm", "LLM.wake_up", "tags", "QuantizedVLLMGeneration wakes the weights before loading"),
    ("vllm.v1.worker.gpu_worker", "Worker.reload_weights", "", "RolloutWorker.load_rollout_weights calls it"),
    ("vllm.v1.worker.gpu_worker", "Worker.start_weight_update", "", "RolloutWorker receives a stream between"),
    ("vllm.v1.worker.gpu_worker", "Worker.update_weights", "update_info", "RolloutWorker receives a stream by it"),
    ("vllm.v1.worker.gpu_worker", "Worker.finish_weight_update", "", "RolloutWorker receives a stream between"),
    (TRANSFER, "WeightTransferEngine.set_weight_update_target", "model model_config", "RolloutWorker takes digests"),
    (TRANSFER, "WeightTransferEngine.reset_weight_update_target", "", "RolloutWorker takes digests"),
    (
        PACKED,
        "packed_nccl_broadcast_producer",
        "iterator group src post_iter_func buffer_size_bytes num_buffers",
        "ServedEngine streams by it",
    ),
    ("vllm.v1.worker.gpu_worker", "Worker.get_model", "", "RolloutWorker repairs the model it returns"),
    ("vllm.v1.worker.cpu_worker", "CPUWorker", "", "RolloutWorker is mixed into it"),
    (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.reload_weights",
        "weights_iterator",
        "RolloutWorker.load_rollout_weights passes it",
    ),
    (LAYERWISE, "initialize_layerwise_reload", "", "a reload takes checkpoint tensors as often as one likes"),
    (COMPRESSED_TENSORS, "CompressedTensorsConfig.__init__", "config", "starting_fingerprint reads its groups"),
    (
        CPU_KERNELS,
        "CPUInt8ScaledMMLinearKernel.process_weights_for_onednn",
        "layer",
        "ReloadableCPUInt8Kernel keeps the scales that it hands to oneDNN",
    ),
    (HEAD, "ParallelLMHead", "", "rollout/engine/cpu.py packs its weight again"),
    (
        HEAD,
        "UnquantizedEmbeddingMethod.process_weights_after_loading",
        "layer",
        "rollout/engine/cpu.py packs the output head's weight by it",
    ),
    ("compressed_tensors.utils.match", "is_match", "name module targets", "quantization/layers.py ignores by it"),
    (
        "compressed_tensors.utils.match",
        "match_targets",
        "name module targets",
        "quantization/plan.py reads groups by it",
    ),
    (
        "compressed_tensors.quantization.quant_scheme",
        "preset_name_to_scheme",
        "name targets",
        "quantization/plan.py writes vLLM's config.json from it",
    ),
]


# (module, class, attribute, what leans on it)
ATTRIBUTES = [
    ("torch.nn.modules.module", "Module", "_buffers", "quantization/checkpoint_form.py sends what checkpoints store"),
    (
        "torch.nn.modules.module",
        "Module",
        "_parameters",
        "rollout/checks/reload.py knows layers without weights by it",
    ),
    (
        "torch.nn.modules.module",
        "Module",
        "_non_persistent_buffers_set",
        "quantization/checkpoint_form.py leaves these buffers out",
    ),
    (
        "transformers.modeling_utils",
        "PreTrainedModel",
        "_is_stateful",
        "quantization/layers.py refuses recurrent models by it",
    ),
    (
        "transformers.configuration_utils",
        "PreTrainedConfig",
        "_name_or_path",
        "quantization/checkpoint.py points llm-compressor to a directory by it",
    ),
    (
        "vllm.distributed.weight_transfer.nccl_engine",
        "NCCLWeightTransferEngine",
        "model_update_group",
        "engine/worker.py knows a restarted server by it",
    ),
    (
        "vllm.model_executor.layers.attention.attention",
        "set_default_quant_scales",
        "_k_scale",
        "engine/cuda.py fills it after sleep",
    ),
    (
        "vllm.lora.worker_manager",
        "WorkerLoRAManager",
        "_adapter_manager",
        "engine/worker.py compares what it lists",
    ),
]

LIBRARIES = ("trl", "vllm", "transformers", "accelerate", "peft", "compressed_tensors", "llmcompressor")
NOT_PRIVATE = {"_asdict", "_replace", "_exit"}  # of named tuples and `os`, whatever their names look like
NOT_PRIVATE |= {"_version"}  # how often a tensor was written to: documented by torch
NOT_PRIVATE |= {"_evaluate"}  # of our callback; a trainer has one, too


# Reading sources -----------------------------------------------------------------------------------------------------


def source_file(module: str) -> Path | None:
    """Where a module's source is, found without importing its package; `None` if there is no such file."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    path = Path(spec.submodule_search_locations[0], *rest)
    return next((found for found in (path.with_suffix(".py"), path / "__init__.py") if found.is_file()), None)


@functools.cache
def tree(module: str) -> ast.Module:
    path = source_file(module)
    assert path is not None, f"{module} is gone, and trl_qurl leans on it: see DEFINITIONS in this file."
    return ast.parse(path.read_text())


def definition(module: str, name: str) -> ast.AST | None:
    """The class or function called `name` (dotted inside classes), also inside an `if` of the module."""
    node = tree(module)
    for part in name.split("."):
        kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
        nodes = ast.walk(node) if node is tree(module) else node.body
        node = next((child for child in nodes if isinstance(child, kinds) and child.name == part), None)
        if node is None:
            return None
    return node


def body_of(module: str, name: str) -> ast.AST:
    found = definition(module, name)
    assert found is not None, f"{module}.{name} is gone; DEFINITIONS in this file says what leans on it."
    return found


def text_of(module: str, name: str) -> str:
    """Source of a definition in one canonical form: single quotes, one space, no comments."""
    return ast.unparse(body_of(module, name))


def calls(node: ast.AST, function: str) -> list[ast.Call]:
    return [call for call in ast.walk(node) if isinstance(call, ast.Call) and ast.unparse(call.func) == function]


def assigned_attributes(module: str, name: str) -> set[str]:
    targets = (target for node in ast.walk(body_of(module, name)) for target in getattr(node, "targets", ()))
    return {target.attr for target in targets if isinstance(target, ast.Attribute)}


# TRL -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name", "parameters", "leaning"), DEFINITIONS, ids=[f"{entry[0]}.{entry[1]}" for entry in DEFINITIONS]
)
def test_what_is_called_or_overridden_exists(module, name, parameters, leaning):
    assert source_file(module) is not None, f"The module {module} is gone ({name} was in it); {leaning}."
    found = definition(module, name)
    assert found is not None, f"{module}.{name} is gone; {leaning}."
    if parameters:
        taken = {argument.arg for argument in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)}
        missing = set(parameters.split()) - taken
        assert not missing, f"{module}.{name} takes no {', '.join(sorted(missing))} any more; {leaning}."


@pytest.mark.parametrize(("module", "owner", "attribute", "leaning"), ATTRIBUTES)
def test_private_attributes_exist(module, owner, attribute, leaning):
    assert re.search(rf"\b{attribute}\b", text_of(module, owner)), f"{owner} has no {attribute} any more; {leaning}."


@functools.cache
def code() -> list[ast.AST]:
    """Every node of the package's code."""
    files = Path(trl_qurl.__file__).parent.rglob("*.py")
    return [node for path in files for node in ast.walk(ast.parse(path.read_text()))]


def test_every_private_name_is_listed_here():
    """A name is private to a library if it is not ours, or if the classes that we extend have it, too."""
    methods = {node.name for node in code() if isinstance(node, ast.FunctionDef)}
    attributes = [node for node in code() if isinstance(node, ast.Attribute)]
    fields = {ast.unparse(node.target) for node in code() if isinstance(node, ast.AnnAssign)}
    fields |= {ast.unparse(target) for node in code() if isinstance(node, ast.Assign) for target in node.targets}
    ours = methods | fields | {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    extended = "".join(
        ast.unparse(tree(module))
        for module in (GRPO, RLOO, GENERATION, CLIENT, "trl.trainer.base_trainer", "transformers.trainer")
    )
    theirs = set(re.findall(r"(?:\bdef |\bself\.)(_\w+)", extended))
    used = {name for name in {node.attr for node in attributes} | methods if re.match(r"_[^_]", name)}
    listed = set(re.findall(r"\w+", Path(__file__).read_text()))
    missing = {name for name in used - NOT_PRIVATE if name not in ours or name in theirs} - listed
    assert not missing, f"{sorted(missing)} are private to a library and not in this file."


def imported_names() -> set[tuple[str, str]]:
    """(module, name) of every import from inside a library; `tools/cuda_contract.py` compares them in two builds."""
    imports = [node for node in code() if isinstance(node, ast.ImportFrom) and node.level == 0]
    names = {(node.module, alias.name) for node in imports for alias in node.names}
    return {(module, name) for module, name in names if "." in module and module.split(".")[0] in LIBRARIES}


def test_every_import_from_inside_a_library_exists():
    inside = imported_names()
    assert len(inside) > 50
    gone = []
    for module, name in sorted(inside):
        if importlib.util.find_spec(module.split(".")[0]) is None:
            continue  # llm-compressor is optional
        path = source_file(module)
        files = [] if path is None else [path]
        if path is not None and path.name == "__init__.py":  # a package passes on what its modules define
            files = [*path.parent.rglob("*.py")]
        is_module = source_file(f"{module}.{name}") is not None
        if not is_module and not any(re.search(rf"\b{name}\b", file.read_text()) for file in files):
            gone.append(f"{module}.{name}")
    assert not gone, f"{gone} are gone from where trl_qurl imports them."


@pytest.mark.parametrize(
    ("module", "where", "name"),
    [
        (GRPO, "GRPOTrainer.__init__", "VLLMGeneration"),
        (RLOO, "RLOOTrainer.__init__", "VLLMGeneration"),
        (GENERATION, "VLLMGeneration._init_vllm", "LLM"),
        (GENERATION, "VLLMGeneration._init_vllm", "VLLMClient"),
    ],
)
def test_classes_are_looked_up_by_module_name(module, where, name):
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert name in imported and len(calls(body_of(module, where), name)) == 1, (
        f"{module}.{where} no longer builds {name} by its name in the module, so rollout/substitution.py cannot put "
        "ours in its place."
    )


@needs_trl_1_16
@pytest.mark.parametrize("module", OTHER_TRAINERS)
def test_trainers_of_the_table_have_what_the_engine_needs(module):
    [trainer] = re.findall(r"^class (\w+Trainer)\(", source_file(module).read_text(), re.M)
    body = text_of(module, trainer)
    for part in (
        "self.vllm_generation = VLLMGeneration(",
        "self._metrics = {'train': defaultdict(list), 'eval': defaultdict(list)}",
        "def _prepare_inputs(self, generation_batch",
        "def compute_loss(self, model, inputs",
    ):
        assert part in body, f"{trainer} has no `{part}`, which QuantizedEngineMixin extends: docs/architecture.md."
    is_inside = "from ...generation.vllm_generation import VLLMGeneration" in body
    assert is_inside == (trainer in ("SDPOTrainer", "SDFTTrainer")), (
        "docs/architecture.md names the module to replace."
    )


def test_arguments_of_the_engine_are_those_the_config_reserves():
    [call] = calls(body_of(GENERATION, "VLLMGeneration._init_vllm"), "LLM")
    given = {keyword.arg for keyword in call.keywords}
    assert not call.args and None not in given, (
        "TRL builds vllm.LLM with more than keywords; build_engine takes those."
    )
    ours = {"worker_extension_cls", "enable_lora", "max_lora_rank"}
    reserved = TAKEN_ENGINE_ARGUMENTS.keys() - ours | {"seed"}
    assert given == reserved, (
        "TRL gives vllm.LLM other arguments than config.TAKEN_ENGINE_ARGUMENTS reserves: new "
        f"{sorted(given - reserved)}, gone {sorted(reserved - given)}."
    )
    fixed = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    assert fixed["max_num_batched_tokens"] == "4096", (
        "TRL changed max_num_batched_tokens, which config.py says is 4096."
    )
    assert fixed["seed"] == "accelerator.process_index // self.tensor_parallel_size", (
        "build_engine counts engines by it."
    )
    assert fixed["logprobs_mode"] == "'processed_logprobs'", "The importance ratio needs processed log-probabilities."
    assert fixed["model"] == "model.name_or_path", "_starts_from_checkpoint asks whether model.name_or_path is empty."


def test_the_sampling_parameters_that_the_config_knows_exist():
    fields = {
        node.target.id
        for node in body_of("vllm.sampling_params", "SamplingParams").body
        if isinstance(node, ast.AnnAssign)
    }
    known = {*HARMLESS, *NEUTRAL, *REFUSED, "min_p", "temperature", "structured_outputs"}
    assert known <= fields, f"vLLM renamed {sorted(known - fields)}, which config/checks.py allows or refuses by name."
    assert "lp[0]" in text_of("trl.trainer.grpo_trainer", "GRPOTrainer._generate_single_turn"), (
        "TRL no longer takes the likeliest of a token's log-probabilities: config/checks.py may allow `logprobs`."
    )


def test_attributes_of_the_generation_backend():
    used = {"model", "accelerator", "processing_class", "mode", "enable_sleep_mode", "llm", "vllm_client"}
    used |= {"_llm_weights_sleeping", "_dist"}
    missing = used - assigned_attributes(GENERATION, "VLLMGeneration")
    assert not missing, f"VLLMGeneration no longer has {sorted(missing)}, which rollout/backend.py uses."


def test_the_constructor_starts_the_engine_last():
    last = body_of(GENERATION, "VLLMGeneration.__init__").body[-1]
    assert ast.unparse(last) == "self._init_vllm()", (
        "VLLMGeneration.__init__ does not end with _init_vllm(), whose override needs every attribute to be there."
    )


def test_generate_returns_completions_second():
    [returned] = [
        node for node in ast.walk(body_of(GENERATION, "VLLMGeneration.generate")) if isinstance(node, ast.Return)
    ]
    assert ast.unparse(returned.value) == "(prompt_ids, completion_ids, logprobs, logprob_token_ids)", (
        "VLLMGeneration.generate returns something else; QuantizedVLLMGeneration.generate counts the tokens of [1]."
    )


def test_sleeping_engines_sync_inside_generate():
    assert calls(body_of(GENERATION, "VLLMGeneration.generate"), "self.sync_weights"), (
        "VLLMGeneration.generate does not sync a sleeping engine itself, for which our generate subtracts the seconds."
    )


def test_a_stop_at_the_end_of_a_step_still_saves():
    body = text_of("transformers.trainer", "Trainer._maybe_log_save_evaluate")
    saves, overrides = "if self.control.should_save:", "self.control.should_save = is_new_best_metric"
    evaluates = "if self.control.should_evaluate:"
    assert body.index(evaluates) < body.index(overrides) < body.index(saves), (
        "Trainer._maybe_log_save_evaluate decides otherwise what is saved; mismatch_guard='stop' leaves a checkpoint "
        "by should_save, without should_evaluate."
    )
    begin = text_of("transformers.trainer_callback", "CallbackHandler.on_train_begin")
    assert "should_training_stop = False" in begin, "A run that was stopped would not start again from its checkpoint."


@pytest.mark.parametrize(("module", "trainer"), [(GRPO, "GRPOTrainer"), (RLOO, "RLOOTrainer")])
def test_the_trainer_syncs_before_the_first_rollout_of_every_step(module, trainer):
    body = text_of(module, f"{trainer}._generate_single_turn")
    condition, call = "if self.state.global_step != self._last_loaded_step:", "self.vllm_generation.sync_weights()"
    assert condition in body and body.index(condition) < body.index(call) < body.index("vllm_generation.generate("), (
        f"{trainer}._generate_single_turn does not sync weights before it generates, unless `_last_loaded_step`, a "
        "property of our trainers, is the current step."
    )


def test_the_loss_reads_what_the_objective_completes_only_after_its_forward_pass():
    body = text_of(GRPO, "GRPOTrainer._compute_loss")
    assert body.count("self._get_per_token_logps_and_entropies(") == 1, (
        "GRPOTrainer._compute_loss makes several forward passes: GroupRolloutsMixin._compute_loss acts on each."
    )
    forward = body.index("self._get_per_token_logps_and_entropies(")
    for name in ("old_per_token_logps", "importance_sampling_ratio"):
        assert forward < body.index(name), (
            f"GRPOTrainer._compute_loss reads {name} before the forward pass that "
            "GroupRolloutsMixin._compute_loss waits for."
        )


def test_a_rollout_is_not_scored_beforehand_where_its_update_does_it():
    body = text_of(GRPO, "GRPOTrainer._generate_and_score_completions")
    condition = (
        "if self.args.gradient_accumulation_steps % generate_every != 0 or "
        "(self.use_vllm and self.vllm_importance_sampling_correction):"
    )
    assert condition in body and "generate_every = self.args.steps_per_generation * self.num_iterations" in body, (
        "GRPOTrainer._generate_and_score_completions decides otherwise whether to score a rollout, which "
        "QuRLGRPOTrainer._scores_in_update repeats."
    )


def test_the_clipped_surrogate_is_the_one_that_the_objectives_are_made_of():
    body = text_of(GRPO, "GRPOTrainer._compute_loss")
    for line in (
        "log_ratio = per_token_logps - old_per_token_logps",
        "coef_1 = torch.exp(log_importance_weights)",
        "coef_2 = torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)",
        "per_token_loss = -torch.min(per_token_loss1, per_token_loss2)",
        "per_token_loss = per_token_loss * inputs['importance_sampling_ratio']",
        "if advantages.dim() == 1:",
    ):
        assert line in body, (
            f"GRPOTrainer._compute_loss has no `{line}`, through which objective.surrogate_terms acts."
        )
    [branch] = [
        node.test
        for node in ast.walk(body_of(GRPO, "GRPOTrainer._compute_loss"))
        if isinstance(node, ast.If) and any("coef_2 = torch.clamp" in ast.unparse(line) for line in node.body)
    ]
    clipped = set(ast.literal_eval(branch.comparators[0]))
    assert set(CLIPPED_LOSS_TYPES) <= clipped, (
        f"config.CLIPPED_LOSS_TYPES are no longer all clamped; TRL's: {clipped}."
    )


def test_a_log_probability_below_the_ratio_may_be_replaced():
    body = text_of(GRPO, "GRPOTrainer._compute_loss")
    assert "inputs.get('old_per_token_logps')" in body, (
        "GRPOTrainer._compute_loss takes old_per_token_logps from elsewhere than its inputs, where objective "
        "'quantized_ratio' puts the behavior policy's."
    )


def test_what_scoring_hands_over():
    body = text_of(GRPO, "GRPOTrainer._generate_and_score_completions")
    used = ("old_per_token_logps", "sampling_per_token_logps", "completion_mask", "tool_mask", "advantages")
    for key in used:
        assert f"'{key}': {key}" in body or f"output['{key}'] = {key}" in body, (
            f"GRPOTrainer._generate_and_score_completions hands over no {key!r}, which trainers/grpo.py reads."
        )


def test_rloo_scores_a_rollout_with_the_policy_first():
    body = text_of(RLOO, "RLOOTrainer._generate_and_score_completions")
    passes = [
        "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(self.model,",
        "old_logps = (old_per_token_logps * completion_mask).sum(1)",
        "ref_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(self.ref_model,",
    ]
    places = [body.find(line) for line in passes]
    assert -1 not in places and places == sorted(places), (
        "RLOOTrainer scores a rollout otherwise; trainers/rloo.py takes the first forward pass for the policy's."
    )


def test_rloo_forms_its_ratio_from_one_forward_pass():
    body = text_of(RLOO, "RLOOTrainer._compute_loss")
    for line in (
        "logps = (per_token_logps * completion_mask).sum(1)",
        "old_logps = inputs['old_logps']",
        "log_ratio = logps - old_logps",
        "coef_1 = torch.exp(log_ratio)",
        "per_sequence_loss = -torch.min(per_sequence_loss1, per_sequence_loss2)",
    ):
        assert line in body, f"RLOOTrainer._compute_loss has no `{line}`; trainers/rloo.py weighs tokens through it."
    assert body.count("_get_per_token_logps_and_entropies(") == 1, "trainers/rloo.py expects one forward pass."


@pytest.mark.parametrize("module, name", [(GRPO, "GRPOTrainer"), (RLOO, "RLOOTrainer")])
def test_reward_functions_get_what_the_constructor_checks_them_for(module, name):
    body = body_of(module, f"{name}._calculate_rewards")
    [call] = [call for call in calls(body, "reward_func") if {word.arg for word in call.keywords} >= {"prompts"}]
    named = {word.arg for word in call.keywords if word.arg}
    added = set(re.findall(r"reward_kwargs\['(\w+)'\] =", ast.unparse(body)))
    added -= {"environments", "prompt", "completion"}  # the first is optional, the others are for a warning
    assert named | added == set(REWARD_KEYWORDS), "TRL passes other arguments: see trainers/arguments.py"
    assert f"not in {list(NOT_PASSED)}" in ast.unparse(body), "TRL leaves out other columns: see trainers/arguments.py"


def test_generation_and_scoring_are_called_as_dynamic_sampling_calls_them():
    body = text_of(GRPO, "GRPOTrainer._generate_and_score_completions")
    leaning = "which trainers/dynamic_sampling.py leans on."
    results = "prompt_ids_list, completion_ids_list, tool_mask_list, completions, sampling_per_token_logps_list, "
    results += "extra_fields, images, tool_images = self._generate(prompts)"
    assert results in body.replace("(prompt_ids_list", "prompt_ids_list").replace("tool_images)", "tool_images"), (
        f"_generate returns something else, {leaning}"
    )
    call = "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)"
    assert call in body, f"_calculate_rewards is called otherwise, {leaning}"
    assert "gather(rewards_per_func)" in text_of(GRPO, "GRPOTrainer._calculate_rewards"), (
        f"_calculate_rewards does not return the rewards of all processes, {leaning}"
    )
    added = text_of(GRPO, "GRPOTrainer._log_completion_extra")
    assert "self._pending_extra_logs[column].extend(values)" in added and (
        "self._pending_extra_logs.clear()" in body and "self._pending_extra_logs.get(column" in body
    ), f"columns that rewards add do not wait in _pending_extra_logs, {leaning}"


def test_log_probabilities_are_the_first_result():
    body = body_of(GRPO, "GRPOTrainer._get_per_token_logps_and_entropies")
    [returned] = [node for node in ast.walk(body) if isinstance(node, ast.Return)]
    assert ast.unparse(returned.value).startswith("(logps, "), (
        "_get_per_token_logps_and_entropies does not return log-probabilities first; trainers/rollouts.py keeps [0]."
    )
    assert "self._get_per_token_logps_and_entropies(" in text_of(GRPO, "GRPOTrainer._compute_loss"), (
        "_compute_loss does not score through _get_per_token_logps_and_entropies, so acr/... would use an old result."
    )


def test_attributes_of_the_trainer():
    used = {"epsilon_high", "vllm_generation", "_metrics", "_step", "_buffered_inputs"}
    used |= {"_is_vlm", "_logs", "_tokenizer"}
    missing = used - assigned_attributes(GRPO, "GRPOTrainer.__init__")
    assert not missing, f"GRPOTrainer.__init__ no longer sets {sorted(missing)}, which trainers/ uses."
    assert "_is_vlm" in assigned_attributes(RLOO, "RLOOTrainer.__init__"), (
        "RLOOTrainer.__init__ no longer sets _is_vlm, which trainers/rollouts.py uses."
    )


def test_metrics_are_lists_by_mode_and_name():
    assert "self._metrics = {'train': defaultdict(list), 'eval': defaultdict(list)}" in text_of(
        GRPO, "GRPOTrainer.__init__"
    ), "GRPOTrainer._metrics is no longer lists by mode and name, to which QuantizedEngineMixin._record appends."
    assert "for key, val in self._metrics[mode].items()" in text_of(GRPO, "GRPOTrainer.log"), (
        "GRPOTrainer.log does not log what is in _metrics, where QuantizedEngineMixin._record puts ours."
    )


def test_the_place_within_a_rollout_is_step_and_buffer():
    body = text_of(GRPO, "GRPOTrainer._prepare_inputs")
    for line in (
        "if self._step % generate_every == 0 or self._buffered_inputs is None:",
        "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]",
    ):
        assert line in body, f"GRPOTrainer._prepare_inputs has no `{line}`; GroupRolloutsMixin saves those two."


def test_checkpoints_are_named_as_the_state_of_rollouts_expects():
    body = text_of("transformers.trainer", "Trainer._save_checkpoint")
    assert "f'{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}'" in body and "self._get_output_dir(" in body, (
        "Trainer._save_checkpoint names its directory otherwise; trainers/rollouts.py writes into it."
    )


def test_trl_only_warns_about_a_vllm_that_is_newer_than_itself():
    body = body_of("trl.import_utils", "is_vllm_available")
    assert calls(body, "warnings.warn") and not any(isinstance(node, ast.Raise) for node in ast.walk(body)), (
        "TRL refuses a vLLM outside its own range, and the extra `vllm` in setup.cfg may go further than TRL's."
    )


def test_trl_is_one_that_this_file_was_written_for():
    required = map(Requirement, importlib.metadata.requires("trl-qurl"))
    [trl] = [one for one in required if one.name == "trl" and one.marker is None]  # extras add to it
    installed = importlib.metadata.version("trl")
    assert trl.specifier.contains(installed, prereleases=True), (
        f"TRL is {installed}, and setup.cfg says {trl}: read its changes to what this file lists, then edit setup.cfg."
    )


# vLLM ----------------------------------------------------------------------------------------------------------------


def test_the_worker_extension_is_mixed_in_by_name():
    assert "parallel_config.worker_extension_cls" in ast.unparse(tree("vllm.v1.worker.worker_base")), (
        "vLLM's worker_base does not read parallel_config.worker_extension_cls, by which RolloutWorker gets in."
    )
    assert "worker_extension_cls: str" in text_of("vllm.config.parallel", "ParallelConfig"), (
        "ParallelConfig has no worker_extension_cls, by which ServedEngine recognizes its own servers."
    )


def test_the_finalizer_of_an_engine_takes_the_process_groups_along():
    client = text_of("vllm.v1.engine.core_client", "InprocClient.__init__")
    ours = "self._finalizer = weakref.finalize(self, self.engine_core.shutdown)"
    assert client.count(ours) == client.count("finalize("), (  # before vLLM 0.31 it has none
        "vLLM's InprocClient has another finalizer, which rollout/engine/colocated.py replaces."
    )
    shutdown = text_of("vllm.v1.engine.core", "EngineCore.shutdown")
    for part in ("structured_output_manager.clear_backend()", "model_executor.shutdown()", "scheduler.shutdown()"):
        assert part in shutdown, (
            f"EngineCore.shutdown has no `{part}`, which rollout/engine/colocated.py calls itself."
        )
    assert "cleanup_dist_env_and_memory()" in shutdown, (
        "EngineCore.shutdown spares the process groups: release_when_deleted may go."
    )


def test_a_reload_goes_layer_by_layer_through_load_weights():
    body = text_of("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.reload_weights")
    if source_file(INPLACE):  # vLLM 0.32 moved the body there
        assert "reload_weights(self.vllm_config, self.get_model()" in body, "GPUModelRunner reloads in another way."
        body = text_of(INPLACE, "reload_weights")
    for call in (
        "initialize_layerwise_reload(model)",
        "model.load_weights(weights_iterator)",
        "finalize_layerwise_reload",
    ):
        assert call in body, (
            f"vLLM's reload_weights has no `{call}`: quantized tensors may not be taken twice any more."
        )


def test_a_reload_reports_layers_without_weights():
    assert "logger = init_logger(__name__)" in ast.unparse(tree(LAYERWISE)), (
        f"The logger of vLLM's reload is not {LAYERWISE!r}, which rollout/checks/reload.py listens to."
    )
    body = text_of(LAYERWISE, "finalize_layerwise_processing")
    assert "logger.warning('%s: Failed to load weights', layer.__class__.__name__)" in body, (
        "vLLM words its report of a layer without new weights otherwise; rollout/checks/reload.py raises on it."
    )
    for function, event in (
        ("finalize_layerwise_processing", "Delayed processing"),
        ("make_online_process_loader", "Excessive loading"),
    ):
        assert f"logger.debug('%s: {event}', layer.__class__.__name__)" in text_of(LAYERWISE, function), (
            f"vLLM words its report of {event.lower()} otherwise; rollout/checks/reload.py raises on it."
        )


def test_vllms_variables_exist():
    texts = {node.value for node in code() if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    ours = {text for text in texts if re.fullmatch(r"VLLM_[A-Z0-9_]+", text)}
    assert len(ours) > 5
    missing = ours - set(re.findall(r"\bVLLM_\w+", source_file("vllm.envs").read_text()))
    assert not missing, f"vLLM no longer reads {sorted(missing)}, which trl_qurl sets or reads."


def test_names_of_the_int8_parameters():
    body = text_of(CPU_KERNELS, "CPUInt8ScaledMMLinearKernel.process_weights_for_onednn")
    assert "w_q_name, w_s_name, i_s_name, i_zp_name, azp_adj_name = self.layer_param_names" in body, (
        "layer_param_names are in another order; ReloadableCPUInt8Kernel takes the scales' name from [1]."
    )
    assert "ops.create_onednn_scaled_mm(weight, getattr(layer, w_s_name)" in body, (
        "The oneDNN primitive is not built from layer_param_names[1], which ReloadableCPUInt8Kernel holds on to."
    )


def test_a_quantized_layer_says_which_kernel_it_uses():
    scheme = "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_int8"
    assert "kernel" in assigned_attributes(scheme, "CompressedTensorsW8A8Int8.create_weights"), (
        "CompressedTensorsW8A8Int8 no longer keeps its kernel as `kernel`; rollout/engine/cpu.py exchanges it there."
    )
    assert "layer.scheme = " in ast.unparse(tree(COMPRESSED_TENSORS)), (
        "A quantized layer no longer keeps its scheme as `scheme`; rollout/engine/cpu.py looks for it there."
    )
    kernels = "vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel"
    attributes = assigned_attributes(kernels, "ScaledMMLinearKernel.__init__")
    assert {"config", "layer_param_names"} <= attributes, (
        "Kernels keep their arguments under other names; rollout/engine/cpu.py builds one from another's."
    )


def test_quantized_models_say_in_which_format():
    attributes = assigned_attributes(COMPRESSED_TENSORS, "CompressedTensorsConfig.__init__")
    assert "config" in attributes, (
        "CompressedTensorsConfig has no config, by which RolloutWorker.starting_fingerprint tells what a server holds."
    )


@pytest.mark.parametrize(
    ("router", "route", "leaning"),
    [
        ("rpc", "router.post('/collective_rpc')", "ServedEngine has weights loaded by it"),
        ("cache", "router.post('/reset_prefix_cache')", "TRL's client drops what old weights cached by it"),
        ("cache", "router.post('/reset_encoder_cache')", "ServedEngine drops what old weights saw by it"),
        (
            "server_info",
            "router.get('/server_info')",
            "ServedEngine tells by it that a server has no worker extension",
        ),
    ],
)
def test_server_endpoints(router, route, leaning):
    module = f"vllm.entrypoints.serve.dev.{router}.api_router"
    assert f"@{route}" in ast.unparse(tree(module)), f"vLLM's server has no {route} any more; {leaning}."


def test_layers_that_multiply_have_a_method_for_it():
    for module, layer in (("vllm.model_executor.layers.linear", "LinearBase"), (HEAD, "VocabParallelEmbedding")):
        assert "self.quant_method" in text_of(module, f"{layer}.__init__"), (
            f"{layer} keeps its method under another name; rollout/checks/reload.py skips layers that have one."
        )


def test_experts_are_packed_where_their_kernel_is_new():
    body = text_of(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod._setup_kernel"
    )
    first, _, packs = body.partition("if not is_weight_update:")
    assert "is_weight_update = self.moe_kernel is not None" in first, (
        "rollout/engine/cpu.py takes the kernel away for it"
    )
    assert "fused_experts.process_weights_after_loading(layer)" in packs, (
        "replace_kernels in engine/cpu.py has it run again"
    )
    assert "process_weights_after_loading" not in first, (
        "vLLM repaired it: the workaround for experts in replace_kernels in trl_qurl/rollout/engine/cpu.py can go."
    )


def test_an_api_key_does_not_guard_the_development_endpoints():
    sources = source_file("vllm.entrypoints").parent.rglob("*.py")
    [guarded] = [found for path in sources for found in re.findall(r"^GUARDED_PREFIX = (.*)", path.read_text(), re.M)]
    for path in ("/collective_rpc", "/server_info", "/reset_prefix_cache", "/reset_encoder_cache"):
        assert not path.startswith(ast.literal_eval(guarded)), (
            f"vLLM's --api-key guards {path} now: KeyGuard may not be needed any more."
        )


def test_remote_calls_return_dictionaries_as_they_are():
    body = text_of("vllm.entrypoints.serve.dev.rpc.api_router", "collective_rpc")
    assert "isinstance(result, dict | list)" in body and "{'results': response}" in body, (
        "/collective_rpc does not return a worker's dictionary under 'results', where ServedEngine finds reports."
    )


# llm-compressor ------------------------------------------------------------------------------------------------------


def test_llmcompressor_quantizes_a_model_without_data():
    oneshot = body_of("llmcompressor.entrypoints.oneshot", "oneshot")
    taken = {argument.arg for argument in (*oneshot.args.args, *oneshot.args.kwonlyargs)}
    assert {"model", "recipe"} <= taken, "oneshot takes no model and recipe; CheckpointWriter gives both."


def test_transformers_warning_about_offloaded_modules_is_worded_as_it_is_silenced():
    assert (
        "Attempting to save a model with offloaded modules" in source_file("transformers.modeling_utils").read_text()
    ), "transformers words it otherwise; quantization/checkpoint.py silences it by these words, at every step."


# What is repaired ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_reload(run_scenario, tmp_path_factory):
    """One reload by vLLM alone, on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("the repairs are for vLLM on CPU")
    return run_scenario("plain_reload.py", tmp_path_factory.mktemp("plain_reload"))


@pytest.mark.vllm
@pytest.mark.xdist_group("plain_reload")
@needs_avx512
def test_a_tied_head_is_still_left_stale_by_vllm(plain_reload):
    assert plain_reload["started"]["head_error"] < 0.02, "the head is wrong before any reload: this test shows nothing"
    assert plain_reload["reloaded"]["head_error"] > 0.1, (
        "vLLM repaired it: the workaround repack_output_head in trl_qurl/rollout/engine/cpu.py can go."
    )


@pytest.mark.vllm
@pytest.mark.xdist_group("plain_reload")
@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="with AMX, vLLM uses another INT8 kernel")
def test_int8_scales_are_still_freed_under_the_primitive_by_vllm(plain_reload):
    # Using freed memory would make this a matter of luck. Addresses do not: those of the layers' scales are in use all
    # the time, so an address that is none of them belongs to a tensor that only the kernel knew.
    assert plain_reload["started"]["primitives"] == plain_reload["reloaded"]["primitives"] == 8
    assert plain_reload["started"]["dangling"] == 0
    assert plain_reload["reloaded"]["dangling"] == 8, (
        "vLLM repaired it: the workaround ReloadableCPUInt8Kernel in trl_qurl/rollout/engine/cpu.py can go."
    )
