"""A sync that goes wrong on its way, or an engine that lies about it: which check notices?

The faults are put between trl-qurl and vLLM, where a bug of either would sit. Prints what the sync raised.
"""

import json
import os
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tiny import ENGINE, KEPT, tiny_model, tiny_tokenizer

from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer

SCALE = "model.layers.1.mlp.gate_proj.weight_scale"
UP = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"


def skip_a_tensor(tensors):
    return ((name, tensor) for name, tensor in tensors if name != SCALE)


def double_a_scale(tensors):
    return ((name, 2 * tensor if name == SCALE else tensor) for name, tensor in tensors)


def double_an_adapter(tensors):
    return ((name, 2 * tensor if ".lora_B" in name else tensor) for name, tensor in tensors)


def swap_two_layers(tensors):
    swapped = {"layers.0.mlp.up_proj": "layers.1.mlp.up_proj", "layers.1.mlp.up_proj": "layers.0.mlp.up_proj"}

    def other(name):
        for ours, theirs in swapped.items():
            if ours in name:
                return name.replace(ours, theirs)
        return name

    return ((other(name), tensor) for name, tensor in tensors)


# Each returns a context in which the fault is there.


def sound(generation):
    return nullcontext()


def on_the_way(fault):
    """Between the trainer and the worker, after the trainer's digests were taken."""

    def context(generation):
        load = generation.sync.route.engine.load_stream
        broken = lambda source, *arguments: load(fault(source), *arguments)  # noqa: E731
        return patch.object(generation.sync.route.engine, "load_stream", broken)

    return context


def before_sending(fault):
    """Before the digests are taken: both sides agree on wrong tensors."""

    def context(generation):
        route = generation.sync.route
        produce = route.tensors
        return patch.object(route, "tensors", lambda: fault(produce()))

    return context


def diverged(name, value):
    """A weight of the policy that is no number, for the length of one sync."""

    @contextmanager
    def context(generation):
        parameter = dict(generation.model.named_parameters())[name]
        kept = parameter.detach().clone()
        parameter.data[1, 1] = value
        yield
        parameter.data.copy_(kept)

    return context


def load_nothing(generation):
    """The worker claims success and digests without loading anything."""

    def load_stream(source, update):
        for _ in source:
            pass
        [worker] = generation.llm.collective_rpc(lambda wrapper: wrapper.worker)
        worker.loaded_version, worker.rollout_digests = update.version, dict(source.digests)

    return patch.object(generation.sync.route.engine, "load_stream", load_stream)


def double_a_norm_inside(generation):
    """Behind the worker's door: the tensors arrive as they were sent, and the model's loader changes one."""
    [model] = generation.llm.apply_model(lambda model: model)
    load = model.load_weights
    norm = "model.layers.0.input_layernorm.weight"
    broken = lambda weights: load((n, 2 * t if n == norm else t) for n, t in weights)  # noqa: E731
    return patch.object(model, "load_weights", broken)


def forget_the_version(generation):
    """As if another run had sent its weights in between."""
    [worker] = generation.llm.collective_rpc(lambda wrapper: wrapper.worker)
    return patch.object(worker, "rollout_version", lambda: "of another run")


def keep_the_prefix_cache(generation):
    """The engine says it emptied its cache of keys and values, and did not."""
    return patch.object(generation.llm, "reset_prefix_cache", lambda *args, **kwargs: True)


def change_the_file(path):
    tensors = load_file(path / "adapter_model.safetensors")
    save_file({**tensors, UP: 2 * tensors[UP]}, path / "adapter_model.safetensors")


def change_the_file_before_loading(generation):
    """After the trainer has written an adapter, and before anyone reads it."""
    load = generation.sync.route.engine.load_adapter

    def load_adapter(path, update):
        change_the_file(path)
        load(path, update)

    return patch.object(generation.sync.route.engine, "load_adapter", load_adapter)


def change_the_file_after_loading(generation):
    """Between vLLM's reading and the worker's."""
    add = generation.llm.llm_engine.add_lora

    def add_lora(request):
        added = add(request)
        change_the_file(Path(request.lora_path))
        return added

    return patch.object(generation.llm.llm_engine, "add_lora", add_lora)


