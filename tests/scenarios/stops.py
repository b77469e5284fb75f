"""Runs that stop and go on, in each case beside the run that never stopped; prints a JSON record of
each case.
"""

import logging
import sys
from pathlib import Path

import torch
from child import Heard, print_record
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from short_runs import build as build_short_run
from short_runs import saved, texts
from tiny import KEPT, SIXTEEN_BIT_EXPERTS, tiny_mixture, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, TrainerCallback

EVERY_SECOND = {
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "vllm_max_model_length": 64,
    "learning_rate": 1e-2,
}
NOT_REPEATED = ("time/", "step_time", "throughput/", "train_", "weights/")


def build(out, kind, model, settings, **given):
    trainer = build_short_run(out, kind, model, given=given, **EVERY_SECOND | settings)
    KEPT.append(trainer)
    return trainer


def rows(trainer):
    """The rows of updates, without seconds."""
    updates = []
    for row in trainer.state.log_history:
        if "loss" in row:
            repeated = [name for name in row if not name.startswith(NOT_REPEATED)]
            updates.append({name: row[name] for name in repeated})
    return updates


def whole_and_resumed(out, kind, make, settings, make_critic=None, **given):
    """The last two updates of a run, and the same after a new
    trainer has resumed from the second.
    """

    def build_here(name):
        if make_critic:
            given["value_model"] = make_critic()
        return build(out / name, kind, make(), settings, **given)

    whole = build_here("whole")
    whole.train()
    resumed = build_here("resumed")
    resumed.train(resume_from_checkpoint=f"{out}/whole/checkpoint-2")
    adapters = []
    if isinstance(resumed.model, PeftModel):
        adapters = list(resumed.model.peft_config)
    return {"whole": rows(whole)[2:], "resumed": rows(resumed)[-2:], "adapters": adapters}


def holds(state, stored):
    """Whether a state has all that was stored, bit for bit."""
    return all(torch.equal(state[name], tensor) for name, tensor in stored.items())


def adapter(**settings):
    return LoraConfig(r=4, target_modules=["q_proj", "up_proj"], **settings)


def own_adapter(out):
    """A run that continues an adapter, with a KL penalty: TRL keeps the initial one as the
    reference, `ref`.
    """
    directory = saved(out)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(directory)
    get_peft_model(base, adapter(init_lora_weights=False)).save_pretrained(out / "adapter")

    def make():
        base = AutoModelForCausalLM.from_pretrained(directory)
        return PeftModel.from_pretrained(base, out / "adapter", is_trainable=True)

    return whole_and_resumed(out, "GRPO", make, {"beta": 0.5})


def two_adapters(out):
    """PPO with an adapter of the policy and one of the critic."""
    directory = saved(out)

    def critic():
        torch.manual_seed(0)  # of the head and the adapter
        model = AutoModelForTokenClassification.from_pretrained(directory, num_labels=1)
        return get_peft_model(model, adapter(task_type="TOKEN_CLS"))

    settings = {"num_generations": 1}
    return whole_and_resumed(out, "PPO", lambda: directory, settings, critic, peft_config=adapter())


def experts(out):
    """A mixture of experts, whose checkpoint has a tensor for each expert, and the model one for
    all.
    """
    settings = {"rollout_quantization": "int8", "quantization_ignore": SIXTEEN_BIT_EXPERTS}
    return whole_and_resumed(out, "GRPO", lambda: tiny_mixture("qwen3_moe"), settings)


def moving_reference(out):
    """A reference model that follows the policy."""
    directory = saved(out)
    settings = {
        "beta": 0.5,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "ref_model_mixup_alpha": 0.5,
    }
    return whole_and_resumed(out, "GRPO", lambda: directory, settings)


def only_models(out):
    """PPO from a checkpoint without optimizers."""

    model = saved(out)
    settings = {"num_generations": 1, "save_only_model": True}
    build(out / "whole", "PPO", model, settings).train()
    still = {"learning_rate": 0.0, "critic_learning_rate": 1e-30}  # 0 is refused
    resumed = build(out / "resumed", "PPO", model, settings | still)
    heard = Heard()
    logging.getLogger("trl_qurl").addHandler(heard)
    checkpoint = out / "whole" / "checkpoint-2"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    stored = load_file(checkpoint / "critic" / "model.safetensors")
    critic = resumed.accelerator.unwrap_model(resumed.critic.model).state_dict()
    return {
        "said": [text for text in heard.said if "scheduler.pt" in text],
        "critic_is_loaded": holds(critic, stored),
    }


def best(out):
    """PPO that loads the best of its checkpoints at the end, and saves it."""
    settings = {
        "num_generations": 1,
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_reward",
        "greater_is_better": False,
    }
    trainer = build(out / "run", "PPO", saved(out), settings, eval_dataset=texts(8))
    rewards = iter([0.0, 1.0, 2.0])
    evaluate = trainer.evaluate
    trainer.evaluate = lambda *args, **given: (
        evaluate(*args, **given) | {"eval_reward": next(rewards)}
    )
    trainer.train()
    trainer.save_model(f"{out}/final")

    def weights(name):
        return [load_file(out / name / part / "model.safetensors") for part in (".", "critic")]

    final = weights("final")
    record = {}
    for name in ("checkpoint-1", "checkpoint-3"):
        record[name] = []
        for stored, last in zip(weights(f"run/{name}"), final, strict=True):
            record[name].append(holds(last, stored))
    return record


def interrupted(out):
    """Ctrl-C inside the second rollout, and `train()` again, as a cell of a notebook."""

    class Interrupt(TrainerCallback):
        micro_batches = 0

        def on_substep_end(self, args, state, control, **kwargs):
            self.micro_batches += 1
            if self.micro_batches == 2:
                raise KeyboardInterrupt

    settings = {
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
        "max_steps": 3,
    }
    trainer = build(out / "run", "GRPO", tiny_model(), settings, callbacks=[Interrupt()])
    begun = []
    not_logged = []
    generate = trainer._generate_and_score_completions

    def generate_and_note(inputs):
        begun.append(trainer._step)
        not_logged.append(len(trainer._metrics["train"]["reward"]))
        return generate(inputs)

    trainer._generate_and_score_completions = generate_and_note
    try:
        trainer.train()
    except KeyboardInterrupt:
        begun.append("Ctrl-C")
    trainer.train()
    return {
        "begun": begun,
        "not_logged": not_logged,
        "kl": [row["mismatch/kl_k3"] for row in rows(trainer)],
    }


# The mixture comes first: vLLM makes the groups of its processes once, and only a mixture has one
# for experts.
CASES = (experts, own_adapter, two_adapters, moving_reference, only_models, best, interrupted)


if __name__ == "__main__":
    records = {}
    for case in CASES:
        directory = Path(sys.argv[1], case.__name__)
        directory.mkdir()
        records[case.__name__] = case(directory)
    print_record(records)
