"""QuRLGRPOConfig: its defaults, what it refuses and what it advises, and when it warns."""

import dataclasses
import importlib.util
import json
import warnings
from dataclasses import dataclass, fields

import pytest
import yaml
from support.configs import PLAIN, SEVERAL_UPDATES, config
from transformers import HfArgumentParser
from trl import GRPOConfig, TrlParser
from trl.experimental.gmpo import GMPOConfig
from trl.experimental.iw_opd import IWOPDConfig
from trl.experimental.sdft import SDFTConfig
from trl.experimental.sdpo import SDPOConfig

from trl_qurl import QuRLGRPOConfig, QuRLPPOConfig
from trl_qurl.config import CLIPPED_LOSS_TYPES, TAKEN_ENGINE_ARGUMENTS, QuantizedRolloutsConfig
from trl_qurl.config.checks import check_types
from trl_qurl.config.refusals import CHOICES, GROUP_NUMBERS, NUMBERS, UNFOLLOWED
from trl_qurl.objective import OBJECTIVES
from trl_qurl.quantization.formats import TOKEN_CACHES

TRLS = ("correction", "mode", "clip_max", "clip_min")
"""TRL's settings of its own correction, without their prefix."""

# Defaults
# --------------------------------------------------------------------------------------------------

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
    "rollouts_ahead": 0,
    "importance_cap": 2.0,
    "mismatch_guard": "warn",
    "mismatch_guard_kl": 0.1,
    "smooth_activations": None,
}
CHANGED_DEFAULTS = {"use_vllm": True}


def test_defaults():
    assert {name: getattr(config(), name) for name in OWN_DEFAULTS | CHANGED_DEFAULTS} == (
        OWN_DEFAULTS | CHANGED_DEFAULTS
    )


@pytest.mark.parametrize("objective", [*OBJECTIVES, "trl"])
def test_only_these_fields_are_new_or_differ_from_trl(objective):
    ours, theirs = (
        vars(config(objective=objective)),
        vars(GRPOConfig("out", **PLAIN | SEVERAL_UPDATES)),
    )
    timestamped = {"_n_gpu", "logging_dir", "run_name"}
    assert ours.keys() - theirs.keys() == OWN_DEFAULTS.keys()
    differing = {name for name in theirs.keys() - timestamped if ours[name] != theirs[name]}
    # The device is compared by what it is for: both are built for the CPU.
    assert differing - {"distributed_state"} == CHANGED_DEFAULTS.keys()


def test_no_default_is_shared_between_two_configs():
    first, second = config(), config()
    first.quantization_ignore.append("re:.*down_proj")
    first.vllm_engine_kwargs["enforce_eager"] = True
    assert (second.quantization_ignore, second.vllm_engine_kwargs) == (["lm_head"], {})


def test_every_added_field_has_its_sentence_on_the_command_line():
    helps = {field.name: field.metadata.get("help", "") for field in fields(QuRLPPOConfig)}
    added = helps.keys() - {field.name for field in fields(GRPOConfig)}
    assert not [
        name for name in added if not helps[name] or "`" in helps[name] or "%" in helps[name]
    ]
    assert (
        helps["critic_warmup_steps"]
        == "Number of initial optimizer steps in which only the critic learns."
    )
    assert all(len(helps[name]) < 200 for name in added)


def test_the_mixin_fits_another_trainers_config():
    @dataclass
    class QuantizedGMPOConfig(QuantizedRolloutsConfig, GMPOConfig):
        pass

    settings = QuantizedGMPOConfig(
        "out", **PLAIN, rollout_quantization="fp8", vllm_engine_kwargs='{"seed_": 1}'
    )
    assert (settings.use_vllm, settings.rollout_quantization, settings.engine_kwargs) == (
        True,
        "fp8",
        {"seed_": 1},
    )
    assert settings.learning_rate == GMPOConfig("out", **PLAIN).learning_rate, (
        "TRL's defaults are kept"
    )
    assert settings.updates_per_rollout == 1
    assert "weight_sync is 'nccl'" in refusal(QuantizedGMPOConfig, weight_sync="nccl")


@pytest.mark.parametrize("parent", [SDPOConfig, SDFTConfig])
def test_a_teacher_on_the_server_that_generates_is_refused(parent):
    """It would be the quantized actor. IW-OPD's teacher has a server of its own."""
    ours = dataclass(type("Quantized", (QuantizedRolloutsConfig, parent), {}))
    message = refusal(ours, vllm_mode="server", use_teacher_server=True)
    assert "use_teacher_server=True" in message and "use_teacher_server=False" in message
    assert not ours("out", **PLAIN, vllm_mode="server").use_teacher_server
    other = dataclass(type("Quantized", (QuantizedRolloutsConfig, IWOPDConfig), {}))
    url = "http://127.0.0.1:8001"
    assert other(
        "out", **PLAIN, use_teacher_server=True, teacher_model_server_url=url
    ).use_teacher_server


@pytest.mark.parametrize(("given", "expected"), [("none", None), ("None", None), (None, None)])
def test_unquantized_rollouts_by_name(given, expected):
    assert config(rollout_quantization=given).rollout_quantization is expected


def test_one_ignore_pattern_may_stand_without_a_list():
    assert config(quantization_ignore="lm_head").quantization_ignore == ["lm_head"]


@pytest.mark.parametrize(
    ("steps_per_generation", "gradient_accumulation_steps", "num_iterations", "updates"),
    [(4, 1, 1, 4), (4, 2, 1, 2), (4, 4, 1, 1), (4, 4, 3, 3), (2, 4, 1, 0.5)],
)
def test_updates_per_rollout(
    steps_per_generation, gradient_accumulation_steps, num_iterations, updates
):
    settings = config(
        steps_per_generation=steps_per_generation,
        gradient_accumulation_steps=gradient_accumulation_steps,
        num_iterations=num_iterations,
        objective="tis",
    )
    assert settings.updates_per_rollout == updates


# Refusals
# --------------------------------------------------------------------------------------------------

NAN, INFINITY = float("nan"), float("inf")

# A setting, a value that it cannot have, and what the message names as allowed.
VALUES = [
    ("weight_sync", "nccl", "'checkpoint'"),
    ("vllm_mode", "remote", "'server'"),
    ("mismatch_guard", "halt", "'stop'"),
    ("objective", "ppo", "'trl'"),
    *(("uaq_scale", scale, "1.0") for scale in (0.0, -1.5, INFINITY, NAN)),
    *(("importance_cap", cap, "None") for cap in (0.0, -1.0, NAN)),
    ("mismatch_guard_kl", 0.0, "0.1"),
    ("vllm_request_timeout", 0, "seconds"),
    ("vllm_request_timeout", NAN, "seconds"),
    ("sync_check_interval", -1, "0"),
    ("temperature", 0.0, "positive"),
    ("max_completion_length", 0, "1"),
    ("rollouts_ahead", -1, "0 or 1"),
    ("rollouts_ahead", 2, "0 or 1"),
    ("vllm_gpu_memory_utilization", 30, "at most 1"),
    ("num_generations", 0, "1"),
    ("top_p", 2.0, "at most 1"),
    ("top_k", -5, "0 for all"),
    ("min_p", 1.5, "[0, 1]"),
    ("repetition_penalty", 0.0, "positive"),
    ("generation_kwargs", "temperature=1", "dictionary"),
    ("uaq_scale", "1.5", "number"),
    ("smooth_activations", "off", "True or False or None"),
    ("max_steps", 2.5, "whole number"),
    ("importance_cap", True, "number or None"),
    ("quantization_ignore", "re:([", "regular expression"),
    ("vllm_engine_kwargs", "enforce_eager", "JSON"),
]


def refusal(kind=QuRLGRPOConfig, **settings):
    """What a config says that cannot be made."""
    with pytest.raises(ValueError) as error:
        kind("out", **PLAIN | SEVERAL_UPDATES | settings)
    return str(error.value)


@pytest.mark.parametrize(("name", "value", "allowed"), VALUES)
def test_a_value_that_is_refused_is_named_with_what_is_allowed(name, value, allowed):
    message = refusal(**{name: value})
    assert name in message and repr(value) in message and allowed in message


def test_every_value_of_the_tables_is_checked():
    assert {*CHOICES, *NUMBERS, *GROUP_NUMBERS} <= {name for name, *_ in VALUES}


