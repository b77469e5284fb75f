"""Tiny random models of each dense architecture that UAQ and smoothing know."""

import torch
from tiny import tiny_model

# Tied like the released models of that type; Qwen2 and one Llama have biases.
VARIANTS = {
    "llama": {"model_type": "llama"},
    "llama_biases_tied": {
        "model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True
    },
    "mistral": {"model_type": "mistral", "sliding_window": 4},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "ministral": {"model_type": "ministral", "sliding_window": 4},
    "smollm3": {"model_type": "smollm3", "tie_word_embeddings": True},
    "granite": {"model_type": "granite", "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "helium": {"model_type": "helium"},
    "seed_oss": {"model_type": "seed_oss", "attention_bias": True},
    "ernie4_5": {"model_type": "ernie4_5", "use_bias": True},
    "hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense"},
    "glm": {"model_type": "glm", "attention_bias": True},
    "glm4": {"model_type": "glm4"},
    "phi3": {"model_type": "phi3"},
    "cohere": {"model_type": "cohere", "logit_scale": 1.0},
    "cohere2": {"model_type": "cohere2", "logit_scale": 1.0, "sliding_window": 4},
    "gemma": {"model_type": "gemma", "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", "tie_word_embeddings": True, "sliding_window": 4},
    "gemma3_text": {"model_type": "gemma3_text", "tie_word_embeddings": True, "sliding_window": 4},
}  # fmt: skip
IDS = torch.randint(3, 48, (2, 12), generator=torch.Generator().manual_seed(0))


def dense_model(variant="llama", dtype=torch.float32):
    """A tiny model with weights so large that each layer matters to the logits."""
    options = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "head_dim": 8,
        "tie_word_embeddings": False,
    }
    options |= {"initializer_range": 0.3, **VARIANTS[variant]}
    return tiny_model(options.pop("model_type"), dtype, **options).eval()


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits
