"""Runs that save 8-bit checkpoints on the way, and one that does not; prints a JSON record of each."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import transformers.trainer
from child import print_record
from huggingface_hub.utils import filter_repo_objects
from short_runs import build
from support.losses import vowels
from tiny import CHAT_TEMPLATE, KEPT, tiny_classifier, tiny_tokenizer
from train import engine_logps, lora
from transformers import TrainerCallback

SETTINGS = {
    "max_steps": 4,
    "learning_rate": 1e-3,
    "smooth_activations": True,
    "hub_model_id": "someone/tiny",
    "hub_token": "hf_secret",
    "report_to": ["tensorboard"] if importlib.util.find_spec("tensorboard") else [],
    "save_strategy": "steps",
    "save_steps": 4,
    "vllm_max_model_length": 64,
}


class SaveOnTheWay(TrainerCallback):
    """In the middle of a rollout's updates, when the engine's weights are older than the policy's.

    In the first rollout, inputs for the first fit of the smoothing are being collected, too.
    """

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (1, 3):
            self.trainer.save_quantized(f"{args.output_dir}/on the way")


class Hub:
    """The part of the Hub's client that a push needs; keeps the names of the files it would
    upload.
    """

    def create_repo(self, name, **kwargs):
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, folder_path, ignore_patterns, **kwargs):
        folder = Path(folder_path)
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        self.files = sorted(filter_repo_objects(names, ignore_patterns=ignore_patterns))


def run(directory, name, kind="GRPO", saves=True, given=None, **settings):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    callback = SaveOnTheWay()
    given = {"processing_class": tokenizer, "callbacks": [callback] * saves} | (given or {})
    out = f"{directory}/{name}"
    trainer = build(out, kind, None, vowels, given, **SETTINGS | settings)
    callback.trainer = trainer
    KEPT.append(trainer)
    trainer.train()
    record = {"history": trainer.state.log_history}
    generation = trainer.vllm_generation
    if saves:
        version = generation.sync.version
        record["directory"] = str(trainer.save_quantized())
        record["version_kept"] = generation.sync.version == version
        hub = Hub()
        transformers.trainer.hf_api = lambda: hub
        trainer.push_to_hub(blocking=True)
        record["pushed"] = hub.files
    generation.sync_weights()
    return record | {"probe": engine_logps(trainer)}


def main(directory):
    adapted = {
        "peft_config": lora(init_lora_weights=False),
        "value_model": tiny_classifier(),
    }
    print_record(
        {
            "full": run(directory, "full", uaq_scale=1.5),
            "full unsaved": run(directory, "full unsaved", saves=False, uaq_scale=1.5),
            "lora": run(directory, "lora", "PPO", given=adapted),
        }
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