# Settings that conflict, others that they need, and the way out.
CONFLICTING = [
    ({"use_vllm": False}, {}, "TRL's own trainer"),
    ({"round_base": True, "rollout_quantization": None}, {}, "round_base=False"),
    ({"round_base": True, "weight_sync": "stream"}, {}, "weight_sync='adapter'"),
    ({"weight_sync": "llmcompressor", "rollout_quantization": None}, {}, "weight_sync='auto'"),
    ({"rollout_checkpoint_dir": "~/rollouts"}, {}, "Write the path out"),
    ({"rollouts_ahead": 1, "vllm_mode": "colocate"}, {}, "vllm_mode='server'"),
    (
        {"vllm_engine_kwargs": {"enforce_eager": True}, "vllm_mode": "server"},
        {},
        "trl-qurl serve",
    ),
    (
        {"smooth_activations": True, "rollout_quantization": "fp8"},
        {},
        "Leave smooth_activations out",
    ),
    (
        {"smooth_activations": True, "weight_sync": "llmcompressor"},
        {},
        "Leave smooth_activations out",
    ),
    ({"smooth_activations": True, "round_base": True}, {}, "Leave smooth_activations out"),
    ({"sync_ref_model": True, "uaq_scale": 1.5}, {"beta": 0.1}, "sync_ref_model=False"),
    ({"dynamic_sampling_reward": "length"}, {}, "dynamic_sampling=True"),
    ({"dynamic_sampling": True, "rollouts_ahead": 1}, {"vllm_mode": "server"}, "rollouts_ahead=0"),
    (
        {
            "objective": "trl",
            "loss_type": "vespo",
            "vllm_importance_sampling_mode": "sequence_mask",
        },
        {},
        "'token_truncate' and 'token_mask'",
    ),
    *(
        (
            {"objective": objective, "vllm_importance_sampling_correction": False},
            {},
            "objective='trl'",
        )
        for objective in ("acr", "naive")
    ),
    *(
        ({"objective": "acr"} | settings, {}, "objective='tis'")
        for settings in (
            {"importance_sampling_level": "sequence"},
            {"loss_type": "cispo"},
            {"loss_type": "vespo"},
            {"use_bias_correction_kl": True, "beta": 0.1},
            {"delta": 4.0},
        )
    ),
]


@pytest.mark.parametrize(("settings", "beside", "way_out"), CONFLICTING, ids=json.dumps)
def test_a_conflict_is_named_with_the_way_out(settings, beside, way_out):
    message = refusal(**settings, **beside)
    assert all(f"{name}={value!r}" in message for name, value in settings.items()), message
    assert way_out in message


def test_what_only_some_trainers_can_do():
    @dataclass
    class Other(QuantizedRolloutsConfig, SDPOConfig):
        """As a project of somebody else may have it."""

    assert "rollouts_ahead=1" in refusal(Other, rollouts_ahead=1, vllm_mode="server")


def test_engine_arguments_that_are_taken_or_cannot_be_followed():
    for name, reason in {**TAKEN_ENGINE_ARGUMENTS, **UNFOLLOWED}.items():
        message = refusal(vllm_engine_kwargs={name: None})
        assert f"vllm_engine_kwargs sets {name!r}" in message and reason in message


