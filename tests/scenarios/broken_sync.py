"""Syncs with a fault, or engines that report something false: which check notices?

The faults are put between trl-qurl and vLLM, where a bug of either would sit. Prints what the sync
or its rollout raised.
"""

import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from child import print_record
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from short_runs import BASE
from tiny import ENGINE, KEPT, tiny_model, tiny_tokenizer

from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer

GROUP = 4  # completions per prompt

SCALE = "model.layers.1.mlp.gate_proj.weight_scale"
UP = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"


# Changes of the tensors
# ----------------------------------------------------------------------------------------------


def without(part):
    def change(tensors):
        for name, tensor in tensors:
            if part not in name:
                yield name, tensor

    return change


def doubled(part):
    def change(tensors):
        for name, tensor in tensors:
            if part in name:
                tensor = 2 * tensor
            yield name, tensor

    return change


# Places for a fault. Each takes the trainer's generation backend, and returns a context in which
# the fault is there.
# --------------------------------------------------------------------------------------------------


def on_the_way(change):
    """Between the trainer and the worker, after the trainer's digests were computed."""

    def context(generation):
        engine = generation.sync.route.engine
        load = engine.load_stream
        return patch.object(
            engine, "load_stream", lambda source, *rest: load(change(source), *rest)
        )

    return context


def before_sending(change):
    """Before the digests are computed: both sides agree on wrong tensors."""

    def context(generation):
        produce = generation.sync.route.tensors
        return patch.object(generation.sync.route, "tensors", lambda: change(produce()))

    return context


@contextmanager
def diverged(generation):
    """A weight of the policy that is not a number, for one sync."""
    weight = generation.model.get_parameter("model.layers.1.mlp.up_proj.weight")
    before = weight.detach().clone()
    weight.data[1, 1] = float("nan")
    yield
    weight.data.copy_(before)


def load_nothing(generation):
    """The worker reports success without loading anything."""

    def load_stream(source, update):
        for _ in source:
            pass
        [worker] = generation.llm.collective_rpc(lambda wrapper: wrapper.worker)
        worker.loaded_version = update.version

    return patch.object(generation.sync.route.engine, "load_stream", load_stream)


def forget_the_version(generation):
    """As if another run had sent its weights in between."""
    [worker] = generation.llm.collective_rpc(lambda wrapper: wrapper.worker)
    return patch.object(worker, "rollout_version", lambda: "of another run")


def keep_the_prefix_cache(generation):
    """The engine reports that it emptied its cache of keys and values, and did not."""
    return patch.object(generation.llm, "reset_prefix_cache", lambda *args, **kwargs: True)


def change_the_file(path):
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[UP] *= 2
    save_file(tensors, file)


def change_the_file_before_loading(generation):
    """The adapter's file changes between the trainer and the engine."""
    engine = generation.sync.route.engine
    load = engine.load_adapter

    def load_adapter(path, update):
        change_the_file(path)
        load(path, update)

    return patch.object(engine, "load_adapter", load_adapter)


def change_the_file_after_loading(generation):
    """It changes when vLLM has read it."""
    engine = generation.llm.llm_engine
    add = engine.add_lora

    def add_lora(request):
        added = add(request)
        change_the_file(Path(request.lora_path))
        return added

    return patch.object(engine, "add_lora", add_lora)


FAULTS = {
    "none": nullcontext,
    "tensor skipped": on_the_way(without(SCALE)),
    "scale doubled before sending": before_sending(doubled(SCALE)),
    "reload that does nothing": load_nothing,
    "version forgotten": forget_the_version,
    "prefix cache kept": keep_the_prefix_cache,
    "NaN in a quantized layer": diverged,
    "layer skipped": on_the_way(without("layers.1.mlp.down_proj")),
}
ADAPTER_FAULTS = {
    "adapter": nullcontext,
    "adapter's file changed before loading": change_the_file_before_loading,
    "adapter's file changed after loading": change_the_file_after_loading,
}
"""With an adapter that is sent alone, with different ranks and scalings per layer."""


