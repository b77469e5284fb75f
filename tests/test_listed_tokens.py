"""The policy's log-probabilities over the tokens that sampling settings leave: by brute force."""

import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import SATURATES, needs_vnni
from peft import LoraConfig, get_peft_model
from support import losses
from support.losses import ROWS, assert_close, gradients, our_loss, vowels
from tiny import ENGINE, save_tiny, tiny_model
from trl.trainer.utils import add_fused_lm_head
from vllm.logprobs import FlatLogprobs

from trl_qurl import QuRLGRPOTrainer, QuRLRLOOTrainer
from trl_qurl.rollout.results import Completions
from trl_qurl.rollout.samples import read_lists, read_outputs
from trl_qurl.trainers import listed_tokens
from trl_qurl.trainers.checks.samples import mismatch_of_samples
from trl_qurl.trainers.listed_tokens import (
    MOST_LISTED,
    ListedTokens,
    list_tokens,
    listed_count,
    renormalized,
)


def in_an_engine(function):
    return pytest.mark.vllm(pytest.mark.xdist_group("trainer")(function))


OFF = {"top_k": 0, "top_p": 1.0, "min_p": None, "structured_outputs_regex": None}
CUTS = [
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
    {"structured_outputs_regex": "[0-9]{8}"},
]


@pytest.fixture(scope="module", params=[QuRLGRPOTrainer, QuRLRLOOTrainer])
def trainer(request, tmp_path_factory):
    """With a reference model that is another one, and a list as long as any setting needs."""
    sharp = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():
        sharp.lm_head.weight.mul_(12)  # so that answers are not all equally likely
    start = str(save_tiny(tmp_path_factory.mktemp("start"), model=sharp))
    directory = tmp_path_factory.mktemp("out")
    trainer = losses.build(
        request.param,
        directory,
        start,
        vowels,
        top_p=0.9,
        beta=0.1,
        temperature=1.2,
        vllm_engine_kwargs=ENGINE | {"max_logprobs": 5},  # too few
    )
    trainer.current_gradient_accumulation_steps = 1
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter.mul_(1.02)
    return trainer


def sample_with(trainer, monkeypatch, cuts):
    for name, value in (OFF | cuts).items():
        monkeypatch.setattr(trainer.vllm_generation, name, value)
    trainer._metrics["train"].clear()
    return trainer._generate_and_score_completions(ROWS)


