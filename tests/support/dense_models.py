"""Tiny random models of each dense architecture that UAQ and smoothing know."""

import torch
import yaml
from tiny import tiny_model

# Tied like the released models of that type; Qwen2 and one Llama have biases.
VARIANTS = yaml.safe_load("""
llama: {}
llama_biases_tied: {model_type: llama, attention_bias: true, mlp_bias: true, tie_word_embeddings: true}
mistral: {sliding_window: 4}
qwen2: {tie_word_embeddings: true}
qwen3: {tie_word_embeddings: true}
ministral: {sliding_window: 4}
smollm3: {tie_word_embeddings: true}
granite: {residual_multiplier: 0.5, attention_multiplier: 0.3}
helium: {}
seed_oss: {attention_bias: true}
ernie4_5: {use_bias: true}
hunyuan_v1_dense: {}
glm: {attention_bias: true}
glm4: {}
phi3: {}
cohere: {logit_scale: 1.0}
cohere2: {logit_scale: 1.0, sliding_window: 4}
gemma: {tie_word_embeddings: true}
gemma2: {tie_word_embeddings: true, sliding_window: 4}
gemma3_text: {tie_word_embeddings: true, sliding_window: 4}
""")
generator = torch.Generator().manual_seed(0)
IDS = torch.randint(3, 48, (2, 12), generator=generator)


def dense_model(variant="llama", dtype=torch.float32):
    """A tiny model with weights so large that each layer matters to the logits."""
    options = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "head_dim": 8,
        "tie_word_embeddings": False,
    }
    options |= {"initializer_range": 0.3, **VARIANTS[variant]}
    return tiny_model(options.pop("model_type", variant), dtype, **options).eval()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits
