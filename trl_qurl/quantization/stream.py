"""A model's parameters in, the tensors of its quantized checkpoint out, one layer at a time.

`CheckpointForm` splits and renames parameters, `Smoothing` rescales them, and each layer's format
rounds and packs it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from trl_qurl.quantization.checkpoint_form import CheckpointForm, NamedTensors
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.quantization.plan import QuantizationPlan
from trl_qurl.quantization.smoothing import Smoothing


class WeightStream:
    """Reusable converter from a model's parameters to the tensors of its checkpoint.

    The model may have PEFT's wrapper. Raises `ValueError` as `CheckpointForm` and `Smoothing` do.
    """

    # The type of the trainer's autocast, to which it rounds all but adapters.
    grid: torch.dtype | None = None

    def __init__(
        self,
        model: Any,
        plan: QuantizationPlan,  # an empty one quantizes nothing
        smooths: bool = False,  # whether to smooth the layers in formats that this helps
    ) -> None:
        self.plan = plan
        self.form = CheckpointForm(model, splits_experts=bool(plan.schemes))
        self.smoothing: Smoothing | None = None
        if smooths:
            layers = frozenset(name for name, scheme in plan.schemes.items() if scheme.is_smoothed)
            self.smoothing = Smoothing(model, layers)
        self.transforms: list[Callable[[NamedTensors], NamedTensors]] = []
        if self.smoothing is not None:
            self.transforms.append(self.smoothing.fold)

    def fit_smoothing(self, model: Any, sequences: Iterable[Sequence[int]]) -> None:
        """Fit the scales to the tokens of a few sequences before there are rollouts.

        This is for one process. The stream's `model` must be whole and in memory.
        """
        assert self.smoothing is not None, "the stream must smooth"
        self.smoothing.collects = True
        for _ in self.smoothing.fold(self.form.convert(model_parameters(model))):
            pass  # reading records the weights' magnitudes
        was_training = model.training
        model.eval()
        autocast = torch.autocast(
            model.device.type, self.grid, self.grid is not None, cache_enabled=False
        )
        with torch.inference_mode(), autocast, self.smoothing.watch():
            for tokens in sequences:
                ids = torch.tensor([tokens], device=model.device)
                model(input_ids=ids, use_cache=False, logits_to_keep=1)
        model.train(was_training)
        self.smoothing.fit(is_shared=False)

    def tensors(
        self,
        named_parameters: NamedTensors,
        dtype: torch.dtype | None = None,
        is_exact: bool = False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Convert a model's parameters, without adapters, to tensors in checkpoint format.

        `dtype` casts what is not quantized. The engine would cast it to the same bits, but also log
        a warning for each vector. If `is_exact`, codes are made from float32 and do not depend on
        the dtype of the parameters.

        Raises `ValueError` if the scheme cannot store a layer.
        """
        for name, tensor in self._transformed(named_parameters):
            layer = name.removesuffix(".weight")
            scheme = self.plan.schemes.get(layer)
            if layer == name or scheme is None:
                yield name, self._cast(name, tensor, dtype)
                continue
            if is_exact:
                tensor = tensor.float()
            for suffix, part in scheme.quantize(tensor).items():
                yield f"{layer}.{suffix}", part

    def _transformed(self, named_parameters: NamedTensors) -> NamedTensors:
        tensors: NamedTensors = self.form.convert(named_parameters)
        for transform in self.transforms:
            tensors = transform(tensors)
        return tensors

    def copies(
        self, named_parameters: NamedTensors, dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """Copy to host memory, by the model's names, what `tensors` rounds and casts to `dtype`."""
        copies: dict[str, torch.Tensor] = {}
        views: dict[str, torch.Tensor] = {}  # of the copies, by name in the checkpoint

        def allocate() -> NamedTensors:
            for name, parameter in named_parameters:
                part = next(iter(self.form.layout[name]))
                sent = self._cast(part, parameter, dtype)
                copies[name] = torch.empty_like(sent, device="cpu")
                views.update(self.form.convert([(name, copies[name])]))
                yield name, parameter

        for name, tensor in self._transformed(allocate()):
            views[name].copy_(tensor)
        return copies

    def stored(
        self, parameter: str, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what `tensors` yields for the parameter of this name, on the meta device."""
        for name, tensor in self.form.layout[parameter].items():
            layer = name.removesuffix(".weight")
            if layer == name or layer not in self.plan.schemes:
                yield name, self._cast(name, tensor, dtype)
            else:
                for suffix, part in self.plan.schemes[layer].layout(tensor).items():
                    yield f"{layer}.{suffix}", part

    def nbytes(self, dtype: torch.dtype | None = None) -> int:
        """Return the size of everything that `tensors` yields, in bytes."""
        total = 0
        for parameter in self.form.layout:
            total += sum(tensor.nbytes for _, tensor in self.stored(parameter, dtype))
        return total

    def _cast(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Cast a tensor of the full-precision checkpoint, unless it is to be quantized."""
        is_quantized = name.removesuffix(".weight") in self.plan.schemes
        # Engines keep other vectors, such as corrections of routers, in float32.
        is_cast = tensor.dim() > 1 or name.endswith((".weight", ".bias"))
        if dtype is None or is_quantized or not is_cast or not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype)
