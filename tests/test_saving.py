"""`save_quantized`: what vLLM starts from is what was trained, and training does not notice."""

import copy
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import PartialState
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from support.training import SAME, metrics_by_step
from tiny import stream_of, tiny_model, tiny_tokenizer
from transformers import AutoTokenizer, GenerationConfig

from trl_qurl.quantization import write_checkpoint
from trl_qurl.quantization.checks.output import check_replaceable
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.rollout.backend import QuantizedVLLMGeneration
from trl_qurl.rollout.group import APART
from trl_qurl.rollout.routes import AdapterRoute
from trl_qurl.trainers.engine import QuantizedEngineMixin
from trl_qurl.trainers.saving import read_in_main_process

KINDS = ("full", "lora")  # of GRPO, and of PPO


@pytest.fixture(scope="module")
def saved(run_scenario, tmp_path_factory):
    """Directory, and records: full weights with and without saving, and PPO with LoRA."""
    directory = tmp_path_factory.mktemp("saving")
    return directory, run_scenario("saving.py", directory)


@pytest.fixture(scope="module")
def fresh(saved, run_scenario):
    """Log-probabilities of engines started from what was saved at the end."""
    probes = run_scenario("fresh_engine.py", *(saved[1][kind]["directory"] for kind in KINDS))
    return dict(zip(KINDS, probes, strict=True))


def weights_of(directory):
    return load_file(directory / "model.safetensors")


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


class TestRuns:
    pytestmark = [
        pytest.mark.vllm,
        pytest.mark.xdist_group("saving"),
        pytest.mark.parametrize("kind", KINDS),
    ]

    def test_a_fresh_engine_computes_what_the_trainers_own_does(self, kind, saved, fresh):
        directory, records = saved
        assert records[kind]["probe"] == pytest.approx(fresh[kind], abs=SAME)
        path = directory / f"{kind}-int8"
        assert records[kind]["directory"] == str(path), "the default directory"
        assert records[kind]["version_kept"]
        assert config_of(path).get("uaq_scale") == (1.5 if kind == "full" else None)
        names = weights_of(path).keys()
        assert names == weights_of(directory / kind / "on the way").keys()
        assert not re.search("lora|base_layer|score", " ".join(names))

    def test_a_push_uploads_the_policy_its_card_and_its_log(self, kind, saved):
        wanted = "README.md tokenizer.json chat_template.jinja training_args.bin run.jsonl"
        weights = {
            "full": "model.safetensors",
            "lora": "adapter_model.safetensors critic/model.safetensors",
        }
        pushed = saved[1][kind]["pushed"]
        assert {*wanted.split(), *weights[kind].split()} <= set(pushed)
        assert not re.search("optimizer|rollout_state", " ".join(pushed))

    def test_every_metric_reaches_tensorboard(self, kind, saved):
        events = pytest.importorskip(
            "tensorboard.backend.event_processing.event_accumulator",
            reason="needs tensorboard (trl-qurl[test])",
        )
        [directory] = (saved[0] / kind / "runs").iterdir()
        accumulator = events.EventAccumulator(str(directory))
        accumulator.Reload()
        logged = set()
        for row in saved[1][kind]["history"]:
            if "loss" in row:
                logged |= {f"train/{name}" for name in row.keys() - {"step"}}
        assert len(logged) > 30
        assert logged <= set(accumulator.Tags()["scalars"])


@pytest.mark.vllm
@pytest.mark.xdist_group("saving")
def test_training_goes_on_as_if_nothing_had_been_saved(saved):
    record = saved[1]["full"]
    unsaved = saved[1]["full unsaved"]
    assert metrics_by_step(record) == metrics_by_step(unsaved)
    assert record["probe"] == unsaved["probe"]


