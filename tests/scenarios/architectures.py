"""Train tiny models of several architectures for two steps each, at TRL's default learning rate;
print histories.

Arguments: a directory, and the families; `FAMILY@RATE` trains at another learning rate, for four
steps on one prompt, and `FAMILY@URL` through a server.
"""

import sys
from pathlib import Path

from child import print_record
from short_runs import run, texts
from tiny import ENGINE, MIXTURES, SIXTEEN_BIT_EXPERTS, tiny_mixture, tiny_model, tiny_tokenizer
from tiny_vision import IDS, VISION_FAMILIES, picture, tiny_vision_model, vision_processor

# A random model would generate image tokens. Tokens with a bias are missing from the engine's
# probabilities, so only these two have one.
NO_IMAGES = {"logit_bias": {IDS["image"]: -100.0, IDS["video"]: -100.0}}


def small_tokens(completion_ids: list[list[int]], **columns: object) -> list[float]:
    return [sum(ids) / len(ids) for ids in completion_ids]


def train(directory: str, family: str, choice: str) -> dict:
    url, rate = (choice, "") if choice.startswith("http") else ("", choice)
    settings = {"learning_rate": float(rate), "max_steps": 4} if rate else {"learning_rate": 1e-6}
    settings |= {"vllm_mode": "server", "vllm_server_base_url": url} if url else {}
    data = texts(1 if rate else 8)
    if family in VISION_FAMILIES:
        model, processor = tiny_vision_model(family), vision_processor(family)
        settings["generation_kwargs"] = NO_IMAGES
        chats = [[{"role": "user", "content": text}] for text in data["prompt"]]
        data = data.remove_columns("prompt").add_column("prompt", chats)
        data = data.add_column("image", [picture(20 * index) for index in range(len(data))])
    else:
        model = tiny_mixture(family) if family in MIXTURES else tiny_model(family)
        processor = tiny_tokenizer()
    if family in MIXTURES:
        settings["quantization_ignore"] = SIXTEEN_BIT_EXPERTS
    trainer = run(
        Path(directory),
        model=model,
        reward_funcs=small_tokens,
        given={"train_dataset": data, "processing_class": processor},
        per_device_train_batch_size=4,
        steps_per_generation=None,
        num_generations=4 if rate else 2,
        vllm_max_model_length=None,
        vllm_engine_kwargs=None if url else ENGINE,
        smooth_activations=None,
        **settings,
    )
    layers = sorted(trainer.vllm_generation.weights.plan.schemes)
    return {
        "history": trainer.state.log_history,
        "layers": layers,
        "rate": trainer.args.learning_rate,
    }


if __name__ == "__main__":
    records = {
        family: train(sys.argv[1], *(family.split("@") + [""])[:2]) for family in sys.argv[2:]
    }
    print_record(records)
