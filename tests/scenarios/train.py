"""Short training runs on tiny random models, outside the tests' own process; prints a JSON record
of each.

An engine takes over its process (distributed groups, threads), so every test that needs one runs
this script. Starting Python with TRL and vLLM takes longer than a run does, so `--and` lets several
follow one another.
"""

import argparse
import copy
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate.utils import gather_object
from child import run_all
from datasets import Dataset
from delayed import delay, record_prompts
from short_runs import BASE, KINDS
from tiny import KEPT, PROBE, tiny_model, tiny_tokenizer

from trl_qurl.quantization.merging import model_parameters

ORDERS: list = []
"""The prompts of each run, rollout by rollout."""

PROMPTS = ["ab", "cde", "f g", "h1", "i22", "jj", "k", "lm"]


def count_vowels(completions, **kwargs):
    return [
        sum(character in "aeiou4567" for character in completion) / 8 for completion in completions
    ]


def reseed_globally(completions, **kwargs):
    """The same reward, from a function that seeds the generators of the process, as libraries of
    users do.
    """
    numpy.random.seed(0)
    torch.manual_seed(0)
    return count_vowels(completions)


def export_with_adapter(trainer, directory: Path) -> None:
    """Save the base as a user does, and the adapter as PEFT does."""
    if trainer.vllm_generation.rollout.formats is None:
        state = {name: tensor.clone() for name, tensor in model_parameters(trainer.model)}
        trainer.model.get_base_model().save_pretrained(directory, state_dict=state)
        tiny_tokenizer().save_pretrained(directory)
    else:
        trainer.save_quantized(directory)
    if trainer.accelerator.is_main_process:
        shutil.rmtree(directory / "adapter", ignore_errors=True)
        trainer.model.save_pretrained(directory / "adapter")


class Teaching:
    """The reward of `count_vowels`, but 0 for the first kinds of prompt; adds a column to the
    completions' table.
    """

    __name__ = "teaching"

    def __init__(self, useless: int) -> None:
        self.useless = tuple(PROMPTS[:useless])

    def __call__(self, prompts, completions, log_extra=None, **kwargs):
        log_extra("first letter", [prompt[0] for prompt in prompts])
        counts = count_vowels(completions)
        return [
            0.0 if prompt.startswith(self.useless) else count
            for prompt, count in zip(prompts, counts, strict=True)
        ]


def engine_logps(trainer) -> list[float]:
    """The engine's log-probabilities of the probe's tokens from the second on; only this process's
    own engine's.
    """
    generation = trainer.vllm_generation
    if generation.sync.route.engine is None:
        return []
    if generation.mode == "server":
        result = generation.vllm_client.get_sequence_logprobs([PROBE], [1], top_logprobs=1)
        return [logps[0] for logps in result["actual_logprobs"][0]]
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [output] = generation.llm.generate([{"prompt_token_ids": PROBE}], params, use_tqdm=False)
    return [
        logps[token].logprob
        for token, logps in zip(PROBE[1:], output.prompt_logprobs[1:], strict=True)
    ]


def export(model, scheme: str | None, ignore: list[str], directory: str) -> None:
    """Save a checkpoint for a fresh engine, made by llm-compressor where it can be."""
    from peft import PeftModel

    from trl_qurl.quantization import write_checkpoint

    if isinstance(model, PeftModel):
        model = copy.deepcopy(model).merge_and_unload()
    if scheme is None:
        model.config.architectures = [type(model).__name__]
        model.save_pretrained(directory)
        tiny_tokenizer().save_pretrained(directory)
    else:
        is_alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        # llm-compressor would wait for all processes
        quantizer = "llmcompressor" if is_alone else "streaming"
        write_checkpoint(
            model, tiny_tokenizer(), scheme, directory, ignore=ignore, quantizer=quantizer
        )


def whole_model(trainer):
    """The trained model with all of its weights in this process,
    also where training splits them.
    """
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        return trainer.model
    whole = type(trainer.model)(trainer.model.config)
    whole.load_state_dict(trainer.accelerator.get_state_dict(trainer.model_wrapped), strict=False)
    whole.tie_weights()
    return whole


def kill_before_generation(client, server: int) -> None:
    """Kill a server's process when it is about to generate for the second rollout."""
    generate, calls = client.generate, []

    def after_the_server(prompts, *args, **kwargs):
        # not the probe's
        calls.extend([None] if kwargs.get("max_tokens") == 8 and kwargs.get("temperature") else [])
        if len(calls) == 2:
            calls.append(None)
            # a shim (`forks`) may lead: its server would still answer
            os.killpg(server, signal.SIGKILL)
        return generate(prompts, *args, **kwargs)

    client.generate = after_the_server


FLAGS = {
    "lora": "with an adapter",
    "untied": "a model with a separate head",
    "ppo": "with a critic",
    "rloo": "without ratios of single tokens",
    "critic-lora": "a critic with an adapter",
    "save": "save the model to output_dir at the end",
    "reseed": "with a reward that seeds NumPy's and torch's generators",
    "delayed": "by one rollout, in the order of the run before",
}
VALUES = {
    "lora-targets": "modules of the adapter",
    "model": "directory of a saved model, instead of a new one",
    "export": "directory for a checkpoint of the last weights",
    "resume": "checkpoint",
    "value-model": "directory where the critic starts, instead of the policy's start",
    "config": "JSON of more config fields",
}
NUMBERS = {
    "useless": "kinds of prompt that are always rewarded with 0",
    "kill-before-generation": "process of a server, killed in the second rollout",
    "request-seed": "of every request, to compare runs on servers",
}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir")
    for name, text in FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    for name, text in VALUES.items():
        parser.add_argument(f"--{name}", help=text)
    for name, text in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.set_defaults(config="{}", lora_targets="all-linear")
    return parser.parse_args(arguments)


