"""Vision-language models, mixtures of experts and other families: real runs with every sync
checked.
"""

import functools

import pytest
from conftest import needs_vnni, vllm_server
from tiny import SIXTEEN_BIT_EXPERTS, save_tiny, tiny_mixture
from tiny_vision import VISION_FAMILIES, picture, tiny_vision_model, vision_processor

from trl_qurl.rollout.repairs.image_prompts import as_plain, check_seen, plain_prompts

VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm")
TEXT = ("qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "glm4", "granite", "cohere2")
SLOW = (*TEXT, *VISION, *(f"{family}@0.02" for family in VISION))
TOGETHER = [("mixtral", "phi3"), ("llava_next", "llava_next@0.02")]
"""Cases that share a process. vLLM makes the group for experts with the first engine of one."""


def needs_packages(family):
    if family in VISION_FAMILIES:
        pytest.importorskip("torchvision", reason="vLLM's vision-language models need torchvision")
    if family == "smolvlm":
        pytest.importorskip("num2words", reason="the processor needs num2words")


def assert_sound(record, steps=2, rate=1e-6):
    rows = [row for row in record["history"] if "grad_norm" in row]
    assert len(rows) == steps and rows[0]["grad_norm"] > 0 and record["rate"] == rate
    for row in rows:
        assert 0 <= row["mismatch/kl_k3"] < 1e-3, (
            "the engine answers other prompts, or with other weights"
        )


@pytest.fixture(scope="module")
def record_of(run_scenario, tmp_path_factory):
    """The record of a case, which runs together with others that share its process."""
    records = {}

    def record(case):
        if case not in records:
            needs_packages(case.partition("@")[0])
            together = next((cases for cases in TOGETHER if case in cases), (case,))
            records.update(
                run_scenario("architectures.py", tmp_path_factory.mktemp("run"), *together)
            )
        return records[case]

    return record


@pytest.mark.vllm
@pytest.mark.xdist_group("architectures")
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param("mixtral", marks=needs_vnni), "phi3", "llava_next", "llava_next@0.02"),
        *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_engine_computes_with_the_trainers_weights(case, record_of):
    """At 0.02, updates of one image are so large that features which the engine has cached would
    show.
    """
    assert_sound(record_of(case), **{"steps": 4, "rate": 0.02} if "@" in case else {})


@pytest.mark.vllm
@pytest.mark.xdist_group("architectures")
def test_ignored_experts_are_not_quantized(record_of):
    layers = record_of("mixtral")["layers"]
    assert len(layers) == 8 and not [layer for layer in layers if "experts" in layer]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("family", ["mixtral", "llava_next"])
def test_a_server_computes_with_the_trainers_weights(family, run_scenario, tmp_path):
    needs_packages(family)
    if family in VISION_FAMILIES:
        save_tiny(
            tmp_path / "model", model=tiny_vision_model(family), tokenizer=vision_processor(family)
        )
        options = ("--max-model-len", "512")
    else:
        save_tiny(tmp_path / "model", model=tiny_mixture(family))
        options = tuple(part for pattern in SIXTEEN_BIT_EXPERTS for part in ("--ignore", pattern))
    with vllm_server(tmp_path / "model", tmp_path, "--scheme", "int8", *options) as server:
        case = f"{family}@{server.url}"
        assert_sound(run_scenario("architectures.py", tmp_path, case)[case])


@pytest.mark.parametrize("family", ["gemma3", "llava_next"])
def test_prompts_have_one_placeholder_per_image(family):
    processor = vision_processor(family)
    image = {"type": "image", "image": picture()}
    # as ids, the first begins the last
    parts = ([image, "a"], [image, image, "b"], [image, "a>", image])
    chats = []
    for row in parts:
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else part for part in row
        ]
        chats.append([{"role": "user", "content": content}])
    template = functools.partial(processor.apply_chat_template, chats, add_generation_prompt=True)
    whole = template(tokenize=True, return_dict=True)["input_ids"]
    plain = plain_prompts(processor, chats, whole)
    for prompt, text in zip(whole, template(tokenize=False), strict=True):
        found = as_plain(prompt, plain)
        assert "".join(processor.tokenizer.convert_ids_to_tokens(found)) == text
        assert as_plain([*prompt, 40, 41], plain) == [*found, 40, 41]
        assert len(found) < len(prompt)
    assert as_plain([50, 51], plain) == [50, 51]
    check_seen(whole, whole)
    with pytest.raises(
        ValueError,
        match=rf"of 9 tokens where the trainer scores one of {len(whole[0])}: .*'server'",
    ):
        check_seen(whole, [[7] * 9])
