"""What is compared: every arm of every experiment, as changes to the demonstration's settings.

`EXPERIMENTS` is all that `study.py` can run; each answers one question, which its `question`
states.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.objectives.coarse import UNBIASED

OBJECTIVES = ("naive", "quantized_ratio", "decoupled", "tis", "acr")
SEEDS = (0, 1, 2, 3, 4)
LORA_RATE = 3e-4  # the best of `lora_rate`
# objectives that were cut; their arms have logs, and are not run again
RETIRED = ("icepop", "geometric_mask")
AHEAD = 60  # rollouts


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: unique within its experiment.
        scheme: format of the rollouts, a key of `SCHEMES` or one of `coarse.CODE_BITS`; `None` for
            BF16.
        changed: fields of the trainer's config.
        rollouts: length of the run.
        activation_bits: of the engine's activations; 8 is its kernel's own.
        seeds: of the runs.
        lora: whether an adapter is trained, of rank 16 on all linear layers but the head.
        algorithm: of the demonstration.
        is_delayed: whether the weights of one rollout before sample each, as where a server
            generates ahead.
        is_updated_in_flight: whether a rollout that is one ahead gets the weights of every update
            that is made while it is sampled.
        listed: tokens per position that score centering reads; 0 for no centering.
        seed_offset: is added to the seed: other problems and other noise than the arms it is
            compared with.
    """

    name: str
    scheme: str | None
    changed: dict[str, Any] = field(default_factory=dict)
    rollouts: int = 120
    activation_bits: int = 8
    seeds: tuple[int, ...] = SEEDS
    lora: bool = False
    algorithm: str = "grpo"
    is_delayed: bool = False
    is_updated_in_flight: bool = False
    listed: int = 0
    seed_offset: int = 0

    @property
    def is_repeatable(self) -> bool:
        """Return whether the trainer's quantized forward pass can repeat the engine's."""
        return self.activation_bits == 8 and self.scheme not in UNBIASED


@dataclass(frozen=True)
class Experiment:
    """Arms that answer one question, alone or compared with another experiment of the same
    settings.
    """

    name: str
    question: str
    arms: tuple[Arm, ...]
    beside: str | None = None


def objective_arms(scheme: str, **common: Any) -> list[Arm]:
    """The five objectives, and ACR with UAQ, on one format."""
    arms = [Arm(f"{scheme}_{name}", scheme, {"objective": name}, **common) for name in OBJECTIVES]
    return [
        *arms,
        Arm(f"{scheme}_acr_uaq", scheme, {"objective": "acr", "uaq_scale": 1.5}, **common),
    ]


def _main() -> Experiment:
    arms = [Arm("bf16", None, {"objective": "naive"})]
    arms += objective_arms("int3") + objective_arms("int8")
    arms += [
        arm
        if arm.changed["objective"] in ("naive", "tis", "acr") and "uaq_scale" not in arm.changed
        else replace(arm, seeds=(0, 1, 2))
        for arm in objective_arms("int4")
    ]
    return Experiment("main", "Which objective trains best on which format?", tuple(arms))


def _lora_rate() -> Experiment:
    """With a seed that no other experiment has."""
    common: dict[str, Any] = {"seeds": (9,), "lora": True}
    arms = [
        Arm(f"bf16_lora_{rate:g}", None, {"objective": "naive", "learning_rate": rate}, **common)
        for rate in (1e-4, 3e-4, 1e-3, 3e-3)
    ]
    return Experiment("lora_rate", "Which learning rate suits an adapter?", tuple(arms))


def _lora() -> Experiment:
    """One objective for all quantized arms: they differ in how the engine gets the adapter, and on
    which base.
    """
    ways: dict[str, dict[str, Any]] = {
        "merged": {"weight_sync": "stream"},
        "adapter": {"weight_sync": "adapter"},
        "rounded": {"weight_sync": "adapter", "round_base": True},
    }
    arms = [Arm("bf16_lora", None, {"objective": "naive", "learning_rate": LORA_RATE}, lora=True)]
    arms += [
        Arm(
            f"{scheme}_lora_{way}",
            scheme,
            {"objective": "acr", "learning_rate": LORA_RATE, **changed},
            lora=True,
        )
        for scheme in ("int3", "int8", "w4a16")
        for way, changed in ways.items()
    ]
    return Experiment(
        "lora", "An adapter merged, beside a quantized base, or beside a rounded one?", tuple(arms)
    )


def _long() -> Experiment:
    common: dict[str, Any] = {"rollouts": 450, "seeds": (0, 1, 2)}
    arms = [Arm("bf16", None, {"objective": "naive"}, **common)]
    arms += [arm for arm in objective_arms("int3", **common) if arm.name != "int3_quantized_ratio"]
    return Experiment(
        "long", "Does TIS collapse after 1,500 updates, and does ACR not?", tuple(arms)
    )