# Each piece of advice, followed.
@pytest.mark.parametrize(
    "settings",
    [
        *({"objective": "acr", "loss_type": loss} for loss in CLIPPED_LOSS_TYPES),
        *(
            {"objective": objective, "loss_type": "cispo", "importance_sampling_level": "sequence"}
            for objective in (*OBJECTIVES.keys() - {"acr"}, "trl")
        ),
        *(
            {"objective": "tis", "loss_type": loss}
            for loss in (*CLIPPED_LOSS_TYPES, "sapo", "vespo", "luspo")
        ),
        *(
            {"objective": "trl", "vllm_importance_sampling_mode": mode}
            for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        ),
        {"objective": "trl", "vllm_importance_sampling_correction": False},
        *({"importance_cap": cap} for cap in (None, float("inf"), 1, 0.5)),
        {
            "loss_type": "vespo",
            "vllm_importance_sampling_mode": "token_truncate",
            "objective": "tis",
        },
        {
            f"vllm_importance_sampling_{name}": getattr(
                GRPOConfig, f"vllm_importance_sampling_{name}"
            )
            for name in TRLS
        },
        {"objective": "trl", "vllm_importance_sampling_clip_min": 0.5},
        {"objective": "tis", "delta": 4.0},
        {"vllm_model_impl": "transformers"},
        {"sync_ref_model": True, "beta": 0.1, "uaq_scale": 1.0, "use_bias_correction_kl": False},
        {"objective": "acr", "beta": 0.1, "use_bias_correction_kl": False},
        {"objective": "tis", "beta": 0.1},
        {"vllm_engine_kwargs": {"enforce_eager": True, "kv_cache_dtype": "bfloat16"}},
        {"vllm_engine_kwargs": {"kv_cache_dtype": "fp8"}},
        {"vllm_engine_kwargs": None},
    ],
    ids=json.dumps,
)
def test_what_fits_is_accepted_without_a_warning(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(**settings)


@pytest.mark.parametrize("cache", TOKEN_CACHES)
def test_caches_that_only_gpus_have(cache, monkeypatch):
    settings = {"vllm_engine_kwargs": {"kv_cache_dtype": cache}}
    message = refusal(**settings)
    assert "kv_cache_dtype of vllm_engine_kwargs" in message and repr(cache) in message
    assert message.endswith("'fp8', 'fp8_e4m3'.")
    monkeypatch.setattr("trl_qurl.quantization.formats.gpu_capability", lambda: (8, 0))
    config(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"importance_sampling_level": "sequence"},  # TRL's own gspo.py
        *({"loss_type": loss_type} for loss_type in ("cispo", "sapo", "vespo", "luspo")),
        {"delta": 4.0},
        {"beta": 0.1},  # TRL weights the penalty by the ratio
    ],
    ids=json.dumps,
)
def test_a_loss_that_the_default_does_not_fit_is_corrected_by_tis(settings):
    with pytest.warns(
        UserWarning, match="does not fit the default objective 'acr', so 'tis' is used"
    ) as caught:
        given = config(**settings)
    assert given.objective == "tis" and [warning.filename for warning in caught] == [
        config.__code__.co_filename
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = dataclasses.replace(given, generation_batch_size=None)
    assert copied.objective == given.to_dict()["objective"] == "tis"


@pytest.mark.parametrize(
    "settings",
    [
        {"vllm_importance_sampling_correction": False},
        *({"vllm_importance_sampling_mode": mode} for mode in ("token_mask", "sequence_truncate")),
        {"vllm_importance_sampling_mode": "token_mask", "loss_type": "cispo"},
        {"vllm_importance_sampling_clip_min": 0.5},
    ],
    ids=json.dumps,
)
def test_a_correction_of_trls_that_is_written_out_is_trls(settings):
    with pytest.warns(
        UserWarning, match="does not fit the default objective 'acr', so 'trl' is used"
    ) as caught:
        given = config(**settings)
    assert given.objective == "trl" and [warning.filename for warning in caught] == [
        config.__code__.co_filename
    ]
    assert {name: getattr(given, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("per_rollout", "iterations", "per_update", "mixes"),
    [
        (4, 1, 4, False),
        (8, 1, 4, False),
        (2, 1, 4, False),
        (3, 2, 2, False),
        (4, 1, 3, True),
        (3, 1, 2, True),
    ],
)
def test_updates_that_mix_two_rollouts_are_named(per_rollout, iterations, per_update, mixes):
    settings = {"steps_per_generation": per_rollout, "num_iterations": iterations}
    settings["gradient_accumulation_steps"] = per_update
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config(**settings)
    messages = [str(warning.message) for warning in caught]
    assert [message.startswith("Updates mix two rollouts: ") for message in messages] == [
        True
    ] * mixes


def test_changed_settings_that_only_trls_loss_reads_are_named_in_one_warning():
    settings = {
        "vllm_importance_sampling_clip_max": 4.0,
        "vllm_importance_sampling_clip_min": 0.5,
        "vllm_importance_sampling_mode": "token_mask",
    }
    with pytest.warns(UserWarning) as caught:
        given = config(objective="naive", **settings)
    [warning] = caught
    message = str(warning.message)
    assert all(f"{name}={value!r} has no effect" in message for name, value in settings.items())
    assert "importance_cap" in message and message.count("objective='trl'") == 2
    assert warning.filename == config.__code__.co_filename
    assert {name: getattr(given, name) for name in settings} == settings
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(objective="trl", **settings)


def test_a_list_of_numbers_is_not_checked_as_a_number():  # the beta of TRL's Online DPO
    check_types(dataclasses.make_dataclass("Betas", [("beta", list[float])])([0.1]))


def test_llmcompressor_works_in_one_process(monkeypatch):
    # whether llm-compressor is here or not
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    config(weight_sync="llmcompressor")
    monkeypatch.setattr(QuRLGRPOConfig, "world_size", 2)
    message = refusal(weight_sync="llmcompressor")
    assert "world_size=2" in message and "weight_sync='auto'" in message


def test_processes_wait_for_the_main_one_longer_than_it_waits_for_the_server(monkeypatch):
    monkeypatch.setattr(QuRLGRPOConfig, "world_size", 2)
    config(vllm_mode="server")  # 900 + 240 seconds, and TRL's 1800
    message = refusal(vllm_mode="server", vllm_server_timeout=1200.0)
    assert "vllm_request_timeout=900.0 and vllm_server_timeout=1200.0" in message
    assert "ddp_timeout=1800" in message
    config(vllm_mode="server", vllm_server_timeout=1200.0, ddp_timeout=2101)
    config(vllm_mode="server", vllm_request_timeout=1559.0)
    assert "ddp_timeout=1800" in refusal(vllm_mode="server", vllm_request_timeout=1560.0)
    config(vllm_server_timeout=1200.0)  # a colocated engine has no requests
    monkeypatch.setattr(QuRLGRPOConfig, "world_size", 1)
    config(vllm_mode="server", vllm_server_timeout=1200.0)


# The command line and YAML
# -------------------------------------------------------------------------------------------

COMMAND_LINE = [
    "--output_dir",
    "out",
    "--use_cpu",
    "true",
    "--bf16",
    "false",
    "--report_to",
    "none",
]
COMMAND_LINE += ["--steps_per_generation", "4"]


@pytest.mark.parametrize("parser", [TrlParser, HfArgumentParser])
def test_the_command_line(parser):
    arguments = [
        "--rollout_quantization",
        "none",
        "--vllm_engine_kwargs",
        '{"enforce_eager": true, "seed_": 3}',
    ]
    arguments += ["--quantization_ignore", "lm_head", "re:.*down_proj", "--objective", "tis"]
    arguments += ["--importance_cap", "inf"]
    [settings] = parser(QuRLGRPOConfig).parse_args_into_dataclasses([*COMMAND_LINE, *arguments])
    assert settings.rollout_quantization is None
    assert settings.engine_kwargs == {"enforce_eager": True, "seed_": 3}
    assert settings.quantization_ignore == ["lm_head", "re:.*down_proj"]
    assert (settings.objective, settings.importance_cap) == ("tis", float("inf"))


def test_a_clash_is_found_in_json_as_well():
    arguments = [*COMMAND_LINE, "--vllm_engine_kwargs", '{"quantization": "fp8"}']
    with pytest.raises(ValueError, match="'quantization', .* rollout_quantization"):
        TrlParser(QuRLGRPOConfig).parse_args_and_config(arguments)


def test_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    settings = {
        "rollout_quantization": "none",
        "quantization_ignore": ["lm_head", "re:.*mlp.*"],
        "objective": "tis",
    }
    settings |= {"vllm_engine_kwargs": {"enforce_eager": True}, "importance_cap": 4.0}
    path.write_text(yaml.safe_dump(settings))
    [parsed] = TrlParser(QuRLGRPOConfig).parse_args_and_config(
        [*COMMAND_LINE, "--config", str(path)]
    )
    assert {name: getattr(parsed, name) for name in settings} == settings | {
        "rollout_quantization": None
    }


def test_yaml_with_one_ignore_pattern(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("quantization_ignore: lm_head\n")
    [parsed] = TrlParser(QuRLGRPOConfig).parse_args_and_config(
        [*COMMAND_LINE, "--config", str(path)]
    )
    assert parsed.quantization_ignore == ["lm_head"]
