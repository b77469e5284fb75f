"""Engines of one model, in one format after the other, and its policy, which scores what they answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.evaluation.tasks import needed_context
from trl_qurl.lab.formats import fitting_formats, label
from trl_qurl.lab.mismatch.job import Answer, Job
from trl_qurl.lab.mismatch.prompts import encode, load_prompts
from trl_qurl.lab.processes import ENGINE_ENVIRONMENT, call_in_child

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from trl_qurl.lab.mismatch.score import Scored
    from trl_qurl.quantization.scheme import QuantizationScheme
    from trl_qurl.quantization.weight_stream import WeightStream

BASELINE = "none"


@dataclass(frozen=True)
class Sampling:
    """How much is sampled.

    Attributes:
        questions: Where they come from; `None` for those of the package.
        limit: Largest number of them.
        samples: Answers to each.
        max_tokens: Longest answer.
        seed: Of the sampling.
    """

    questions: str | None = None
    limit: int = 16
    samples: int = 4
    max_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("limit", "samples", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a positive number.")


class Engines:
    """Lets an engine per format answer the same prompts, and the policy in full precision score the answers.

    Args:
        model: Name on the Hub, or directory of a model in full precision.
        sampling: How much is sampled.
        engine_kwargs: Further arguments of `vllm.LLM`.
        say: Called with a line about what is being done.
        smooths: Whether activations are smoothed where a run smooths them by default.

    Raises:
        ValueError: If arguments do not fit.
        FileNotFoundError: If a model or a file does not exist.
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
        import torch
        from transformers import AutoConfig, AutoTokenizer

        from trl_qurl.lab.device import full_precision
        from trl_qurl.quantization.checkpoint import load_model
        from trl_qurl.rollout.engine.colocated import check_head_size
        from trl_qurl.rollout.engine.launch import require_vllm, resolve_model

        require_vllm()
        prompts = load_prompts(sampling.questions, sampling.limit)
        self._say = say
        self.directory = resolve_model(model)
        config, tokenizer = (kind.from_pretrained(self.directory) for kind in (AutoConfig, AutoTokenizer))
        self.prompts = token_ids = [encode(tokenizer, prompt) for prompt in prompts]
        self._smooths = smooths
        check_head_size(config)
        context = needed_context(config, token_ids, sampling.max_tokens)
        _, sixteen_bits = full_precision()
        is_gpu = torch.cuda.is_available()
        self._device = "cuda" if is_gpu else "cpu"
        policy, self._tokenizer = load_model(self.directory)
        self._policy = policy.to(getattr(torch, sixteen_bits) if is_gpu else torch.float32).eval()
        arguments: dict[str, Any] = {"dtype": sixteen_bits, "max_model_len": context}
        if not is_gpu:  # vLLM would compile for minutes, and take nearly all memory for keys and values
            cache = cache_bytes(config, context, len(token_ids) * sampling.samples)
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": cache}
        repeated = [tokens for tokens in token_ids for _ in range(sampling.samples)]
        self._job = Job(self.directory, repeated, sampling.max_tokens, sampling.seed, {**arguments, **engine_kwargs})

    @contextmanager
    def policy(self) -> Iterator[PreTrainedModel]:
        """The policy on its device; outside of the block an engine may take the GPU's memory."""
        try:
            yield self._policy.to(self._device)
        finally:
            self._policy.to("cpu")

    def formats(self, names: Sequence[str] | None, ignore: Sequence[str]) -> list[QuantizationScheme]:
        """The formats of these names, or those that fit this machine and the model (`fitting_formats`)."""
        return fitting_formats(self._policy, names, ignore, self._say)

    def check(self, scheme: QuantizationScheme, ignore: Sequence[str]) -> frozenset[str]:
        """The layers that a format quantizes; `ValueError` where it cannot."""
        from trl_qurl.quantization.layers import quantized_layer_names

        return quantized_layer_names(self._policy, ignore, scheme)

    def sample(self, name: str, ignore: Sequence[str]) -> list[Scored]:
        """Let an engine answer, and score what it says.

        Args:
            name: Of its format, `"none"` for 16 bits.
            ignore: Modules that it keeps in 16 bits.

        Raises:
            ChildProcessError: If it failed; the last lines that it printed are on the standard error then.
        """
        from trl_qurl.lab.mismatch.score import score

        self._say(f"Sampling {len(self._job.prompts)} answers from {label(name)}")
        with self._checkpoint(name, ignore) as directory:
            answers = ask_engine(replace(self._job, model=directory), name)
        with self.policy() as policy:
            return list(score(policy, answers))

    @contextmanager
    def weights(self, scheme: QuantizationScheme, ignore: Sequence[str]) -> Iterator[WeightStream]:
        """The policy's weights in a format, smoothed by the prompts as a run does it; the policy is on its device."""
        from trl_qurl.quantization.smoothing import can_smooth
        from trl_qurl.quantization.weight_stream import WeightStream

        with self.policy() as policy:
            smooths = self._smooths and scheme.is_smoothed and can_smooth(policy)
            weights = WeightStream(policy, scheme, ignore, smooths)
            try:
                if weights.smoothing is not None:
                    weights.fit_smoothing(policy, self.prompts)
                yield weights
            finally:
                if weights.smoothing is not None:
                    weights.smoothing.close()

    @contextmanager
    def _checkpoint(self, name: str, ignore: Sequence[str]) -> Iterator[str]:
        """A directory with the weights in a format, gone after the block."""
        from trl_qurl.quantization.checkpoint import CheckpointWriter
        from trl_qurl.quantization.formats import get_scheme
        from trl_qurl.quantization.weight_stream import model_parameters
        from trl_qurl.rollout.directory import CheckpointDirectory

        if name == BASELINE:
            yield self.directory
            return
        scheme = get_scheme(name)
        with self.weights(scheme, ignore) as weights:
            place = CheckpointDirectory(None, weights.nbytes())
            writer = CheckpointWriter(self._policy, self._tokenizer, scheme, ignore)
            # As a server's: the same codes whatever dtype holds the weights.
            writer.write(weights.tensors(model_parameters(self._policy), is_exact=True), place.path / "model")
        try:
            yield str(place.path / "model")
        finally:
            place.remove()


def cache_bytes(config: PretrainedConfig, context: int, answers: int) -> int:
    """Memory for 16-bit keys and values of all answers at once, but at most 1 GiB."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    blocks = context + 256  # the last block of an answer is not full, and vLLM wants some to spare
    return min(2**30, max(2**26, answers * blocks * 4 * text.num_hidden_layers * heads * width))


def ask_engine(job: Job, scheme: str) -> list[Answer]:
    """Answers from a process with an engine of its own.

    Raises:
        ChildProcessError: If it failed; the last lines that it printed are on the standard error then.
    """
    from trl_qurl.quantization.formats import get_scheme
    from trl_qurl.rollout.engine.kernels import kernel_environment

    kernels = kernel_environment(None if scheme == BASELINE else get_scheme(scheme))
    failure = (
        f"The engine for {label(scheme)} failed; the last lines that it printed are above. Fewer --samples or a "
        "smaller --max-tokens need less memory."
    )
    return call_in_child("trl_qurl.lab.mismatch.worker", job, failure, {**ENGINE_ENVIRONMENT, **os.environ, **kernels})
