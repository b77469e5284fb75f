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

from trl_qurl import QuRLGRPOConfig, QuRLPPOConfig, QuRLRLOOConfig
from trl_qurl.config import CLIPPED_LOSS_TYPES, TAKEN_ENGINE_ARGUMENTS, QuantizedRolloutsConfig
from trl_qurl.config.checks import UNFOLLOWED, check_types
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
    with pytest.raises(ValueError, match="weight_sync is 'nccl'"):
        QuantizedGMPOConfig("out", **PLAIN, weight_sync="nccl")


@pytest.mark.parametrize("parent", [SDPOConfig, SDFTConfig])
def test_a_teacher_on_the_server_that_generates_is_refused(parent):
    """It would be the quantized actor. IW-OPD's teacher has a server of its own."""
    ours = dataclass(type("Quantized", (QuantizedRolloutsConfig, parent), {}))
    with pytest.raises(ValueError, match="use_teacher_server=True .* quantized actor.* False"):
        ours("out", **PLAIN, vllm_mode="server", use_teacher_server=True)
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

# Settings that cannot work together -> what is wrong ... what to do.
REFUSED = [
    (
        {"rollout_quantization": "int4"},
        r"Unknown quantization scheme 'int4'; did you mean 'w4a16'\? Choose one of 'int8', 'fp8', "
        r".*, or None",
    ),
    (
        {"weight_sync": "nccl"},
        r"weight_sync is 'nccl', but must be one of 'auto', 'stream', 'checkpoint', 'adapter', "
        r"'llmcompressor'",
    ),
    (
        {"uaq_scale": 0.0},
        r"uaq_scale is 0\.0, .* must be positive and finite \(.* 1\.5; 1\.0 turns UAQ off\)",
    ),
    ({"uaq_scale": "1.5"}, r"uaq_scale is '1\.5', but must be a number\."),
    (
        {"smooth_activations": "off"},
        r"smooth_activations is 'off', but must be True or False or None\.",
    ),
    ({"max_steps": 2.5}, r"max_steps is 2\.5, but must be a whole number\."),
    ({"importance_cap": True}, r"importance_cap is True, but must be a number or None\."),
    ({"num_generations": 0}, r"num_generations is 0, but must be 1 or more\."),
    (
        {"vllm_gpu_memory_utilization": 30},
        r"vllm_gpu_memory_utilization is 30, but must be a share of the GPU",
    ),
    (
        {"quantization_ignore": ["lm_head", "re:(["]},
        r"quantization_ignore has 're:\(\[', which is not a regular exp",
    ),
    ({"uaq_scale": -1.5}, r"uaq_scale is -1\.5, .* 1\.0 turns UAQ off"),
    ({"uaq_scale": float("inf")}, r"uaq_scale is inf, .* 1\.0 turns UAQ off"),
    ({"uaq_scale": float("nan")}, r"uaq_scale is nan, .* 1\.0 turns UAQ off"),
    (
        {"sync_ref_model": True, "beta": 0.1, "uaq_scale": 1.5},
        r"sync_ref_model=True mixes .* uaq_scale=1\.5 .*: set uaq_scale=1\.0, or "
        r"sync_ref_model=False",
    ),
    (
        {"sync_check_interval": -1},
        r"sync_check_interval is -1, but must be a number of syncs, or 0 for none",
    ),
    (
        {"vllm_request_timeout": 0},
        r"vllm_request_timeout is 0, but must be a positive number of seconds",
    ),
    (
        {"vllm_request_timeout": float("nan")},
        r"vllm_request_timeout is nan, but must be a positive number of seconds",
    ),
    (
        {"vllm_engine_kwargs": {"kv_cache_dtype": "fp8_e5m2"}},
        r"kv_cache_dtype of vllm_engine_kwargs is 'fp8_e5m2', a format of the key-value cache .*: "
        r"use one of 'auto', ",
    ),
    (
        {"vllm_mode": "server", "vllm_engine_kwargs": {"enforce_eager": True}},
        r"\['enforce_eager'\] would have no effect with vllm_mode='server': pass them to `trl-qurl "
        r"serve`",
    ),
    (
        {"vllm_engine_kwargs": "enforce_eager"},
        r"vllm_engine_kwargs is 'enforce_eager': write a JSON dictionary, such as",
    ),
    (
        {"objective": "ppo"},
        r"objective is 'ppo', but must be one of 'acr', 'tis', 'decoupled', 'quantized_ratio', "
        r"'naive', .*'trl'\.",
    ),
    *(
        (
            {"objective": objective, "vllm_importance_sampling_correction": False},
            rf"correction=False does not fit objective='{objective}': leave it True .*, or use "
            r"objective='trl'",
        )
        for objective in OBJECTIVES
    ),
    (
        {"objective": "acr", "beta": 0.1},
        r"use_bias_correction_kl=True with beta=0\.1 does not fit objective='acr': set .*=False, "
        r"or use .*'tis'",
    ),
    *(
        (
            {"importance_cap": cap},
            r"importance_cap is .*, but must be a ratio above 0, or None for no cap",
        )
        for cap in (0.0, -1.0, float("nan"))
    ),
    (
        {"use_vllm": False},
        r"use_vllm=False has no quantized rollouts: set it to True, or use TRL's own trainer",
    ),
    (
        {"objective": "acr", "delta": 4.0},
        r"delta=4\.0 does not fit .*: set delta=None, or use objective='tis'.* or 'trl'",
    ),
    (
        {"objective": "acr", "importance_sampling_level": "sequence"},
        r"importance_sampling_level='sequence' does not fit objective='acr': use 'token', or use "
        r"objective='tis'",
    ),
    *(
        (
            {"objective": "acr", "loss_type": loss_type},
            rf"loss_type='{loss_type}' does not fit objective='acr'.*'dr_grpo', 'dapo', or use "
            r"objective='tis'.*'trl'",
        )
        for loss_type in ("cispo", "sapo", "vespo", "luspo")
    ),
    *(
        (
            {"objective": "trl", "loss_type": "vespo", "vllm_importance_sampling_mode": mode},
            rf"'vespo' does not fit vllm_importance_sampling_mode='{mode}': use one of "
            r"'token_truncate', 'token_mask'",
        )
        for mode in ("sequence_mask", "sequence_truncate")
    ),
    *(
        (
            {"vllm_engine_kwargs": {argument: None}},
            rf"vllm_engine_kwargs sets '{argument}', but that is governed by .*\. Remove it\.",
        )
        for argument in TAKEN_ENGINE_ARGUMENTS
    ),
    *(
        (
            {"vllm_engine_kwargs": {argument: None}},
            rf"vllm_engine_kwargs sets '{argument}', but .*\. Remove it\.",
        )
        for argument in UNFOLLOWED
    ),
]


@pytest.mark.parametrize(
    ("settings", "message"), REFUSED, ids=[json.dumps(settings) for settings, _ in REFUSED]
)
def test_what_cannot_work_is_refused_with_the_way_out(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


# Each piece of advice, followed.
@pytest.mark.parametrize(
    "settings",
    [
        *({"objective": "acr", "loss_type": loss} for loss in CLIPPED_LOSS_TYPES),
        *(
            {
                "loss_type": loss,
                "importance_sampling_level": level,
                "delta": 4.0,
                "objective": objective,
            }
            for objective in (*[name for name in OBJECTIVES if name != "acr"], "trl")
            for loss in (*CLIPPED_LOSS_TYPES, "cispo", "sapo", "vespo", "luspo")
            for level in ("token", "sequence")
            if not (objective == "trl" and loss == "vespo")  # refused with TRL's default mode
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
    with pytest.raises(
        ValueError, match=f"is {cache!r}, a format .* not support here: .* 'fp8', 'fp8_e4m3'."
    ):
        config(**settings)
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


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_changed_settings_that_only_trls_loss_reads_are_named_in_one_warning(objective):
    advice = {
        "vllm_importance_sampling_clip_max=4.0": "set importance_cap.",
        "vllm_importance_sampling_clip_min=0.5": "leave it out, or use objective='trl'.",
        "vllm_importance_sampling_mode='token_mask'": "leave it out, or use objective='trl'.",
    }
    settings = {
        setting.partition("=")[0]: yaml.safe_load(setting.partition("=")[2]) for setting in advice
    }
    with pytest.warns(UserWarning) as caught:
        given = config(objective=objective, **settings)
    [warning] = caught
    sentences = [
        f"{setting} has no effect with objective='{objective}': {way}"
        for setting, way in advice.items()
    ]
    assert (str(warning.message), warning.filename) == (
        " ".join(sentences),
        config.__code__.co_filename,
    )
    assert {name: getattr(given, name) for name in settings} == settings
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(objective="trl", **settings)


def test_a_list_of_numbers_is_not_checked_as_a_number():  # the beta of TRL's Online DPO
    check_types(dataclasses.make_dataclass("Betas", [("beta", list[float])])([0.1]))


def test_llmcompressor_works_with_a_format_and_in_one_process(monkeypatch):
    # whether llm-compressor is here or not
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(
        ValueError, match=r"needs a format .*, but rollout_quantization is None .*: use weight_sync"
    ):
        config(weight_sync="llmcompressor", rollout_quantization=None)
    monkeypatch.setattr(QuRLGRPOConfig, "world_size", 2)
    with pytest.raises(
        ValueError, match=r"works in one process, .* and this run has 2: use weight_sync='auto'"
    ):
        config(weight_sync="llmcompressor")
    config(weight_sync="auto")


def test_processes_wait_for_the_main_one_longer_than_it_waits_for_the_server(monkeypatch):
    for kind in (QuRLGRPOConfig, QuRLRLOOConfig, QuRLPPOConfig):
        monkeypatch.setattr(kind, "world_size", 2)
    config(vllm_mode="server")  # 900 + 240 seconds, and TRL's 1800
    for kind in (QuRLGRPOConfig, QuRLRLOOConfig, QuRLPPOConfig):
        with pytest.raises(
            ValueError, match=r"for 2100 seconds .* give up after ddp_timeout=1800: set it to more"
        ):
            kind("out", **PLAIN, vllm_mode="server", vllm_server_timeout=1200.0)
    config(vllm_mode="server", vllm_server_timeout=1200.0, ddp_timeout=2101)
    config(vllm_mode="server", vllm_request_timeout=1559.0)
    with pytest.raises(ValueError, match="for 1800 seconds"):
        config(vllm_mode="server", vllm_request_timeout=1560.0)
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
    with pytest.raises(
        ValueError, match=r"vllm_engine_kwargs sets 'quantization', .* by rollout_quantization"
    ):
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
