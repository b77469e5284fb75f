"""How much of a training run does bfloat16 autocast round away, and what does INT8 see of it?

    python benchmarks/autocast_grid.py START TRAINED

START is the directory of the model before training, TRAINED the float32 weights after it, as `trl-qurl demo --model`
trains them. Each KL is exact: of whole distributions after each token of answers that the float32 weights sample, in
nats per token.
"""

import argparse
import copy
import sys
from contextlib import nullcontext
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_qurl.lab.demo.chat import LONGEST_ANSWER, conversation, questions
from trl_qurl.quantization import make_plan
from trl_qurl.quantization.fake_quantization import quantized_forward
from trl_qurl.quantization.stream import on_grid

QUESTIONS = 12
BF16 = torch.bfloat16


def sampled(model: Any, directory: str) -> list[tuple[torch.Tensor, int]]:
    """Answers to questions that were held out, with the lengths of their prompts."""
    tokenizer, found = AutoTokenizer.from_pretrained(directory), []
    for question in questions(held_out=True)[:QUESTIONS]:
        torch.manual_seed(0)
        given = tokenizer.apply_chat_template(
            conversation(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**given, max_new_tokens=LONGEST_ANSWER, do_sample=True, top_k=0, temperature=1.0)
        found.append((tokens, given["input_ids"].shape[1]))
    return found


def logps(model: Any, answers: list[tuple[torch.Tensor, int]], autocasts: bool = False, rounds: bool = False) -> Any:
    """Log-probabilities after each token, (tokens, vocabulary), under autocast or with INT8's rounding."""
    plan = make_plan(model, "int8")
    with (
        torch.no_grad(),
        torch.autocast("cpu", BF16, enabled=autocasts),
        quantized_forward(model, plan) if rounds else nullcontext(),
    ):
        return torch.cat(
            [model(tokens).logits[0, prompt - 1 : -1].float().log_softmax(-1) for tokens, prompt in answers]
        )


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """KL(p ‖ q), nats per token."""
    return float((p.exp() * (p - q)).sum(-1).mean())


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start")
    parser.add_argument("trained")
    args = parser.parse_args()
    start, trained = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        for directory in (args.start, args.trained)
    )
    moved, lost = 0, 0
    for old, new in zip(start.parameters(), trained.parameters(), strict=True):
        changed = new != old
        moved += int(changed.sum())
        lost += int((changed & (on_grid(new.data, BF16) == on_grid(old.data, BF16))).sum())
    print(f"Updates that bfloat16 rounds away: {lost / moved:.1%} of the weights that moved")
    rounded = copy.deepcopy(trained)
    for parameter in rounded.parameters():
        parameter.data = on_grid(parameter.data, BF16)
    answers = sampled(trained, args.trained)
    exact, autocast = logps(trained, answers), logps(trained, answers, autocasts=True)
    engine, engine_on_grid = logps(trained, answers, rounds=True), logps(rounded, answers, rounds=True)
    print(f"float32 weights ‖ autocast:                {kl(exact, autocast):.4f}")
    print(f"the same weights in bfloat16 ‖ autocast:   {kl(logps(rounded, answers), autocast):.4f}")
    print(f"INT8 of float32 weights ‖ float32 weights: {kl(engine, exact):.4f}")
    print(f"INT8 of float32 weights ‖ autocast:        {kl(engine, autocast):.4f}")
    print(f"INT8 of what autocast sees ‖ autocast:     {kl(engine_on_grid, autocast):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
