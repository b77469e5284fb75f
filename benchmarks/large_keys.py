"""Make a model whose keys are as large as Qwen2.5's may be, to measure caches with.

    python benchmarks/large_keys.py MODEL --output DIRECTORY
    python benchmarks/large_keys.py MODEL --text docs/choosing.md

MODEL has Llama's architecture and becomes a Qwen2, whose queries and keys have biases. In each head
the pairs of channels that rotary embeddings turn least have their keys multiplied, and their
queries divided, by one number, which leaves the function as it is. Their keys also get a bias. What
it adds to the scores of a query is nearly the same for all keys, so softmax takes it away again.

With a text, a table has the exact KL of each cache, simulated, by the size of the largest keys.
"""

import argparse
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from trl_qurl.lab.rounded_cache import ROUNDINGS, rounded_cache

PAIRS = 2  # of a head's channels
BIAS = 600.0
BIASES = (0.0, 60.0, 150.0, 300.0, 600.0)
UNIT = 3.0  # a bias of this size belongs to keys that are not multiplied
FIRST, LAST = 100, 500  # tokens of the text; what precedes them is context
KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Fields that Llama and Qwen2 share."""


def as_qwen2(llama: PreTrainedModel) -> PreTrainedModel:
    """Return the same function with Qwen2's architecture; its biases are zero."""
    config = Qwen2Config(**{name: getattr(llama.config, name) for name in KEPT})
    model = Qwen2ForCausalLM(config).to(llama.dtype)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(zeros | llama.state_dict())
    return model


@torch.no_grad()
def enlarge_keys(model: PreTrainedModel, bias: float = BIAS) -> None:
    """Enlarge keys of a Qwen2 in place, by `bias` and a factor of `bias / UNIT`."""
    factor = bias / UNIT
    config = model.config
    width = model.model.layers[0].self_attn.head_dim
    last = torch.arange(width // 2 - PAIRS, width // 2)
    channels = torch.cat([last, last + width // 2])  # of a head
    for layer in model.model.layers:
        attention = layer.self_attn
        for head in range(config.num_attention_heads):
            for tensor in attention.q_proj.parameters():
                tensor[head * width + channels] /= factor
        for head in range(config.num_key_value_heads):
            for tensor in attention.k_proj.parameters():
                tensor[head * width + channels] *= factor
            attention.k_proj.bias[head * width + channels] += bias


@torch.inference_mode()
def row(model: PreTrainedModel, ids: torch.Tensor) -> list[float]:
    """Return the median of the largest keys of a middle layer's tokens, and the KL of each cache.

    Takes the ids of a text, (1, N).
    """
    largest: list[float] = []
    layer = model.model.layers[len(model.model.layers) // 2].self_attn.k_proj
    hook = layer.register_forward_hook(
        lambda module, inputs, keys: largest.append(float(keys.abs().amax(-1).median()))
    )
    exact = model(ids).logits[0, FIRST:].log_softmax(-1)  # (T, V)
    hook.remove()
    kls = []
    for cache in ROUNDINGS:
        with rounded_cache(model, cache):
            rounded = model(ids).logits[0, FIRST:].log_softmax(-1)
        kls.append(float((rounded.exp() * (rounded - exact)).sum(-1).mean()))
    return [*largest, *kls]


def main() -> None:
    """Write the model and its tokenizer, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--output", help="directory for the model")
    parser.add_argument("--text", type=Path, help="file with a text of 500 tokens or more")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    llama = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if args.output:
        model = as_qwen2(llama)
        enlarge_keys(model)
        model.to(torch.bfloat16).save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
    if args.text:
        ids = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
        print("bias", "largest key", *ROUNDINGS, sep=" | ")
        for bias in BIASES:
            model = as_qwen2(llama).eval()
            if bias:
                enlarge_keys(model, bias)
            largest, *kls = row(model, ids[:, :LAST])
            print(f"{bias:g}", f"{largest:.0f}", *(f"{kl:.4f}" for kl in kls), sep=" | ")


if __name__ == "__main__":
    main()