def brute_force(trainer, batch, model=None):
    """Log-probabilities over the engine's lists, with their mass, (B, T), from all logits."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    length = batch["completion_ids"].size(1)
    logits = (model or trainer.model)(input_ids=ids, attention_mask=mask).logits
    logps = (logits[:, -length - 1 : -1] / trainer.temperature).log_softmax(-1)
    listed = batch["listed_ids"].long()
    is_kept = torch.zeros_like(logps).bool()
    is_kept.scatter_(-1, listed.clamp(min=0), True)  # a token that is not listed adds token 0
    is_kept[..., 0] = (listed == 0).any(-1)
    mass = logps.masked_fill(~is_kept, -torch.inf).logsumexp(-1)
    sampled = logps.gather(-1, batch["completion_ids"][..., None])[..., 0]
    return sampled - mass.masked_fill(mass.isinf(), 0) + batch["listed_log_mass"]


@in_an_engine
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_a_rollout_is_scored_over_the_tokens_that_are_left(cuts, trainer, monkeypatch):
    batch = sample_with(trainer, monkeypatch, cuts)
    learned = batch["completion_mask"].bool()
    kept = (batch["listed_ids"] >= 0).sum(-1)[learned]
    assert 1 < kept.max() < MOST_LISTED
    with torch.no_grad():
        expected = brute_force(trainer, batch)
        whole = losses.logps_of(trainer, batch)
        reference = brute_force(trainer, batch, trainer.ref_model)
    for name, logps in (("old_per_token_logps", expected), ("ref_per_token_logps", reference)):
        if name in batch:  # RLOO keeps the sum of a completion instead
            torch.testing.assert_close(batch[name][learned], logps[learned], rtol=0, atol=1e-5)
    behavior = batch["sampling_per_token_logps"]
    assert (whole - behavior)[learned].exp().mean() < 0.95, "the cut made no difference"
    metrics = trainer._metrics["train"]
    # 128 tokens, whose log-probabilities differ by a few hundredths of a nat in INT8
    slack, kl = (0.05, 4e-2) if SATURATES else (0.01, 2e-3)
    assert metrics["mismatch/ratio_mean"] == [pytest.approx(1.0, abs=slack)]
    assert metrics["mismatch/kl_k3"][0] < kl
    assert metrics["mismatch/unlisted_mass"] == [pytest.approx(0.0, abs=1e-3)]


# RLOO scores in advance, and its loss is of whole completions.
@in_an_engine
@pytest.mark.parametrize("trainer", [QuRLGRPOTrainer], indirect=True)
def test_the_gradient_is_that_of_brute_force(trainer, monkeypatch):
    """With one update per rollout, and with several: the gradient of both is that of brute force."""
    monkeypatch.setattr(trainer.args, "objective", "naive")
    monkeypatch.setattr(trainer, "beta", 0.0)
    rollout = sample_with(trainer, monkeypatch, {"top_k": 5})
    rows = torch.tensor([9, 2, 14, 5])  # as TRL shuffles a rollout, and cuts it into micro-batches
    batch = losses.micro_batch(rollout, rows)
    batch["advantages"] = torch.linspace(-1, 1, len(rows))
    trainer.loss_type = "bnpo"
    learned = batch["completion_mask"].bool()
    # R is 1, so the gradient of R is that of the log-probability.
    loss = -(brute_force(trainer, batch) * batch["advantages"][:, None])[learned].mean()
    expected = gradients(trainer, loss)
    for steps in (1, 4):  # only with 4, the update scores the rollout
        trainer._metrics["train"].clear()
        monkeypatch.setattr(trainer.args, "gradient_accumulation_steps", steps)
        monkeypatch.setattr(trainer, "_step", 3)
        if steps == 4:
            assert trainer._scores_in_update
            del batch["old_per_token_logps"]
        ours = gradients(trainer, our_loss(trainer, batch))
        assert_close(ours, expected, 1e-3, 1e-4)
    ratio = trainer._metrics["train"]["mismatch/ratio_mean"]
    assert ratio == [pytest.approx(1.0, abs=0.05 if SATURATES else 0.02)]


def test_lists_as_the_engine_returns_them():
    """A sampled token beyond the K likeliest, one that is listed again, tokens that were cut, no
    value for the sampled one, a shorter completion, and what is left of the mass.
    """
    half = math.log(0.5)
    tenth = math.log(0.1)
    none = -math.inf
    whole = [
        ([7, 3, 4], [tenth, half, none]),
        ([4, 4, 5], [half, half, half]),
        ([8, 8, 9], [half, half, none]),
    ]
    outputs = []
    without_sampled = [([7, 3], [math.nan, half])]
    for lists in (whole, without_sampled, []):
        flat = FlatLogprobs()
        for ids, logps in lists:
            flat.append_fast(ids, logps, itertools.repeat(1), itertools.repeat(None))
        outputs.append(SimpleNamespace(logprobs=flat))
    listings, _ = read_outputs([SimpleNamespace(outputs=outputs)])
    listed = list_tokens(listings, length=4, device=torch.device("cpu"))
    nothing = [-1, -1, -1]
    assert listed.listed_ids.tolist() == [
        [[7, 3, -1], [4, -1, 5], [8, -1, -1], nothing],
        [nothing] * 4,
        [nothing] * 4,
    ]
    mass = listed.listed_log_mass.exp()
    assert mass[0].tolist() == pytest.approx([0.6, 1.0, 0.5, 0.0])
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    doubled = listed.metrics(mask, lambda sums: sums * torch.tensor([1.0, 2.0]))
    assert doubled == {"mismatch/unlisted_mass": pytest.approx(0.4 / 4)}
    two = ListedTokens(torch.tensor([[[0, 3]]]), torch.zeros(1, 1))
    logps = listed_tokens.over_lists(torch.zeros(1, 1), torch.zeros(1, 1, 5), two)
    assert logps.exp() == 0.5, "token 0 is one as any other"


def test_lists_as_a_server_sorts_them():
    """The sampled token goes first, whatever its place; one more list is longer; a cut token."""
    half = math.log(0.5)
    quarter = math.log(0.25)
    lists = Completions(
        prompt_ids=[],
        completion_ids=[[3, 9], []],
        logprobs=[[[half, quarter], [half, -9999.0, None]], []],
        logprob_token_ids=[[[7, 3], [7, 4, 9]], []],
    )
    several, empty = read_lists(lists, 8)
    assert several.ids.tolist() == [[3, 7, 3], [9, 7, 4]]
    expected = torch.tensor([[quarter, half, quarter], [math.nan, half, math.nan]])
    torch.testing.assert_close(several.logps, expected, equal_nan=True)
    assert empty.ids.shape == (0, 1)
    assert [each.ids.tolist() for each in read_lists(lists, 0)] == [[[3], [9]], []]


@in_an_engine
def test_tokens_beyond_the_list_have_the_actors_share(trainer, monkeypatch):
    """Where more are left than the engine lists."""
    monkeypatch.setattr(trainer.vllm_generation, "logprobs", 3)
    batch = sample_with(trainer, monkeypatch, {"top_p": 0.9})
    learned = batch["completion_mask"].bool()
    [unlisted] = trainer._metrics["train"]["mismatch/unlisted_mass"]
    mass = batch["listed_log_mass"][learned].exp()
    assert unlisted == pytest.approx(1 - mass.mean().item(), abs=1e-6)
    assert 0.05 < unlisted < 0.6
    assert trainer._metrics["train"]["mismatch/ratio_mean"] == [pytest.approx(1.0, abs=0.1)]


@in_an_engine
@needs_vnni
def test_a_proof_follows_the_lists(trainer, monkeypatch):
    sample_with(trainer, monkeypatch, {"top_p": 0.9})
    samples = trainer.vllm_generation.samples
    followed = mismatch_of_samples(trainer, samples)
    assert followed["mismatch/ratio_mean"] == pytest.approx(1.0, abs=0.03)
    assert followed["mismatch/kl_k3"] < 0.002
    monkeypatch.setattr(trainer, "_listed_count", 0)
    assert mismatch_of_samples(trainer, samples)["mismatch/ratio_mean"] < 0.95


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_float32", [True, False])
def test_a_few_rows_of_the_head(bias, in_float32, monkeypatch):
    """In parts of two tokens, under autocast."""
    monkeypatch.setattr(listed_tokens, "TOKENS_AT_ONCE", 2)
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 30, bias=bias)
    states = torch.randn(5, 16)
    ids = torch.stack([torch.randperm(30)[:4] for _ in states])
    ids[1, 2:] = -1
    with torch.autocast("cpu", torch.bfloat16):
        found = listed_tokens.listed_logps(states, head, ids, 0.7, in_float32)
        logits = head(states)
    if in_float32:
        logits = head(states)
    listed = (logits.float() / 0.7).gather(1, ids.clamp(min=0))
    listed[ids < 0] = -math.inf
    torch.testing.assert_close(found, listed.log_softmax(1)[:, 0], rtol=0, atol=1e-6)


class OwnLoss(QuRLGRPOTrainer):
    """Written after TRL's, without a call of the parent."""

    def _compute_loss(self, model, inputs):
        self.scored = losses.logps_of(self, inputs)
        return self.scored.sum()


