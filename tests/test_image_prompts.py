"""Prompts with pictures, as trainer and engine take them."""

import functools

import pytest
from tiny_vision import picture, vision_processor
from tokenizers.processors import TemplateProcessing

from trl_qurl.rollout.repairs.image_prompts import as_plain, check_seen, plain_prompts


@pytest.mark.parametrize("family", ["gemma3", "llava_next"])
def test_prompts_have_one_placeholder_per_image(family):
    processor = vision_processor(family)
    # A template that writes the token that the tokenizer adds, as Gemma's does.
    tokenizer = processor.tokenizer
    tokenizer.bos_token = "<eos>"
    added = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    tokenizer.backend_tokenizer.post_processor = added
    processor.chat_template = "<eos>" + processor.chat_template
    image = {"type": "image", "image": picture()}
    chats = []
    # as ids, the first begins the last
    for row in ([image, "a"], [image, image, "b"], [image, "a>", image]):
        content = []
        for part in row:
            if isinstance(part, str):
                part = {"type": "text", "text": part}
            content.append(part)
        chats.append([{"role": "user", "content": content}])
    template = functools.partial(processor.apply_chat_template, chats, add_generation_prompt=True)
    whole = template(tokenize=True, return_dict=True)["input_ids"]
    plain = plain_prompts(processor, chats, whole)
    for prompt, text in zip(whole, template(tokenize=False), strict=True):
        found = as_plain(prompt, plain)
        assert "".join(tokenizer.convert_ids_to_tokens(found)) == text
        assert as_plain([*prompt, 40, 41], plain) == [*found, 40, 41]
        assert len(found) < len(prompt)
    assert as_plain([50, 51], plain) == [50, 51]
    check_seen(whole, whole)
    with pytest.raises(
        ValueError,
        match=rf"of 9 tokens where the trainer scores one of {len(whole[0])}: .*'server'",
    ):
        check_seen(whole, [[7] * 9])
