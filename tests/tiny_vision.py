"""Tiny random vision-language models of real architectures, their processors, and pictures to ask
about.
"""

import tempfile
from pathlib import Path

import torch
import transformers
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny import VOCABULARY, move_from_start, tiny_tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

TEXT = yaml.safe_load("""
vocab_size: 128
hidden_size: 128
intermediate_size: 128
num_hidden_layers: 2
num_attention_heads: 4
num_key_value_heads: 2
head_dim: 32
max_position_embeddings: 512
pad_token_id: 0
eos_token_id: 1
bos_token_id: null
""")
"""Settings of all language models."""

SPECIAL = {
    "image": "<image>",
    "start": "<|vision_start|>",
    "end": "<|vision_end|>",
    "video": "<video>",
    "global": "<global-img>",
    "newline": "\n",  # Gemma's processor asks for these
    "newlines": "\n\n",
    "paragraph": "\n\n\n",
    "paragraphs": "\n\n\n\n",
    "before": "<start_of_image>",  # Gemma's; older processors read them as regular expressions
    "after": "<end_of_image>",
}
# at the end, as in published models, where a probe does not look
FIRST = TEXT["vocab_size"] - len(SPECIAL)
IDS = {name: FIRST + index for index, name in enumerate(SPECIAL)}

WORDS = list(range(2, len(VOCABULARY)))
"""Tokens that a model may generate. A random one would generate image tokens too."""

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}: {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == "
    "'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}{% "
    "if add_generation_prompt %}>{% endif %}"
)


SIGLIP = yaml.safe_load("""
hidden_size: 32
intermediate_size: 64
num_hidden_layers: 1
num_attention_heads: 2
image_size: 28
patch_size: 14
""")
GRIDS = [[28, 56], [56, 28], [56, 56]]
QWEN = {
    "image_token_id": IDS["image"],
    "video_token_id": IDS["video"],
    "vision_start_token_id": IDS["start"],
    "vision_end_token_id": IDS["end"],
    "tie_word_embeddings": True,
}
QWEN_VISION = {"depth": 1, "num_heads": 2, "patch_size": 14}
QWEN_LATER = QWEN_VISION | {"hidden_size": 32, "out_hidden_size": 128, "intermediate_size": 64}
ROTARY = {"rope_theta": 10000.0, "type": "mrope", "mrope_section": [4, 6, 6]}
ROTARY_3 = {
    "rope_theta": 10000.0,
    "rope_type": "default",
    "mrope_interleaved": True,
    "mrope_section": [6, 5, 5],
}
LLAMA = {"model_type": "llama", **TEXT}
CONFIGS = {
    "qwen2_vl": {
        "text_config": TEXT | {"rope_scaling": ROTARY},
        "vision_config": QWEN_VISION | {"embed_dim": 32, "hidden_size": 128, "mlp_ratio": 2},
        **QWEN,
    },
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_scaling": ROTARY},
        "vision_config": QWEN_LATER | {"fullatt_block_indexes": [0], "window_size": 56},
        **QWEN,
    },
    "qwen3_vl": {
        "text_config": TEXT | {"rope_scaling": ROTARY_3},
        "vision_config": QWEN_LATER
        | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **QWEN,
    },
    "gemma3": {
        "text_config": {**TEXT, "query_pre_attn_scalar": 32, "sliding_window": 64},
        "vision_config": SIGLIP | {"vision_use_head": False},
        "mm_tokens_per_image": 4,
        "boi_token_index": IDS["before"],
        "eoi_token_index": IDS["after"],
        "image_token_index": IDS["image"],
    },
    "llava_next": {
        "text_config": LLAMA,
        "vision_config": SIGLIP
        | {"model_type": "clip_vision_model", "projection_dim": 32, "num_hidden_layers": 2},
        "image_token_index": IDS["image"],
        "image_grid_pinpoints": GRIDS,
    },
    "smolvlm": {
        "text_config": LLAMA,
        "vision_config": SIGLIP,
        "image_token_id": IDS["image"],
        "scale_factor": 2,
    },
}
"""By `model_type`."""