class AnotherTerm(QuRLGRPOTrainer):
    """The parent's loss, and a term from another pass."""

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.scored = losses.logps_of(self, inputs)
        return loss + 0.1 * self.scored.mean()


@in_an_engine
@pytest.mark.parametrize("trainer", [QuRLGRPOTrainer], indirect=True)
def test_a_loss_of_a_subclass_follows_and_a_pass_is_warned_of(trainer, monkeypatch):
    monkeypatch.setattr(trainer, "__class__", OwnLoss)
    batch = sample_with(trainer, monkeypatch, {"top_k": 5})
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    learned = batch["completion_mask"].bool()
    for kind in (AnotherTerm, OwnLoss):
        monkeypatch.setattr(trainer, "__class__", kind)
        trainer.compute_loss(trainer.model, batch)
        torch.testing.assert_close(
            trainer.scored[learned], batch["old_per_token_logps"][learned], rtol=0, atol=1e-5
        )
    without = {name: part for name, part in batch.items() if not name.startswith("listed_")}
    trainer.compute_loss(trainer.model, without)  # of a checkpoint from before there were lists
    assert (trainer.scored - batch["old_per_token_logps"])[learned].abs().max() > 0.1
    monkeypatch.setattr(trainer, "__class__", losses.OwnPass)
    with pytest.warns(UserWarning, match="top_p=0.9: .*because OwnPass computes them itself"):
        assert trainer._count_listed() == 0
    monkeypatch.setattr(trainer, "__class__", QuRLGRPOTrainer)
    assert trainer._count_listed() == MOST_LISTED


