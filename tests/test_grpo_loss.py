"""The trainer's loss is the paper's: against the reference functions, TRL's own loss, and counts by
hand.
"""

import copy
import math
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from reference_loss import reference_objective
from support import losses
from support.building import reward
from support.deployment import before
from support.losses import (
    CAP,
    EPSILON_HIGH,
    EPSILON_LOW,
    ROWS,
    assert_close,
    assert_equal,
    give_invalid_logps,
    gradients,
    logps_of,
    our_loss,
)
from tiny import tiny_model, tiny_tokenizer
from trl import GRPOTrainer

from trl_qurl import QuRLGRPOTrainer
from trl_qurl.config.checks.conflicts import CLIPPED_LOSS_TYPES
from trl_qurl.objective import OBJECTIVES
from trl_qurl.rollout.errors import SyncError
from trl_qurl.trainers.callbacks import RolloutCallback
from trl_qurl.trainers.checks.guard import MismatchGuard
from trl_qurl.trainers.grpo import has_dropout

# One trainer, with a real engine, in one process: an engine cannot be started twice in a process.
pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("trainer")]

B = 4
T = 6


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A trainer, and the weights that it starts with."""
    directory = tmp_path_factory.mktemp("out")
    trainer = losses.build(QuRLGRPOTrainer, directory, tiny_model(), reward, None, tiny_tokenizer())
    return trainer, copy.deepcopy(trainer.model.state_dict())


@pytest.fixture
def trainer(built, monkeypatch):
    """The trainer as it was built, whatever a test before has changed."""
    trainer, start = built
    trainer.model.load_state_dict(start)
    trainer.model.gradient_checkpointing_disable()
    trainer.model.zero_grad()
    trainer._forget_rollout()
    trainer._metrics["eval"].clear()
    trainer.current_gradient_accumulation_steps = 1
    monkeypatch.setattr(trainer, "args", copy.copy(trainer.args))
    monkeypatch.setattr(trainer, "loss_type", "dapo")
    return losses.ready(trainer)


@pytest.fixture
def batch(trainer):
    """Random inputs: padding, unscored tokens, R on both sides of the clip range, ρ from 1e-5 to
    1e5.
    """
    inputs = losses.random_batch(torch.tensor([T, 3, 1, 4]), T)
    inputs["advantages"] = torch.tensor([1.5, -0.7, 0.3, 0.9])
    inputs["num_items_in_batch"] = torch.tensor(40)
    with torch.no_grad():
        policy_logps = logps_of(trainer, inputs)
    proximal_logps = policy_logps + 0.4 * torch.randn(B, T)
    log_rho = 11.5 * (2 * torch.rand(B, T) - 1)  # ln(1e5) = 11.5
    log_rho[:, ::2] = 0.3 * torch.randn(B, 3)  # as usual in training
    log_rho[0, :2] = torch.tensor([1.2, 0.9])  # above the cap, positive advantage
    losses.score(inputs, proximal_logps, log_rho)
    # TRL puts this beside the tokens with `token_truncate` and C = 2
    difference = (proximal_logps - inputs["sampling_per_token_logps"]) * inputs["completion_mask"]
    inputs["importance_sampling_ratio"] = difference.nan_to_num(0.0).exp().clamp(max=CAP)
    return inputs


def test_a_prompt_that_fills_the_context_ends_a_rollout_in_our_words(trainer):
    with pytest.raises(ValueError, match="A prompt of 64 tokens fills the context of 64 tokens"):
        trainer.vllm_generation._sample([[5], [5] * 64], None, num_generations=1)


def test_errors_of_reward_functions_stay_and_are_explained(trainer, monkeypatch):
    def graded(completions, answer, **kwargs):  # a stream's columns are known only now
        return [0.0] * len(completions)

    monkeypatch.setattr(trainer, "reward_func_names", ["judged"])
    for function, message in (
        (graded, "'answer'.*remove_unused_columns=True"),
        (lambda **kwargs: ["right"] * 4, "judged.*return a number"),
        (lambda **kwargs: [{"score": 1.0}] * 4, "judged.*return a number"),
    ):
        monkeypatch.setattr(trainer, "reward_funcs", [function])
        errors = (RuntimeError, TypeError, ValueError)  # TRL's, with a note
        with pytest.raises(errors, match=f"(?s){message}"):
            trainer._generate_and_score_completions(ROWS[:4])


def reference(trainer, inputs, objective, loss_type, mask=None):
    """−J of each token, averaged as TRL does for the loss type, without gradient accumulation."""
    learned = inputs["completion_mask"] if mask is None else mask
    values = reference_objective(
        objective,
        logps_of(trainer, inputs),
        inputs["old_per_token_logps"],
        inputs["sampling_per_token_logps"].masked_fill(learned == 0, torch.nan),
        inputs["advantages"],
        epsilon_low=EPSILON_LOW,
        epsilon_high=EPSILON_HIGH,
        cap=CAP,
    )
    values = -torch.where(learned.bool(), values, 0.0)
    if loss_type == "grpo":
        return (values.sum(1) / learned.sum(1)).mean()
    divisors = {
        "bnpo": learned.sum(),
        "dr_grpo": B * trainer.max_completion_length,
        "dapo": 40 / 4,  # TRL divides the tokens of the generation batch among its four steps
    }
    return values.sum() / divisors[loss_type]


@pytest.mark.parametrize("loss_type", CLIPPED_LOSS_TYPES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradient_equal_the_reference(objective, loss_type, trainer, batch):
    trainer.args.objective = objective
    trainer.loss_type = loss_type
    loss = our_loss(trainer, batch)
    expected = reference(trainer, batch, objective, loss_type)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_close(gradients(trainer, loss), gradients(trainer, expected), 1e-4, 1e-6)


@pytest.mark.parametrize(("level", "delta"), [("token", None), ("token", 1.5), ("sequence", 1.5)])
@pytest.mark.parametrize("loss_type", [*CLIPPED_LOSS_TYPES, "cispo", "sapo", "vespo", "luspo"])
@pytest.mark.parametrize("objective", ["trl", "tis"])
def test_every_loss_of_trls_is_trls_own(
    objective, loss_type, level, delta, trainer, batch, monkeypatch
):
    monkeypatch.setattr(trainer, "importance_sampling_level", level)
    trainer.args.delta = delta
    trainer.args.objective = objective
    trainer.loss_type = loss_type
    theirs = GRPOTrainer._compute_loss(trainer, trainer.model, batch)
    ours = our_loss(trainer, batch)
    assert ours.item() == theirs.item() != 0
    assert trainer._metrics["train"]["policy/approx_kl"][0] > 0
    assert_equal(gradients(trainer, ours), gradients(trainer, theirs))


def test_clip_metrics_count_the_lifted_bounds(trainer, batch):
    trainer.args.objective = "acr"
    # One advantage for all, positive: then only the upper bound clips, and every token above it is
    # counted.
    batch["advantages"] = torch.ones(B)
    our_loss(trainer, batch)
    proximal_logps = batch["old_per_token_logps"]
    learned = batch["completion_mask"].bool()
    with torch.no_grad():
        ratio = (logps_of(trainer, batch) - proximal_logps).exp()[learned]
    rho = (proximal_logps - batch["sampling_per_token_logps"]).exp().nan_to_num(1.0)[learned]
    upper = (1 + EPSILON_HIGH) * (rho / CAP).clamp(min=1.0)
    counts = {
        "acr/lifted_share": rho > CAP,
        "acr/let_through_share": (ratio > 1 + EPSILON_HIGH) & (ratio <= upper),
        "clip_ratio/high_mean": ratio > upper,
    }
    for name, is_counted in counts.items():
        assert is_counted.any(), "the inputs show nothing"
        share = is_counted.float().mean().item()
        assert trainer._metrics["train"][name][-1] == pytest.approx(share), name


def test_evaluation_uses_the_same_loss(trainer, batch):
    trainer.args.objective = "acr"
    trainer.loss_type = "bnpo"
    trainer.model.eval()
    loss = our_loss(trainer, batch)
    expected = reference(trainer, batch, "acr", "bnpo")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert "acr/lifted_share" in trainer._metrics["eval"]


def test_the_guard_judges_each_batch_of_an_evaluation(trainer):
    one_update_per_rollout(trainer)
    trainer.pop_callback(MismatchGuard)
    trainer.add_callback(MismatchGuard(trainer.args))
    sync = trainer.vllm_generation.sync
    due = []  # a proof, by batch: what is contradicted between two of them asks for one
    trainer.model.eval()
    for error in (0.0, 1.0):
        batch = trainer._generate_and_score_completions(ROWS)
        batch["sampling_per_token_logps"] += error
        sync.needs_proof = False
        our_loss(trainer, batch)
        due.append(sync.needs_proof)
    sync.needs_proof = False
    assert due == [False, True]
    assert trainer._metrics["eval"]["mismatch/guard"] == [0, 1]


def test_gradient_accumulation_and_tool_tokens(trainer, batch, monkeypatch):
    # Tool output is in the completion but was not sampled: it counts for nothing. The policy still
    # reads it.
    trainer.args.objective = "acr"
    trainer.loss_type = "bnpo"
    tool_mask = torch.ones(B, T, dtype=torch.long)
    tool_mask[0, 1:3] = 0
    monkeypatch.setattr(trainer, "current_gradient_accumulation_steps", 2)
    loss = our_loss(trainer, batch | {"tool_mask": tool_mask})
    expected = reference(trainer, batch, "acr", "bnpo", batch["completion_mask"] * tool_mask)
    assert loss.item() == pytest.approx(expected.item() / 2, rel=1e-5)


def one_update_per_rollout(trainer):
    trainer.args.gradient_accumulation_steps = trainer.args.steps_per_generation


@pytest.fixture(params=[True, False])
def is_one_update(request, trainer):
    """Whether there is one update per rollout, or several."""
    if request.param:
        one_update_per_rollout(trainer)
    return request.param


def rollout_of(trainer):
    trainer._metrics["train"].clear()
    return trainer._generate_and_score_completions(ROWS)


def train_step(trainer):
    trainer.training_step(trainer.model, ROWS, None)


def latest(trainer):
    return {name: values[-1] for name, values in trainer._metrics["train"].items() if values}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_one_update_per_rollout_needs_no_scoring_pass(objective, trainer, monkeypatch):
    trainer.args.objective = objective
    torch.manual_seed(0)
    scored = rollout_of(trainer)
    scored_metrics = latest(trainer)
    one_update_per_rollout(trainer)
    torch.manual_seed(0)
    unscored = rollout_of(trainer)
    assert "old_per_token_logps" not in unscored
    assert "importance_sampling_ratio" not in unscored
    assert trainer._metrics["train"]["time/logps_s"] == [0.0]
    # The same rollout, so the losses can be compared.
    unscored = {name: part for name, part in scored.items() if name in unscored}
    advantages = torch.linspace(-1, 1, len(ROWS))

    def loss_of(rollout, step):
        rows = slice(B * step, B * step + B)
        batch = losses.micro_batch(rollout, rows)
        batch["advantages"] = advantages[rows]
        monkeypatch.setattr(trainer, "_step", step)
        return our_loss(trainer, batch)

    for step in range(4):
        theirs = loss_of(scored, step)
        ours = loss_of(unscored, step)
        # Scoring passes over other rows at once, and so rounds otherwise.
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-4, abs=1e-6)
        assert_close(gradients(trainer, ours), gradients(trainer, theirs), 1e-3, 1e-4)
    measured = {name for name in scored_metrics if name.startswith("mismatch/")}
    measured.remove("mismatch/guard")  # which remembers rollouts of other tests
    assert len(measured) == 10
    metrics = latest(trainer)
    for name in measured:
        assert metrics[name] == pytest.approx(scored_metrics[name], rel=1e-2, abs=1e-7), name


def test_a_rollout_is_scored_without_dropout(is_one_update, trainer, monkeypatch):
    monkeypatch.setattr(trainer.model.config, "attention_dropout", 0.5)
    for layer in trainer.model.model.layers:
        monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.5)
    batch = rollout_of(trainer)
    assert trainer.model.training
    assert "old_per_token_logps" in batch
    assert trainer._metrics["train"]["mismatch/kl_k3"][0] < 1e-3
    with torch.no_grad():
        noisy = trainer.model(batch["completion_ids"]).logits
        again = trainer.model(batch["completion_ids"]).logits
    assert not torch.equal(noisy, again), "the loss keeps its dropout"


def test_dropout_is_found_in_modules_and_in_the_configuration(trainer, monkeypatch):
    assert not has_dropout(trainer.model)
    monkeypatch.setattr(trainer.model, "dropped", torch.nn.Dropout(0.05), raising=False)
    assert has_dropout(trainer.model)
    monkeypatch.setattr(trainer.model.dropped, "p", 0.0)
    assert not has_dropout(trainer.model)
    for name in ("hidden_dropout", "router_jitter_noise"):
        with monkeypatch.context() as change:
            change.setattr(trainer.model.config, name, 0.1, raising=False)
            assert has_dropout(trainer.model), name
    adapter = LoraConfig(lora_dropout=0.5, target_modules=["q_proj"])
    assert has_dropout(get_peft_model(tiny_model(), adapter))


def test_an_update_does_not_score_a_rollout_with_noise_or_after_another(trainer):
    one_update_per_rollout(trainer)
    assert trainer._scores_in_update
    trainer.args.gradient_accumulation_steps = 1
    assert not trainer._scores_in_update
    trainer.args.gradient_accumulation_steps = 8
    trainer.args.neftune_noise_alpha = 5.0
    assert not trainer._scores_in_update


class OwnLoss(QuRLGRPOTrainer):
    """Written after TRL's, without a call of the parent."""

    def _compute_loss(self, model, inputs):
        logps = logps_of(self, inputs)
        loss = -torch.exp(logps - inputs.get("old_per_token_logps", logps.detach()))
        if self.vllm_importance_sampling_correction:
            loss = loss * inputs["importance_sampling_ratio"]
        return (loss * inputs["advantages"].unsqueeze(1) * inputs["completion_mask"]).sum()


@pytest.mark.parametrize("kind", [OwnLoss, losses.OwnPass])
def test_a_subclass_with_its_own_loss_or_pass_gets_trls_batch(
    kind, is_one_update, trainer, monkeypatch
):
    monkeypatch.setattr(trainer, "__class__", kind)
    train_step(trainer)
    batch = trainer._buffered_inputs[0]
    difference = batch["old_per_token_logps"] - batch["sampling_per_token_logps"]
    learned = batch["completion_mask"].bool()
    ratio = difference.exp().clamp(max=CAP)[learned]
    torch.testing.assert_close(batch["importance_sampling_ratio"][learned], ratio)
    logged = trainer._metrics["train"].keys()
    assert {"mismatch/guard", "sampling/importance_sampling_ratio/mean"} <= logged


def test_smoothing_learns_from_the_pass_that_scores_and_from_no_other(
    is_one_update, trainer, monkeypatch
):
    smoothing = trainer.vllm_generation.weights.smoothing
    sync = trainer.vllm_generation.sync_weights
    monkeypatch.setattr(trainer.vllm_generation, "sync_weights", lambda: (sync(), due()))

    def due():
        smoothing.collects = True
        smoothing._inputs.clear()

    monkeypatch.setattr(trainer, "_last_loaded_step", -1)  # so TRL syncs
    trainer.model.gradient_checkpointing_enable()
    own_loss = QuRLGRPOTrainer._compute_loss

    def with_another_term(self, model, inputs):  # of another length, and without a mask
        other = model(inputs["prompt_ids"]).logits.pow(2).mean()
        return own_loss(self, model, inputs) + 0.01 * other

    monkeypatch.setattr(QuRLGRPOTrainer, "_compute_loss", with_another_term)
    # the second rollout of four micro-batches is not collected twice
    micro_batches = 8 if is_one_update else 4
    for _ in range(micro_batches):
        if trainer._step == 4:
            due()
        train_step(trainer)
    tokens = 0
    for part in trainer._buffered_inputs:
        for name in ("prompt_mask", "completion_mask"):
            tokens += part[name].sum().item()
    counts = [sums[-1].item() for sums in smoothing._inputs.values()]
    smoothing.collects = False
    smoothing._inputs.clear()
    assert len(counts) >= 4
    assert set(counts) == {tokens}


