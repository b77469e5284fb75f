"""Simulates cases in forks of a process that has imported what they share: most of a case's time
would be imports.

    python -m simulated_gpu.forking  # cases on the standard input, a line with a report for each on
    the output
"""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

from conftest import child_environment

from simulated_gpu import platform
from simulated_gpu.engine import Case, Report, simulate

TESTS = Path(__file__).parents[1]


def simulate_all(cases):
    """Simulate each case in a separate process, and yield it with its report."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-m", "simulated_gpu.forking"],
        env=child_environment(PYTHONPATH=path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdin.write(json.dumps([dataclasses.asdict(case) for case in cases]))
        process.stdin.close()
        for line in process.stdout:
            case, report = json.loads(line)
            yield Case(**case), Report(**report)


def run_all(cases):
    """vLLM asks for the GPU while it is imported: so each GPU has a fork, and each of its cases a
    fork of that.
    """
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    by_gpu = {}
    for case in cases:
        by_gpu.setdefault(case.gpu, []).append(case)
    for gpu, theirs in by_gpu.items():
        yield from fork(lambda gpu=gpu, theirs=theirs: run_on(gpu, theirs))


def run_on(gpu, cases):
    platform.install(gpu)
    import vllm.engine.arg_utils
    import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
    import vllm.model_executor.model_loader
    import vllm.model_executor.models.qwen2
    import vllm.v1.worker.cpu.shm  # streams and pinned memory, as for vLLM's CPU build
    import vllm.v1.worker.gpu.model_runner  # noqa: F401

    import trl_qurl.rollout.engine.worker  # noqa: F401

    gc.freeze()  # or each case would look through all that was imported
    for case in cases:
        report = {"kernels": {}, "faults": {"crash": "its process ended"}}
        for line in fork(lambda case=case: [json.dumps(dataclasses.asdict(simulate(case)))]):
            report = json.loads(line)
        yield json.dumps([dataclasses.asdict(case), report])


def fork(work):
    """Yield the lines that `work` yields in a child process; fewer if that fails."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            with os.fdopen(writer, "w") as pipe:
                for line in work():
                    print(line.rstrip("\n"), file=pipe, flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        yield from pipe
    os.waitpid(child, 0)


if __name__ == "__main__":
    output = sys.stdout
    sys.stdout = sys.stderr  # where libraries print
    for line in run_all([Case(**case) for case in json.load(sys.stdin)]):
        print(line, end="", file=output, flush=True)