def vision_tokenizer(**named):
    """One token per printable ASCII character, and those around a picture, named as a processor
    asks for them.
    """
    unused = [f"<unused{index}>" for index in range(len(VOCABULARY), FIRST)]
    return tiny_tokenizer(
        [*VOCABULARY, *unused, *SPECIAL.values()],
        additional_special_tokens=[token for token in SPECIAL.values() if token.strip()],
        extra_special_tokens={name: SPECIAL[token] for name, token in named.items()},
    )


def tiny_vision_model(family, seed=0):
    """A model of a family with moved norm gains, loaded from a checkpoint that is named as
    published ones are.
    """
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **CONFIGS[family]))
    move_from_start(model)
    tower = "vision_tower.vision_model." if family in ("gemma3", "llava_next") else "vision_tower."
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        file = Path(directory) / "model.safetensors"
        tensors = {}
        for name, tensor in load_file(file).items():
            tensors[name.replace("vision_tower.", tower)] = tensor
        save_file(tensors, file, metadata={"format": "pt"})
        return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)


def vision_processor(family):
    """The processor of a family; Qwen's and SmolVLM's need torchvision, and SmolVLM's also
    num2words.
    """
    return VISION_FAMILIES[family]()


def picture(shade=100):
    """A plain square of one gray."""
    return Image.new("RGB", (56, 56), (shade, shade, 255 - shade))


def _qwen_processor(kind, videos):
    patches = {"patch_size": 14, "min_pixels": 28 * 28, "max_pixels": 56 * 56}
    placeholder = f"{SPECIAL['start']}{SPECIAL['image']}{SPECIAL['end']}"
    return getattr(transformers, kind)(
        image_processor=transformers.Qwen2VLImageProcessor(**patches),
        tokenizer=vision_tokenizer(
            image_token="image",
            video_token="video",
            vision_bos_token="start",
            vision_eos_token="end",
        ),
        video_processor=getattr(transformers, videos)(**patches),
        chat_template=TEMPLATE.replace("IMAGE", placeholder),
    )


def _gemma3_processor():
    return transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28}),
        tokenizer=vision_tokenizer(image_token="image", boi_token="before", eoi_token="after"),
        chat_template=TEMPLATE.replace("IMAGE", SPECIAL["before"]),
        image_seq_length=4,
    )


def _llava_next_processor():
    return transformers.LlavaNextProcessor(
        image_processor=transformers.LlavaNextImageProcessorPil(
            size={"shortest_edge": 28},
            crop_size={"height": 28, "width": 28},
            image_grid_pinpoints=GRIDS,
        ),
        tokenizer=vision_tokenizer(image_token="image"),
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token=SPECIAL["image"],
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", SPECIAL["image"]),
    )


def _smolvlm_processor():
    size = {"longest_edge": 28}
    return transformers.SmolVLMProcessor(
        image_processor=transformers.SmolVLMImageProcessor(
            size=size, max_image_size=size, do_image_splitting=False
        ),
        tokenizer=vision_tokenizer(
            image_token="image",
            fake_image_token="start",
            global_image_token="global",
            end_of_utterance_token="end",
        ),
        video_processor=transformers.SmolVLMVideoProcessor(size=size, max_image_size=size),
        image_seq_len=1,
        chat_template=TEMPLATE.replace("IMAGE", SPECIAL["image"]),
    )


VISION_FAMILIES = {
    "qwen2_vl": lambda: _qwen_processor("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": lambda: _qwen_processor("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": lambda: _qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "gemma3": _gemma3_processor,
    "llava_next": _llava_next_processor,
    "smolvlm": _smolvlm_processor,
}
"""By `model_type`: how to make a processor."""