def lora(targets: str, **settings: Any) -> Any:
    from peft import LoraConfig

    modules = targets if targets == "all-linear" else targets.split(",")
    return LoraConfig(r=4, target_modules=modules, **settings)


def build(options: argparse.Namespace) -> Any:
    config = BASE | {"max_steps": 4, "learning_rate": 1e-3, "uaq_scale": 1.5}
    config |= {"vllm_max_model_length": 64, **json.loads(options.config)}
    if config.get("vllm_mode") == "server":
        del config["vllm_engine_kwargs"]
    cls, config_cls = KINDS["PPO" if options.ppo else "RLOO" if options.rloo else "GRPO"]
    adapters = {}
    if options.lora:  # B starts random: a sync of the base alone would be noticed at once
        adapters["peft_config"] = lora(options.lora_targets, init_lora_weights=False)
    if options.critic_lora:
        adapters["value_peft_config"] = lora("all-linear", task_type="CAUSAL_LM")
    prompts, reward = PROMPTS * 4, count_vowels
    if options.useless:
        prompts, reward = (
            [f"{prompt}{i}" for i in range(4) for prompt in PROMPTS],
            Teaching(options.useless),
        )
    if options.reseed:
        reward = reseed_globally
    return cls(
        model=options.model or tiny_model(tie_word_embeddings=not options.untied),
        reward_funcs=reward,
        args=config_cls(options.output_dir, **config),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tiny_tokenizer(),
        **adapters,
        **({"value_model": options.value_model} if options.ppo else {}),
    )


def run(options: argparse.Namespace) -> dict:
    trainer = build(options)
    KEPT.append(trainer)
    if options.ppo:
        critic_start = {
            name: p.detach().clone() for name, p in trainer.critic.model.named_parameters()
        }
    trainer.vllm_generation.cost.take()  # of the engine's start
    trainer.vllm_generation.sync_weights()
    record = {
        "probe_start": engine_logps(trainer),
        "whole_mb": trainer.vllm_generation.cost.take().sent_bytes / 1e6,
    }
    # the first rollout is to sync as it would without the probe above
    trainer.vllm_generation.sync._sent = None
    if options.kill_before_generation and trainer.accelerator.is_main_process:
        kill_before_generation(trainer.vllm_generation.vllm_client, options.kill_before_generation)
    if options.request_seed is not None:
        trainer.vllm_generation.generation_kwargs["seed"] = options.request_seed
    if options.delayed:
        delay(trainer, ORDERS[-1])
    ORDERS.append(record_prompts(trainer))
    trainer.train(resume_from_checkpoint=options.resume)

    adapter = {name: p.clone() for name, p in trainer.model.named_parameters() if "lora_" in name}
    record["is_proven"] = not trainer.vllm_generation.sync.needs_proof
    trainer.vllm_generation.sync_weights()
    record["adapter_untouched"] = all(
        torch.equal(p, adapter[name])
        for name, p in trainer.model.named_parameters()
        if name in adapter
    )
    record["probe_end"] = engine_logps(trainer)
    record["history"] = trainer.state.log_history
    record["weight_version"] = trainer.vllm_generation.sync.version
    record["uaq_scale"] = getattr(trainer.model.config, "uaq_scale", 1.0)
    if options.export and not trainer.vllm_generation.sync.route.is_merged:
        export_with_adapter(trainer, Path(options.export))
    elif options.export:
        model = whole_model(trainer)
        if trainer.accelerator.is_main_process:
            export(
                model,
                trainer.vllm_generation.rollout.formats,
                trainer.args.quantization_ignore,
                options.export,
            )
    policy = trainer.vllm_generation.policy_parameters
    # After the export: merging an adapter and taking it out again leaves the base a rounding error
    # away. In a list: a pass that is not read to its end leaves adapters merged.
    sent = [torch.equal(p, p.bfloat16().to(p.dtype)) for _, p in policy() if p.dim() > 1]
    record["on_the_grid_of_bf16"] = sum(sent) / len(sent)
    if options.ppo:
        moved = (
            (p - critic_start[name.removeprefix("module.")]).norm().item()
            for name, p in trainer.critic.model.named_parameters()
            if p.requires_grad
        )
        record["critic_moved"] = sum(change > 0 for change in moved)
        record["critic_parameters"] = sum(
            p.requires_grad for p in trainer.critic.model.parameters()
        )
        record["sent_names"] = sorted(name for name, _ in policy())
    if options.save:
        trainer.save_model()
    if (engine := trainer.vllm_generation.sync.route.engine) is not None:
        record["engine_dtype"] = engine.describe().dtype
    record["processes"] = trainer.accelerator.num_processes
    record["distribution"] = str(trainer.accelerator.distributed_type.value)
    record["probes"] = gather_object([record["probe_end"]])
    return record


if __name__ == "__main__":
    run_all(lambda arguments: run(parse(arguments)))
