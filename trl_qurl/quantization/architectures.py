"""Map from norms to the linear layers they feed, by `model_type`.

That is all that rescaling needs to know about a model.
"""

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Architecture(NamedTuple):
    """Norms and the linear layers they feed, inside one decoder layer."""

    # Linear layers by the norm that feeds them, named relative to the decoder layer.
    feeds: dict[str, tuple[str, ...]]
    # The norm multiplies by gain_offset + weight: 0, or 1 in the Gemma family.
    gain_offset: float = 0.0


ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj")
FUSED_MLP = ("mlp.gate_up_proj",)

# Layers as in Fig. 5. In Gemma 2 and 3 `post_attention_layernorm` normalizes the output of
# attention; another norm feeds the MLP. In Cohere's models attention and MLP read the same norm.
LLAMA = Architecture({"input_layernorm": ATTENTION, "post_attention_layernorm": MLP})
GLM = Architecture({"input_layernorm": ATTENTION, "post_attention_layernorm": FUSED_MLP})
PHI3 = Architecture(
    {"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": FUSED_MLP}
)
COHERE = Architecture({"input_layernorm": ATTENTION + MLP})
GEMMA2 = Architecture(
    {"input_layernorm": ATTENTION, "pre_feedforward_layernorm": MLP}, gain_offset=1.0
)

ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "smollm3": LLAMA,
    "granite": LLAMA,
    "helium": LLAMA,
    "seed_oss": LLAMA,
    "ernie4_5": LLAMA,
    "hunyuan_v1_dense": LLAMA,
    "glm": GLM,
    "glm4": GLM,
    "phi3": PHI3,
    "cohere": COHERE,
    "cohere2": COHERE,
    "gemma": Architecture(LLAMA.feeds, gain_offset=1.0),
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA2,
}
"""Architectures by `model_type`. Unsupported are models with norms after their blocks (OLMo 2 and
3, EXAONE 4), where no norm feeds a layer, and models with biases in their norms (StarCoder 2,
Nemotron)."""


def decoder_layers(
    model: "PreTrainedModel", feature: str, way_out: str
) -> tuple[Architecture, dict[str, nn.Module]]:
    """Return a model's architecture, and its decoder layers by name.

    Decoder layers are the modules that have all of the norms.

    Raises `ValueError` if there are none: this `feature` cannot work then, and `way_out` says what
    to do instead.
    """
    architecture = ARCHITECTURES.get(model.config.model_type, Architecture({}))
    norms = architecture.feeds.keys()
    layers = {}
    for path, module in model.named_modules():
        children = dict(module.named_children())
        if norms and norms <= children.keys():
            layers[path] = module
    if not layers:
        raise ValueError(
            f"{feature} does not know which norm feeds which layer in {type(model).__name__}, "
            f"model type {model.config.model_type!r}. Known: {', '.join(ARCHITECTURES)}. {way_out}"
        )
    return architecture, layers
