"""Train tiny models of several architectures for two steps each, at TRL's default learning rate; print histories.

Arguments: a directory, and the families; `FAMILY@RATE` trains at another learning rate, for four steps on one prompt,
and `FAMILY@URL` through a server.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from datasets import Dataset
from tiny import ENGINE, KEPT, MIXTURES, SIXTEEN_BIT_EXPERTS, tiny_mixture, tiny_model, tiny_tokenizer
from tiny_vision import IDS, VISION_FAMILIES, picture, tiny_vision_model, vision_processor

from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer

# A random model would say that there are pictures where there are none. What is barred is missing from the engine's
# probabilities, so as little as possible is.
NO_PICTURES = {"logit_bias": {IDS["image"]: -100.0, IDS["video"]: -100.0}}


def likes_small_tokens(completion_ids: list[list[int]], **columns: object) -> list[float]:
    return [sum(ids) / len(ids) for ids in completion_ids]


def prompts(is_vision: bool, count: int) -> Dataset:
    questions = [f"say {index}" for index in range(count)]
    if not is_vision:
        return Dataset.from_dict({"prompt": questions})
    pictures = [picture(20 * index) for index in range(count)]
    chats = [[{"role": "user", "content": question}] for question in questions]
    return Dataset.from_dict({"prompt": chats, "image": pictures})


def train(directory: str, family: str, choice: str) -> dict:
    is_vision = family in VISION_FAMILIES
    url, rate = (choice, "") if choice.startswith("http") else ("", choice)
    changed = {"learning_rate": float(rate), "max_steps": 4} if rate else {"max_steps": 2}
    where = {"vllm_mode": "server", "vllm_server_base_url": url} if url else {"vllm_engine_kwargs": ENGINE}
    if is_vision:
        model, processor = tiny_vision_model(family), vision_processor(family)
        changed["generation_kwargs"] = NO_PICTURES
    else:
        model = tiny_mixture(family) if family in MIXTURES else tiny_model(family)
        processor = tiny_tokenizer()
    if family in MIXTURES:
        changed["quantization_ignore"] = SIXTEEN_BIT_EXPERTS
    args = QuRLGRPOConfig(
        directory,
        per_device_train_batch_size=4,
        num_generations=4 if rate else 2,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        sync_check_interval=1,
        **where,
        **changed,
    )
    torch.manual_seed(0)
    trainer = QuRLGRPOTrainer(
        model,
        likes_small_tokens,
        args,
        train_dataset=prompts(is_vision, 1 if rate else 8),
        processing_class=processor,
    )
    KEPT.append(trainer)
    trainer.train()
    layers = sorted(trainer.vllm_generation.weights.plan.schemes)
    return {"history": trainer.state.log_history, "layers": layers, "rate": args.learning_rate}


if __name__ == "__main__":
    records = {family: train(sys.argv[1], *(family.split("@") + [""])[:2]) for family in sys.argv[2:]}
    print("RECORD " + json.dumps(records))
