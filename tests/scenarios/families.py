"""Runs of other models than a plain one: with adapters, of other families, with pictures."""

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from short_runs import run, saved, seen, texts
from tiny import SIXTEEN_BIT_EXPERTS, save_remote_code_model, tiny_mixture, tiny_model

from trl_qurl.quantization.checkpoint_form import parameter_name

LORA = LoraConfig(
    r=4, target_modules="all-linear", modules_to_save=["norm"], init_lora_weights=False
)


def adapter(out):
    """A new adapter and trained norms on a base in bfloat16, with a KL penalty; trained twice,
    changed, evaluated.
    """
    model = tiny_model(dtype=torch.bfloat16)
    given = {"peft_config": LORA, "eval_dataset": texts(2)}
    frozen = {name: p.clone() for name, p in model.named_parameters() if "norm" not in name}
    trainer = run(
        out, model=model, given=given, beta=0.1, learning_rate=2e-2, per_device_eval_batch_size=8
    )
    record = seen(trainer)
    trainer.train()
    again = trainer.state.log_history
    trainer.evaluate()
    for name, parameter in trainer.model.named_parameters():
        if ".lora_B." in name:
            parameter.data.mul_(2.0)  # as averages of weights are assigned
    changed = trainer.evaluate()
    count = trainer.vllm_generation.sync.version
    trainer.evaluate()
    base = {parameter_name(name): p for name, p in trainer.model.named_parameters()}
    return record | {
        "again": again,
        "changed": changed,
        "synced_for_nothing": trainer.vllm_generation.sync.version != count,
        "drifted": [name for name, p in frozen.items() if not torch.equal(base[name], p)],
    }


def trained_adapter(out):
    """A model that already has an adapter and trained norms, with a KL penalty against both."""
    return seen(run(out, model=get_peft_model(tiny_model(), LORA), beta=0.1))


def reference(out):
    """A reference model that follows the policy."""
    trainer = run(
        out,
        model=saved(out),
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=1.0,
    )
    policy = dict(trainer.model.named_parameters())
    followed = trainer.ref_model.named_parameters()
    return seen(trainer) | {"follows": all(torch.equal(policy[name], p) for name, p in followed)}


def kernels(out):
    """torch.compile of the policy."""
    return seen(run(out, torch_compile=True, torch_compile_backend="eager"))


def transformers_backend(out):
    """A model that vLLM has itself, by its transformers backend; and another one of its class
    afterwards.
    """
    trainer = run(out, vllm_model_impl="transformers", **backend_format())
    tiny_model()(torch.tensor([[40, 50]]))  # would fail if the class were changed
    return seen(trainer)


def remote_code(out):
    """A model with classes in its checkpoint, and the quantized checkpoint after training."""
    model = save_remote_code_model(out / "own")
    trainer = run(
        out,
        model=model,
        given={"processing_class": None},
        trust_remote_code=True,
        model_init_kwargs={"dtype": "float32"},
        vllm_engine_kwargs={"enforce_eager": True},  # the size of the cache is ours
    )
    trainer.save_quantized(f"{out}/quantized")
    return seen(trainer) | {"files": sorted(path.name for path in (out / "quantized").glob("*.py"))}


BACKEND = ("smollm3", "olmo2", "olmo3", "starcoder2", "vaultgemma")


def has_amx():
    return torch.cpu.get_capabilities().get("amx_tile")


def backend_format():
    """16 bits where vLLM's INT8 kernel takes no batches, which its transformers backend gives it:
    CPUs with AMX.
    """
    if has_amx():
        return {"rollout_quantization": None}
    return {}


def dense(out, family):
    """A family of models without experts, smoothed where that is the default."""
    settings = backend_format() if family in BACKEND else {}
    return seen(run(out, model=tiny_model(family), smooth_activations=None, **settings))


def experts(out, family):
    """A mixture of experts, with the loss that balances them. CPUs without AMX keep experts in 16
    bits by default.
    """
    ignore = SIXTEEN_BIT_EXPERTS if has_amx() else ["lm_head"]
    model = tiny_mixture(family, output_router_logits=True)
    return seen(run(out, model=model, router_aux_loss_coef=0.01, quantization_ignore=ignore))


def vision(out, family, *parts):
    """A vision-language model, with pictures or without (`text`), with an adapter (`lora`), for
    `RLOO`, or with large updates between two rollouts of the same pictures (`again`).
    """
    from tiny_vision import IDS, picture, tiny_vision_model, vision_processor

    model = tiny_vision_model(family)
    processor = vision_processor(family)
    count = 4 if "again" in parts else 16
    rows = {"prompt": [[{"role": "user", "content": f"say {i}"}] for i in range(count)]}
    if "text" not in parts:
        rows["image"] = [picture(10 * i) for i in range(count)]
    given = {"train_dataset": Dataset.from_dict(rows), "processing_class": processor}
    settings = {"beta": 0.0}
    if "lora" in parts:
        settings["beta"] = 0.1
        given["peft_config"] = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
    if "again" in parts:
        settings |= {"learning_rate": 0.02, "max_steps": 4}
    trainer = run(
        out,
        "RLOO" if "RLOO" in parts else "GRPO",
        model=model,
        given=given,
        # A random model would generate image tokens. Tokens with a bias are missing from the
        # engine's probabilities, so only these two have one.
        generation_kwargs={"logit_bias": {IDS["image"]: -100.0, IDS["video"]: -100.0}},
        vllm_max_model_length=256,
        log_completions=True,
        **settings,
    )
    return seen(trainer)