@pytest.mark.vllm
@pytest.mark.xdist_group("saving")
def test_what_lies_beside_the_weights(saved):
    tokenizer = AutoTokenizer.from_pretrained(saved[0] / "full-int8")
    chat = [{"role": "user", "content": "Ab2"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "Ab2"
    assert GenerationConfig.from_pretrained(saved[0] / "full-int8").eos_token_id == [1]
    names = set()
    for path in saved[0].rglob("*"):
        if path.suffix in (".jsonl", ".json", ".md"):
            names.add(path.name)
            assert "hf_secret" not in path.read_text()
    assert names >= {"run.jsonl", "README.md", "config.json"}


# Where it may be written
# ---------------------------------------------------------------------------------------------


def test_nothing_and_a_quantized_checkpoint_are_replaced(tmp_path):
    check_replaceable(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {}}')
    check_replaceable(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("thesis.tex", ""),
        ("config.json", "{}"),
        ("config.json", "no"),
    ],
)
def test_nothing_but_a_quantized_checkpoint_is_replaced(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(FileExistsError, match=rf"{name}.*not a quantized checkpoint: choose"):
        write_checkpoint(tiny_model(), None, "int8", tmp_path)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [("file", FileExistsError, "is a file"), ("~/out", ValueError, "~/out.*home directory")],
)
def test_other_paths_are_refused(path, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    check_replaceable("new")
    with pytest.raises(error, match=message):
        check_replaceable(path)


def test_parameters_are_gone_through_to_the_end_when_writing_fails():
    state = []

    def parameters():
        state.append("merged")
        yield from range(3)
        state.append("unmerged")

    def fail(unread):
        next(unread)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        read_in_main_process(parameters(), fail)
    assert state == ["merged", "unmerged"]


@pytest.fixture
def processes(monkeypatch):
    """Play the main process, then another one, which waits for the outcome of the first."""
    sent = []

    def broadcast(outcome, from_process):
        if PartialState().is_main_process:
            sent.append(outcome[0])
        else:
            outcome[0] = sent.pop(0)

    def play():
        PartialState()
        for is_main in (True, False):
            monkeypatch.setattr(PartialState, "is_main_process", is_main)
            yield is_main
        assert sent == [], "one of them did not wait for the other"

    monkeypatch.setattr("trl_qurl.rollout.group.broadcast_object_list", broadcast)
    return play


def test_an_error_of_the_main_process_is_raised_in_all(processes):
    def fail(unread):
        raise FileExistsError("is a file")

    for is_main in processes():
        with pytest.raises(FileExistsError, match="is a file"):
            read_in_main_process([], fail if is_main else lambda unread: None)


# An adapter that is sent by itself
# -----------------------------------------------------------------------------------


@pytest.fixture
def trainer(tmp_path):
    """What `save_quantized` asks of a trainer whose rollouts had an adapter beside a base in four
    bits.
    """
    lora = LoraConfig(r=9, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model(), lora)
    trainer = QuantizedEngineMixin.__new__(QuantizedEngineMixin)
    trainer.model = model
    trainer.hub_model_id = None
    trainer.args = SimpleNamespace(
        rollout_quantization="w4a16",
        quantization_ignore=["lm_head"],
        output_dir=str(tmp_path / "run"),
        hub_model_id="someone/tiny",
    )
    weights = stream_of(model, "w4a16")
    trainer.vllm_generation = QuantizedVLLMGeneration.__new__(QuantizedVLLMGeneration)
    vars(trainer.vllm_generation).update(
        model=model,
        weights=weights,
        processing_class=tiny_tokenizer(),
        sync=SimpleNamespace(route=AdapterRoute(model, weights, APART)),
    )
    return trainer


def test_an_adapter_lies_beside_its_base(trainer):
    trainer.vllm_generation.weights.grid = torch.bfloat16
    directory = trainer.save_quantized()
    write_checkpoint(tiny_model(), None, "w4a16", directory.with_name("base"))
    base = weights_of(directory.with_name("base"))
    torch.testing.assert_close(weights_of(directory), base, rtol=0, atol=0)
    assert config_of(directory)["quantization_config"]["format"] == "pack-quantized"
    assert config_of(directory)["dtype"] == "bfloat16", "as it was trained"
    assert (directory / "adapter" / "adapter_model.safetensors").exists()
    adapted = PeftModel.from_pretrained(tiny_model(), directory / "adapter")
    merged = adapted.merge_and_unload().state_dict()
    for name, weight in model_parameters(trainer.model, merges=True):
        torch.testing.assert_close(merged[name], weight)
    assert trainer.save_quantized() == directory, "an earlier one is replaced"


def test_a_base_that_is_gone_is_an_error_in_all_processes(trainer, processes, tmp_path):
    trainer.vllm_generation.sync.route.checkpoint = tmp_path / "gone"
    for _ in processes():
        with pytest.raises(FileNotFoundError, match="The quantized base of this run is gone"):
            trainer.save_quantized()


EXACT = ["lm_head", "re:.*down_proj"]


@pytest.mark.parametrize(
    "choice",
    [
        {"merge": True},
        {"formats": "fp8", "ignore": EXACT},
        {"ignore": EXACT},
    ],
    ids=str,
)
def test_an_adapter_is_merged_where_that_is_asked_for_or_the_base_is_another(choice, trainer):
    before = copy.deepcopy(trainer.model.state_dict())
    beside = weights_of(trainer.save_quantized())
    directory = trainer.save_quantized(f"{trainer.args.output_dir}-merged", **choice)
    assert not (directory / "adapter").exists()
    weights = weights_of(directory)
    query = "model.layers.0.self_attn.q_proj.weight_scale"
    assert not torch.equal(weights[query], beside[query]), "the adapter is nowhere"
    ignored = config_of(directory)["quantization_config"]["ignore"]
    assert ignored == choice.get("ignore", ["lm_head"])
    eight_bits = [each for each in weights.values() if each.dtype == torch.float8_e4m3fn]
    # Six of a layer's seven projections, in two layers.
    assert len(eight_bits) == (12 if "formats" in choice else 0)
    torch.testing.assert_close(trainer.model.state_dict(), before, rtol=0, atol=0)


MISTAKES = yaml.safe_load(r"""
a directory of something else:
  path: .
  error: 'FileExistsError: .*thesis.*would be replaced.*not a quantized'
no formats:
  choice: {formats: {}}
  error: 'ValueError: .*formats is {}.*one of int8'
nothing to quantize:
  choice: {ignore: ["re:.*"]}
  error: 'ValueError: .*re:\.\*.*narrow the patterns'
unquantized rollouts:
  formats: null
  error: 'ValueError: .*formats is None.*int8, fp8'
a path through a file:
  path: thesis/new
  error: 'Error: .*Not a directory.*output_dir of save_quantized'""")


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_with_the_way_out(name, trainer, tmp_path):
    mistake = {"formats": "w4a16", "path": "new", "choice": {}} | MISTAKES[name]
    trainer.args.rollout_quantization = mistake["formats"]
    (tmp_path / "thesis").write_text("")
    with pytest.raises((OSError, ValueError)) as caught:
        trainer.save_quantized(tmp_path / mistake["path"], **mistake["choice"])
    said = f"{type(caught.value).__name__}: {caught.value}"
    assert re.search(mistake["error"], said, re.DOTALL)


def test_formats_in_another_order_and_one_pattern_to_ignore_are_as_asked(trainer):
    first = {"re:.*layers.0.": "w4a16"}
    second = {"re:.*down_proj": "int8"}
    trainer.args.rollout_quantization = first | second
    trainer.vllm_generation.weights = stream_of(trainer.model, first | second)
    trainer.vllm_generation.weights.grid = torch.bfloat16
    layer = "model.layers.0.mlp.down_proj"
    directory = trainer.save_quantized(f"{trainer.args.output_dir}-order", second | first)
    assert config_of(directory)["dtype"] == "bfloat16", "as it was trained"
    assert weights_of(directory)[f"{layer}.weight"].dtype == torch.int8
    kept = f"{trainer.args.output_dir}-kept"
    directory = trainer.save_quantized(kept, "int8", ignore="re:.*(down_proj|lm_head)")
    assert f"{layer}.weight_scale" not in weights_of(directory)
