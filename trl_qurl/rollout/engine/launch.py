"""Start a vLLM server for training: the quantized checkpoint, and the complete command line.

The server is vLLM's own. This process prepares a checkpoint, prints the command, then execs it:
signals, logs, and exit codes are vLLM's, and no parent process stays behind.
"""

import hashlib
import importlib.util
import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from trl_qurl.quantization.checkpoint import CheckpointWriter, load_model
from trl_qurl.quantization.checks.kv_cache import check_kv_cache
from trl_qurl.quantization.checks.recurrent import check_recurrent_layers
from trl_qurl.quantization.files import cache_directory, cached
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.quantization.plan import Formats, format_name, make_plan
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.checks.hardware import check_cpu_build
from trl_qurl.rollout.engine.guard import KEY_GUARD
from trl_qurl.rollout.repairs.cpu_memory import cpu_cache_arguments, weight_bytes
from trl_qurl.rollout.repairs.cpu_serve import serve_words
from trl_qurl.rollout.repairs.dead_engine import ENGINE_WATCH
from trl_qurl.rollout.wire import COMPILING, CPU_LOAD_FORMAT, WORKER_EXTENSION

CHECKPOINT_FILES = (".safetensors", ".json", ".model", ".txt", ".jinja", ".py")
MEMORY_SHARE = 0.92  # vLLM's default for --gpu-memory-utilization
CPU_SEQUENCES = 128  # vLLM's default for --max-num-seqs on a CPU


def starting_checkpoint(
    model: str, formats: Formats, ignore: Sequence[str], arguments: Mapping[str, Any]
) -> Path:
    """Return the checkpoint that an engine with these arguments starts from, new or cached."""
    # A model that changed under the same name is quantized again.
    inputs = [formats, sorted(ignore), "float32", content_digest(Path(model))]
    key = hashlib.blake2b(json.dumps(inputs).encode(), digest_size=10).hexdigest()
    name = format_name(formats)

    def make(path: Path) -> None:
        print(f"Quantizing {model} to {name} (cached in {path})", flush=True)
        full_model, tokenizer = load_model(model, "trust_remote_code" in arguments)
        check_recurrent_layers(full_model)
        plan = make_plan(full_model, formats, ignore)
        check_cpu_build(full_model.config, plan.schemes, arguments)
        # A trainer makes the same codes from weights of any dtype, and compares an adapter's base
        # with them.
        tensors = WeightStream(full_model, plan).tensors(
            model_parameters(full_model), is_exact=True
        )
        CheckpointWriter(full_model, tokenizer, plan).write(tensors, path)

    return cached(cache_directory() / f"{Path(model).name}-{name}-{key}", make)


def resolve_model(name: str) -> str:
    """Return a directory with the model's files: itself, or a snapshot from the Hub."""
    if Path(name).is_dir():
        return name
    from huggingface_hub import snapshot_download

    return snapshot_download(name, allow_patterns=[f"*{suffix}" for suffix in CHECKPOINT_FILES])


def content_digest(directory: Path) -> str:
    """Return a digest of a checkpoint's files, by names and contents.

    These are weights, config, tokenizer, and code.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.iterdir()):
        if path.suffix in CHECKPOINT_FILES and path.is_file():
            digest.update(path.name.encode())
            with path.open("rb") as file:
                contents = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            digest.update(contents.digest())
    return digest.hexdigest()


def server_command(checkpoint: str, host: str, port: int, extra_args: Sequence[str]) -> list[str]:
    """Return the command that starts a server for training.

    `extra_args` are vLLM's, and override the options here.
    """
    user_options = values_of(extra_args)
    command = [sys.executable, "-m", *serve_words(checkpoint)]
    for name, value in default_options(checkpoint, host, port, user_options).items():
        if name not in user_options:
            command += [f"--{name.replace('_', '-')}", str(value)]
    command.append("--disable-uvicorn-access-log")
    config = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
    if "vision_config" in config:
        command.append("--enable-scale-out")  # TRL has vLLM tokenize prompts with images
    command += ["--middleware", ENGINE_WATCH, "--middleware", KEY_GUARD]  # the last comes first
    return [*command, *extra_args]


def default_options(
    checkpoint: str, host: str, port: int, user_options: Mapping[str, str]
) -> dict[str, str | int]:
    """Return a server's options, by argument name, for what the user has chosen otherwise."""
    sequences = user_options.get("max_num_seqs", "")
    cache = cpu_cache_arguments(
        checkpoint,
        user_options,
        sequences=int(sequences) if sequences.isdecimal() else CPU_SEQUENCES,
        length=sys.maxsize,  # up to the whole context
    )
    options: dict[str, str | int] = {
        "host": host,
        "port": port,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "worker_extension_cls": WORKER_EXTENSION,
        **cache,
    }
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        share = memory_share(weight_bytes(checkpoint), memory)
        options["weight_transfer_config"] = '{"backend": "nccl"}'
        options["gpu_memory_utilization"] = f"{share:.2f}"
    elif "enable_lora" in user_options:
        options["load_format"] = CPU_LOAD_FORMAT
    return options


def memory_share(weights: int, memory: int) -> float:
    """Return the share of a GPU's memory that vLLM may use, with room for new weights.

    vLLM fills its share with the key-value cache. On top of that, a sync needs the tensors of a
    layer (an embedding may have 1 GiB), and the layer being rebuilt from them: calculated, not
    measured.
    """
    room = 4 * min(2**30, weights)
    share = math.floor(100 * (MEMORY_SHARE - room / memory)) / 100
    return max(MEMORY_SHARE / 2, share)


def require_vllm() -> None:
    """Raise `ImportError` with the install command if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(
            "This needs vLLM, which is not installed: run `pip install 'trl-qurl[vllm]'`."
        )


def check_options(extra_args: Sequence[str]) -> None:
    """Raise `ValueError` for an unsafe cache, and for a front end that does not check our key."""
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") != "0":
        raise ValueError(
            "VLLM_USE_RUST_FRONTEND is set, but only vLLM's Python front end checks our key: unset "
            "it."
        )
    check_kv_cache(values_of(extra_args).get("kv_cache_dtype", "auto"), "--kv-cache-dtype")


def values_of(extra_args: Sequence[str]) -> dict[str, str]:
    """Return the values of vLLM's options by argument name.

    A value follows `=` or is the next word.
    """
    values = {}
    next_words = [*extra_args, ""][1:]
    for option, following in zip(extra_args, next_words, strict=True):
        name, _, value = option.partition("=")
        if name.startswith("--"):
            values[name.removeprefix("--").replace("-", "_")] = value or following
    return values


def run_server(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Print the command, then exec it with these variables and the ones that training needs."""
    options = values_of(command)
    compiling = "" if "enforce_eager" in options else COMPILING
    print(
        f"Starting vLLM{compiling}. The server is ready when it says "
        '"Application startup complete".'
    )
    switches = {"VLLM_SERVER_DEV_MODE": "1", **environment}
    if "enable_lora" in options:
        switches["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    assignments = [f"{name}={shlex.quote(value)}" for name, value in switches.items()]
    print(*assignments, shlex.join(command), flush=True)
    os.execve(command[0], list(command), {**os.environ, **switches})
