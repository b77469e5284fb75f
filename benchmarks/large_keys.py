"""Make a model whose keys are as large as Qwen2.5's may be, to measure caches with.

    python benchmarks/large_keys.py MODEL DIRECTORY

MODEL has Llama's architecture and becomes a Qwen2, whose queries and keys have biases. In each head
the pairs of channels that rotary embeddings turn least have their keys multiplied, and their
queries divided, by one number, which leaves the function as it is. Their keys also get a bias. What
it adds to the scores of a query is nearly the same for all keys, so softmax takes it away again.
"""

import argparse

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

PAIRS = 2  # of a head's channels
FACTOR = 200.0
BIAS = 600.0
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
def enlarge_keys(model: PreTrainedModel) -> None:
    """Enlarge keys of a Qwen2 in place."""
    config = model.config
    width = model.model.layers[0].self_attn.head_dim
    last = torch.arange(width // 2 - PAIRS, width // 2)
    channels = torch.cat([last, last + width // 2])  # of a head
    for layer in model.model.layers:
        attention = layer.self_attn
        for head in range(config.num_attention_heads):
            for tensor in attention.q_proj.parameters():
                tensor[head * width + channels] /= FACTOR
        for head in range(config.num_key_value_heads):
            for tensor in attention.k_proj.parameters():
                tensor[head * width + channels] *= FACTOR
            attention.k_proj.bias[head * width + channels] += BIAS


def main() -> None:
    """Write the model and its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("directory")
    args = parser.parse_args()
    model = as_qwen2(AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32))
    enlarge_keys(model)
    model.to(torch.bfloat16).save_pretrained(args.directory)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.directory)


if __name__ == "__main__":
    main()
