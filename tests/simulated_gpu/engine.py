"""An engine on a simulated GPU: started, reloaded twice, and compared with a fresh one."""

import importlib
import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import MIXTURES, tiny_model, tiny_tokenizer

from simulated_gpu import humming, tensors
from simulated_gpu.platform import GPUS, installed
from trl_qurl.quantization.checkpoint import CheckpointWriter
from trl_qurl.quantization.checkpoint_form import plain_model
from trl_qurl.quantization.plan import make_plan, read_formats, schemes_of
from trl_qurl.quantization.stream import WeightStream, model_parameters
from trl_qurl.rollout.adapter import adapter_tensors, write_adapter

# a bias that has lost its loader is noticed by the first, what the first breaks by the second
RELOADS = 2

RUNNERS = {"V1": "vllm.v1.worker.gpu_model_runner", "V2": "vllm.v1.worker.gpu.model_runner"}
"""Modules of vLLM's model runners."""

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 256,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
"""A model that every kernel takes."""


@dataclass(frozen=True)
class Case:
    """Formats on a GPU, and settings that change the code that vLLM runs."""

    gpu: str
    scheme: str  # its name, or formats by pattern in JSON
    family: str = "qwen2"  # linear layers have biases; those of qwen3 have none
    head: bool = False  # whether the output head is quantized
    experts: bool = False  # whether experts are, without FlashInfer
    rank: int | None = None  # of two in tensor parallelism; `None` without it
    adapter: bool = False  # whether an adapter is sent alone
    runner: str = "V2"  # vLLM's model runner; GPUs run V2
    backend: str = "auto"  # vLLM's `linear_backend`
    sleeps: bool = False  # level 2, as TRL's
    cache: str = "auto"  # dtype of keys and values
    is_repaired: bool = True  # False: vLLM's own reload

    def __str__(self):
        formats = read_formats(self.scheme)
        if not isinstance(formats, str):
            formats = "+".join(dict.fromkeys(formats.values()))
        words = [self.gpu, formats]
        for name, value in vars(self).items():
            if value != getattr(Case, name, value):
                words.append(f"{name}={value}")
        return " ".join(words)

    @property
    def schemes(self):
        """The formats that an engine must run."""
        return schemes_of(read_formats(self.scheme))


@dataclass
class Report:
    """The result of a simulation."""

    kernels: dict[str, str]  # by the last part of a layer's name, of the first decoder layer
    faults: dict[str, Any]  # empty: as fresh


def simulate(case):
    """Start an engine on the GPU that is installed, reload it twice, and look for faults."""
    prepare_environment(case)
    report = Report({}, {})
    models = [build_policy(case, seed) for seed in range(RELOADS + 1)]
    stage = "refused"
    try:
        from trl_qurl.rollout.checks import hardware

        hardware.gpu_capability = lambda: GPUS[case.gpu]
        os.environ.update(hardware.kernel_environment(*case.schemes))
        stage = "start"
        engine = Engine(case, models[0])
        report.kernels = engine.kernels()
        captured = tensors.capture(engine.held())
        if case.sleeps:
            tensors.sleep(engine.held())
        stage = "reload"
        for version, model in enumerate(models[1:]):
            engine.load(model, f"v{version}")
        stage = "fresh start"
        fresh = Engine(case, models[-1])
        if case.adapter:
            fresh.load(models[-1], "fresh")
    except Exception as error:
        report.faults = {stage: f"{type(error).__name__}: {' '.join(str(error).split())}"}
    else:
        report.faults = tensors.compare(engine.held(), fresh.held(), captured)
    return report


def prepare_environment(case):
    os.environ |= {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1",  # a CUDA stream
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    os.environ.pop("VLLM_DISABLED_KERNELS", None)
    if not case.experts:
        installed.add("flashinfer")


def build_policy(case, seed):
    sizes = SIZES | MIXTURES.get(case.family, {})
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if name in sizes:
            sizes[name] = 256
    if not case.adapter:
        return tiny_model(case.family, torch.float32, seed, **sizes)
    base = tiny_model(case.family, torch.float32, **sizes)
    torch.manual_seed(seed)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(base, lora)


class Engine:
    """vLLM's worker with trl-qurl's extension, as far as starts and loads need one."""

    def __init__(self, case, policy):
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs

        from trl_qurl.rollout.engine import worker

        humming.after_vllm()
        self.ignore = [] if case.head else ["lm_head"]
        if case.family in MIXTURES and not case.experts:
            self.ignore.append(r"re:.*\.experts\.")
        self.plan = make_plan(policy, case.scheme, self.ignore)
        with tempfile.TemporaryDirectory() as directory:
            writer = CheckpointWriter(plain_model(policy), tiny_tokenizer(), self.plan)
            writer.write(self.tensors_of(policy), Path(directory))
            arguments = EngineArgs(
                directory,
                enforce_eager=True,
                dtype="bfloat16",
                max_model_len=128,
                kv_cache_dtype=case.cache,
                linear_backend=case.backend,
                seed=0,
                enable_lora=case.adapter,
            )
            config = arguments.create_engine_config()
            config.device_config.device = torch.device("cpu")
            config.device_config.device_type = "cpu"
            with set_current_vllm_config(config):
                join_group(case.rank)
                module = importlib.import_module(RUNNERS[case.runner])
                runner = module.GPUModelRunner(config, config.device_config.device)
                runner.load_model()
        if not case.is_repaired:
            worker.repaired_reload = lambda _: nullcontext()

        class Worker(worker.RolloutWorker):
            model_runner = runner
            vllm_config = config
            get_model = runner.get_model

            def reload_weights(self, **source):
                with set_current_vllm_config(config), torch.no_grad():
                    runner.reload_weights(**source)

        self.model = runner.model
        self.worker = Worker()

    def tensors_of(self, policy):
        return WeightStream(policy, self.plan).tensors(model_parameters(policy))

    def load(self, policy, version):
        from vllm.lora.request import LoRARequest

        update = {"version": version, "digest": True}
        if not isinstance(policy, PeftModel):
            self.worker.load_rollout_weights(update, weights_iterator=self.tensors_of(policy))
            return
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "adapter")
            write_adapter(policy, adapter_tensors(policy), path)
            request = LoRARequest("policy", 1, str(path), load_inplace=True)
            self.worker.model_runner.add_lora(request)
            self.worker.accept_rollout_adapter(update, str(path))

    def held(self):
        return tensors.held_tensors(self.model)

    def kernels(self):
        names = {}
        for path, module in self.model.named_modules():
            owner = getattr(module, "scheme", None) or getattr(module, "quant_method", None)
            parts = [type(part).__name__ for part in vars(owner).values()] if owner else []
            kernels = [name for name in parts if "Kernel" in name]
            experts = getattr(owner, "experts_cls", None)
            if experts:
                kernels = [experts.__name__]
            if kernels:
                names.setdefault(path.rpartition(".")[2], kernels[0])
        return names


def join_group(rank):
    """Process groups of one process; with a rank, layers are cut as on that one of two."""
    from vllm.distributed import parallel_state

    if parallel_state._WORLD is None:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            pass
        os.unlink(file.name)
        parallel_state.init_distributed_environment(1, 0, f"file://{file.name}", 0, backend="gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
    if rank is not None:
        parallel_state._TP.world_size = 2
        parallel_state._TP.rank_in_group = rank
