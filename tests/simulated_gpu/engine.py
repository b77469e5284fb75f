"""An engine on a simulated GPU: started, reloaded twice, and compared with a fresh one."""

import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tiny import MIXTURES, tiny_model, tiny_tokenizer

from simulated_gpu import humming, tensors
from simulated_gpu.platform import GPUS, installed
from trl_qurl.quantization.checkpoint import CheckpointWriter
from trl_qurl.quantization.plan import make_plan, read_formats, schemes_of
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.quantization.stream import WeightStream, model_parameters

# a bias that has lost its loader is noticed by the first, what the first breaks by the second
RELOADS = 2

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
    experts: bool = False  # whether experts are
    rank: int | None = None  # of two in tensor parallelism; `None` without it
    sleeps: bool = False  # level 2, as TRL's
    cache: str = "auto"  # dtype of keys and values
    has_flashinfer: bool = True
    disabled: str = ""  # more kernels that vLLM may not choose
    is_repaired: bool = True  # False: vLLM's own reload
    is_refused: bool = True  # False: tried although we refuse it

    def __str__(self) -> str:
        changed = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if value != getattr(Case, name, value)
        ]
        formats = read_formats(self.scheme)
        name = formats if isinstance(formats, str) else "+".join(dict.fromkeys(formats.values()))
        return " ".join([self.gpu, name, *changed])

    @property
    def schemes(self) -> list[QuantizationScheme]:
        """The formats that an engine must run."""
        return schemes_of(read_formats(self.scheme))


@dataclass
class Report:
    """The result of a simulation."""

    kernels: dict[str, str]  # by the last part of a layer's name, of the first decoder layer
    faults: dict[str, Any]  # empty: as fresh


def simulate(case: Case) -> Report:
    """Start an engine on the GPU that is installed, reload it twice, and look for faults."""
    prepare_environment(case)
    report = Report({}, {})
    models = [build_policy(case, seed) for seed in range(RELOADS + 1)]
    stage = "refused"
    try:
        from trl_qurl.rollout.engine import hardware

        hardware.gpu_capability = lambda: GPUS[case.gpu]
        hardware.has_flashinfer = lambda: case.has_flashinfer
        os.environ.update(hardware.kernel_environment(*case.schemes * case.is_refused))
        if case.disabled:
            os.environ["VLLM_DISABLED_KERNELS"] = (
                f"{os.environ.get('VLLM_DISABLED_KERNELS', '')},{case.disabled}"
            )
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
    except Exception as error:
        report.faults = {stage: f"{type(error).__name__}: {' '.join(str(error).split())}"}
    else:
        report.faults = tensors.compare(engine.held(), fresh.held(), captured)
    return report


def prepare_environment(case: Case) -> None:
    os.environ |= {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1",  # a CUDA stream
    }
    os.environ.pop("VLLM_DISABLED_KERNELS", None)
    if case.has_flashinfer:
        installed.add("flashinfer")


def build_policy(case: Case, seed: int) -> torch.nn.Module:
    sizes = SIZES | MIXTURES.get(case.family, {})
    sizes |= {
        name: 256
        for name in ("moe_intermediate_size", "shared_expert_intermediate_size")
        if name in sizes
    }
    return tiny_model(case.family, torch.float32, seed, **sizes)


class Engine:
    """vLLM's worker with trl-qurl's extension, as far as starts and loads need one."""

    def __init__(self, case: Case, policy: torch.nn.Module) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        from trl_qurl.rollout.engine import worker

        humming.after_vllm()
        self.ignore = [] if case.head else ["lm_head"]
        if case.family in MIXTURES and not case.experts:
            self.ignore.append(r"re:.*\.experts\.")
        self.plan = make_plan(policy, case.scheme, self.ignore)
        with tempfile.TemporaryDirectory() as directory:
            writer = CheckpointWriter(policy, tiny_tokenizer(), self.plan)
            writer.write(self.tensors_of(policy), Path(directory))
            arguments = {
                "dtype": "bfloat16",
                "max_model_len": 128,
                "kv_cache_dtype": case.cache,
                "seed": 0,
            }
            config = EngineArgs(directory, enforce_eager=True, **arguments).create_engine_config()
            config.device_config.device, config.device_config.device_type = (
                torch.device("cpu"),
                "cpu",
            )
            with set_current_vllm_config(config):
                join_group(case.rank)
                self.model = get_model_loader(config.load_config).load_model(
                    config, config.model_config
                )
        model = self.model
        if not case.is_repaired:
            worker.repaired_reload = lambda _: nullcontext()

        class Worker(worker.RolloutWorker):
            model_runner = SimpleNamespace(
                get_model=lambda: model,
                lora_config=None,
                model_config=config.model_config,
                vllm_config=config,
            )
            vllm_config = config

            def get_model(self):
                return model

            def reload_weights(self, **source):
                for name in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
                    setattr(self.model_runner, name, lambda: None)
                with set_current_vllm_config(config), torch.no_grad():
                    GPUModelRunner.reload_weights(self.model_runner, **source)

        self.worker = Worker()

    def tensors_of(self, policy: torch.nn.Module):
        return WeightStream(policy, self.plan).tensors(model_parameters(policy))

    def load(self, policy: torch.nn.Module, version: str) -> None:
        update = {"version": version, "digest": True}
        self.worker.load_rollout_weights(update, weights_iterator=self.tensors_of(policy))

    def held(self) -> dict[str, tensors.Held]:
        return tensors.held_tensors(self.model)

    def kernels(self) -> dict[str, str]:
        names = {}
        for path, module in self.model.named_modules():
            owner = getattr(module, "scheme", None) or getattr(module, "quant_method", None)
            parts = [type(part).__name__ for part in vars(owner).values()] if owner else []
            kernels = [name for name in parts if "Kernel" in name]
            if experts := getattr(owner, "experts_cls", None):
                kernels = [experts.__name__]
            if kernels:
                names.setdefault(path.rpartition(".")[2], kernels[0])
        return names


def join_group(rank: int | None) -> None:
    """Process groups of one process; with a rank, layers are cut as on that one of two."""
    from vllm.distributed import parallel_state

    if parallel_state._WORLD is None:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            pass
        os.unlink(file.name)
        parallel_state.init_distributed_environment(1, 0, f"file://{file.name}", 0, backend="gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
    if rank is not None:
        parallel_state._TP.world_size, parallel_state._TP.rank_in_group = 2, rank
