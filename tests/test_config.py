"""The configurations: their defaults, what they refuse and what they advise, and when they warn."""

import copy
import dataclasses
import inspect
import json
import pickle
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from documents import ROOT
from support.building import build
from support.configs import PLAIN, SEVERAL_UPDATES, config, refusal
from transformers import HfArgumentParser
from trl import GRPOConfig, RLOOConfig, TrlParser
from trl.experimental.gmpo import GMPOConfig

from trl_qurl import QuRLGRPOConfig, QuRLPPOConfig, QuRLRLOOConfig, QuRLRLOOTrainer
from trl_qurl.config.checks import conflicts
from trl_qurl.config.checks.conflicts import WITH_A_CRITIC
from trl_qurl.config.checks.engine_arguments import TAKEN_ENGINE_ARGUMENTS, UNFOLLOWED
from trl_qurl.config.checks.names import OLD_NAMES
from trl_qurl.config.checks.values import COUNT, POSITIVE, SHARE
from trl_qurl.config.rollout import QuantizedRolloutsConfig
from trl_qurl.quantization.formats import TOKEN_CACHES
from trl_qurl.trainers.engine import QuantizedEngineMixin

OF_ROLLOUTS = {
    "rollout_quantization": "int8",
    "quantization_ignore": ["lm_head"],
    "weight_sync": "auto",
    "round_base": False,
    "rollout_checkpoint_dir": None,
    "uaq_scale": 1.0,
    "vllm_engine_kwargs": {},
    "sync_check_interval": 16,
    "vllm_request_timeout": 900.0,
    "importance_cap": 2.0,
    "mismatch_guard": "warn",
    "mismatch_guard_kl": 0.1,
    "smooth_activations": None,
}
OF_GRPO = {"objective": "acr", "dynamic_sampling": False, "dynamic_sampling_reward": None}
OF_A_CRITIC = {
    "gamma": 1.0,
    "gae_lambda": 1.0,
    "value_clip_range": 0.5,
    "critic_learning_rate": 1e-5,
    "critic_warmup_steps": 0,
}
DEFAULTS = [
    (QuRLGRPOConfig, GRPOConfig, OF_ROLLOUTS | OF_GRPO),
    (QuRLPPOConfig, GRPOConfig, OF_ROLLOUTS | OF_GRPO | OF_A_CRITIC),
    (QuRLRLOOConfig, RLOOConfig, OF_ROLLOUTS | {"objective": "tis"}),
]
each_kind = pytest.mark.parametrize("kind", [kind for kind, *_ in DEFAULTS])


@pytest.mark.parametrize(("kind", "parent", "new"), DEFAULTS)
def test_defaults_are_trls_but_for_our_settings(kind, parent, new):
    ours = vars(kind("out", **PLAIN | SEVERAL_UPDATES))
    theirs = vars(parent("out", **PLAIN | SEVERAL_UPDATES)) | {"use_vllm": True}
    if kind is QuRLPPOConfig:
        theirs |= {"num_generations": 1, "num_generations_eval": 1, "scale_rewards": "none"}
    assert {name: ours[name] for name in ours.keys() - theirs.keys()} == new
    for name in theirs.keys() - {"_n_gpu", "logging_dir", "run_name", "distributed_state"}:
        assert ours[name] == theirs[name], name


def test_no_default_is_shared_between_two_configs():
    first = config()
    first.quantization_ignore.append("re:.*down_proj")
    first.vllm_engine_kwargs["enforce_eager"] = True
    assert (config().quantization_ignore, config().vllm_engine_kwargs) == (["lm_head"], {})


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
BEYOND = {POSITIVE: (0.0, NAN, "1.5", True), COUNT: (-1,), SHARE: (-0.1, 1.1)}


