"""Freed memory is kept on a CPU where our commands start, nowhere else, and never against the user's will."""

import os
import subprocess
import sys

import pytest

from trl_qurl.cli import allocator

COUNT = """
import resource
def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        del [bytearray(64 * 2**20)][:]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
page_faults()
print(page_faults())
"""
"""Allocates and frees 64 MiB ten times, after it did so before: kept memory has no page faults then."""


def run(code, **variables):
    """What a new Python prints, in which nobody has set anything."""
    known = {*allocator.USER_VARIABLES, "GLIBC_TUNABLES", "LD_PRELOAD"}
    environment = {name: value for name, value in os.environ.items() if name not in known} | variables
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.fixture(scope="module")
def returned():
    """Page faults of a process that gives memory back."""
    return int(run(COUNT)[0])


@pytest.fixture
def untouched(monkeypatch):
    """The environment of a process that has set nothing, and what it calls malloc to do."""
    for name in (*allocator.USER_VARIABLES, "GLIBC_TUNABLES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # noted, so that it comes back
        monkeypatch.delenv(name)
    monkeypatch.setattr(allocator, "GPU_FILES", ())
    return monkeypatch


NOWHERE = "import os; from trl_qurl import cli; cli.main(['quantize', '/nowhere', 'out', '--scheme', 'int8'])"

needs_cpu = pytest.mark.skipif(any(map(os.path.exists, allocator.GPU_FILES)), reason="left alone where there is a GPU")


@needs_cpu
def test_a_command_keeps_memory_in_its_process(returned):
    assert int(run(NOWHERE + COUNT)[0]) < returned / 10


@needs_cpu
def test_its_children_keep_memory_too(returned):
    code = "from trl_qurl.cli import allocator as a; import subprocess, sys; assert a.keep_freed_memory()\n"
    code += f"subprocess.run([sys.executable, '-c', {COUNT!r}], check=True)"
    assert int(run(code)[0]) < returned / 10


def test_importing_changes_nothing(returned):
    code = "import os; before = dict(os.environ)\nimport trl_qurl, trl_qurl.cli, trl_qurl.cli.allocator\n"
    assert int(run(code + "assert before == dict(os.environ)" + COUNT)[0]) > returned / 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_MMAP_THRESHOLD_", "65536"),
        ("MALLOC_TRIM_THRESHOLD_", "65536"),
        ("MALLOC_TOP_PAD_", "0"),
        ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=65536"),
    ],
)
def test_what_the_user_has_set_stays(untouched, name, value):
    untouched.setenv(name, value)
    assert not allocator.keep_freed_memory()
    assert allocator.describe_allocator() == f"malloc is left as it is: {name} is set"
    assert {n: os.environ[n] for n in allocator.USER_VARIABLES if n in os.environ} == (
        {name: value} if name.startswith("MALLOC") else {}
    )


@needs_cpu
def test_huge_pages_go_with_it(untouched):
    untouched.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert allocator.keep_freed_memory() and allocator.keep_freed_memory()
    assert allocator.describe_allocator() == "malloc keeps freed memory (glibc)"


def test_another_allocator_is_left_alone(untouched):
    addresses = iter([1, 2, 1, 2])
    untouched.setattr(allocator, "_address", lambda function: next(addresses))
    assert not allocator.keep_freed_memory()
    assert allocator.describe_allocator() == "malloc is left as it is: another allocator is loaded"


def test_another_c_library_is_left_alone(untouched):
    def musl(name):
        raise ValueError("unrecognized configuration name")

    untouched.setattr(allocator.os, "confstr", musl)
    assert not allocator.keep_freed_memory()
    assert allocator.describe_allocator() == "malloc is left as it is: the C library is not glibc"


def test_a_gpu_that_is_used_leaves_malloc_alone(untouched, tmp_path):
    untouched.setattr(allocator, "GPU_FILES", (str(tmp_path),))
    assert not allocator.keep_freed_memory()
    assert allocator.describe_allocator() == "malloc is left as it is: there is a GPU"
    untouched.setenv("CUDA_VISIBLE_DEVICES", "")
    assert allocator.keep_freed_memory()


def test_a_glibc_that_refuses_is_left_alone(untouched):
    class Old:
        malloc = None

        def mallopt(self, name, value):
            return 0

    untouched.setattr(allocator.ctypes, "CDLL", lambda name: Old())
    untouched.setattr(allocator, "_address", lambda function: 1)
    assert not allocator.keep_freed_memory()
    assert allocator.describe_allocator() == "malloc returns freed memory (glibc)"
    assert "MALLOC_TRIM_THRESHOLD_" not in os.environ