@in_an_engine
def test_adapters_are_followed_and_a_pass_around_the_head_is_not_silent(trainer, monkeypatch):
    batch = sample_with(trainer, monkeypatch, {"top_k": 5})
    listed = ListedTokens(batch["listed_ids"], batch["listed_log_mass"])
    adapter = LoraConfig(
        target_modules=["q_proj"],
        modules_to_save=["lm_head"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(copy.deepcopy(trainer.model), adapter)
    # TRL's forward of the copy calls the original.
    base = model.get_base_model()
    base.forward = type(base).forward.__get__(base)
    add_fused_lm_head(base, trainer.temperature, outputs=("log_probs", "entropy"))
    monkeypatch.setattr(trainer, "model", model)
    with torch.no_grad(), renormalized(trainer, model, listed):
        found = losses.logps_of(trainer, batch)
    expected = brute_force(trainer, batch)
    learned = batch["completion_mask"].bool()
    torch.testing.assert_close(found[learned], expected[learned], rtol=0, atol=1e-5)
    around = pytest.raises(RuntimeError, match="went around TRL's fused head")
    with around, renormalized(trainer, model, listed):
        pass


def trainer_with(model=None, zero_stage=None, sampling=None, **attributes):
    plugin = None if zero_stage is None else SimpleNamespace(zero_stage=zero_stage)
    state = SimpleNamespace(deepspeed_plugin=plugin, fsdp_plugin=None)
    return SimpleNamespace(
        args=SimpleNamespace(**{"torch_compile": False} | (sampling or {"top_k": 20})),
        accelerator=SimpleNamespace(state=state),
        model=model or tiny_model(),
        **{"tools": [], "rollout_func": None, "environment_factories": None} | attributes,
    )


@pytest.mark.parametrize(
    ("sampling", "count"),
    [
        ({}, 28),  # with those that have the same logit as the twentieth
        ({"sampling": {"top_p": 1.0, "min_p": 0.0, "top_k": -1}}, 0),
        ({"sampling": {"top_p": 0.9}}, MOST_LISTED),
        ({"sampling": {"top_k": 500}}, MOST_LISTED),
        ({"sampling": {"top_k": 3, "generation_kwargs": {"top_k": 9}}}, 17),
    ],
    ids=str,
)
def test_how_many_tokens_are_listed(sampling, count, recwarn):
    assert listed_count(trainer_with(**sampling), True) == count
    small = tiny_model(vocab_size=12)
    assert listed_count(trainer_with(small, **sampling), True) == min(count, 12)
    assert not recwarn


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"tools": [vowels]}, "tools may put a completion together"),
        ({"rollout_func": vowels}, "rollout_func may put"),
        ({"environment_factories": {None: vowels}}, "environment_factories may put"),
        ({"zero_stage": 3}, "ZeRO-3 splits the head"),
        ({"sampling": {"top_k": 20, "torch_compile": True}}, "tried it with torch_compile"),
        ({"model": tiny_model()}, "the model has final_logit_softcapping"),
    ],
    ids=lambda given: str(given)[:30],
)
def test_what_cannot_be_followed_is_warned_of(given, reason):
    if "model" in given:
        given["model"].config.final_logit_softcapping = 30.0
    with pytest.warns(
        UserWarning, match=rf"^top_k=20: .*{reason}.*too small.*Set top_k=0"
    ) as found:
        assert listed_count(trainer_with(**given), True) == 0
    assert len(found) == 1
