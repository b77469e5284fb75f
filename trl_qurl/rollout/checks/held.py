"""What layers hold after a load, against what came in at the door.

Kernels may repack the weights of a layer that multiplies, even within the same shape, so only layers that do not are
looked at: norms, and the embedding (but for rows that the engine adds to the vocabulary). The probe answers for the
rest.
"""

from collections.abc import Iterable, Iterator

import torch

from trl_qurl.rollout.checks.digests import tensor_digest


class HeldTensors:
    """
    Remembers what comes in, and compares it afterwards with what the model holds.

    Args:
        model: The engine's model.
        enabled: `False` lets tensors pass unread.
    """

    def __init__(self, model: torch.nn.Module, enabled: bool = True) -> None:
        self._model = model
        self._enabled = enabled
        self._expected: dict[str, tuple[torch.Size, str]] = {}

    def watch(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, in passing."""
        held = self._comparable() if self._enabled else {}
        for name, tensor in named_tensors:
            if name in held and _keeps_layout(held[name], tensor.shape):
                self._expected[name] = tensor.shape, tensor_digest(tensor.to(held[name].dtype))
            yield name, tensor

    def compare(self) -> list[str]:
        """
        Names of the parameters that could be compared.

        Raises:
            RuntimeError: A layer holds something else than came in for it.
        """
        held = self._comparable()
        compared, differing = [], []
        for name, (shape, digest) in self._expected.items():
            if name not in held or not _keeps_layout(held[name], shape):
                continue
            compared.append(name)
            if tensor_digest(held[name][: shape[0]] if shape else held[name]) != digest:
                differing.append(name)
        if differing:
            raise RuntimeError(
                f"The engine received the right weights, and {len(differing)} of the {len(compared)} parameters that "
                f"can be compared do not hold them, first {differing[0]}: its loader changed them. Please open an "
                "issue with the name of the model and the output of `trl-qurl env`. rollout_quantization=None may do."
            )
        return compared

    def _comparable(self) -> dict[str, torch.Tensor]:
        """Parameters, by name, that vLLM keeps as it loads them: those of layers without a method to multiply by."""
        return {
            f"{layer}.{name}": parameter
            for layer, module in self._model.named_modules()
            if not hasattr(module, "quant_method") or type(module).__name__ == "VocabParallelEmbedding"
            for name, parameter in module.named_parameters(recurse=False)
        }


def _keeps_layout(held: torch.Tensor, shape: torch.Size) -> bool:
    if held.shape == shape:
        return True
    return len(shape) > 0 and held.shape[1:] == shape[1:] and held.shape[0] > shape[0]
