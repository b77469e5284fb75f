"""Run one model's engines, one format at a time, and score their answers with the full-precision policy."""

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
    """Questions to ask and answers to sample.

    Attributes:
        questions: Source of the questions; `None` for the built-in ones.
        limit: Maximum number of questions.
        samples: Answers per question.
        max_tokens: Longest answer, in tokens.
        seed: Sampling seed.
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
        config, tokenizer = (cls.from_pretrained(self.directory) for cls in (AutoConfig, AutoTokenizer))
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
        if not is_gpu:  # otherwise vLLM compiles for minutes and reserves nearly all memory for its KV cache
            cache = cache_bytes(config, context, len(token_ids) * sampling.samples)
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": cache}
        repeated = [tokens for tokens in token_ids for _ in range(sampling.samples)]
        self._job = Job(self.directory, repeated, sampling.max_tokens, sampling.seed, {**arguments, **engine_kwargs})

    @contextmanager
    def policy(self) -> Iterator[PreTrainedModel]:
        """Yield the policy on its device, then move it to the CPU to free GPU memory for an engine."""
        try:
            yield self._policy.to(self._device)
        finally:
            self._policy.to("cpu")

    def formats(self, names: Sequence[str] | None, ignore: Sequence[str]) -> list[QuantizationScheme]:
        """Return the named formats, or all that this machine and the model support (`fitting_formats`)."""
        return fitting_formats(self._policy, names, ignore, self._say)

    def check(self, scheme: QuantizationScheme, ignore: Sequence[str]) -> frozenset[str]:
        """Return the layers that a format quantizes; raise `ValueError` if it cannot quantize one of them."""
        from trl_qurl.quantization.layers import quantized_layer_names

        return quantized_layer_names(self._policy, ignore, scheme)

    def sample(self, name: str, ignore: Sequence[str]) -> list[Scored]:
        """Sample answers from an engine and score them.

        Args:
            name: Format of the engine, `"none"` for 16 bits.
            ignore: Modules to keep in 16 bits.

        Raises:
            ChildProcessError: If the engine failed. Its last output lines go to standard error.
        """
        from trl_qurl.lab.mismatch.score import score

        self._say(f"Sampling {len(self._job.prompts)} answers from {label(name)}")
        with self._checkpoint(name, ignore) as directory:
            answers = ask_engine(replace(self._job, model=directory), name)
        with self.policy() as policy:
            return list(score(policy, answers))

    @contextmanager
    def weights(self, scheme: QuantizationScheme, ignore: Sequence[str]) -> Iterator[WeightStream]:
        """Move the policy to its device and yield its weights in a format, smoothed on the prompts as in training."""
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
        """Yield a temporary directory with the weights in a format."""
        from trl_qurl.quantization.checkpoint import CheckpointWriter
        from trl_qurl.quantization.formats import get_scheme
        from trl_qurl.quantization.weight_stream import model_parameters
        from trl_qurl.rollout.directory import CheckpointDirectory

        if name == BASELINE:
            yield self.directory
            return
        scheme = get_scheme(name)
        with self.weights(scheme, ignore) as weights:
            checkpoint = CheckpointDirectory(None, weights.nbytes())
            writer = CheckpointWriter(self._policy, self._tokenizer, scheme, ignore)
            # As for a server, the codes do not depend on the dtype that holds the weights.
            writer.write(weights.tensors(model_parameters(self._policy), is_exact=True), checkpoint.path / "model")
        try:
            yield str(checkpoint.path / "model")
        finally:
            checkpoint.remove()


def cache_bytes(config: PretrainedConfig, context: int, answers: int) -> int:
    """Return the bytes for 16-bit keys and values of all answers at once, at most 1 GiB."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    blocks = context + 256  # the last block of an answer is partly empty, and vLLM needs some spare blocks
    return min(2**30, max(2**26, answers * blocks * 4 * text.num_hidden_layers * heads * width))


def ask_engine(job: Job, scheme: str) -> list[Answer]:
    """Sample answers from an engine in a separate process.

    Raises:
        ChildProcessError: If the engine failed. Its last output lines go to standard error.
    """
    from trl_qurl.quantization.formats import get_scheme
    from trl_qurl.rollout.engine.kernels import kernel_environment

    kernels = kernel_environment(None if scheme == BASELINE else get_scheme(scheme))
    failure = (
        f"The engine for {label(scheme)} failed; its last output lines are above. If it ran out of memory, lower "
        "--samples or --max-tokens."
    )
    return call_in_child("trl_qurl.lab.mismatch.worker", job, failure, {**ENGINE_ENVIRONMENT, **os.environ, **kernels})