OWN_FAULTS = {
    "own rollouts": nullcontext,
    "scale doubled before sending, own rollouts": before_sending(doubled(SCALE)),
}
"""With a `rollout_func` whose completions are not what the engine has sampled at their place."""


def two_turns(prompts, trainer):
    """The prompts of two turns, then the completions of two, as TRL's example for games has it."""
    result = {}
    for name in ("prompt_ids", "completion_ids", "logprobs"):
        result[name] = [[] for _ in prompts]
    guesses = [f"guess {number % 3}" for number in range(len(prompts))]
    for texts in (prompts, guesses):
        prompt_ids = [trainer.processing_class(text)["input_ids"] for text in texts]
        _, completion_ids, logprobs, *_ = trainer.vllm_generation.generate(
            prompts=prompt_ids, images=None, num_generations=GROUP
        )
        for i in range(len(prompts)):
            result["prompt_ids"][i] += prompt_ids[i]
            result["completion_ids"][i] += completion_ids[i]
            result["logprobs"][i] += [token[0] for token in logprobs[i]]
    return result


def long_texts(count):
    """Prompts that fill a block of the key-value cache, which a kept cache would answer from."""
    prompts = []
    for number in range(count):
        word = "abcdefghij"[number % 10] * 3
        prompts.append(f"say {word} and then " * 5 + str(number))
    return Dataset.from_dict({"prompt": prompts})


def start(output_dir, **given):
    settings = BASE | {
        "vllm_max_model_length": 128,
        "sync_check_interval": 1,
        # vLLM on CPU caches in blocks of 128 tokens by default; 32 is its smallest block.
        "vllm_engine_kwargs": ENGINE | {"block_size": 32},
        "weight_sync": "adapter" if "peft_config" in given else "auto",
        "per_device_train_batch_size": 32,
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 1,
        "num_generations": GROUP,
        "max_completion_length": 16,
    }
    return QuRLGRPOTrainer(
        # With weights as large as a trained model's, each layer matters to the log-probabilities.
        model=tiny_model(initializer_range=0.15),
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=QuRLGRPOConfig(output_dir, **settings),
        train_dataset=long_texts(64 // GROUP),
        processing_class=tiny_tokenizer(),
        **given,
    )


def roll_out(trainer):
    """Sync and generate as a step of training does, and judge what was sampled."""
    trainer.model.train()
    rows = []
    for row in trainer.train_dataset:
        rows += [row] * GROUP
    trainer._step = 0  # TRL generates at the first micro-batch
    trainer._prepare_inputs(rows)


def messages(trainer, faults):
    """The error of the sync after an update, or of its rollout, by fault."""
    generation = trainer.vllm_generation
    record = {}
    for fault, context in faults.items():
        roll_out(trainer)
        with torch.no_grad():  # as an update would
            for parameter in trainer.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
        with context(generation):
            try:
                generation.sync_weights()
                roll_out(trainer)
                record[fault] = None
            except RuntimeError as error:
                record[fault] = f"{type(error).__name__}: {error}"
        generation.llm.reset_prefix_cache()
        generation.sync.needs_proof = False
        generation.sync_weights()
    return record


def main():
    record = {}
    lora = LoraConfig(
        r=4,
        target_modules="all-linear",
        init_lora_weights=False,
        rank_pattern={"up_proj": 8},
        alpha_pattern={"layers.0.mlp.down_proj": 3},
    )
    runs = (
        (FAULTS, {}),
        (ADAPTER_FAULTS, {"peft_config": lora}),
        (OWN_FAULTS, {"rollout_func": two_turns}),
    )
    for faults, given in runs:
        requested = {fault: context for fault, context in faults.items() if fault in sys.argv[2:]}
        if requested:
            trainer = start(sys.argv[1], **given)
            KEPT.append(trainer)
            record |= messages(trainer, requested)
    print_record(record)


if __name__ == "__main__":
    main()
