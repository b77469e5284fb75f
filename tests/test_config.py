"""The configurations: their defaults, what they refuse and what they advise, and when they warn."""

import copy
import dataclasses
import inspect
import json
import pickle
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from documents import ROOT
from support.building import build
from support.configs import PLAIN, SEVERAL_UPDATES, config, refusal
from transformers import HfArgumentParser
from trl import GRPOConfig, RLOOConfig, TrlParser

from trl_qurl import QuRLGRPOConfig, QuRLPPOConfig, QuRLRLOOConfig, QuRLRLOOTrainer
from trl_qurl.config.checks import conflicts, sampling
from trl_qurl.config.checks.engine_arguments import TAKEN_ENGINE_ARGUMENTS, UNFOLLOWED
from trl_qurl.config.checks.names import OLD_NAMES
from trl_qurl.config.checks.values import COUNT, POSITIVE, SHARE
from trl_qurl.quantization.formats import TOKEN_CACHES
from trl_qurl.trainers.engine import QuantizedEngineMixin

PARENTS = {QuRLGRPOConfig: GRPOConfig, QuRLPPOConfig: GRPOConfig, QuRLRLOOConfig: RLOOConfig}
each_kind = pytest.mark.parametrize("kind", PARENTS)


@each_kind
def test_defaults_are_trls_but_for_our_settings(kind):
    """The tables of the documentation have ours (test_documentation.py)."""
    ours = vars(kind("out", **PLAIN | SEVERAL_UPDATES))
    theirs = vars(PARENTS[kind]("out", **PLAIN | SEVERAL_UPDATES))
    theirs |= {"use_vllm": True}
    if kind is QuRLPPOConfig:
        theirs |= {"num_generations": 1, "num_generations_eval": 1, "scale_rewards": "none"}
    for name in theirs.keys() - {"_n_gpu", "logging_dir", "run_name", "distributed_state"}:
        assert ours[name] == theirs[name], name


@pytest.mark.parametrize(("steps", "updates"), [(4, 6), (1, 1.5)])
def test_updates_per_rollout(steps, updates):
    settings = config(
        steps_per_generation=steps,
        gradient_accumulation_steps=2,
        num_iterations=3,
        objective="tis",
    )
    assert settings.updates_per_rollout == updates


# Refusals
# --------------------------------------------------------------------------------------------------

NAN = float("nan")
BEYOND = {
    POSITIVE: (0.0, NAN, "1.5", True),
    COUNT: (-1,),
    SHARE: (-0.1, 1.1),
}


@pytest.mark.parametrize("given", ["none", "None", None])
def test_unquantized_rollouts_by_name(given):
    assert config(rollout_quantization=given).rollout_quantization is None


# By setting, a value with which it conflicts.
FAILING = yaml.safe_load("""
use_vllm: false
weight_sync: llmcompressor
vllm_engine_kwargs: {enforce_eager: true}
vllm_mode: server
smooth_activations: true
rollout_quantization: fp8
vllm_importance_sampling_correction: false
importance_sampling_level: sequence
loss_type: cispo
beta: 0.1
delta: 4.0
objective: acr""")


def refused():
    """Kinds of configs, settings, and the way out that the error names beside these."""
    for kind in PARENTS:
        for name, hint in get_type_hints(kind, include_extras=True).items():
            for limit in getattr(hint, "__metadata__", ()):
                for value in BEYOND[limit]:
                    yield kind, {name: value}, limit.requirement
            if get_origin(hint) is Literal:
                yield kind, {name: "another"}, repr(get_args(hint)[-1])
    for name, fitting in conflicts.WITH_A_CRITIC.items():
        yield QuRLPPOConfig, {name: "another"}, repr(fitting[-1])
    yield QuRLPPOConfig, {"num_generations": 3}, "divisible by num_generations"  # TRL's
    yield QuRLRLOOConfig, {"objective": "acr"}, "'tis'"
    for allowed, settings in OF_GRPO.items():
        yield QuRLGRPOConfig, settings, allowed
    for name, governor in {**TAKEN_ENGINE_ARGUMENTS, **UNFOLLOWED}.items():
        yield QuRLGRPOConfig, {"vllm_engine_kwargs": {name: None}}, governor
    for cache in TOKEN_CACHES:
        for named in (cache, "fp8"):
            yield QuRLGRPOConfig, {"vllm_engine_kwargs": {"kv_cache_dtype": cache}}, repr(named)
    for name in ("n", "seed", "logprobs"):
        yield QuRLGRPOConfig, {"generation_kwargs": {name: 2}}, sampling.REFUSED[name]
    for conflict in (*conflicts.CONFLICTS, conflicts.UNCORRECTED, *conflicts.LIFTED_BOUND):
        settings = {name: FAILING[name] for name in conflict.settings[:2]}
        yield QuRLGRPOConfig, settings, conflict.way_out