def _cap() -> Experiment:
    common: dict[str, Any] = {"activation_bits": 4, "seeds": (0, 1, 2)}
    arms = [
        Arm(
            f"int3a4_{objective}_c{cap:g}",
            "int3",
            {"objective": objective, "importance_cap": cap},
            **common,
        )
        for cap in (1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
        for objective in ("tis", "acr")
    ]
    arms += [
        Arm(f"int3a4_{name}", "int3", {"objective": name}, **common)
        for name in ("naive", "decoupled")
    ]
    return Experiment(
        "cap", "How much does the cap C matter, where ratios are large?", tuple(arms), beside="main"
    )


def _updates() -> Experiment:
    """Sixteen updates of 16 completions with a rollout of 256, which often move the policy out of
    the clip range.
    """
    common: dict[str, Any] = {"activation_bits": 4, "seeds": (0, 1, 2)}
    more = {"per_device_train_batch_size": 16, "steps_per_generation": 16, "learning_rate": 5e-5}
    arms = [
        Arm(
            f"int3a4_{objective}_c{cap:g}",
            "int3",
            {"objective": objective, "importance_cap": cap, **more},
            **common,
        )
        for cap in (1.05, 1.2, 2.0)
        for objective in ("tis", "acr")
    ]
    return Experiment(
        "updates", "Does ACR gain over TIS where its lifted bounds act most often?", tuple(arms)
    )


def _low_rate() -> Experiment:
    """At a tenth of the rate that suits the task, with UAQ, and with the rate that UAQ is said to
    stand for.
    """
    common: dict[str, Any] = {"rollouts": 400, "seeds": (0, 1)}
    arms = [
        Arm(f"int8_s{scale:g}", "int8", {"learning_rate": 1e-5, "uaq_scale": scale}, **common)
        for scale in (1.0, 1.25, 1.5, 2.0, 3.0)
    ]
    arms += [Arm("int8_rate1.5", "int8", {"learning_rate": 1.5e-5}, **common)]
    arms += [Arm("bf16_s1", None, {"learning_rate": 1e-5, "objective": "naive"}, **common)]
    return Experiment("low_rate", "What does UAQ gain at a learning rate of 1e-5?", tuple(arms))


def _lowest_rate() -> Experiment:
    common: dict[str, Any] = {"rollouts": 1500, "seeds": (0,)}
    arms = [
        Arm(f"int8_s{scale:g}", "int8", {"learning_rate": 1e-6, "uaq_scale": scale}, **common)
        for scale in (1.0, 1.5, 3.0)
    ]
    return Experiment("lowest_rate", "What does UAQ gain at a learning rate of 1e-6?", tuple(arms))


def _rloo() -> Experiment:
    """Without a correction, and with the truncated one, on the format that does no harm here and on
    one that does.
    """
    arms = [Arm("bf16", None, {"objective": "naive"}, algorithm="rloo")]
    arms += [
        Arm(f"{scheme}_{objective}", scheme, {"objective": objective}, algorithm="rloo")
        for scheme in ("int8", "int3")
        for objective in ("naive", "tis")
    ]
    return Experiment(
        "rloo",
        "Does RLOO learn from quantized rollouts, and does a correction help it?",
        tuple(arms),
    )


def _actors() -> Experiment:
    """Other ways from the weights to the actor's: smoothed inputs, and rounding that is right on
    average.
    """
    smoothed = {"objective": "tis", "smooth_activations": True}
    seeds = {"int3": SEEDS, "int8": SEEDS[:3]}
    arms = [
        Arm(f"{scheme}_tis_smoothed", scheme, smoothed, seeds=seeds[scheme]) for scheme in seeds
    ]
    arms += [
        Arm(f"{scheme}_tis", scheme, {"objective": "tis"}, seeds=seeds[scheme[:4]])
        for scheme in UNBIASED
    ]
    question = "Does smoothing, or rounding without a bias, train better?"
    return Experiment("actors", question, tuple(arms), beside="main")


def _ahead() -> Experiment:
    """With the demonstration's four updates per rollout, and with sixteen, which move the policy
    far.
    """
    changed: dict[str, Any] = {"per_device_train_batch_size": 16, "steps_per_generation": 16}
    seeds = SEEDS[:3]
    arms = [Arm("bf16", None, {"objective": "naive", **changed}, rollouts=AHEAD, seeds=seeds)]
    for objective in ("naive", "tis", "acr", *RETIRED):
        settings = {"objective": objective, **changed}
        if objective == "geometric_mask":
            settings["importance_cap"] = 1.2  # a mean over five tokens never leaves [1/2, 2]
        arms.append(
            Arm(
                f"bf16_ahead_{objective}",
                None,
                settings,
                rollouts=AHEAD,
                seeds=seeds,
                is_delayed=True,
            )
        )
    arms.append(Arm("bf16_4", None, {"objective": "naive"}, rollouts=AHEAD, seeds=seeds))
    for objective in ("naive", "tis"):
        name = f"bf16_4_ahead_{objective}"
        arms.append(
            Arm(name, None, {"objective": objective}, rollouts=AHEAD, seeds=seeds, is_delayed=True)
        )
    return Experiment(
        "ahead", "Which objective corrects for rollouts that are one rollout old?", tuple(arms)
    )


def _seeds() -> Experiment:
    """The default and the claims about INT3, since `seed` reaches the engine, beside the noise of
    seeds alone.
    """
    common: dict[str, Any] = {"seeds": tuple(range(10))}
    plain = {"objective": "naive"}
    arms = [
        Arm("bf16", None, plain, **common),
        Arm("bf16_again", None, plain, seed_offset=1000, **common),
    ]
    arms += [Arm("int8_default", "int8", {"smooth_activations": None}, **common)]
    arms += [
        Arm(f"int3_{objective}", "int3", {"objective": objective}, **common)
        for objective in ("naive", "quantized_ratio", "tis", "acr")
    ]
    return Experiment("seeds", "What do ten independent seeds show?", tuple(arms))


ONCE: dict[str, Any] = {"gradient_accumulation_steps": 4, "warmup_steps": 5}
"""One update with a whole rollout, not four with its quarters; as many rollouts of warm-up."""


def _one_update_rate() -> Experiment:
    """With a seed that no other experiment has."""
    arms = [
        Arm(
            f"bf16_{rate:g}",
            None,
            {"objective": "naive", "learning_rate": rate, **ONCE},
            seeds=(99,),
        )
        for rate in (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
    ]
    return Experiment("one_update_rate", "Which learning rate suits one update?", tuple(arms))


def _one_update(name: str, rate: float) -> Experiment:
    """TRL's default, with which `acr` is `tis`."""
    common: dict[str, Any] = {"seeds": tuple(range(10))}
    changed = {"learning_rate": rate, **ONCE}
    plain = {"objective": "naive", **changed}
    arms = [
        Arm("bf16", None, plain, **common),
        Arm("bf16_again", None, plain, seed_offset=1000, **common),
        Arm("int8_default", "int8", {"smooth_activations": None, **changed}, **common),
        Arm("int8_naive", "int8", {"smooth_activations": None, **plain}, **common),
    ]
    arms += [
        Arm(f"int3_{objective}", "int3", {**changed, "objective": objective}, **common)
        for objective in ("naive", "tis")
    ]
    question = "Does a correction matter with one update per rollout?"
    return Experiment(name, question, tuple(arms))


def _centering() -> Experiment:
    """At one update, on two formats; and with so few tokens that half of them are not listed."""
    common: dict[str, Any] = {"seeds": tuple(range(10))}
    arms = []
    for scheme in ("int3", "int4"):
        for objective in ("naive", "tis"):
            changed = {"learning_rate": 1e-4, **ONCE, "objective": objective}
            if scheme == "int4":  # those of INT3 are in `one_update`
                arms.append(Arm(f"int4_{objective}", "int4", changed, **common))
            name = "centered" if objective == "naive" else "tis_centered"
            arms.append(Arm(f"{scheme}_{name}", scheme, changed, listed=20, **common))
    few = {"learning_rate": 1e-4, **ONCE, "objective": "naive"}
    arms.append(Arm("int3_centered_3", "int3", few, listed=3, seeds=SEEDS))
    question = "Does score centering train better than truncated importance sampling?"
    return Experiment("centering", question, tuple(arms), beside="one_update")


def _in_flight() -> Experiment:
    """Rollouts one step old, and an engine that gets the weights of each update."""
    arms = []
    for updates in (16, 4):
        changed: dict[str, Any] = {"objective": "acr"}
        if updates == 16:
            changed |= {"per_device_train_batch_size": 16, "steps_per_generation": 16}
        for scheme in (None, "int8"):
            name = f"{scheme or 'bf16'}_{updates}"
            default = {"smooth_activations": None} if scheme else {}
            common: dict[str, Any] = {"changed": changed | default, "rollouts": AHEAD}
            arms += [
                Arm(name, scheme, **common),
                Arm(f"{name}_ahead", scheme, is_delayed=True, **common),
                Arm(f"{name}_in_flight", scheme, is_updated_in_flight=True, **common),
            ]
    question = "Do weights that are sent while a rollout is sampled make up for its age?"
    return Experiment("in_flight", question, tuple(arms))


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        _main(),
        _cap(),
        _updates(),
        _long(),
        _low_rate(),
        _lowest_rate(),
        _lora_rate(),
        _lora(),
        _rloo(),
        _actors(),
        _ahead(),
        _seeds(),
        _one_update_rate(),
        _one_update("one_update", 1e-4),
        _centering(),
        _in_flight(),
    )
}
