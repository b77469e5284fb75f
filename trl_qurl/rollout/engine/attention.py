"""Whether vLLM's CPU build has an attention kernel for a model's heads, checked before an engine starts.

vLLM itself fails at the first token, minutes later, inside a kernel. Tiny test models, which people try first on a
laptop, usually have heads that are too small.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def head_size(config: "PretrainedConfig") -> int:
    """Width of one attention head."""
    text = config.get_text_config()
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def check_head_size(config: "PretrainedConfig") -> None:
    """
    Refuse a model that vLLM's CPU build has no attention kernel for. On other devices every model passes.

    Args:
        config: Of the model.

    Raises:
        ValueError: There is no kernel; the message has the sizes that exist.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_size(config) not in sizes:
        raise ValueError(
            f"The attention heads of this model are {head_size(config)} wide, and vLLM's CPU build has kernels for "
            f"{', '.join(map(str, sizes))} only. Use a model with such heads (`make demo` trains one), or a GPU."
        )