OF_GRPO = yaml.safe_load("""
"'trl'": {objective: ppo}
makes all completions equal: {temperature: 0.0}
at least 0.01: {temperature: 0.002}
regular expression: {quantization_ignore: ["re:(["]}
list of patterns: {quantization_ignore: lm_head}
JSON: {vllm_engine_kwargs: enforce_eager}""")


@pytest.mark.parametrize(("kind", "settings", "way_out"), refused())
def test_what_is_refused_is_named_with_the_way_out(kind, settings, way_out, monkeypatch):
    monkeypatch.setattr(conflicts, "find_spec", lambda name: None)
    message = refusal(kind, **settings)
    assert way_out in message
    for name, value in settings.items():
        parts = value if isinstance(value, list | dict) else [repr(value)]
        for part in (name, *parts):
            assert part in message


def test_a_gpu_has_more_formats_of_caches(monkeypatch):
    monkeypatch.setattr("trl_qurl.quantization.checks.kv_cache.gpu_capability", lambda: (8, 0))
    for cache in TOKEN_CACHES:
        config(vllm_engine_kwargs={"kv_cache_dtype": cache})


@each_kind
def test_unknown_names_are_refused_all_at_once_each_with_its_remedy(kind):
    with pytest.raises(TypeError) as error:
        kind("out", max_prompt_length=1, lerning_rate=1, color=1)
    first, *lines = str(error.value).split("\n")
    assert first == f"{kind.__name__}() got unexpected keyword arguments:"
    [old] = [row for row in OLD_NAMES.read_text().splitlines() if "max_prompt_length" in row]
    assert lines == [f"{old};", "lerning_rate, did you mean learning_rate?;", "color"]


def test_the_table_of_old_names_is_that_of_the_documentation():
    page = (ROOT / "docs" / "from-trl.md").read_text()
    for row in OLD_NAMES.read_text().splitlines():
        name, origin, remedy = re.fullmatch(r"(\w+) \((.+?)\): (.+)", row).groups()
        assert f"| `{name}` | {origin} | {remedy} |\n" in page
    assert page.count(" | transformers < ") == OLD_NAMES.read_text().count("(transformers < ")


def test_a_subclass_may_have_its_own_constructor_and_copies_are_configs():
    class Named(QuRLGRPOConfig):
        def __init__(self, color, **settings):
            super().__init__("out", **settings)

    copies = [
        copy.deepcopy(Named(color="red", objective="tis", **PLAIN)),
        pickle.loads(pickle.dumps(config(objective="tis"))),
    ]
    for copied in copies:
        assert copied.objective == "tis"
    assert [*inspect.signature(QuRLGRPOConfig).parameters][0] == "output_dir"


def test_a_home_directory_is_written_out():
    assert config(rollout_checkpoint_dir="~/rollouts").rollout_checkpoint_dir == str(
        Path.home() / "rollouts"
    )


def test_a_reward_that_decides_turns_dynamic_sampling_on():
    assert config(dynamic_sampling_reward="length").dynamic_sampling


# Each piece of advice, followed; and what must not be refused by mistake.
FITTING = yaml.safe_load("""
- {objective: acr, loss_type: grpo}
# an objective that was chosen does not read TRL's correction
- {objective: tis, vllm_importance_sampling_clip_max: 4.0}
- {objective: tis, loss_type: cispo, importance_sampling_level: sequence}
- {objective: trl, vllm_importance_sampling_correction: false, importance_cap: null}
- {vllm_model_impl: transformers}
- {sync_ref_model: true, beta: 0.1, use_bias_correction_kl: false}
- {objective: tis, beta: 0.1, delta: 4.0}
- {vllm_engine_kwargs: {enforce_eager: true, kv_cache_dtype: fp8}}
# sampling settings that the trainer follows, or that change no distribution
- {top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0, temperature: 0.7}
- {generation_kwargs: {temperature: 1.0, presence_penalty: 0.0, bad_words: []}}
- {generation_kwargs: {include_stop_str_in_output: true}, temperature: 0.01}
- {top_k: 20, min_p: 0.05, top_p: 0.9, max_completion_length: null}
- {generation_kwargs: {structured_outputs: {regex: a}}}
- {repetition_penalty: 1.1, generation_kwargs: {repetition_penalty: 1.0, top_p: 0.8}}""")