def test_the_mismatch_of_a_rollout_comes_with_its_last_micro_batch(trainer):
    """One update per rollout, four micro-batches each."""
    one_update_per_rollout(trainer)
    logged = trainer._metrics["train"]
    for rollout in range(2):
        for step in range(4):
            assert len(logged["mismatch/kl_k3"]) == rollout, f"after {step} micro-batches"
            assert len(logged["mismatch/guard"]) == rollout, "the guard judges rollouts"
            train_step(trainer)
    tokens = sum(part["completion_mask"].sum().item() for part in trainer._buffered_inputs)
    assert logged["mismatch/tokens"][-1] == tokens


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, -9999.0])
@pytest.mark.parametrize("objective", ["decoupled", "trl"])
def test_a_token_without_a_log_probability_is_left_out(objective, value, trainer, monkeypatch):
    trainer.args.objective = objective
    give_invalid_logps(trainer, monkeypatch, value, count=1)
    batch = rollout_of(trainer)
    logged = latest(trainer)
    tokens = batch["completion_mask"].sum().item()
    assert tokens > 100
    assert logged["mismatch/invalid_share"] == pytest.approx(1 / tokens)
    assert all(map(math.isfinite, logged.values())), logged
    ratio = batch["importance_sampling_ratio"]
    assert ratio.isfinite().all()
    if objective != "trl":  # whose ratio is of completions
        assert ratio[0, 0] == 1


