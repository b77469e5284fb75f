"""Run a model's engines, one format at a time, and score their answers with the exact policy."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedModel

from trl_qurl.lab.comparison import BASELINE, label
from trl_qurl.lab.device import full_precision
from trl_qurl.lab.engine import start_engine
from trl_qurl.lab.evaluation.tasks import encode_prompts
from trl_qurl.lab.mismatch.prompts import load_prompts
from trl_qurl.lab.mismatch.statistics import Mismatch, Scored, measure
from trl_qurl.lab.processes import call_in_child
from trl_qurl.lab.rounded_cache import rounded_cache
from trl_qurl.quantization.checkpoint import CheckpointWriter, load_model
from trl_qurl.quantization.files import PrivateDirectory
from trl_qurl.quantization.formats import TOKEN_CACHES
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.quantization.plan import Formats, format_name, make_plan, schemes_of
from trl_qurl.quantization.smoothing import can_smooth
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.checks.hardware import check_cpu_build
from trl_qurl.rollout.engine.launch import require_vllm, resolve_model
from trl_qurl.rollout.wire import COMPILING


class Answer(NamedTuple):
    """An answer of `T` tokens."""

    prompt: list[int]
    tokens: list[int]  # (T,)
    logps: list[float]  # log-probabilities of the tokens under the engine, in nats, (T,)


class Engines:
    """One engine per format for the same prompts, and the policy that scores their answers.

    Args:
        args: Those of the command.
        say: Called with each progress message.

    Raises:
        ValueError: For an invalid argument.
        OSError: About a missing model or file.
        ImportError: Without vLLM.
    """

    def __init__(self, args: Namespace, say: Callable[[str], None]) -> None:
        require_vllm()
        self.say = say
        self._args = args
        self._directory = resolve_model(args.model)
        check_cpu_build(AutoConfig.from_pretrained(self._directory))
        prompts = load_prompts(args.questions, args.limit)
        self.prompts, self._length = encode_prompts(self._directory, prompts, args.max_tokens)
        has_gpu = torch.cuda.is_available()
        sixteen_bits = full_precision()[1]
        policy, self._tokenizer = load_model(self._directory)
        self._device = "cuda" if has_gpu else "cpu"
        dtype = getattr(torch, sixteen_bits) if has_gpu else torch.float32
        self.policy = policy.to(self._device, dtype).eval()
        self._answers: list[Answer] = []  # of the engine in 16 bits
        self._arguments: dict[str, Any] = {
            "dtype": sixteen_bits,
            "max_model_len": self._length,
            "enforce_eager": not has_gpu,  # on a CPU, vLLM compiles for minutes
            "logprobs_mode": "processed_logprobs",
            **args.engine_kwargs,
        }

    def measure(self, formats: Formats, cache: str | None = None) -> Mismatch:
        """Sample answers from an engine in these formats, `"none"` for 16 bits, and score them.

        Args:
            formats: Of the weights.
            cache: Value of `kv_cache_dtype`, instead of that of the command's arguments.

        Raises `ChildProcessError` if the engine failed, after printing its last output lines to
        standard error.
        """
        prompts = [tokens for tokens in self.prompts for _ in range(self._args.samples)]
        name = label(format_name(formats)) + (f" with an {cache} cache" if cache else "")
        compiling = "" if self._arguments["enforce_eager"] else COMPILING
        self.say(f"Sampling {len(prompts)} answers from {name}{compiling}")
        failure = (
            f"The engine for {name} failed; its last output lines are above. If it ran out of "
            "memory, lower --samples or --max-tokens."
        )
        with self._checkpoint(formats) as directory:
            arguments = {**self._arguments, "model": directory}
            if cache is not None:
                arguments["kv_cache_dtype"] = cache
            engine = partial(sample, formats, arguments, self._length, self._args.max_tokens)
            self.policy.to("cpu")  # an engine needs a GPU's memory
            answers = call_in_child(engine, prompts, failure)
            self.policy.to(self._device)
        if formats == BASELINE and cache is None:
            self._answers = answers
        return measure(list(score(self.policy, answers)))

    def measure_cache(self, cache: str) -> Mismatch:
        """Measure a format of the key-value cache beside weights in 16 bits.

        Where the engine lacks it, it is simulated on the answers of 16 bits, measured before.
        """
        if not is_simulated(cache):
            return self.measure(BASELINE, cache)
        self.say(f"Simulating {cache} on the answers from {label(BASELINE)}")
        return measure(list(simulate(self.policy, self._answers, cache)))

    def weights(self, formats: Formats) -> WeightStream:
        """Return the policy's weights as quantized, smoothed on the prompts as in training."""
        plan = make_plan(self.policy, formats, self._args.ignore)
        is_smoothed = any(scheme.is_smoothed for scheme in plan.targets)
        smooths = not self._args.no_smooth and is_smoothed and can_smooth(self.policy)
        weights = WeightStream(self.policy, plan, smooths)
        if weights.smoothing is not None:
            weights.fit_smoothing(self.policy, self.prompts)
        return weights

    @contextmanager
    def _checkpoint(self, formats: Formats) -> Iterator[str]:
        """Yield a temporary directory with the weights as quantized."""
        if formats == BASELINE:
            yield self._directory
            return
        weights = self.weights(formats)
        checkpoint = PrivateDirectory(None, weights.nbytes())
        writer = CheckpointWriter(self.policy, self._tokenizer, weights.plan)
        # As for a server, the codes do not depend on the dtype that holds the weights.
        tensors = weights.tensors(model_parameters(self.policy), is_exact=True)
        writer.write(tensors, checkpoint.path / "model")
        try:
            yield str(checkpoint.path / "model")
        finally:
            checkpoint.remove()


