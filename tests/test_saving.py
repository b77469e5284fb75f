"""`save_quantized`: what vLLM starts from is what was trained, and training does not notice."""

import json
import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from accelerate import PartialState
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from support.training import SAME
from tiny import stream_of, tiny_model, tiny_tokenizer
from transformers import AutoTokenizer, GenerationConfig
from trl.trainer.utils import generate_model_card

from trl_qurl.quantization import SCHEMES, make_plan, write_checkpoint
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.quantization.storage import check_replaceable
from trl_qurl.rollout.backend import QuantizedVLLMGeneration
from trl_qurl.rollout.routes import AdapterRoute
from trl_qurl.trainers.engine import QuantizedEngineMixin
from trl_qurl.trainers.model_card import add_rollouts
from trl_qurl.trainers.saving import read_in_main_process

KINDS = ["full", "lora"]

engines = [pytest.mark.vllm, pytest.mark.xdist_group("saving")]


@pytest.fixture(scope="module")
def saved(run_scenario, tmp_path_factory):
    """Directory, and records: full weights, and PPO with LoRA, each with and without saving."""
    directory = tmp_path_factory.mktemp("saving")
    runs = {
        "full": ["--save"],
        "full unsaved": [],
        "lora": ["--save", "--lora"],
        "lora unsaved": ["--lora"],
    }
    arguments = [
        part for name, options in runs.items() for part in ["--and", directory / name, *options]
    ]
    records = run_scenario("saving.py", *arguments[1:])
    return directory, dict(zip(runs, records, strict=True))


@pytest.fixture(scope="module")
def fresh(saved, run_scenario):
    """Log-probabilities of engines started from what was saved at the end."""
    probes = run_scenario("fresh_engine.py", *(saved[1][kind]["directory"] for kind in KINDS))
    return dict(zip(KINDS, probes, strict=True))


def test_the_card_of_a_local_model_names_it(tmp_path):
    (tmp_path / "run").mkdir()
    generate_model_card(None, "run", None, None, [], None, None, "GRPO").save(
        tmp_path / "run" / "README.md"
    )
    parts = {"sync.route.is_merged": True, "weights.plan": make_plan(tiny_model(), "int8")}
    generation = Mock(**parts, **{"model.config._name_or_path": "models/mine/"})
    add_rollouts("GRPO", SimpleNamespace(output_dir=tmp_path / "run", round_base=False), generation)
    card = (tmp_path / "run" / "README.md").read_text()
    assert "a fine-tuned version of `mine`." in card and 'model="run"' in card
    assert "None" not in card and "licence" not in card


def weights_of(directory):
    return load_file(directory / "model.safetensors")


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


def without_times(history):
    timed = ("time/", "throughput/", "step_time", "train_runtime", "train_samples", "train_steps")
    return [
        {name: value for name, value in row.items() if not name.startswith(timed)}
        for row in history
    ]


@pytest.mark.parametrize("kind", KINDS)
class TestRuns:
    pytestmark = engines

    def test_a_fresh_engine_computes_what_the_trainers_own_does(self, kind, saved, fresh):
        directory, records = saved
        assert records[kind]["probe"] == pytest.approx(fresh[kind], abs=SAME)
        assert records[kind]["directory"] == str(directory / f"{kind}-int8"), (
            "the default directory"
        )

    def test_training_goes_on_as_if_nothing_had_been_saved(self, kind, saved):
        record, unsaved = saved[1][kind], saved[1][f"{kind} unsaved"]
        assert len(record["history"]) > 4
        rows, expected = without_times(record["history"]), without_times(unsaved["history"])
        if kind == "lora":  # merging and unmerging rounds the base, as at each sync
            rows, expected = (
                [row["loss"] for row in rows[:-1]],
                [row["loss"] for row in expected[:-1]],
            )
            assert rows == pytest.approx(expected, rel=1e-3)
        else:
            assert rows == expected and record["probe"] == unsaved["probe"]
        assert record["version_kept"]

    def test_what_was_saved_on_the_way_is_the_policy_of_that_step(self, kind, saved):
        end, on_the_way = (
            load_file(saved[0] / name / "model.safetensors")
            for name in (f"{kind}-int8", f"{kind}/on the way")
        )
        assert end.keys() == on_the_way.keys()
        assert not [
            name for name in end if "lora" in name or "base_layer" in name or "score" in name
        ]
        assert any(not torch.equal(end[name], on_the_way[name]) for name in end)

    def test_mistakes_are_named_with_the_way_out(self, kind, saved):
        messages = saved[1][kind]["messages"]
        for mistake, parts in MISTAKES.items():
            assert all(part in messages[mistake] for part in parts), messages[mistake]