def test_too_many_such_tokens_are_an_error_before_an_update(is_one_update, trainer, monkeypatch):
    give_invalid_logps(trainer, monkeypatch, -math.inf, count=3)
    trainer.vllm_generation.sync_weights()
    trainer.vllm_generation.sync.needs_proof = False  # which would raise the same at once
    with pytest.raises(RuntimeError, match=r"for [23]\.\d% of this rollout's tokens"):
        for _ in range(4):
            train_step(trainer)
    assert trainer._step == 3 * is_one_update


def rollout_function(logps_of_answers):
    """A user's function that answers each prompt with two tokens."""

    def scripted(prompts, trainer):
        ids = [[5, 6]] * len(prompts)
        return {
            "prompt_ids": ids,
            "completion_ids": ids,
            "logprobs": logps_of_answers(prompts),
        }

    return scripted


def test_a_rollout_function_without_log_probabilities_says_what_to_return(
    is_one_update, trainer, monkeypatch
):
    function = rollout_function(lambda prompts: None)
    monkeypatch.setattr(trainer, "rollout_func", function)
    with pytest.raises(ValueError, match=r"logprobs=None.*return a list for each completion"):
        trainer._generate_and_score_completions(ROWS)


@pytest.mark.parametrize("logps", [[-1.0, -2.0], [[-1.0], [-2.0]]])
def test_a_rollout_function_may_do_without_the_engine(logps, trainer, monkeypatch):
    function = rollout_function(lambda prompts: [logps] * len(prompts))
    monkeypatch.setattr(trainer, "rollout_func", function)
    # as before any generation
    monkeypatch.delattr(trainer.vllm_generation, "samples", raising=False)
    batch = trainer._generate_and_score_completions(ROWS)
    assert batch["sampling_per_token_logps"][0].tolist() == [-1.0, -2.0]
    sync = trainer.vllm_generation.sync
    sync.needs_proof = True
    trainer._end_rollout({})
    assert sync.needs_proof, "nothing was sampled"
    sync.needs_proof = False