def keep_the_old_adapter(generation):
    """vLLM without `load_inplace`: it keeps the adapter that it has under this name."""
    add = generation.llm.llm_engine.add_lora

    def add_lora(request):
        request.load_inplace = False
        return add(request)

    return patch.object(generation.llm.llm_engine, "add_lora", add_lora)


def generate_without_the_adapter(generation):
    load = generation.sync.route.engine.load_adapter

    def load_adapter(path, update):
        load(path, update)
        generation.llm.adapter = None

    return patch.object(generation.sync.route.engine, "load_adapter", load_adapter)


ADAPTER_FAULTS = {
    "adapter": sound,
    "adapter's file changed before loading": change_the_file_before_loading,
    "adapter's file changed after loading": change_the_file_after_loading,
    "old adapter kept": keep_the_old_adapter,
    "adapter doubled before sending": before_sending(double_an_adapter),
    "adapter not asked for": generate_without_the_adapter,
    "NaN in an adapter": diverged(UP.replace("lora_B", "lora_B.default"), float("nan")),
}
"""With an adapter that is sent by itself, whose layers have ranks and scalings of their own."""

FAULTS = {
    "none": sound,
    "tensor skipped": on_the_way(skip_a_tensor),
    "scale doubled on the way": on_the_way(double_a_scale),
    "layers swapped on the way": on_the_way(swap_two_layers),
    "scale doubled before sending": before_sending(double_a_scale),
    "layers swapped before sending": before_sending(swap_two_layers),
    "reload that does nothing": load_nothing,
    "norm doubled inside": double_a_norm_inside,
    "version forgotten": forget_the_version,
    "prefix cache kept": keep_the_prefix_cache,
    "NaN in a quantized layer": diverged("model.layers.1.mlp.up_proj.weight", float("nan")),
    "infinity in the embedding": diverged("model.embed_tokens.weight", float("-inf")),
}


def start(output_dir: str, **further: Any) -> QuRLGRPOTrainer:
    config = QuRLGRPOConfig(
        output_dir,
        per_device_train_batch_size=8,
        num_generations=4,
        steps_per_generation=2,
        max_completion_length=8,
        vllm_max_model_length=64,
        sync_check_interval=1,
        # vLLM on CPU caches in blocks of 128 tokens by default; 32 is its smallest block.
        vllm_engine_kwargs=ENGINE | {"block_size": 32},
        weight_sync="adapter" if further else "auto",
        smooth_activations=False,  # the scales would be those of other weights: a step here moves each by a third
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    return QuRLGRPOTrainer(
        # Weights of a trained model's size: a random one of width 128 says the same whatever is done to a layer.
        model=tiny_model(initializer_range=0.15),
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["ab", "cd"] * 4}),
        processing_class=tiny_tokenizer(),
        **further,
    )


def messages(trainer: QuRLGRPOTrainer, faults: dict[str, Any]) -> dict[str, str | None]:
    """What the sync after an update raises under each fault."""
    generation, record = trainer.vllm_generation, {}
    for fault, context in faults.items():
        generation.sync_weights()
        with torch.no_grad():  # as an update would
            for parameter in trainer.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
        with context(generation):
            try:
                generation.sync_weights()
                record[fault] = None
            except RuntimeError as error:
                record[fault] = f"{type(error).__name__}: {error}"
        generation.llm.reset_prefix_cache()
    return record


def main() -> None:
    record = {}
    patterns = {"rank_pattern": {"up_proj": 8}, "alpha_pattern": {"layers.0.mlp.down_proj": 3}}
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **patterns)
    for faults, further in ((FAULTS, {}), (ADAPTER_FAULTS, {"peft_config": lora})):
        wanted = {fault: context for fault, context in faults.items() if fault in sys.argv[2:]}
        if wanted:
            trainer = start(sys.argv[1], **further)
            KEPT.append(trainer)
            record |= messages(trainer, wanted)
    print("RECORD " + json.dumps(record))


if __name__ == "__main__":
    main()