def beyond_limits(kind):
    """Each setting with a limit or choices, a value it cannot have, and what is allowed."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for limit in getattr(hint, "__metadata__", ()):
            yield from ((kind, name, value, limit.requirement) for value in BEYOND[limit])
        if get_origin(hint) is Literal:
            yield kind, name, "another", repr(get_args(hint)[-1])


REFUSED = [case for kind, *_ in DEFAULTS for case in beyond_limits(kind)]
for name, fitting in WITH_A_CRITIC.items():
    REFUSED.append((QuRLPPOConfig, name, "another", repr(fitting[-1])))
REFUSED += [
    (QuRLGRPOConfig, "objective", "ppo", "'trl'"),
    (QuRLRLOOConfig, "objective", "acr", "'tis'"),
    (QuRLGRPOConfig, "temperature", 0.0, "makes all completions equal"),
    (QuRLGRPOConfig, "temperature", 0.002, "at least 0.01"),
    (QuRLGRPOConfig, "quantization_ignore", ["re:(["], "regular expression"),
    (QuRLGRPOConfig, "quantization_ignore", "lm_head", "list of patterns"),
    (QuRLGRPOConfig, "vllm_engine_kwargs", "enforce_eager", "JSON"),
]


@pytest.mark.parametrize(("kind", "name", "value", "allowed"), REFUSED)
def test_a_value_that_is_refused_is_named_with_what_is_allowed(kind, name, value, allowed):
    message = refusal(kind, **{name: value})
    shown = value[0] if isinstance(value, list) else value
    assert name in message and repr(shown) in message and allowed in message


OLD = [line.split(maxsplit=1)[0] for line in OLD_NAMES.read_text().splitlines()]
TABLE_OF_OLD = ROOT / "docs" / "from-trl.md"


@each_kind
def test_unknown_names_are_refused_all_at_once_each_with_its_remedy(kind):
    """Versions of transformers that are supported may still have some of the old ones."""
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = [*(name for name in OLD if name not in known), "lerning_rate", "color"]
    with pytest.raises(TypeError) as error:
        kind("out", **PLAIN | dict.fromkeys(unknown, 1))
    first, *lines = str(error.value).split("\n")
    assert first == f"{kind.__name__}() got unexpected keyword arguments:"
    rows = OLD_NAMES.read_text().splitlines()
    assert [f"{row};" for row in rows if row.split()[0] in unknown] == lines[:-2]
    assert lines[-2:] == ["lerning_rate, did you mean learning_rate?;", "color"]


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


# By setting, a value with which it conflicts.
FAILING = {
    "use_vllm": False,
    "weight_sync": "llmcompressor",
    "vllm_engine_kwargs": {"enforce_eager": True},
    "vllm_mode": "server",
    "smooth_activations": True,
    "rollout_quantization": "fp8",
    "vllm_importance_sampling_correction": False,
    "importance_sampling_level": "sequence",
    "loss_type": "cispo",
    "beta": 0.1,
    "delta": 4.0,
    "objective": "acr",
}
CONFLICTS = (*conflicts.CONFLICTS, conflicts.UNCORRECTED, *conflicts.LIFTED_BOUND)


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda conflict: conflict.settings[0])
def test_a_conflict_is_named_with_the_way_out(conflict, monkeypatch):
    monkeypatch.setattr(conflicts, "find_spec", lambda name: None)
    settings = {name: FAILING[name] for name in conflict.settings[:2]}
    message = refusal(**settings)
    assert conflict.way_out in message
    for named in [f"{name}={value!r}" for name, value in settings.items()]:
        assert named in message


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


def test_a_home_directory_is_written_out():
    assert config(rollout_checkpoint_dir="~/rollouts").rollout_checkpoint_dir == str(
        Path.home() / "rollouts"
    )


def test_a_reward_that_decides_turns_dynamic_sampling_on():
    assert config(dynamic_sampling_reward="length").dynamic_sampling


# Each piece of advice, followed; and what must not be refused by mistake.
FITTING = [
    {"objective": "acr", "loss_type": "grpo"},
    # an objective that was chosen does not read TRL's correction
    {"objective": "tis", "vllm_importance_sampling_clip_max": 4.0},
    {"objective": "tis", "loss_type": "cispo", "importance_sampling_level": "sequence"},
    {"objective": "trl", "loss_type": "cispo", "importance_sampling_level": "sequence"},
    {"objective": "trl", "vllm_importance_sampling_correction": False},
    {"importance_cap": None},
    {"importance_cap": 1},
    {"vllm_model_impl": "transformers"},
    {"sync_ref_model": True, "beta": 0.1, "use_bias_correction_kl": False},
    {"objective": "tis", "beta": 0.1, "delta": 4.0},
    {"vllm_engine_kwargs": {"enforce_eager": True, "kv_cache_dtype": "fp8"}},
    {"vllm_engine_kwargs": None},
    # sampling settings that the trainer follows, or that change no distribution
    {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "temperature": 0.7},
    {"generation_kwargs": {"temperature": 1.0, "presence_penalty": 0.0, "bad_words": []}},
    {"generation_kwargs": {"include_stop_str_in_output": True, "ignore_eos": True}},
    {"top_k": 20, "min_p": 0.05, "top_p": 0.9, "max_completion_length": None},
    {"generation_kwargs": {"structured_outputs": {"regex": "a"}}},
    {"repetition_penalty": 1.1, "generation_kwargs": {"repetition_penalty": 1.0, "top_p": 0.8}},
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


OF_TRLS = [
    {"vllm_importance_sampling_correction": False},
    {"vllm_importance_sampling_mode": "token_mask", "loss_type": "cispo"},
    {"vllm_importance_sampling_clip_min": 0.5},
    {"vllm_importance_sampling_clip_max": 4.0},
]


@pytest.mark.parametrize("name", [conflict.settings[0] for conflict in conflicts.LIFTED_BOUND])
def test_a_loss_that_the_default_does_not_fit_is_corrected_by_tis(name):
    value = FAILING[name]
    given, message = warned(**{name: value})
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


# Sampling settings that make the ratio wrong, or cannot train
# --------------------------------------------------------------------------------------------------

# Settings, and what the warning begins with.
NAMED = [
    ({"top_k": 20, "repetition_penalty": 1.1}, "repetition_penalty=1.1: "),
    ({"generation_kwargs": '{"min_tokens": 2}'}, "generation_kwargs['min_tokens']=2: "),
]
OVERRIDES = {
    "temperature": 0.5,
    "logit_bias": {20: 4.0},
    "of_a_later_vllm": 1,
}
NAMED += [
    (
        {"repetition_penalty": 1.1, "generation_kwargs": {name: value}},
        f"repetition_penalty=1.1, generation_kwargs[{name!r}]={value}: ",
    )
    for name, value in OVERRIDES.items()
]


@pytest.mark.parametrize(("settings", "named"), NAMED, ids=json.dumps)
def test_sampling_settings_are_named_with_the_way_out(settings, named):
    _, message = warned(**settings)
    assert message.startswith(named)
    assert "Set repetition_penalty=1.0, also in generation_kwargs" in message


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("n", 2, "num_generations"),
        ("seed", 0, "seed setting"),
        ("logprobs", 3, "Remove it"),
    ],
)
def test_parameters_that_cannot_work_are_refused(name, value, way_out):
    message = refusal(generation_kwargs={name: value})
    assert f"generation_kwargs sets {name}={value}" in message and way_out in message


def test_a_trainer_that_does_not_score_its_rollouts_does_not_follow():
    args = QuRLGRPOConfig("out", **PLAIN | SEVERAL_UPDATES, top_p=0.9)
    trainer = SimpleNamespace(args=args)
    with pytest.warns(UserWarning, match="top_p=0.9: .*because SimpleNamespace computes them"):
        assert QuantizedEngineMixin._count_listed(trainer) == 0


# The command line
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


# PPO and RLOO
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generations", [1, 3])
def test_any_number_of_generations_from_one_up(generations):
    settings = {"scale_rewards": False, "per_device_train_batch_size": 3, **PLAIN}
    seen = QuRLPPOConfig("out", **settings, num_generations=generations, steps_per_generation=3)
    assert seen.num_generations == generations and seen.generation_batch_size == 9
    copied = QuRLPPOConfig(**{**seen.to_dict(), "generation_batch_size": None})
    assert copied.num_generations == generations


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_generations": 3}, "divisible by num_generations"),
        ({"generation_batch_size": 6, "steps_per_generation": None}, "divisible by the global"),
        ({"dynamic_sampling_reward": "length"}, "dynamic_sampling is True"),
    ],
)
def test_the_parents_other_checks_stay_on(settings, named):
    assert named in refusal(QuRLPPOConfig, per_device_train_batch_size=4, **settings)


def test_trl_itself_refuses_one_generation():
    """The only check that one generation per prompt has to get past; without it, our way around it
    can go.
    """
    assert "at least 2 generations per prompt" in refusal(GRPOConfig, num_generations=1)


@pytest.mark.parametrize("other", [RLOOConfig, QuRLGRPOConfig])
def test_a_config_of_trls_or_of_another_algorithm_is_not_taken(other, tmp_path):
    args = other(str(tmp_path), **PLAIN, steps_per_generation=2)
    with pytest.raises(TypeError, match=rf"{other.__name__}.*QuRLRLOOConfig"):
        build(QuRLRLOOTrainer, tmp_path, args=args)