def sample(
    formats: Formats,
    arguments: Mapping[str, Any],
    length: int,
    max_tokens: int,
    prompts: Sequence[list[int]],
) -> list[Answer]:
    """Sample an answer to each prompt at temperature 1 from the whole vocabulary.

    This is what training does by default.
    """
    from vllm import SamplingParams

    llm = start_engine(schemes_of(formats), arguments, len(prompts), length)
    params = SamplingParams(temperature=1.0, max_tokens=max_tokens, logprobs=0, detokenize=False)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    answers = []
    for prompt, output in zip(prompts, outputs, strict=True):
        [completion] = output.outputs
        tokens = list(completion.token_ids)
        steps = zip(tokens, completion.logprobs, strict=True)
        logps = [candidates[token].logprob for token, candidates in steps]
        answers.append(Answer(prompt, tokens, logps))
    return answers


def is_simulated(cache: str) -> bool:
    """Return whether the engine of this machine lacks a format of the key-value cache."""
    return cache in TOKEN_CACHES and not torch.cuda.is_available()


def score(model: PreTrainedModel, answers: Iterable[Answer]) -> Iterator[Scored]:
    """Score each answer with one forward pass over its prompt and its tokens.

    Answers are not batched: padding would make a row depend on its neighbors, adding to the effect
    being measured.
    """
    for answer in answers:
        if not answer.tokens:
            continue
        sampled = torch.tensor(answer.tokens, device=model.device)
        behavior_logps = torch.tensor(answer.logps, dtype=torch.float64)
        logps = logps_of(all_logps(model, answer), sampled)
        yield Scored(tuple(answer.prompt), logps - behavior_logps)


def simulate(model: PreTrainedModel, answers: Iterable[Answer], cache: str) -> Iterator[Scored]:
    """Score a token that the model with a rounded cache samples at each position of the answers.

    Their KL is exact, as both distributions are known.
    """
    generator = torch.Generator().manual_seed(0)
    for answer in answers:
        if not answer.tokens:
            continue
        with rounded_cache(model, cache):
            rounded = all_logps(model, answer)
        sampled = torch.multinomial(rounded.exp(), 1, generator=generator).squeeze(-1)  # (T,)
        exact = all_logps(model, answer)
        log_ratio = logps_of(exact, sampled) - logps_of(rounded, sampled)
        kl = (rounded.exp() * (rounded - exact)).sum(-1).double().cpu()
        yield Scored(tuple(answer.prompt), log_ratio, kl)


def all_logps(model: PreTrainedModel, answer: Answer) -> torch.Tensor:
    """Return the log-probabilities of all tokens at each of an answer, (T, V)."""
    tokens = torch.tensor([answer.prompt + answer.tokens], device=model.device)  # (1, P + T)
    with torch.inference_mode():
        output = model(input_ids=tokens, logits_to_keep=len(answer.tokens) + 1)
        return output.logits[0, :-1].float().log_softmax(-1)


def logps_of(logps: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token, float64, (T,)."""
    return logps.gather(-1, tokens[:, None]).squeeze(-1).double().cpu()
