"""Which norm feeds which linear layers, by `model_type`: all that is known about models to rescale them."""

from typing import NamedTuple


class Architecture(NamedTuple):
    """Which norm feeds which linear layers, inside one decoder layer.

    Attributes:
        feeds: Linear layers by the norm that feeds them; names are those inside the decoder layer.
        gain_offset: The norm multiplies by gain_offset + weight: 0, or 1 in the Gemma family.
    """

    feeds: dict[str, tuple[str, ...]]
    gain_offset: float = 0.0


ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj")
FUSED_MLP = ("mlp.gate_up_proj",)

# Which layers: Fig. 5. In Gemma 2 and 3 `post_attention_layernorm` normalizes what attention gives back; another feeds
# the MLP. In Cohere's models attention and MLP read the same norm.
LLAMA = Architecture({"input_layernorm": ATTENTION, "post_attention_layernorm": MLP})
GLM = Architecture({"input_layernorm": ATTENTION, "post_attention_layernorm": FUSED_MLP})
PHI3 = Architecture({"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": FUSED_MLP})
COHERE = Architecture({"input_layernorm": ATTENTION + MLP})
GEMMA2 = Architecture({"input_layernorm": ATTENTION, "pre_feedforward_layernorm": MLP}, gain_offset=1.0)

ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "granite", "helium"), LLAMA),
    **dict.fromkeys(("seed_oss", "ernie4_5", "hunyuan_v1_dense"), LLAMA),
    **dict.fromkeys(("glm", "glm4"), GLM),
    "phi3": PHI3,
    **dict.fromkeys(("cohere", "cohere2"), COHERE),
    "gemma": Architecture(LLAMA.feeds, gain_offset=1.0),
    **dict.fromkeys(("gemma2", "gemma3_text"), GEMMA2),
}
"""By `model_type`. Not here: models whose norms come after their blocks (OLMo 2 and 3, EXAONE 4), so that no norm
feeds a layer, and those whose norms have biases (StarCoder 2, Nemotron)."""
