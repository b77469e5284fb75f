"""A sync that goes wrong on its way, or an engine that lies about it: which check notices?

The faults are put between trl-qurl and vLLM, where a bug of either would sit. Prints what the sync raised.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from datasets import Dataset
from tiny import ENGINE, tiny_model, tiny_tokenizer

from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer

SCALE = "model.layers.1.mlp.gate_proj.weight_scale"


def skip_a_tensor(tensors):
    return ((name, tensor) for name, tensor in tensors if name != SCALE)


def double_a_scale(tensors):
    return ((name, 2 * tensor if name == SCALE else tensor) for name, tensor in tensors)


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
        load = generation.engine.load_stream
        broken = lambda source, *arguments: load(fault(source), *arguments)  # noqa: E731
        return patch.object(generation.engine, "load_stream", broken)

    return context


def before_sending(fault):
    """Before the digests are taken: both sides agree on wrong tensors."""

    def context(generation):
        produce = generation.sync._tensors
        return patch.object(generation.sync, "_tensors", lambda *arguments: fault(produce(*arguments)))

    return context


def load_nothing(generation):
    """The worker claims success and digests without loading anything."""

    def load_stream(source, metadata, update):
        for _ in source:
            pass
        [worker] = generation.llm.collective_rpc(lambda wrapper: wrapper.worker)
        worker.loaded_version = update.version
        return [dict(source.digests)]

    return patch.object(generation.engine, "load_stream", load_stream)


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
}


def main() -> None:
    config = QuRLGRPOConfig(
        sys.argv[1],
        per_device_train_batch_size=8,
        num_generations=4,
        steps_per_generation=2,
        max_completion_length=8,
        vllm_max_model_length=64,
        sync_check_interval=1,
        # vLLM on CPU caches in blocks of 128 tokens by default; 32 is its smallest block.
        vllm_engine_kwargs=ENGINE | {"block_size": 32},
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    # Weights of a trained model's size: a random one of width 128 says the same whatever is done to a layer.
    model = tiny_model(initializer_range=0.15)
    trainer = QuRLGRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["ab", "cd"] * 4}),
        processing_class=tiny_tokenizer(),
    )
    generation = trainer.vllm_generation
    record = {}
    for fault in FAULTS:
        if fault not in sys.argv[2:]:
            continue
        generation.sync_weights()
        with torch.no_grad():  # as an update would
            for parameter in model.parameters():
                parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
        with FAULTS[fault](generation):
            try:
                generation.sync_weights()
                record[fault] = None
            except RuntimeError as error:
                record[fault] = f"{type(error).__name__}: {error}"
        generation.llm.reset_prefix_cache()
    print("RECORD " + json.dumps(record))


if __name__ == "__main__":
    main()