MISTAKES = {
    "own directory": ("FileExistsError", "would be replaced", "not a quantized checkpoint"),
    "unknown scheme": ("ValueError", "'int4'", "'int8', 'fp8'"),
    "nothing left": ("ValueError", "re:.*", "narrow the patterns"),
    "no scheme": ("ValueError", "formats is None", "int8, fp8"),
    "unwritable": ("OSError", "Not a directory", "output_dir of save_quantized"),
}


class TestFiles:
    pytestmark = engines

    def test_tokenizer_and_generation_config_lie_beside_the_weights(self, saved):
        tokenizer = AutoTokenizer.from_pretrained(saved[0] / "full-int8")
        assert tokenizer("Ab2").input_ids == tiny_tokenizer()("Ab2").input_ids
        assert (
            tokenizer.apply_chat_template([{"role": "user", "content": "Ab2"}], tokenize=False)
            == "Ab2"
        )
        assert GenerationConfig.from_pretrained(saved[0] / "full-int8").eos_token_id == [1]

    def test_uaqs_scale_stays_on_record(self, saved):
        scales = [
            json.loads((saved[0] / f"{kind}-int8" / "config.json").read_text()).get("uaq_scale")
            for kind in KINDS
        ]
        assert scales == [1.5, None]

    def test_another_scheme_and_other_layers_than_the_rollouts(self, saved):
        config = config_of(saved[0] / "full" / "fp8")["quantization_config"]
        assert config["format"] == "float-quantized" and config["ignore"] == [
            "lm_head",
            "re:.*down_proj",
        ]
        weights = weights_of(saved[0] / "full" / "fp8")
        quantized = {
            name for name, tensor in weights.items() if tensor.dtype == torch.float8_e4m3fn
        }
        # Six of a layer's seven projections, in two layers.
        assert len(quantized) == 12 and not [name for name in quantized if "down_proj" in name]
        policy = weights_of(saved[0] / "full")
        for name in quantized:
            ours, scale = (
                weights[name].float() * weights[f"{name}_scale"],
                weights[f"{name}_scale"].max().item(),
            )
            # E4M3 has three bits of mantissa: half a step is 1/16 of the value, and 2^-10 at the
            # smallest.
            torch.testing.assert_close(ours, policy[name], rtol=1 / 16, atol=scale * 2**-9)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_push_uploads_the_policy_its_card_and_its_log(self, kind, saved):
        record, weights = (
            saved[1][kind],
            "model.safetensors" if kind == "full" else "adapter_model.safetensors",
        )
        wanted = {
            weights,
            "README.md",
            "tokenizer.json",
            "chat_template.jinja",
            "training_args.bin",
            "run.jsonl",
        }
        if kind == "lora":
            wanted |= {"critic/model.safetensors"}
        assert wanted <= set(record["pushed"])
        assert not [
            name for name in record["pushed"] if "optimizer" in name or "rollout_state" in name
        ]

    @pytest.mark.parametrize("kind", KINDS)
    def test_cards_say_how_the_policy_was_made_and_are_valid(self, kind, saved):
        card = ModelCard.load(saved[0] / kind / "README.md")
        assert {"trl", "qurl", "grpo" if kind == "full" else "ppo"} <= set(card.data.tags)
        assert card.data.library_name == "transformers"
        algorithm = "The algorithm is GRPO." if kind == "full" else "The algorithm is PPO."
        for part in (
            algorithm,
            "The objective is `acr` (Eq. 9 of QuRL)",
            "; exact: `lm_head`).",
            "eprint       = {2602.13953}",
            "Cite TRL as",
        ):
            assert part in card.text, part
        quantized = ModelCard.load(saved[0] / f"{kind}-int8" / "README.md")
        assert (quantized.data.base_model, quantized.data.base_model_relation) == (
            "someone/tiny",
            "quantized",
        )
        assert {"int8", "compressed-tensors"} <= set(quantized.data.tags)
        assert f"vllm serve {kind}-int8" in quantized.text

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_metric_reaches_tensorboard(self, kind, saved):
        events = pytest.importorskip(
            "tensorboard.backend.event_processing.event_accumulator",
            reason="needs tensorboard (trl-qurl[test])",
        )
        [directory] = (saved[0] / kind / "runs").iterdir()
        accumulator = events.EventAccumulator(str(directory))
        accumulator.Reload()
        logged = {
            f"train/{name}" for row in saved[1][kind]["history"] if "loss" in row for name in row
        } - {"train/step"}
        assert len(logged) > 30 and logged <= set(accumulator.Tags()["scalars"])

    @pytest.mark.parametrize("kind", KINDS)
    def test_no_secret_is_written_in_plain_text(self, kind, saved):
        texts = [path for path in saved[0].rglob("*") if path.suffix in (".jsonl", ".json", ".md")]
        assert {path.name for path in texts} >= {"run.jsonl", "README.md", "config.json"}
        assert not [path for path in texts if "hf_secret" in path.read_text()]


# Where it may be written
# ---------------------------------------------------------------------------------------------


def quantized_checkpoint(path):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"quantization_config": {}}))
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path / "new",
        lambda path: (path / "empty").mkdir() or path / "empty",
        lambda path: quantized_checkpoint(path / "earlier"),
    ],
)
def test_new_empty_and_quantized_directories_are_written(make, tmp_path):
    check_replaceable(make(tmp_path))


@pytest.mark.parametrize(
    ("contents", "named"),
    [
        ({"thesis.tex": ""}, "thesis.tex"),
        ({"config.json": "{}"}, "config.json"),
        ({"config.json": "no"}, "config.json"),
    ],
)
def test_other_directories_are_left_alone(contents, named, tmp_path):
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(
        FileExistsError, match=rf"{named}.*not a quantized checkpoint: choose a directory"
    ):
        write_checkpoint(tiny_model(), None, "int8", tmp_path, quantizer="streaming")
    assert sorted(os.listdir(tmp_path)) == sorted(contents)


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="is a file"):
        check_replaceable(tmp_path / "file")


def test_a_quoted_home_directory_is_refused():
    with pytest.raises(ValueError, match="~/out.*home directory"):
        check_replaceable("~/out")


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


def test_an_error_of_the_main_process_is_raised_in_all(monkeypatch):
    sent = []

    def fail(unread):
        raise FileExistsError("is a file")

    def broadcast(outcome, from_process):
        """As the main process the first time, and then as another one."""
        if sent:
            outcome[0] = sent[0]
        sent.extend(outcome)

    monkeypatch.setattr("trl_qurl.rollout.recovery.broadcast_object_list", broadcast)
    with pytest.raises(FileExistsError, match="is a file"):
        read_in_main_process([], fail)
    with pytest.raises(FileExistsError, match="is a file"):
        read_in_main_process([], lambda unread: None)
    assert len(sent) == 2, "one of them did not wait for the other"


# An adapter that is sent by itself
# -----------------------------------------------------------------------------------


@pytest.fixture
def trainer(tmp_path):
    """What `save_quantized` asks of a trainer whose rollouts had an adapter beside a base in four
    bits.
    """
    lora = LoraConfig(
        r=9, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = get_peft_model(tiny_model(), lora)
    trainer = QuantizedEngineMixin.__new__(QuantizedEngineMixin)
    trainer.model, trainer.hub_model_id = model, None
    trainer.args = SimpleNamespace(
        rollout_quantization="w4a16",
        quantization_ignore=["lm_head"],
        output_dir=str(tmp_path / "run"),
        hub_model_id="someone/tiny",
    )
    weights = stream_of(model, SCHEMES["w4a16"])
    trainer.vllm_generation = QuantizedVLLMGeneration.__new__(QuantizedVLLMGeneration)
    vars(trainer.vllm_generation).update(
        model=model,
        weights=weights,
        processing_class=tiny_tokenizer(),
        sync=SimpleNamespace(route=AdapterRoute(model, weights, is_served=False)),
    )
    return trainer


def test_an_adapter_lies_beside_its_base_and_the_card_serves_both(trainer):
    directory = trainer.save_quantized()
    write_checkpoint(
        tiny_model(), None, "w4a16", directory.with_name("base"), quantizer="streaming"
    )
    base, expected = weights_of(directory), weights_of(directory.with_name("base"))
    assert base.keys() == expected.keys() and all(
        torch.equal(base[name], expected[name]) for name in base
    )
    assert config_of(directory)["quantization_config"]["format"] == "pack-quantized"
    assert {path.name for path in (directory / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    card = ModelCard.load(directory / "README.md").text
    options = "--enable-lora --max-lora-rank 16 --lora-modules policy=run-w4a16/adapter"
    assert (
        f"\nvllm serve run-w4a16 {options}\n" in card
        and "request the model `policy` from the server" in card
    )
    merged = (
        PeftModel.from_pretrained(tiny_model(), directory / "adapter")
        .merge_and_unload()
        .state_dict()
    )
    for name, weight in model_parameters(trainer.model, merges=True):
        torch.testing.assert_close(merged[name], weight)
    assert trainer.save_quantized() == directory, "an earlier one is replaced"


def test_a_base_that_is_gone_is_an_error_in_all_processes(trainer, monkeypatch, tmp_path):
    trainer.vllm_generation.sync.route.checkpoint = tmp_path / "gone"
    sent = []

    def broadcast(outcome, from_process):
        if PartialState().is_main_process:
            sent.append(outcome[0])
        else:
            outcome[0] = sent.pop(0)

    monkeypatch.setattr("trl_qurl.rollout.recovery.broadcast_object_list", broadcast)
    for is_main in (True, False):
        monkeypatch.setattr(PartialState, "is_main_process", is_main)
        with pytest.raises(FileNotFoundError, match="The quantized base of this run is gone"):
            trainer.save_quantized()
    assert sent == [], "one of them did not wait for the other"


def test_an_adapter_is_merged_where_that_is_asked_for_or_the_base_is_another(trainer):
    beside = weights_of(trainer.save_quantized())
    choices = {
        "asked": {"merge": True},
        "fp8": {"formats": "fp8"},
        "ignored": {"ignore": ["lm_head", "re:.*down"]},
    }
    for name, choice in choices.items():
        directory = trainer.save_quantized(f"{trainer.args.output_dir}-{name}", **choice)
        assert not (directory / "adapter").exists()
        assert "--enable-lora" not in (directory / "README.md").read_text()
        query = "model.layers.0.self_attn.q_proj.weight_scale"
        assert not torch.equal(weights_of(directory)[query], beside[query]), (
            "the adapter is nowhere"
        )


def test_formats_in_another_order_and_one_pattern_to_ignore_are_as_asked(trainer):
    first, second = {"re:.*layers.0.": "w4a16"}, {"re:.*down_proj": "int8"}
    trainer.args.rollout_quantization = first | second
    trainer.vllm_generation.weights = stream_of(trainer.model, first | second)
    trainer.vllm_generation.weights.grid = torch.bfloat16
    layer = "model.layers.0.mlp.down_proj"
    directory = trainer.save_quantized(f"{trainer.args.output_dir}-order", second | first)
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16", (
        "as it was trained"
    )
    assert weights_of(directory)[f"{layer}.weight"].dtype == torch.int8
    directory = trainer.save_quantized(
        f"{trainer.args.output_dir}-kept", "int8", ignore="re:.*(down_proj|lm_head)"
    )
    assert f"{layer}.weight_scale" not in weights_of(directory)
    with pytest.raises(ValueError, match="formats is {}: write 'none', one of int8"):
        trainer.save_quantized(formats={})
