"""The models of the benchmarks: random weights in the layers of Qwen3, so nothing is downloaded.

    python benchmarks/shapes.py --shape 0.6B --scheme int8 --minutes 5

runs `trl-qurl bench` on a shape, with its other options.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from trl_qurl.cli import main as trl_qurl


@dataclass(frozen=True)
class Shape:
    """Size of a Qwen3 model; what is `None` follows in the proportions of Qwen3-0.6B."""

    layers: int = 28
    hidden: int = 1024
    vocabulary: int = 151936
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int = 128
    tied: bool = True

    def build(self, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        """Build the model. Its weights are made in `dtype`: 7 billion in float32 first would need
        30 GB.
        """
        heads = self.heads or max(2, self.hidden // 64)
        config = Qwen3Config(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate or 3 * self.hidden,
            num_attention_heads=heads,
            num_key_value_heads=self.kv_heads or heads // 2,
            head_dim=self.head_dim,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            dtype=dtype,
        )
        torch.manual_seed(0)
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


SHAPES = {
    "0.6B": Shape(),
    "0.5B": Shape(24, 896, 151936, intermediate=4864, heads=14, kv_heads=2, head_dim=64),
    "7B": Shape(28, 3584, 152064, intermediate=18944, heads=28, kv_heads=4, tied=False),
    "tiny": Shape(2, 128, 1000),
}
"""By name: Qwen3-0.6B; the dimensions of Qwen2.5-0.5B and of Qwen2.5-7B; and one to try a script
with.
"""


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add `--shape`, and the options that override parts of it."""
    parser.add_argument(
        "--shape", choices=SHAPES, default="0.6B", help="size of the model (default: %(default)s)"
    )
    for name in ("layers", "hidden", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, help="override this dimension of the shape")


def read_shape(arguments: argparse.Namespace) -> Shape:
    """Return the shape that the options ask for."""
    overrides = {name: getattr(arguments, name) for name in ("layers", "hidden", "vocabulary")}
    return replace(
        SHAPES[arguments.shape],
        **{name: size for name, size in overrides.items() if size is not None},
    )


def main() -> int:
    """Run `trl-qurl bench` on a shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shape_options(parser)
    arguments, options = parser.parse_known_args()
    model = read_shape(arguments).build(torch.float32, torch.device("meta"))
    with tempfile.TemporaryDirectory() as directory:
        model.config.save_pretrained(directory)
        return trl_qurl(["bench", directory, *options])


if __name__ == "__main__":
    sys.exit(main())