def test_vllm_makes_no_text_unless_it_must(trainer, monkeypatch):
    generation = trainer.vllm_generation
    texts = []
    generate = generation.llm.generate

    def watched(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        texts.append("".join(output.outputs[0].text for output in outputs))
        return outputs

    monkeypatch.setattr(generation.llm, "generate", watched)
    monkeypatch.setattr(generation, "temperature", 0.0)

    def completions(**given):
        monkeypatch.setattr(generation, "generation_kwargs", given)
        result = generation.generate([[5, 6]] * 4, None, 4)
        # TRL's IW-OPD looks up each sampled token by its id, here alone.
        for row, listed in zip(result.completion_ids, result.logprob_token_ids, strict=True):
            assert listed == [[token] for token in row]
        return result.completion_ids

    plain = completions()
    assert texts == [""]
    sign = trainer.processing_class.decode(plain[0][3:4])
    stopped = completions(stop=[sign])
    assert len(stopped[0]) < len(plain[0])


class Keeps(RolloutCallback):
    def __init__(self):
        self.rollouts = []

    def on_rollout(self, rollout):
        self.rollouts.append(rollout)
        self.record({"kept": float(len(self.rollouts))})


def test_a_callback_reads_a_rollout_and_logs(trainer, monkeypatch):
    kept = Keeps()
    trainer.add_callback(kept)
    trainer._metrics["train"]["older"].append(1.0)
    trainer.vllm_generation.cost.tokens += 1  # of others
    for step in (0, 1, 0):
        monkeypatch.setattr(trainer, "_step", step)
        train_step(trainer)
    trainer.remove_callback(kept)
    assert trainer._metrics["train"]["kept"] == [1.0, 2.0]
    first, second = kept.rollouts
    assert first.version != ""
    assert first.samples is not second.samples
    assert "reward" in first.metrics
    assert "older" not in first.metrics
    assert first.cost.tokens == sum(map(len, first.samples.completions))


def test_weights_that_no_sync_has_sent_are_sent_before_tokens_are_sampled(trainer, monkeypatch):
    """As where TRL is in the same step, or a callback or a subclass leaves the sync out."""
    rollout_of(trainer)
    generation = trainer.vllm_generation
    versions = [generation.sync.version]
    monkeypatch.setattr(generation, "sync_weights", lambda: None)
    # The first is synced again in the middle, as in sleep mode and after a server's fault.
    llm = generation.llm
    monkeypatch.setattr(llm, "generate", before(llm.generate, generation.sync.push))
    for change in (0.0, 1e-3, 0.0, 1e-3, 1e-3):  # uncounted by torch, as of a fused optimizer
        trainer.model.model.norm.weight.data += change
        rollout_of(trainer)
        versions.append(generation.sync.version)
    assert versions[2] == versions[3]
    assert len({*versions}) == 5


def test_after_a_sync_that_failed_the_weights_are_sent_again(trainer):
    """Even if the policy is as it was before that sync."""
    rollout_of(trainer)
    generation = trainer.vllm_generation
    version = generation.sync.version
    weight = trainer.model.model.norm.weight
    kept = weight.data.clone()
    weight.data.fill_(math.nan)
    with pytest.raises(SyncError, match="NaN"):
        generation.sync_weights()
    weight.data.copy_(kept)
    rollout_of(trainer)
    _, _, first = version.rpartition("sync")
    _, _, second = generation.sync.version.rpartition("sync")
    assert int(second) == int(first) + 2


def test_updates_that_change_no_weight_are_told_of_once(trainer, monkeypatch, caplog):
    """Rates that move a weight by less than its digits, as with weights in 16 bits."""
    monkeypatch.setattr(trainer, "reward_funcs", [lambda **kwargs: list(map(float, range(16)))])
    vars(trainer.args).update(
        max_steps=14, logging_steps=1, save_strategy="no", lr_scheduler_type="constant"
    )

    def train(rate):
        caplog.clear()
        trainer.optimizer = None
        trainer.lr_scheduler = None
        trainer.args.learning_rate = rate
        trainer.train()
        return [text for text in caplog.messages if "changed no weight" in text]

    assert train(0.0) == [], "a rate of 0, as in warmup, is meant"
    assert train(1e-3) == []
    [text] = train(1e-50)
    assert re.search(r"steps \d+ to \d+ .* rate is 1e-50 and grad_norm \d", text)
