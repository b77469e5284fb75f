"""The trainer's side of a sync on a CUDA device that is only in PyTorch's books (`FakeTensorMode`).

No number is computed. What a GPU would do differently from a CPU becomes visible: tensors of two
devices in one operation raise, and a dispatch mode counts launches and what makes the CPU wait for
the GPU. Where PyTorch would reach for a CUDA build before any operator, doubles answer.
"""

import collections
import traceback
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version
from tiny import stream_of
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.initialization import no_init_weights

from trl_qurl.quantization import SCHEMES
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.rollout.checks import tensors as checks

needs_scales_without_waits = pytest.mark.skipif(
    Version(version("compressed-tensors")) < Version("0.19"),
    reason="compressed-tensors 0.17 waits for the device at each scale (float(bit_range))",
)

GRID = torch.bfloat16
LAYERS = 3
# Of Qwen2.5-0.5B, with fewer layers: all budgets are per layer or tensor.
SHAPE = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
# per decoder layer
LAUNCHES = {"int8": 86, "fp8": 57, "fp8_block": 64, "w4a16": 113, "w8a16": 92}
VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "split", "split_with_sizes",
    "unsqueeze", "squeeze", "detach", "alias", "as_strided", "unbind", "chunk", "unflatten", "_reshape_alias", "empty",
    "empty_like", "new_empty", "empty_strided", "new_empty_strided", "device", "lift_fresh", "_local_scalar_dense",
}  # fmt: skip


class Watch(TorchDispatchMode):
    """Counts what operators would do to a GPU, and answers what `FakeTensorMode` cannot: the values
    of scalars.
    """

    def __init__(self):
        super().__init__()
        self.launches = 0
        self.waits = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            return self.scalar(args[0])
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            if source.is_cuda and not result.is_cuda:
                self.waits[f"copy to the host in {line()}"] += 1
        self.launches += name not in VIEWS and any(x.is_cuda for x in tensors)
        return result

    def scalar(self, tensor):
        """A tensor's value on the host: a wait, and an answer that no code here minds."""
        self.waits[f"scalar in {line()}"] += tensor.is_cuda
        if tensor.dtype is torch.bool:
            return False
        return 1.0 if tensor.dtype.is_floating_point else 1

    def begin(self):
        self.launches = 0
        self.waits.clear()


def line():
    """The innermost line of ours."""
    for frame in reversed(traceback.extract_stack()):
        if "/trl_qurl/" in frame.filename:
            return f"{frame.filename}:{frame.lineno}"
    return "a test"


def getitem(tensor, index):
    """`tensor[index]` by operators, for slices and `None`."""
    index = index if isinstance(index, tuple) else (index,)
    for dim, each in enumerate(index):
        if each is None:
            tensor = tensor.unsqueeze(dim)
        elif each != slice(None):
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, *each.indices(tensor.shape[dim]))
    return tensor


@pytest.fixture
def watch(monkeypatch):
    # These reach a device guard, which a build without CUDA has not, before any operator.
    for name, double in {
        "__getitem__": getitem,
        "new_tensor": lambda x, data, dtype=None: x.new_zeros(len(data), dtype=dtype),
        "numpy": lambda x: memoryview(b""),
    }.items():
        monkeypatch.setattr(FakeTensor, name, double, raising=False)
    for scheme in SCHEMES.values():  # its samples are real tensors, or would be fake ones forever
        scheme.layout(torch.empty(128, 256, device="meta"))
    with FakeTensorMode(allow_non_fake_inputs=True), Watch() as watch:
        yield watch


def policy():
    config = Qwen2Config(**SHAPE)
    with torch.device("cuda"), no_init_weights():
        model = Qwen2ForCausalLM(config)
    model.tie_weights()
    return model.eval()


def sync(watch, name):
    """A sync that is checked, smoothed where the format is."""
    model = policy()
    scheme = SCHEMES[name]
    names = []
    weights = stream_of(model, scheme, smooths=scheme.is_smoothed)
    if scheme.is_smoothed:
        weights.smoothing.begin_sync()  # collects, as in the syncs before a fit
        for source, each in weights.smoothing._sources.items():
            inputs = model.get_submodule(each.layers[0]).in_features
            weights.smoothing.scales[source] = torch.ones(inputs, device="cuda")
    watch.begin()
    whole = model_parameters(model, grid=GRID)
    made = checks.find_not_finite(weights.tensors(whole, GRID), names)
    for _, tensor in checks.MeteredStream(made, {}):
        assert tensor.is_cuda


@needs_scales_without_waits
@pytest.mark.parametrize("name", SCHEMES)
def test_a_checked_sync_stays_on_the_device_and_takes_few_launches(name, watch):
    sync(watch, name)
    assert watch.waits.total() <= 2, f"not one for numbers and one for digests: {watch.waits}"
    assert watch.launches <= LAUNCHES[name] * LAYERS + 140
