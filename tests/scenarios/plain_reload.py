"""vLLM's own `reload_weights`, without trl-qurl's worker: are its two faults on CPU still there?

The model is INT8 with a tied, unquantized head, so one engine shows both: what the head computes
against the weight it holds, and whether the scales that the INT8 primitives point to are the ones
that the layers keep.
"""

import os
import sys
from pathlib import Path

from child import print_record

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from tiny import ENGINE, tiny_model, tiny_tokenizer
from vllm import LLM, _custom_ops
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from trl_qurl.quantization import write_checkpoint

scales_pointed_to: list[int] = []
build_primitive = _custom_ops.create_onednn_scaled_mm


def watched_build_primitive(weight, weight_scales, *arguments):
    scales_pointed_to.append(weight_scales.data_ptr())
    return build_primitive(weight, weight_scales, *arguments)


def head_error(worker) -> float:
    """Largest difference between the head's logits of a fixed input and the product with its
    weight.
    """
    [head] = [layer for layer in worker.get_model().modules() if isinstance(layer, ParallelLMHead)]
    hidden = torch.linspace(-1, 1, head.weight.shape[1], dtype=head.weight.dtype).unsqueeze(0)
    logits = head.quant_method.apply(head, hidden)
    return (logits - hidden @ head.weight.t()).abs().max().item()


def dangling(worker) -> int:
    """Count the primitives with an address that does not belong to any layer's scales."""
    kept = {
        module.weight_scale.data_ptr()
        for module in worker.get_model().modules()
        if hasattr(module, "weight_scale")
    }
    return sum(address not in kept for address in scales_pointed_to)


def state(engine: LLM) -> dict[str, float]:
    record = {"primitives": len(scales_pointed_to)}
    record["head_error"], record["dangling"] = (
        engine.collective_rpc(look)[0] for look in (head_error, dangling)
    )
    scales_pointed_to.clear()
    return record


if __name__ == "__main__":
    _custom_ops.create_onednn_scaled_mm = watched_build_primitive
    for name, seed in (("start", 0), ("new", 1)):
        # Qwen2 lacks a separate head in older vLLM
        model = tiny_model("llama", seed=seed, dtype=torch.bfloat16)
        write_checkpoint(model, tiny_tokenizer(), "int8", Path(sys.argv[1], name))
    engine = LLM(str(Path(sys.argv[1], "start")), **ENGINE, max_model_len=64, max_num_seqs=16)
    record = {"started": state(engine)}
    engine.collective_rpc("reload_weights", kwargs={"weights_path": str(Path(sys.argv[1], "new"))})
    record["reloaded"] = state(engine)
    print_record(record)
