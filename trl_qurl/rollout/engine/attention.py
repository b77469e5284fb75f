"""Whether vLLM's CPU build can attend with a model's heads, asked before an engine starts.

vLLM itself finds out at the first token, minutes later, from within a kernel. Tiny models made for tests are what
people try first on a laptop, and theirs are usually too small.
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
    Refuse a model that vLLM's CPU build has no attention kernel for; on other devices there is nothing to refuse.

    Args:
        config: Of the model.

    Raises:
        ValueError: There is none; the message has the sizes there are.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_size(config) not in sizes:
        raise ValueError(
            f"The attention heads of this model are {head_size(config)} wide, and vLLM's CPU build has kernels for "
            f"{', '.join(map(str, sizes))} only: take a model with such heads (`make demo` trains one), or a GPU."
        )
