"""Syncs that leave out one layer each, as a wrong name or a dropped tensor would: what do their engines say?"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny import ENGINE, KEPT, stream_of, tiny_model, tiny_tokenizer
from vllm import LLM

from trl_qurl.quantization import SCHEMES, write_checkpoint
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.rollout.wire import WORKER_EXTENSION


def sync_without(left_out: str, model, checkpoint: str) -> str | None:
    engine = LLM(checkpoint, **ENGINE, max_model_len=64, max_num_seqs=16, worker_extension_cls=WORKER_EXTENSION)
    KEPT.append(engine)
    tensors = stream_of(model, SCHEMES["int8"]).tensors(model_parameters(model))
    kept = (pair for pair in tensors if left_out not in pair[0])
    try:
        engine.collective_rpc("load_rollout_weights", kwargs={"update": {"version": "v1"}, "weights_iterator": kept})
    except RuntimeError as error:
        return str(error)
    return None


if __name__ == "__main__":
    checkpoint, *cases = sys.argv[1:]
    model = tiny_model()
    write_checkpoint(model, tiny_tokenizer(), "int8", checkpoint, quantizer="streaming")
    print("RECORD " + json.dumps({left_out: sync_without(left_out, model, checkpoint) for left_out in cases}))
