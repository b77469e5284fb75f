"""Run a model's engines, one format at a time, and score their answers with the exact policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from trl_qurl.lab.comparison import BASELINE, label
from trl_qurl.lab.device import full_precision
from trl_qurl.lab.evaluation.tasks import encode_prompt, needed_context
from trl_qurl.lab.mismatch.prompts import Sampling, load_prompts
from trl_qurl.lab.mismatch.statistics import Mismatch, Scored, measure
from trl_qurl.lab.processes import call_in_child
from trl_qurl.quantization.checkpoint import CheckpointWriter, load_model
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.quantization.plan import Formats, format_name, make_plan, schemes_of
from trl_qurl.quantization.smoothing import can_smooth
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.directory import CheckpointDirectory
from trl_qurl.rollout.engine.hardware import check_cpu_build, kernel_environment
from trl_qurl.rollout.engine.launch import require_vllm, resolve_model
from trl_qurl.rollout.repairs.cpu_memory import cpu_cache_arguments
from trl_qurl.rollout.wire import COMPILING


class Answer(NamedTuple):
    """An answer of `T` tokens."""

    prompt: list[int]
    tokens: list[int]  # (T,)
    logps: list[float]  # log-probabilities of the tokens under the engine, in nats, (T,)


class Engines:
    """One engine per format for the same prompts, and the policy that scores their answers.

    Raises `ValueError` for an invalid argument, and errors about a missing model, file or vLLM.
    """

    def __init__(
        self,
        model: str,  # Hub name or directory of a full-precision model
        sampling: Sampling,
        ignore: Sequence[str],  # modules to keep in 16 bits
        engine_kwargs: Mapping[str, Any],  # extra arguments for `vllm.LLM`
        say: Callable[[str], None],  # called with each progress message
        # whether to smooth activations for the formats that training smooths by default
        smooths: bool = True,
    ) -> None:
        require_vllm()
        prompts = load_prompts(sampling.questions, sampling.limit)
        self.say = say
        self._ignore = ignore
        self._smooths = smooths
        self._max_tokens = sampling.max_tokens
        self._directory = resolve_model(model)
        config = AutoConfig.from_pretrained(self._directory)
        tokenizer = AutoTokenizer.from_pretrained(self._directory)
        self.prompts = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        self._repeated = [tokens for tokens in self.prompts for _ in range(sampling.samples)]
        check_cpu_build(config)
        length = needed_context(config, self.prompts, sampling.max_tokens)
        has_gpu = torch.cuda.is_available()
        _, sixteen_bits = full_precision()
        policy, self._tokenizer = load_model(self._directory)
        self._device = "cuda" if has_gpu else "cpu"
        dtype = getattr(torch, sixteen_bits) if has_gpu else torch.float32
        self.policy = policy.to(dtype).eval()
        arguments: dict[str, Any] = {
            "dtype": sixteen_bits,
            "max_model_len": length,
            "enforce_eager": not has_gpu,  # on a CPU, vLLM compiles for minutes
            **engine_kwargs,
        }
        memory = cpu_cache_arguments(
            self._directory, arguments, sequences=len(self._repeated), length=length
        )
        self._arguments = {**memory, **arguments}

    def measure(self, formats: Formats) -> Mismatch:
        """Sample answers from an engine in these formats, `"none"` for 16 bits, and score them.

        Raises `ChildProcessError` if the engine failed, after printing its last output lines to
        standard error.
        """
        name = label(format_name(formats))
        compiling = "" if self._arguments["enforce_eager"] else COMPILING
        self.say(f"Sampling {len(self._repeated)} answers from {name}{compiling}")
        failure = (
            f"The engine for {name} failed; its last output lines are above. If it ran out of "
            "memory, lower --samples or --max-tokens."
        )
        with self._checkpoint(formats) as directory:
            arguments = {"model": directory, **self._arguments}
            engine = partial(sample, formats, self._max_tokens, arguments)
            answers = call_in_child(engine, self._repeated, failure)
        with self._policy_on_device():
            return measure(list(score(self.policy, answers)))

    @contextmanager
    def weights(self, formats: Formats) -> Iterator[WeightStream]:
        """Yield the policy's weights as quantized, smoothed on the prompts as in training."""
        plan = make_plan(self.policy, formats, self._ignore)
        is_smoothed = any(scheme.is_smoothed for scheme in plan.targets)
        smooths = self._smooths and is_smoothed and can_smooth(self.policy)
        weights = WeightStream(self.policy, plan, smooths)
        with self._policy_on_device():
            if weights.smoothing is not None:
                weights.fit_smoothing(self.policy, self.prompts)
            yield weights

    @contextmanager
    def _policy_on_device(self) -> Iterator[None]:
        """Move the policy to its device, and back to the CPU to free GPU memory for an engine."""
        self.policy.to(self._device)
        try:
            yield
        finally:
            self.policy.to("cpu")

    @contextmanager
    def _checkpoint(self, formats: Formats) -> Iterator[str]:
        """Yield a temporary directory with the weights as quantized."""
        if formats == BASELINE:
            yield self._directory
            return
        with self.weights(formats) as weights:
            checkpoint = CheckpointDirectory(None, weights.nbytes())
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
    max_tokens: int,
    engine_kwargs: Mapping[str, Any],
    prompts: Sequence[list[int]],
) -> list[Answer]:
    """Sample an answer to each prompt at temperature 1 from the whole vocabulary.

    This is what training does by default.
    """
    from vllm import LLM, SamplingParams

    os.environ.update(kernel_environment(*schemes_of(formats)))
    llm = LLM(**{"seed": 0, "logprobs_mode": "processed_logprobs", **engine_kwargs})
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


def score(model: PreTrainedModel, answers: Iterable[Answer]) -> Iterator[Scored]:
    """Score each answer with one forward pass over its prompt and its tokens.

    Answers are not batched: padding would make a row depend on its neighbors, adding to the effect
    being measured.
    """
    for answer in answers:
        count = len(answer.tokens)
        if count == 0:
            continue
        tokens = torch.tensor([answer.prompt + answer.tokens], device=model.device)  # (1, P + T)
        with torch.inference_mode():
            output = model(input_ids=tokens, logits_to_keep=count + 1)
            logits = output.logits[0, :-1].float()  # (T, V)
        sampled = tokens[0, -count:, None]  # (T, 1)
        logps = logits.log_softmax(-1).gather(-1, sampled).squeeze(-1)  # (T,)
        behavior_logps = torch.tensor(answer.logps, dtype=torch.float64)
        yield Scored(tuple(answer.prompt), logps.double().cpu() - behavior_logps)
