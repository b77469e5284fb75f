"""A trainer with an engine that samples from another policy, in several ways; prints the guard's
verdicts.

No setting does this: the faults are planted where settings and checks cannot see them.
"""

import logging
import sys
from pathlib import Path

import torch
from child import print_record
from short_runs import run, texts
from tiny import tiny_model

from trl_qurl.trainers.checks.guard import MismatchGuard

SETTINGS = {
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 32,
    "steps_per_generation": 1,
    "max_completion_length": 16,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "beta": 0.0,
    "sync_check_interval": 16,
}


class Warnings(logging.Handler):
    """Keeps what the guard warns of."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def policy(seed: int, certainty: float) -> torch.nn.Module:
    """A policy that is sure of some tokens."""
    model = tiny_model(seed=seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(certainty)
    return model


def main(out: Path) -> None:
    warnings = Warnings()
    logging.getLogger("trl_qurl.trainers.checks.guard").addHandler(warnings)
    model, other = policy(0, 3.0), policy(1, 6.0).state_dict()
    trainer = run(out, sys.argv[2], model=model, given={"eval_dataset": texts(32)}, **SETTINGS)
    trainer.args.sync_check_interval = 0  # the guard warns, and no proof raises
    generation, record = trainer.vllm_generation, {}
    sync = generation.sync_weights
    generation.generate = generation.generate_from_sent  # else it sends what has changed

    def observe(name: str, is_new: bool = False) -> None:
        """Evaluate once, as a new run does if it `is_new`."""
        if is_new:
            trainer.pop_callback(MismatchGuard)
            trainer.add_callback(MismatchGuard(trainer.args))
        [guard] = (each for each in trainer._callbacks if isinstance(each, MismatchGuard))
        guard._quiet = len(record) + 100  # a new alarm is a new warning
        warnings.texts.clear()
        generation.sync_weights()
        metrics = trainer.evaluate()
        kept = {
            name.removeprefix("eval_"): value
            for name, value in metrics.items()
            if "mismatch/" in name
        }
        record[name] = {"warnings": list(warnings.texts), **kept}

    record["training"] = {
        "warnings": list(warnings.texts),
        "guard": [
            row["mismatch/guard"] for row in trainer.state.log_history if "mismatch/guard" in row
        ],
        "kl": [
            row["mismatch/kl_k3"] for row in trainer.state.log_history if "mismatch/kl_k3" in row
        ],
    }
    observe("evaluation")
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generation.sync_weights = lambda: None
    model.load_state_dict(other)
    observe("a sync is skipped")
    generation.sync_weights = sync
    observe("synced again")

    def sync_others() -> None:
        model.load_state_dict(start)
        sync()
        model.load_state_dict(other)

    generation.sync_weights = sync_others
    observe("other weights from the start", is_new=True)
    generation.sync_weights = sync
    model.load_state_dict(start)
    generation.structured_outputs_regex = "[0-9]{4,16}"
    observe("structured outputs", is_new=True)
    print_record(record)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
