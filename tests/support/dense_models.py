"""Tiny random models of each dense architecture that UAQ and smoothing know."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

TINY = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
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


def dense_model(variant: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model with norms and biases moved away from ones and zeros."""
    torch.manual_seed(0)
    options = {**TINY, **VARIANTS[variant]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
    return model.to(dtype)


def logits(model: PreTrainedModel, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits
