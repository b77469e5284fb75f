"""QuRLGRPOConfig: its defaults, what it refuses and what it advises, and when it warns."""

import copy
import dataclasses
import inspect
import json
import pickle
import re
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import yaml
from documents import ROOT
from support.configs import PLAIN, SEVERAL_UPDATES, config, limited, refusal
from transformers import HfArgumentParser
from trl import GRPOConfig, ModelConfig, TrlParser
from trl.experimental.gmpo import GMPOConfig

from trl_qurl import QuRLGRPOConfig, QuRLPPOConfig, QuRLRLOOConfig
from trl_qurl.config.checks import conflicts
from trl_qurl.config.checks.conflicts import CLIPPED_LOSS_TYPES
from trl_qurl.config.checks.engine_arguments import TAKEN_ENGINE_ARGUMENTS, UNFOLLOWED
from trl_qurl.config.checks.names import OLD_NAMES
from trl_qurl.config.rollout import QuantizedRolloutsConfig
from trl_qurl.objective import OBJECTIVES
from trl_qurl.quantization.formats import TOKEN_CACHES

OWN_DEFAULTS = {
    "dynamic_sampling": False,
    "dynamic_sampling_reward": None,
    "rollout_quantization": "int8",
    "quantization_ignore": ["lm_head"],
    "weight_sync": "auto",
    "round_base": False,
    "rollout_checkpoint_dir": None,
    "objective": "acr",
    "uaq_scale": 1.0,
    "vllm_engine_kwargs": {},
    "sync_check_interval": 16,
    "vllm_request_timeout": 900.0,
    "importance_cap": 2.0,
    "mismatch_guard": "warn",
    "mismatch_guard_kl": 0.1,
    "smooth_activations": None,
}


def test_defaults_are_trls_but_for_our_settings():
    ours = vars(config())
    theirs = vars(GRPOConfig("out", **PLAIN | SEVERAL_UPDATES)) | {"use_vllm": True}
    assert {name: ours[name] for name in ours.keys() - theirs.keys()} == OWN_DEFAULTS
    for name in theirs.keys() - {"_n_gpu", "logging_dir", "run_name", "distributed_state"}:
        assert ours[name] == theirs[name], name


def test_no_default_is_shared_between_two_configs():
    first = config()
    first.quantization_ignore.append("re:.*down_proj")
    first.vllm_engine_kwargs["enforce_eager"] = True
    assert (config().quantization_ignore, config().vllm_engine_kwargs) == (["lm_head"], {})


def test_every_added_field_has_its_sentence_on_the_command_line():
    theirs = {field.name for field in dataclasses.fields(GRPOConfig)}
    for field in dataclasses.fields(QuRLPPOConfig):
        sentence = field.metadata.get("help", "")
        plain = 0 < len(sentence) < 200 and not {"`", "%"} & set(sentence)
        assert field.name in theirs or plain, field.name


def test_the_mixin_fits_another_trainers_config():
    @dataclass
    class QuantizedGMPOConfig(QuantizedRolloutsConfig, GMPOConfig):
        pass

    settings = QuantizedGMPOConfig("out", **PLAIN, vllm_engine_kwargs='{"seed_": 1}')
    assert settings.use_vllm and settings.vllm_engine_kwargs == {"seed_": 1}
    assert settings.learning_rate == GMPOConfig("out", **PLAIN).learning_rate
    assert settings.updates_per_rollout == 1
    assert "weight_sync is 'nccl'" in refusal(QuantizedGMPOConfig, weight_sync="nccl")


@pytest.mark.parametrize("given", ["none", "None", None])
def test_unquantized_rollouts_by_name(given):
    assert config(rollout_quantization=given).rollout_quantization is None


@pytest.mark.parametrize(
    ("per_generation", "per_update", "iterations", "updates"),
    [(4, 1, 1, 4), (4, 2, 1, 2), (4, 4, 3, 3), (2, 4, 1, 0.5)],
)
def test_updates_per_rollout(per_generation, per_update, iterations, updates):
    settings = config(
        steps_per_generation=per_generation,
        gradient_accumulation_steps=per_update,
        num_iterations=iterations,
        objective="tis",
    )
    assert settings.updates_per_rollout == updates


# Refusals
# --------------------------------------------------------------------------------------------------

NAN = float("nan")

# A setting, a value that it cannot have, and what the message names as allowed.
VALUES = [
    ("weight_sync", "nccl", "'checkpoint'"),
    ("mismatch_guard", "halt", "'stop'"),
    ("objective", "ppo", "'trl'"),
    ("uaq_scale", 0.0, "positive"),
    ("uaq_scale", NAN, "positive"),
    ("uaq_scale", "1.5", "positive"),
    ("importance_cap", 0.0, "positive"),
    ("importance_cap", NAN, "positive"),
    ("importance_cap", True, "positive"),
    ("mismatch_guard_kl", 0.0, "positive"),
    ("mismatch_guard_kl", NAN, "positive"),
    ("vllm_request_timeout", 0, "positive"),
    ("sync_check_interval", -1, "0 or more"),
    ("temperature", 0.0, "makes all completions equal"),
    ("temperature", 0.002, "at least 0.01"),
    ("quantization_ignore", ["re:(["], "regular expression"),
    ("quantization_ignore", "lm_head", "list of patterns"),
    ("vllm_engine_kwargs", "enforce_eager", "JSON"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), VALUES)
def test_a_value_that_is_refused_is_named_with_what_is_allowed(name, value, allowed):
    message = refusal(**{name: value})
    shown = value[0] if isinstance(value, list) else value
    assert name in message and repr(shown) in message and allowed in message


def test_every_limit_is_tried():
    assert limited(QuRLGRPOConfig) <= {name for name, *_ in VALUES}


OLD = [line.split(maxsplit=1)[0] for line in OLD_NAMES.read_text().splitlines()]
TABLE_OF_OLD = ROOT / "docs" / "from-trl.md"


@pytest.mark.parametrize("kind", [QuRLGRPOConfig, QuRLPPOConfig, QuRLRLOOConfig])
def test_unknown_names_are_refused_all_at_once_each_with_its_remedy(kind):
    """Versions of transformers that are supported may still have some of the old ones."""
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = [*(name for name in OLD if name not in known), "lerning_rate", "color"]
    assert {"max_prompt_length", "vllm_device", "evaluation_strategy"} <= {*unknown}
    with pytest.raises(TypeError) as error:
        kind("out", **PLAIN | dict.fromkeys(unknown, 1))
    first, *lines = str(error.value).split("\n")
    assert first == f"{kind.__name__}() got unexpected keyword arguments:"
    remedies = dict(zip(unknown, lines, strict=True))
    rows = OLD_NAMES.read_text().splitlines()
    assert {f"{row};" for row in rows if row.split()[0] in unknown} == {*lines[:-2]}
    assert remedies["lerning_rate"] == "lerning_rate, did you mean learning_rate?;"
    assert remedies["color"] == "color"


def test_remedies_name_settings_that_exist():
    kinds = (QuRLPPOConfig, QuRLRLOOConfig, ModelConfig)
    known = {field.name for kind in kinds for field in fields(kind)}
    for row in OLD_NAMES.read_text().splitlines():
        for code in re.findall("`(.+?)`", row):
            name = code.partition("=")[0]
            assert name in known or name.isupper() or "/" in name, row


def test_the_table_of_old_names_is_that_of_the_documentation():
    page = TABLE_OF_OLD.read_text()
    for row in OLD_NAMES.read_text().splitlines():
        name, origin, remedy = re.fullmatch(r"(\w+) \((.+?)\): (.+)", row).groups()
        assert f"| `{name}` | {origin} | {remedy} |\n" in page
    assert page.count(" | transformers < ") == OLD_NAMES.read_text().count("(transformers < ")


def test_a_subclass_may_have_its_own_constructor_and_copies_are_configs():
    class Named(QuRLGRPOConfig):
        def __init__(self, *positional, color, **settings):
            super().__init__(*positional, **settings)
            self.color = color

    named = Named("out", color="red", objective="tis", **PLAIN)
    for copied in (pickle.loads(pickle.dumps(config(objective="tis"))), copy.deepcopy(named)):
        assert copied.objective == "tis"
    assert list(inspect.signature(QuRLGRPOConfig).parameters)[0] == "output_dir"


# Settings that conflict, and the way out; not all settings need to be named.
NO_SMOOTHING = "Leave smooth_activations out"
CONFLICTING = [
    ({"use_vllm": False}, "TRL's own trainer"),
    ({"vllm_engine_kwargs": {"enforce_eager": True}, "vllm_mode": "server"}, "trl-qurl serve"),
    ({"smooth_activations": True, "rollout_quantization": "fp8"}, NO_SMOOTHING),
    ({"smooth_activations": True, "weight_sync": "adapter"}, NO_SMOOTHING),
    ({"smooth_activations": True, "round_base": True}, NO_SMOOTHING),
    ({"objective": "acr", "vllm_importance_sampling_correction": False}, "objective='trl'"),
    ({"objective": "acr", "importance_sampling_level": "sequence"}, "objective='tis'"),
    ({"objective": "acr", "loss_type": "cispo"}, "objective='tis'"),
    ({"objective": "acr", "beta": 0.1}, "use_bias_correction_kl=False, or objective='tis'"),
    ({"objective": "acr", "delta": 4.0}, "objective='tis'"),
]


@pytest.mark.parametrize(("settings", "way_out"), CONFLICTING, ids=json.dumps)
def test_a_conflict_is_named_with_the_way_out(settings, way_out):
    message = refusal(**settings)
    assert way_out in message
    for named in [f"{name}={value!r}" for name, value in settings.items()]:
        assert named in message


def test_every_conflict_is_tried():
    known = [conflicts.UNCORRECTED, *conflicts.LIFTED_BOUND, *conflicts.CONFLICTS]
    tried = [settings.keys() for settings, _ in CONFLICTING]
    for conflict in known:
        assert any(names & {*conflict.settings} for names in tried), conflict


def test_engine_arguments_that_are_taken_or_cannot_be_followed():
    for name, reason in {**TAKEN_ENGINE_ARGUMENTS, **UNFOLLOWED}.items():
        message = refusal(vllm_engine_kwargs={name: None})
        assert f"vllm_engine_kwargs sets {name!r}" in message and reason in message


@pytest.mark.parametrize("cache", TOKEN_CACHES)
def test_caches_that_only_gpus_have(cache, monkeypatch):
    settings = {"vllm_engine_kwargs": {"kv_cache_dtype": cache}}
    message = refusal(**settings)
    assert "kv_cache_dtype of vllm_engine_kwargs" in message and repr(cache) in message
    assert "'fp8'" in message
    monkeypatch.setattr("trl_qurl.quantization.checks.kv_cache.gpu_capability", lambda: (8, 0))
    config(**settings)


def test_llmcompressor_is_for_any_number_of_processes_if_it_is_installed(monkeypatch):
    monkeypatch.setattr(QuRLGRPOConfig, "world_size", 2)
    monkeypatch.setattr(conflicts, "find_spec", lambda name: object())
    config(weight_sync="llmcompressor", smooth_activations=True)
    monkeypatch.setattr(conflicts, "find_spec", lambda name: None)
    message = refusal(weight_sync="llmcompressor")
    assert "trl-qurl[llmcompressor]" in message and "or use 'auto'" in message


def test_a_home_directory_is_written_out():
    assert config(rollout_checkpoint_dir="~/rollouts").rollout_checkpoint_dir == str(
        Path.home() / "rollouts"
    )


def test_a_reward_that_decides_turns_dynamic_sampling_on():
    assert config(dynamic_sampling_reward="length").dynamic_sampling


# Each piece of advice, followed; and what must not be refused by mistake.
SEQUENCES = {"loss_type": "cispo", "importance_sampling_level": "sequence"}
FITTING = [
    *({"objective": "acr", "loss_type": loss} for loss in CLIPPED_LOSS_TYPES),
    *({"objective": "tis", "loss_type": loss} for loss in ("sapo", "vespo", "luspo")),
    # an objective that was chosen does not read TRL's correction
    {"objective": "tis", "vllm_importance_sampling_clip_max": 4.0},
    *({"objective": objective} | SEQUENCES for objective in OBJECTIVES if objective != "acr"),
    {"objective": "trl"} | SEQUENCES,
    {"objective": "trl", "vllm_importance_sampling_mode": "token_mask"},
    {"objective": "trl", "vllm_importance_sampling_mode": "sequence_truncate"},
    {"objective": "trl", "vllm_importance_sampling_correction": False},
    {"objective": "tis", "loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
    {"importance_cap": None},
    {"importance_cap": 1},
    {"objective": "tis", "delta": 4.0},
    {"vllm_model_impl": "transformers"},
    {"sync_ref_model": True, "beta": 0.1, "use_bias_correction_kl": False},
    {"objective": "tis", "beta": 0.1},
    {"vllm_engine_kwargs": {"enforce_eager": True, "kv_cache_dtype": "fp8"}},
    {"vllm_engine_kwargs": None},
]


@pytest.mark.parametrize("settings", FITTING, ids=json.dumps)
def test_what_fits_is_accepted_without_a_warning(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(**settings)


# Warnings
# --------------------------------------------------------------------------------------------------


def warned(**settings):
    """A config and its only warning, which names the line that made it."""
    with pytest.warns(UserWarning) as caught:
        made = config(**settings)
    [warning] = caught
    assert warning.filename == config.__code__.co_filename
    return made, str(warning.message)


OTHERS = [
    *({"loss_type": loss} for loss in ("cispo", "sapo", "vespo", "luspo")),
    {"importance_sampling_level": "sequence"},  # TRL's own gspo.py
    {"delta": 4.0},
    {"beta": 0.1},  # TRL weights the penalty by the ratio
]
OF_TRLS = [
    {"vllm_importance_sampling_correction": False},
    {"vllm_importance_sampling_mode": "token_mask", "loss_type": "cispo"},
    {"vllm_importance_sampling_mode": "sequence_truncate"},
    {"vllm_importance_sampling_clip_min": 0.5},
    {"vllm_importance_sampling_clip_max": 4.0},
]


@pytest.mark.parametrize("settings", OTHERS, ids=json.dumps)
def test_a_loss_that_the_default_does_not_fit_is_corrected_by_tis(settings):
    given, message = warned(**settings)
    [(name, value)] = settings.items()
    assert message.startswith(f"{name}={value!r} and objective='acr', the default, do not fit: ")
    assert given.objective == "tis"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = dataclasses.replace(given, generation_batch_size=None)
    assert copied.objective == given.to_dict()["objective"] == "tis"


@pytest.mark.parametrize("settings", OF_TRLS, ids=json.dumps)
def test_a_correction_of_trls_that_is_written_out_is_trls(settings):
    given, message = warned(**settings)
    assert "'acr'" in message and given.objective == "trl"
    assert settings.items() <= vars(given).items()


# The command line and YAML
# --------------------------------------------------------------------------------------------------

COMMAND_LINE = "--output_dir out --use_cpu true --bf16 false --report_to none"
COMMAND_LINE += " --steps_per_generation 4"


@pytest.mark.parametrize("parser", [TrlParser, HfArgumentParser])
def test_the_command_line(parser):
    words = "--rollout_quantization none --objective tis --importance_cap inf"
    words += " --quantization_ignore lm_head re:.*down_proj --vllm_engine_kwargs"
    arguments = [*COMMAND_LINE.split(), *words.split(), '{"enforce_eager": true}']
    [settings] = parser(QuRLGRPOConfig).parse_args_into_dataclasses(arguments)
    assert settings.rollout_quantization is None
    assert settings.vllm_engine_kwargs == {"enforce_eager": True}
    assert settings.quantization_ignore == ["lm_head", "re:.*down_proj"]
    assert (settings.objective, settings.importance_cap) == ("tis", float("inf"))


def test_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    settings = {
        "rollout_quantization": "none",
        "quantization_ignore": ["re:.*down_proj"],
        "vllm_engine_kwargs": {"enforce_eager": True},
        "importance_cap": 4.0,
    }
    path.write_text(yaml.safe_dump(settings))
    arguments = [*COMMAND_LINE.split(), "--config", str(path)]
    [parsed] = TrlParser(QuRLGRPOConfig).parse_args_and_config(arguments)
    expected = settings | {"rollout_quantization": None}
    assert expected.items() <= vars(parsed).items()
