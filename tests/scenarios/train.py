"""Short training runs on tiny random models, outside the tests' own process; prints a JSON record
of each.

An engine takes over its process (distributed groups, threads), so every test that needs one runs
this script. Starting Python with TRL and vLLM takes longer than a run does, so `--and` lets several
follow one another.
"""

import argparse
import copy
import json
import logging
import os
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy
import torch
from accelerate.utils import gather_object
from child import Heard, run_all
from datasets import Dataset
from fresh_engine import answer
from peft import LoraConfig, PeftModel, get_peft_model
from short_runs import build as build_trainer
from splits import ZERO3, UnderFSDP2, UnderZeRO3
from support.losses import vowels
from tiny import KEPT, PROBE, tiny_model, tiny_tokenizer, write_with_llmcompressor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForTokenClassification

from trl_qurl.quantization import write_checkpoint
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.rollout import routes

PROMPTS = ["ab", "cde", "f g", "h1", "i22", "jj", "k", "lm"]


def reseed_globally(completions, **kwargs):
    """The same reward, from a function that seeds the generators of the process, as libraries of
    users do.
    """
    numpy.random.seed(0)
    torch.manual_seed(0)
    return vowels(completions)


def teaching(useless):
    """The reward of `vowels`, but 0 for the first kinds of prompt; adds a column to the
    completions' table.
    """

    def teaching(prompts, completions, log_extra=None, **kwargs):
        log_extra("first letter", [prompt[0] for prompt in prompts])
        counts = vowels(completions)
        zeros = tuple(PROMPTS[:useless])
        pairs = zip(prompts, counts, strict=True)
        return [0.0 if prompt.startswith(zeros) else count for prompt, count in pairs]

    return teaching


def engine_logps(trainer):
    """The engine's log-probabilities of the probe's tokens from the second on; only this process's
    own engine's.
    """
    generation = trainer.vllm_generation
    if generation.sync.route.engine is None:
        return []
    if generation.mode == "server":
        result = generation.vllm_client.get_sequence_logprobs([PROBE], [1], top_logprobs=1)
        return [logps[0] for logps in result["actual_logprobs"][0]]
    if generation.enable_sleep_mode:
        generation.llm.wake_up(tags=["kv_cache"])
    return answer(generation.llm)


def export(trainer, directory):
    """Save a checkpoint for a fresh engine: by itself, or with an adapter beside it."""
    scheme = trainer.vllm_generation.rollout.rollout_quantization
    if not trainer.vllm_generation.sync.route.is_merged:
        if scheme is None:
            save_unquantized(trainer.model.get_base_model(), directory)
        else:
            trainer.save_quantized(directory)
        model = whole_model(trainer)
        if trainer.accelerator.is_main_process:
            shutil.rmtree(directory / "adapter", ignore_errors=True)
            model.save_pretrained(directory / "adapter")
        return
    if trainer.is_deepspeed_enabled:
        trainer.save_quantized(directory)
        return
    model = whole_model(trainer)
    if not trainer.accelerator.is_main_process:
        return
    if isinstance(model, PeftModel):
        model = copy.deepcopy(model).merge_and_unload()
    if scheme is None:
        save_unquantized(model, directory)
        return
    write = write_with_llmcompressor if find_spec("llmcompressor") else write_checkpoint
    write(model, tiny_tokenizer(), scheme, directory, ignore=trainer.args.quantization_ignore)


def save_unquantized(model, directory):
    """Save a model as a user does, without an adapter's layers."""
    model.config.architectures = [type(model).__name__]
    weights = {name: tensor.clone() for name, tensor in model_parameters(model)}
    model.save_pretrained(directory, state_dict=weights)
    tiny_tokenizer().save_pretrained(directory)


def whole_model(trainer):
    """The trained model with all of its weights in this process, also where FSDP splits them."""
    if not trainer.is_fsdp_enabled:
        return trainer.model
    unsplit = copy.deepcopy(trainer.unsplit)
    unsplit.load_state_dict(trainer.accelerator.get_state_dict(trainer.model_wrapped), strict=False)
    return unsplit


def kill_before_generation(client, server):
    """Kill a server's process when it is about to generate for the second rollout."""
    generate = client.generate
    calls = []

    def after_the_server(prompts, *args, **kwargs):
        if kwargs.get("max_tokens") == 8 and kwargs.get("temperature"):  # not the probe's
            calls.append(prompts)
            if len(calls) == 2:
                # a shim (`forks`) may lead: its server would still answer
                os.killpg(server, signal.SIGKILL)
        return generate(prompts, *args, **kwargs)

    client.generate = after_the_server


FLAGS = (
    "lora",
    "untied",  # a model with a separate head
    "ppo",
    "rloo",
    "critic-lora",  # a critic with an adapter
    "save",  # the model to output_dir at the end
    "reseed",  # with a reward that seeds NumPy's and torch's generators
    "fsdp2",  # policy and critic split over the processes
    "zero3",
)
VALUES = (
    "lora-targets",
    "model",  # directory of a saved model, instead of a new one
    "export",  # directory for a checkpoint of the last weights
    "resume",  # checkpoint
    "value-model",  # directory where the critic starts, instead of the policy's start
    "config",  # JSON of more config fields
)
NUMBERS = (
    "useless",  # kinds of prompt that are always rewarded with 0
    "kill-before-generation",  # process of a server, killed in the second rollout
    "request-seed",  # of every request, to compare runs on servers
)


