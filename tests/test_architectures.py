"""Vision-language models, mixtures of experts and other families: real runs with every sync checked by digests."""

import pytest
from conftest import Server, needs_vnni
from tiny import SIXTEEN_BIT_EXPERTS, tiny_mixture, tiny_tokenizer
from tiny_vision import VISION_FAMILIES, picture, tiny_vision_model, vision_processor

from trl_qurl.rollout.images import as_plain, check_seen, plain_prompts

VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm")
TEXT = ("qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "glm4", "granite", "cohere2")


def assert_sound(record, steps=2, rate=1e-6):
    rows = [row for row in record["history"] if "grad_norm" in row]
    assert len(rows) == steps and rows[0]["grad_norm"] > 0 and record["rate"] == rate
    for row in rows:
        assert row["sync/probe_ratio"] < 1, "the engine does not compute with the trainer's weights"
        assert 0 <= row["mismatch/kl_k3"] < 1e-3, "the engine answers other prompts, or with other weights"


@pytest.fixture(scope="module")
def texts(run_scenario, tmp_path_factory):
    # vLLM makes the group for experts with the first engine of a process.
    return run_scenario("architectures.py", tmp_path_factory.mktemp("run"), "mixtral", "phi3")


@pytest.mark.vllm
@pytest.mark.xdist_group("architectures")
@pytest.mark.parametrize("family", [pytest.param("mixtral", marks=needs_vnni), "phi3"])
def test_two_steps_with_digests(family, texts):
    assert_sound(texts[family])


@pytest.mark.vllm
@pytest.mark.xdist_group("architectures")
def test_experts_stay_whole_where_they_are_ignored(texts):
    assert len(texts["mixtral"]["layers"]) == 8 and not [x for x in texts["mixtral"]["layers"] if "experts" in x]


@pytest.fixture(scope="module")
def pictures(run_scenario, tmp_path_factory):
    pytest.importorskip("torchvision", reason="vLLM's vision-language models need torchvision")
    return run_scenario("architectures.py", tmp_path_factory.mktemp("run"), "llava_next", "llava_next@0.02")


@pytest.mark.vllm
@pytest.mark.xdist_group("architectures")
def test_a_vision_language_model_takes_two_steps(pictures):
    assert_sound(pictures["llava_next"])


@pytest.mark.vllm
@pytest.mark.xdist_group("architectures")
def test_pictures_are_seen_with_the_new_weights(pictures):
    """Large updates on one picture, whose features an engine would keep from before them."""
    assert_sound(pictures["llava_next@0.02"], steps=4, rate=0.02)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("family", VISION)
def test_more_vision_language_models(family, run_scenario, tmp_path):
    pytest.importorskip("torchvision", reason="vLLM's vision-language models need torchvision")
    if family == "smolvlm":
        pytest.importorskip("num2words", reason="the processor needs num2words")
    records = run_scenario("architectures.py", tmp_path, family, f"{family}@0.02")
    assert_sound(records[family])
    assert_sound(records[f"{family}@0.02"], steps=4, rate=0.02)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("family", TEXT)
def test_more_families(family, run_scenario, tmp_path):
    assert_sound(run_scenario("architectures.py", tmp_path, family)[family])


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("family", ["mixtral", "llava_next"])
def test_a_server_takes_them_too(family, run_scenario, tmp_path):
    if family in VISION_FAMILIES:
        pytest.importorskip("torchvision", reason="vLLM's vision-language models need torchvision")
        model, processor, options = tiny_vision_model(family), vision_processor(family), ("--max-model-len", "512")
    else:
        model, processor = tiny_mixture(family), tiny_tokenizer()
        options = tuple(part for pattern in SIXTEEN_BIT_EXPERTS for part in ("--ignore", pattern))
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    server = Server(tmp_path / "model", tmp_path, "--scheme", "int8", *options)
    try:
        server.wait_until_healthy()
        record = run_scenario("architectures.py", tmp_path, f"{family}@{server.url}")[f"{family}@{server.url}"]
    finally:
        server.kill()
    assert_sound(record)


@pytest.mark.parametrize("family", ["gemma3", "llava_next"])
def test_an_engine_is_sent_placeholders_of_pictures(family):
    processor = vision_processor(family)
    image = {"type": "image", "image": picture()}
    parts = ([image, "a"], [image, image, "b"], [image, "a>", image])  # as ids, the first begins the last
    contents = [[{"type": "text", "text": part} if isinstance(part, str) else part for part in row] for row in parts]
    chats = [[{"role": "user", "content": content}] for content in contents]
    further, template = [40, 41], {"add_generation_prompt": True}
    whole = processor.apply_chat_template(chats, tokenize=True, return_dict=True, **template)["input_ids"]
    plain = plain_prompts(processor, chats, whole)
    texts = processor.apply_chat_template(chats, tokenize=False, **template)
    for prompt, text in zip(whole, texts, strict=True):
        assert "".join(processor.tokenizer.convert_ids_to_tokens(as_plain(prompt, plain))) == text
        assert as_plain([*prompt, *further], plain) == [*as_plain(prompt, plain), *further]
        assert len(as_plain(prompt, plain)) < len(prompt)
    assert as_plain([50, 51], plain) == [50, 51]
    check_seen(whole, whole)
    with pytest.raises(ValueError, match=rf"of 9 tokens where the trainer scores one of {len(whole[0])}: .*'server'"):
        check_seen(whole, [[7] * 9])
