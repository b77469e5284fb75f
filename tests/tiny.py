"""Tiny random models of real architectures, and a tokenizer for them."""

import json
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

SHARED = Path(__file__).parents[2] / "shared"
"""Data and models beside the checkout; absent on a user's machine."""

VOCABULARY = ["<pad>", "<eos>", *map(chr, range(32, 127))]

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

PROBE = [40, 50, 60, 70, 41, 51, 61, 71]
"""Tokens with log-probabilities that identify the weights of an engine."""

ENGINE = {"enforce_eager": True, "kv_cache_memory_bytes": 2**24}
"""Arguments of an engine of a tiny model. vLLM fills the memory for keys and values with zeros at
each start.
"""

KEPT = []
"""Scenarios keep trainers and engines here. Freeing one takes as long as a run: two collections
visit all that was ever imported. Nothing is collected when the process ends (`forks.end_of`)."""

FAMILIES = ("llama", "qwen2", "qwen3")

MIXTURES = yaml.safe_load("""
qwen3_moe:
  num_experts: 4
  num_experts_per_tok: 2
  moe_intermediate_size: 64
  decoder_sparse_step: 1
qwen2_moe:
  num_experts: 4
  num_experts_per_tok: 2
  moe_intermediate_size: 64
  decoder_sparse_step: 1
  shared_expert_intermediate_size: 64
mixtral:
  num_local_experts: 4
  num_experts_per_tok: 2
# vLLM ties no heads of the next two.
olmoe:
  num_experts: 4
  num_experts_per_tok: 2
  num_key_value_heads: 4
  tie_word_embeddings: false
glm4_moe:
  n_routed_experts: 4
  n_shared_experts: 1
  num_experts_per_tok: 2
  moe_intermediate_size: 64
  first_k_dense_replace: 1
  n_group: 1
  topk_group: 1
  num_key_value_heads: 4
  tie_word_embeddings: false
gpt_oss:
  num_local_experts: 4
  num_experts_per_tok: 2
""")
"""Families with experts, and what makes them tiny."""

SIXTEEN_BIT_EXPERTS = ["lm_head", r"re:.*\.experts\."]
"""Layers to ignore without a kernel for quantized experts."""

WHOLE_BLOCKS = {"num_attention_heads": 8, "num_key_value_heads": 4}
"""Sizes of a model with layers of 128 x 128 blocks, which every format supports."""


def tiny_tokenizer(vocabulary=VOCABULARY, **settings):
    """One token per character or string of the vocabulary, by default per printable ASCII
    character.
    """
    ids = {token: index for index, token in enumerate(vocabulary)}
    characters = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", **settings
    )


def tiny_model(family="qwen2", dtype=torch.float32, seed=0, **overrides):
    """A causal model with grouped-query attention; biases (Qwen2) and norm gains are moved off
    their neutral start.
    """
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 100,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings | overrides))
    move_from_start(model)
    return model.to(dtype)


@torch.no_grad()
def move_from_start(model):
    """Move biases and norm gains off their neutral start."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("bias") or "norm" in name:
            tensor.add_(0.1 * torch.randn_like(tensor))


def save_tokenizer(directory, chat_template=None, tokenizer=None):
    """Save a tokenizer, by default the tiny one, beside a model."""
    tokenizer = tokenizer or tiny_tokenizer()
    if chat_template:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)


def save_tiny(
    directory,
    chat_template=None,
    *,
    model=None,
    tokenizer=None,
    **settings,
):
    """Save a model, by default a tiny one with these settings, with its tokenizer."""
    if model is None:
        model = tiny_model(**settings)
    model.save_pretrained(directory)
    save_tokenizer(directory, chat_template, tokenizer)
    return directory


def tiny_classifier(kind=AutoModelForTokenClassification, num_labels=1, **overrides):
    """A model that classifies tokens, as a critic with one label does."""
    config = tiny_model(**overrides).config
    config.num_labels = num_labels
    return kind.from_config(config)


def tiny_mixture(family, dtype=torch.float32, **overrides):
    """A model with experts, one of `MIXTURES`."""
    return tiny_model(family, dtype, **MIXTURES[family] | overrides)


def with_outliers(model, layer, channels=(3, 50)):
    """Make two inputs of a block's feed-forward layers large, as in trained models, without
    changing the function.
    """
    block = model.model.layers[layer]
    with torch.no_grad():
        for channel in channels:
            block.post_attention_layernorm.weight[channel] *= 60
            for fed in (block.mlp.gate_proj, block.mlp.up_proj):
                fed.weight[:, channel] /= 60
    return model


REMOTE_CODE = {
    "configuration_own.py": """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own"
""",
    "modeling_own.py": """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig


class InternLM3ForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
""",
}
"""Code that comes with a checkpoint, for an architecture that vLLM has and transformers lacks: the
case in which it is needed. If transformers has the architecture, TRL loads that class and ignores
`auto_map`."""


def save_remote_code_model(directory, architecture="InternLM3ForCausalLM"):
    """Save a model with its classes, like models on the Hub with remote code."""
    save_tiny(directory, family="llama")
    for name, code in REMOTE_CODE.items():
        (directory / name).write_text(code)
    config = json.loads((directory / "config.json").read_text())
    classes = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": f"modeling_own.{architecture}",
    }
    config |= {"model_type": "own", "architectures": [architecture], "auto_map": classes}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def layers_of(model, ignore=("lm_head",), scheme=None):
    """Names of the layers that a format quantizes, INT8 by default."""
    from trl_qurl.quantization import make_plan

    return frozenset(make_plan(model, scheme.name if scheme else "int8", ignore).schemes)


def stream_of(model, scheme, ignore=("lm_head",), smooths=False):
    """The stream of a model's weights in one format (`None`: 16 bits), or in several by pattern."""
    from trl_qurl.quantization import make_plan
    from trl_qurl.quantization.stream import WeightStream

    return WeightStream(model, make_plan(model, getattr(scheme, "name", scheme), ignore), smooths)


def write_with_llmcompressor(model, tokenizer, formats, directory, ignore=("lm_head",)):
    """Write llm-compressor's checkpoint of a model, in this process alone."""
    from trl_qurl.quantization.checkpoint import CheckpointWriter
    from trl_qurl.quantization.merging import model_parameters
    from trl_qurl.rollout.substitution import substitute

    weights = stream_of(model, formats, ignore)
    writer = CheckpointWriter(model, tokenizer, weights.plan)
    copies = weights.copies(model_parameters(model))
    with substitute(torch.distributed, "is_initialized", lambda: False):
        writer.write_with_llmcompressor(copies, directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def assert_same_bits(tensors, expected):
    """Compare tensors by name: dtype, shape and bytes."""
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert tensors[name].shape == tensor.shape, name
        bits = tensors[name].flatten().view(torch.uint8)
        assert torch.equal(bits, tensor.flatten().view(torch.uint8)), name


def rollout_settings(scheme, **changed):
    """Return the default settings of rollouts, without smoothing, with these changes."""
    from trl_qurl.rollout.preparation import RolloutSettings

    defaults = {
        "quantization_ignore": ["lm_head"],
        "vllm_mode": "colocate",
        "weight_sync": "auto",
        "round_base": False,
        "smooths": False,
        "rollout_checkpoint_dir": None,
        "vllm_engine_kwargs": {},
        "seed": 0,
        "sync_check_interval": 16,
        "vllm_request_timeout": 900.0,
    }
    return RolloutSettings(getattr(scheme, "name", scheme), **defaults | changed)
