"""Runs that save 8-bit checkpoints on the way, and the same runs that do not; prints a JSON record
of each.
"""

import argparse
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import transformers.trainer
from child import run_all
from datasets import Dataset
from huggingface_hub.utils import filter_repo_objects
from short_runs import BASE, KINDS
from tiny import CHAT_TEMPLATE, KEPT, tiny_classifier, tiny_model, tiny_tokenizer
from train import PROMPTS, count_vowels, engine_logps, lora
from transformers import TrainerCallback

SECRET = "hf_secret"


class SaveAtStep(TrainerCallback):
    """In the middle of a rollout's updates, when the engine's
    weights are older than the policy's.
    """

    def __init__(self, step: int, directory: Path) -> None:
        self.step, self.directory = step, directory
        self.trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.trainer.save_quantized(self.directory)


class Hub:
    """The part of the Hub's client that a push needs; keeps the
    names of the files it would upload.
    """

    def create_repo(self, name: str, **kwargs) -> SimpleNamespace:
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, folder_path: str, ignore_patterns: list[str], **kwargs) -> None:
        names = [
            str(path.relative_to(folder_path))
            for path in Path(folder_path).rglob("*")
            if path.is_file()
        ]
        self.files = sorted(filter_repo_objects(names, ignore_patterns=ignore_patterns))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir", type=Path)
    parser.add_argument(
        "--lora", action="store_true", help="PPO with an adapter, instead of GRPO without"
    )
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--config", default="{}", help="JSON of more config fields")
    return parser.parse_args(arguments)


def message_of(trainer, *args, **kwargs) -> str:
    try:
        trainer.save_quantized(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def mistakes(trainer, output_dir: Path) -> dict[str, str]:
    """What the trainer says of each; the last is noticed when the first tensors have gone by."""
    messages = {
        "own directory": message_of(trainer, output_dir),
        "unknown scheme": message_of(trainer, formats="int4"),
        "nothing left": message_of(trainer, ignore=["re:.*"]),
    }
    trainer.args.rollout_quantization, kept = None, trainer.args.rollout_quantization
    messages["no scheme"] = message_of(trainer)
    trainer.args.rollout_quantization = kept
    (output_dir / "a file").write_text("")
    messages["unwritable"] = message_of(trainer, output_dir / "a file" / "int8")
    return messages


def run(options: argparse.Namespace) -> dict:
    settings = BASE | {
        "max_steps": 4,
        "learning_rate": 1e-3,
        "smooth_activations": True,
        "uaq_scale": 1.0 if options.lora else 1.5,
        "hub_model_id": "someone/tiny",
        "hub_token": SECRET,
        "report_to": ["tensorboard"] if importlib.util.find_spec("tensorboard") else [],
        "save_strategy": "steps",
        "save_steps": 4,
        "vllm_max_model_length": 64,
    }
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    callback = SaveAtStep(3, options.output_dir / "on the way")
    kind, config = KINDS["PPO" if options.lora else "GRPO"]
    critic = {"value_model": tiny_classifier()} if options.lora else {}
    trainer = kind(
        model=tiny_model(),
        reward_funcs=count_vowels,
        args=config(str(options.output_dir), **settings | json.loads(options.config)),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4}),
        processing_class=tokenizer,
        peft_config=lora("all-linear", init_lora_weights=False) if options.lora else None,
        callbacks=[callback] if options.save else [],
        **critic,
    )
    callback.trainer = trainer
    KEPT.append(trainer)
    trainer.train()
    record = {"history": trainer.state.log_history}
    if options.save:
        version = trainer.vllm_generation.sync.version
        record["directory"] = str(trainer.save_quantized())
        record["messages"] = mistakes(trainer, options.output_dir)
        record["version_kept"] = trainer.vllm_generation.sync.version == version
        if not options.lora:
            trainer.save_quantized(
                options.output_dir / "fp8", formats="fp8", ignore=["lm_head", "re:.*down_proj"]
            )
        hub = Hub()
        transformers.trainer.hf_api = lambda: hub
        trainer.push_to_hub(blocking=True)
        record["pushed"] = hub.files
    trainer.vllm_generation.sync_weights()
    record["probe"] = engine_logps(trainer)
    return record


if __name__ == "__main__":
    run_all(lambda arguments: run(parse(arguments)))