@pytest.mark.parametrize("settings", FITTING, ids=json.dumps)
def test_what_fits_is_accepted_without_a_warning(settings):
    with warnings.catch_warnings(action="error"):
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


OF_TRLS = yaml.safe_load("""
- {vllm_importance_sampling_correction: false}
- {vllm_importance_sampling_mode: token_mask, loss_type: cispo}
- {vllm_importance_sampling_clip_min: 0.5}
- {vllm_importance_sampling_clip_max: 4.0}""")


@pytest.mark.parametrize("name", [conflict.settings[0] for conflict in conflicts.LIFTED_BOUND])
def test_a_loss_that_the_default_does_not_fit_is_corrected_by_tis(name):
    value = FAILING[name]
    given, message = warned(**{name: value})
    assert message.startswith(f"{name}={value!r} and objective='acr', the default, do not fit: ")
    assert given.objective == "tis"
    with warnings.catch_warnings(action="error"):
        copied = dataclasses.replace(given, generation_batch_size=None)
    assert copied.objective == given.to_dict()["objective"] == "tis"


@pytest.mark.parametrize("settings", OF_TRLS, ids=json.dumps)
def test_a_correction_of_trls_that_is_written_out_is_trls(settings):
    given, message = warned(**settings)
    assert "'acr'" in message
    assert given.objective == "trl"
    assert settings.items() <= vars(given).items()


# Sampling settings that make the ratio wrong, or cannot train
# --------------------------------------------------------------------------------------------------

# What the warning begins with, and settings
NAMED = yaml.safe_load("""
"repetition_penalty=1.1: ":
  {top_k: 20, repetition_penalty: 1.1}
"generation_kwargs['min_tokens']=2: ":
  {generation_kwargs: '{"min_tokens": 2}'}
"generation_kwargs['temperature']=0.5: ":
  {generation_kwargs: {temperature: 0.5}}
"generation_kwargs['logit_bias']={20: 4.0}":
  {generation_kwargs: {logit_bias: {20: 4.0}}}
"repetition_penalty=1.1, generation_kwargs['of_a_later_vllm']=1: ":
  {repetition_penalty: 1.1, generation_kwargs: {of_a_later_vllm: 1}}""")


@pytest.mark.parametrize("named", NAMED)
def test_sampling_settings_are_named_with_the_way_out(named):
    _, message = warned(**NAMED[named])
    assert message.startswith(named)
    assert "Set repetition_penalty=1.0, also in generation_kwargs" in message


def test_a_trainer_that_does_not_score_its_rollouts_does_not_follow():
    trainer = SimpleNamespace(args=config(top_p=0.9))
    with pytest.warns(UserWarning, match="top_p=0.9: .*because SimpleNamespace computes them"):
        assert QuantizedEngineMixin._count_listed(trainer) == 0


# The command line
# --------------------------------------------------------------------------------------------------

COMMAND_LINE = """
--output_dir out --use_cpu true --bf16 false --report_to none
--steps_per_generation 4
--rollout_quantization none --objective tis --importance_cap inf
--quantization_ignore lm_head re:.*down_proj
--vllm_engine_kwargs {"enforce_eager":true}"""


@pytest.mark.parametrize("parser", [TrlParser, HfArgumentParser])
def test_the_command_line(parser):
    [settings] = parser(QuRLGRPOConfig).parse_args_into_dataclasses(COMMAND_LINE.split())
    assert settings.rollout_quantization is None
    assert settings.vllm_engine_kwargs == {"enforce_eager": True}
    assert settings.quantization_ignore == ["lm_head", "re:.*down_proj"]
    assert settings.objective == "tis"
    assert settings.importance_cap == float("inf")


# PPO and RLOO
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generations", [1, 3])
def test_any_number_of_generations_from_one_up(generations):
    settings = {"scale_rewards": False, "per_device_train_batch_size": 3, **PLAIN}
    seen = QuRLPPOConfig("out", **settings, num_generations=generations, steps_per_generation=3)
    assert seen.num_generations == generations
    assert seen.generation_batch_size == 9
    copied = QuRLPPOConfig(**{**seen.to_dict(), "generation_batch_size": None})
    assert copied.num_generations == generations


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