def parse(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir")
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    for name in VALUES:
        parser.add_argument(f"--{name}")
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    parser.set_defaults(config="{}", lora_targets="all-linear")
    return parser.parse_args(arguments)


def lora(targets="all-linear", **settings):
    modules = targets if targets == "all-linear" else targets.split(",")
    return LoraConfig(r=4, target_modules=modules, **settings)


def build(options):
    config = {"max_steps": 4, "learning_rate": 1e-3, "uaq_scale": 1.0 if options.lora else 1.5}
    config |= {"vllm_max_model_length": 64, **json.loads(options.config)}
    if config.get("vllm_mode") == "server":
        config["vllm_engine_kwargs"] = None
    given = {}
    if options.lora:  # B starts random: a sync of the base alone would be noticed at once
        given["peft_config"] = lora(options.lora_targets, init_lora_weights=False)
    if options.critic_lora:
        critic = AutoModelForTokenClassification.from_pretrained(options.model, num_labels=1)
        torch.nn.init.zeros_(critic.score.weight)
        options.value_model = get_peft_model(
            critic, lora(task_type="TOKEN_CLS", exclude_modules=["score"])
        )
    kind = "RLOO" if options.rloo else "GRPO"
    if options.ppo:
        kind = "PPO"
        given["value_model"] = options.value_model
    prompts = PROMPTS * 4
    reward = reseed_globally if options.reseed else vowels
    if options.useless:
        prompts = [f"{prompt}{i}" for i in range(4) for prompt in PROMPTS]
        reward = teaching(options.useless)
    given["train_dataset"] = Dataset.from_dict({"prompt": prompts})
    model = options.model or tiny_model(tie_word_embeddings=not options.untied)
    split_by = UnderFSDP2 if options.fsdp2 else None
    if options.zero3:
        import deepspeed

        # as accelerate does for GPUs, before the first model is loaded
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        config["deepspeed"] = ZERO3
        split_by = UnderZeRO3
    return build_trainer(options.output_dir, kind, model, reward, given, split_by, **config)


def copied(parameters):
    return {name: whole(p).detach().clone() for name, p in parameters}


def whole(parameter):
    """A parameter, put together from the parts that the processes have."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def is_on_the_grid(parameter):
    """Whether bfloat16 has all of its values."""
    return torch.equal(parameter, parameter.bfloat16().to(parameter.dtype))


def run(options):
    heard = Heard(logging.WARNING)
    logging.getLogger("trl_qurl.rollout.backend").addHandler(heard)
    with mock.patch.object(routes, "choose_route", wraps=routes.choose_route) as choose_route:
        trainer = build(options)
    logging.getLogger("trl_qurl.rollout.backend").removeHandler(heard)
    KEPT.append(trainer)
    generation = trainer.vllm_generation
    critic_start = copied(trainer.critic.model.named_parameters()) if options.ppo else {}
    generation.cost.take()  # of the engine's start
    generation.sync_weights()
    record = {
        "probe_start": engine_logps(trainer),
        "warned": heard.said,
        "is_sharded": [call.args[-1] for call in choose_route.call_args_list],
        "whole_mb": generation.cost.take().sent_bytes / 1e6,
    }
    if options.kill_before_generation and trainer.accelerator.is_main_process:
        kill_before_generation(generation.vllm_client, options.kill_before_generation)
    if options.request_seed is not None:
        generation.generation_kwargs["seed"] = options.request_seed
    trainer.unsplit = copy.deepcopy(trainer.model)
    trainer.train(resume_from_checkpoint=options.resume)

    adapter = copied(p for p in trainer.model.named_parameters() if "lora_" in p[0])
    record["is_proven"] = not generation.sync.needs_proof
    generation.sync_weights()
    parameters = dict(trainer.model.named_parameters())
    record["adapter_untouched"] = all(
        torch.equal(whole(parameters[name]), before) for name, before in adapter.items()
    )
    record["probe_end"] = engine_logps(trainer)
    record["history"] = trainer.state.log_history
    record["weight_version"] = generation.sync.version
    record["uaq_scale"] = getattr(trainer.model.config, "uaq_scale", 1.0)
    if options.export:
        export(trainer, Path(options.export))
    policy = generation.policy_parameters
    # In a list: every process must read to the end.
    sent = [is_on_the_grid(p) for _, p in policy() if p.dim() > 1]
    record["on_the_grid_of_bf16"] = sum(sent) / len(sent)
    frozen = [whole(p) for p in trainer.model.parameters() if not p.requires_grad]
    record["base_on_the_grid_of_bf16"] = all(is_on_the_grid(p) for p in frozen if p.dim() > 1)
    if options.ppo:
        critic = [p for p in trainer.critic.model.named_parameters() if p[1].requires_grad]
        moved = [
            not torch.equal(whole(p), critic_start[name.removeprefix("module.")])
            for name, p in critic
        ]
        record["critic_moved"] = all(moved) and bool(moved)
        record["sent_names"] = sorted(name for name, _ in policy())
    if options.save:
        trainer.save_model()
    record |= {"exported": options.export, "output_dir": options.output_dir}
    engine = generation.sync.route.engine
    if engine is not None:
        record["runner"] = engine.describe().runner
    record["held"] = 0
    for parameter in trainer.model.parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        record["held"] += part.numel()
    record["model"] = options.model
    record["processes"] = trainer.accelerator.num_processes
    record["distribution"] = str(trainer.accelerator.distributed_type.value)
    record["probes"] = gather_object([record["probe_end"]])
    return record


if __name__ == "__main__":
    run_all(lambda arguments: run(parse(arguments)))
