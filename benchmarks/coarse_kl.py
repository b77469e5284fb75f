"""How far does rounding its weights to a few bits move a real model?

    python benchmarks/coarse_kl.py MODEL

For each format: the exact KL(rounded ‖ model) per token on answers that the rounded model samples
to questions of `arithmetic`, in nats; its entropy there; its mean reward. Activations stay as they
are, and no engine is started.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.chat_tasks import TASKS
from benchmarks.objectives.coarse import CODE_BITS, add_coarse_schemes
from trl_qurl.quantization import make_plan

QUESTIONS, SAMPLES = 32, 4


@torch.inference_mode()
def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="directory of the model")
    args = parser.parse_args()
    add_coarse_schemes()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    task = TASKS["arithmetic"]
    questions, rights = zip(*task.learned[:QUESTIONS], strict=True)
    prompts = tokenizer.apply_chat_template(
        list(questions),
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    length = prompts["input_ids"].shape[1]
    for name in ("int8", *sorted(CODE_BITS, key=CODE_BITS.__getitem__, reverse=True)):
        exact = {}
        for layer, scheme in make_plan(model, name, ["lm_head"]).schemes.items():
            weight = model.get_submodule(layer).weight
            exact[weight] = weight.clone()
            weight.copy_(scheme.dequantize(scheme.quantize(weight)))
        torch.manual_seed(0)
        ids = model.generate(
            **prompts,
            max_new_tokens=task.longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=SAMPLES,
        )
        answers = ids[:, length:]
        mask = torch.ones_like(ids)
        mask[:, :length] = prompts["attention_mask"].repeat_interleave(SAMPLES, 0)
        ended = answers == tokenizer.eos_token_id
        is_sampled = ended.cumsum(1) - ended.long() == 0  # (B, T)

        def logps(ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> torch.Tensor:
            """Return those of all tokens at each position of the answers, (B, T, V)."""
            logits = model(ids, attention_mask=mask).logits
            return logits[:, length - 1 : -1].log_softmax(-1)

        rounded = logps()
        for weight, before in exact.items():
            weight.copy_(before)
        kl = (rounded.exp() * (rounded - logps())).sum(-1)[is_sampled].mean()
        entropy = -(rounded.exp() * rounded).sum(-1)[is_sampled].mean()
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        rewards = [
            task.reward(text, rights[number // SAMPLES]) for number, text in enumerate(texts)
        ]
        reward = sum(rewards) / len(rewards)
        print(f"{name}: KL {kl:.4f}, entropy {entropy:.2f}, reward {reward:.2f}", flush=True)


if __name__ == "__main__":
    main()
