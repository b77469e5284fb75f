"""Run one model's engines, one format at a time, and score their answers with the full-precision policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from trl_qurl.lab.comparison import BASELINE, fitting_formats, label
from trl_qurl.lab.device import full_precision
from trl_qurl.lab.evaluation.tasks import encode_prompt, needed_context
from trl_qurl.lab.mismatch.answers import Job, Scored, sample, score
from trl_qurl.lab.mismatch.prompts import Sampling, load_prompts
from trl_qurl.lab.processes import call_in_child
from trl_qurl.quantization.checkpoint import CheckpointWriter, load_model
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.quantization.plan import Formats, format_name, make_plan
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.quantization.smoothing import can_smooth
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.directory import CheckpointDirectory
from trl_qurl.rollout.engine.hardware import check_cpu_build, cpu_cache_arguments
from trl_qurl.rollout.engine.launch import require_vllm, resolve_model


class Engines:
    """One engine per format for the same prompts, and the full-precision policy that scores their answers.

    Args:
        model: Hub name or directory of a full-precision model.
        sampling: Questions to ask and answers to sample.
        engine_kwargs: Extra arguments for `vllm.LLM`.
        say: Called with each progress message.
        smooths: Smooth activations for the formats that training smooths by default.

    Raises:
        ValueError: If an argument is invalid.
        FileNotFoundError: If the model or a file does not exist.
        ImportError: If vLLM is missing.
    """

    def __init__(
        self,
        model: str,
        sampling: Sampling,
        engine_kwargs: Mapping[str, Any],
        say: Callable[[str], None],
        smooths: bool = True,
    ) -> None:
        require_vllm()
        prompts = load_prompts(sampling.questions, sampling.limit)
        self.model, self.sampling, self.say, self._smooths = model, sampling, say, smooths
        self.directory = resolve_model(model)
        config, tokenizer = (cls.from_pretrained(self.directory) for cls in (AutoConfig, AutoTokenizer))
        self.prompts = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        check_cpu_build(config)
        _, sixteen_bits = full_precision()
        arguments: dict[str, Any] = {
            "dtype": sixteen_bits,
            "max_model_len": needed_context(config, self.prompts, sampling.max_tokens),
            "enforce_eager": not torch.cuda.is_available(),  # on a CPU, vLLM compiles for minutes
        }
        policy, self._tokenizer = load_model(self.directory)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._policy = policy.to(getattr(torch, sixteen_bits) if self._device == "cuda" else torch.float32).eval()
        repeated = [tokens for tokens in self.prompts for _ in range(sampling.samples)]
        load = {"sequences": len(repeated), "length": arguments["max_model_len"]}
        arguments |= engine_kwargs
        engine_kwargs = {**cpu_cache_arguments(self.directory, arguments, **load), **arguments}
        self._job = Job(self.directory, BASELINE, repeated, sampling.max_tokens, engine_kwargs)

    @contextmanager
    def policy(self) -> Iterator[PreTrainedModel]:
        """Yield the policy on its device, then move it to the CPU to free GPU memory for an engine."""
        try:
            yield self._policy.to(self._device)
        finally:
            self._policy.to("cpu")

    def formats(self, names: Sequence[str] | None, ignore: Sequence[str]) -> list[QuantizationScheme]:
        """Return the named formats, or all that this machine and the model support (`fitting_formats`)."""
        return fitting_formats(self._policy, names, ignore, self.say)

    def sample(self, formats: Formats, ignore: Sequence[str]) -> list[Scored]:
        """Sample answers from an engine and score them.

        Args:
            formats: Format or formats of the engine, `"none"` for 16 bits.
            ignore: Modules to keep in 16 bits.

        Raises:
            ChildProcessError: If the engine failed. Its last output lines go to standard error.
        """
        name = format_name(formats)
        self.say(f"Sampling {len(self._job.prompts)} answers from {label(name)}")
        failure = (
            f"The engine for {label(name)} failed; its last output lines are above. If it ran out of memory, lower "
            "--samples or --max-tokens."
        )
        with self._checkpoint(formats, ignore) as directory:
            answers = call_in_child(sample, replace(self._job, model=directory, formats=formats), failure)
        with self.policy() as policy:
            return list(score(policy, answers))

    @contextmanager
    def weights(self, formats: Formats, ignore: Sequence[str]) -> Iterator[WeightStream]:
        """Move the policy to its device and yield its weights as quantized, smoothed on the prompts as in training."""
        with self.policy() as policy:
            plan = make_plan(policy, formats, ignore)
            smooths = self._smooths and can_smooth(policy) and any(scheme.is_smoothed for scheme in plan.targets)
            weights = WeightStream(policy, plan, smooths)
            try:
                if weights.smoothing is not None:
                    weights.fit_smoothing(policy, self.prompts)
                yield weights
            finally:
                if weights.smoothing is not None:
                    weights.smoothing.close()

    @contextmanager
    def _checkpoint(self, formats: Formats, ignore: Sequence[str]) -> Iterator[str]:
        """Yield a temporary directory with the weights as quantized."""
        if formats == BASELINE:
            yield self.directory
            return
        with self.weights(formats, ignore) as weights:
            checkpoint = CheckpointDirectory(None, weights.nbytes())
            writer = CheckpointWriter(self._policy, self._tokenizer, weights.plan)
            # As for a server, the codes do not depend on the dtype that holds the weights.
            writer.write(weights.tensors(model_parameters(self._policy), is_exact=True), checkpoint.path / "model")
        try:
            yield str(checkpoint.path / "model")
        finally:
            checkpoint.remove()
