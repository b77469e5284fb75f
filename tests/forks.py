"""
A `python` that has imported TRL and vLLM before it starts.

A fresh Python takes about ten seconds of processor time to import them, more than most of what the tests start runs
for. So one process of a test run imports everything and then forks (`serve`), and a small program stands in for
`python` (`SHIM`): it sends its arguments, its environment and its open files to that process, and behaves as the fork
does. Programs that start further ones by `sys.executable` or multiprocessing start forks as well.
"""

import atexit
import fcntl
import gc
import importlib.util
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

PRELOADED = [
    "trl.rewards.accuracy_rewards",
    "trl.trainer.grpo_trainer",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.registry",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "transformers.models.qwen2.modeling_qwen2",
    "llmcompressor",
    "peft",
    "trl_qurl.trainers.grpo",
    "trl_qurl.trainers.ppo",
]

# What it does not know how to start, such as `python -I`, the real Python does.
SHIM = """#!{python} -IS
import json, os, signal, socket, struct, sys

arguments = sys.argv[1:]
while arguments and arguments[0] in ("-B", "-u", "-W"):
    del arguments[: 1 + (arguments[0] == "-W")]
if not arguments or arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
files = []
for descriptor in map(int, os.listdir("/proc/self/fd")):
    try:
        if descriptor != server.fileno():
            os.fstat(descriptor)
            files.append(descriptor)
    except OSError:  # the list's own
        pass
job = dict(arguments=arguments, environment=dict(os.environ), directory=os.getcwd(), files=files, group=os.getpgrp())
job = json.dumps(job).encode()
socket.send_fds(server, [struct.pack("I", len(job))], files)
server.sendall(job)
answers = server.makefile()
process = int(answers.readline() or sys.exit("The process that forks has ended:\\n" + open({log!r}).read()))

def forward(number, frame):
    try:
        os.kill(process, number)
    except ProcessLookupError:
        pass

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, forward)
for descriptor in files:  # a pipe ends when the fork closes it
    os.close(descriptor)
status = int(answers.readline() or 1)
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def start(directory: Path, environment: dict[str, str], owner: int) -> Path:
    """
    Start the process that forks, unless it has been, and return at once.

    Args:
        directory: Which only this user can read; of the processes that share the forks.
        environment: Variables of the process; modules read some of them while they are imported.
        owner: Process at whose end everything is killed.

    Returns:
        The program that stands in for `python`; it waits until everything is imported.
    """
    shim = directory / "python"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if shim.exists():
            return shim
        address = str(directory / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            command = [sys.executable, __file__, str(listener.fileno()), str(owner), str(shim)]
            with (directory / "log").open("w") as log:  # what libraries say while they are imported
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[listener.fileno()],
                )
        unfinished = shim.with_suffix(".new")
        unfinished.write_text(SHIM.format(python=sys.executable, address=address, log=str(directory / "log")))
        unfinished.chmod(0o755)
        unfinished.rename(shim)
    return shim


def serve(listener: socket.socket, owner: int) -> dict[str, Any]:
    """Fork for every shim that asks. Returns in the forks only: what each is to become."""
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ)
    end_of_owner = os.pidfd_open(owner)
    events.register(end_of_owner, selectors.EVENT_READ)
    shims: dict[int, socket.socket] = {}  # by process, and the other way round by what an event comes from
    processes: dict[Any, int] = {}
    while True:
        for key, _ in events.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                job = receive(connection)
                if job is None:
                    connection.close()
                    continue
                process = os.fork()
                if process == 0:
                    for other in [*events.get_map().values()]:
                        os.close(other.fd)
                    events.close()
                    connection.close()
                    return job
                for descriptor in job["received"]:
                    os.close(descriptor)
                shims[process] = connection
                for event in (connection, os.pidfd_open(process)):
                    processes[event] = process
                    events.register(event, selectors.EVENT_READ)
                tell(connection, process)
            elif key.fileobj == end_of_owner:
                for process in shims:
                    kill(process)
                os._exit(0)
            elif key.fileobj in processes:  # else a shim whose fork has ended at the same moment
                process = processes.pop(key.fileobj)
                events.unregister(key.fileobj)
                if isinstance(key.fileobj, socket.socket):  # the shim was killed
                    kill(process)
                    continue
                os.close(key.fileobj)
                connection = shims.pop(process)
                tell(connection, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
                if processes.pop(connection, None):
                    events.unregister(connection)
                connection.close()


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """What a shim asks for, with its open files under `received`; nothing if it was killed before it had said so."""
    files: list[int] = []
    with suppress(ConnectionError, struct.error):
        header, files, _, _ = socket.recv_fds(connection, 4, 253)
        (length,) = struct.unpack("I", header)
        content = b""
        while len(content) < length and (part := connection.recv(length - len(content))):
            content += part
        if len(content) == length:
            return json.loads(content) | {"received": files}
    for descriptor in files:
        os.close(descriptor)
    return None


def tell(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # nobody listens any more
        connection.sendall(b"%d\n" % number)


def kill(process: int) -> None:
    """With all that it started, where it leads a session of its own."""
    with suppress(ProcessLookupError):
        if os.getsid(process) == process:
            os.killpg(process, signal.SIGKILL)
        else:
            os.kill(process, signal.SIGKILL)


def become(job: dict[str, Any]) -> None:
    """Be the process that `python ARGUMENTS` would be, and end as it does."""
    try:
        os.setpgid(0, job["group"])
    except PermissionError:  # the group belongs to another session
        os.setsid()
    os.chdir(job["directory"])
    os.environ.clear()
    os.environ.update(job["environment"])
    free = 1 + max(job["files"] + job["received"])
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in job["received"]]
    for descriptor in job["received"]:
        os.close(descriptor)
    for number, descriptor in zip(job["files"], moved, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)

    kind, *further = job["arguments"]
    sys.path[0] = str(Path(kind).resolve().parent) if kind not in ("-c", "-m") else ""
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [place for place in places if place and place not in sys.path]
    if kind == "-c":
        code, *further = further
        sys.argv = ["-c", *further]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv = further
        runpy.run_module(further[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *further]
        runpy.run_path(kind, run_name="__main__")


def end_of(job: dict[str, Any]) -> int:
    """The exit status after all that a Python does at its end, but for taking itself apart."""
    status: Any = 0
    try:
        become(job)
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    gc.collect = lambda *generation: 0  # libraries do so at the end, for half a second each time
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError, ValueError):
            stream.flush()
    return status & 0xFF


def import_vllm() -> None:
    """Import it, and do once what each engine would do again, for half a second each."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    class Platform(CpuPlatform):
        """Goes through all modules for kernels to replace once, and not for each engine."""

        @classmethod
        def register_triton_kernel_overrides(cls) -> None:
            if "has_kernels" not in vars(cls):
                super().register_triton_kernel_overrides()
                cls.has_kernels = True

    if vllm.platforms.current_platform.is_cpu():
        vllm.platforms.current_platform = Platform()  # before others import it
    preload()
    with suppress(AttributeError, ImportError):  # of older releases, which do not have the last two
        from vllm.model_executor.layers.quantization import get_quantization_config

        get_quantization_config("compressed-tensors")  # imports every method
        vllm.platforms.current_platform.register_triton_kernel_overrides()
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging

        configure_logging(LoggingConfig())


def preload() -> None:
    for name in PRELOADED:
        with suppress(ImportError):
            __import__(name)


def main() -> None:
    listener, owner, shim = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Control-C is for the tests, which end this process
    sys.path[0] = os.getcwd()
    # First: vLLM notes at its import what it starts to look at a family of models that it has not seen before.
    sys.executable = shim
    multiprocessing.set_executable(shim)
    if importlib.util.find_spec("vllm"):
        import_vllm()
    else:
        preload()
    gc.freeze()  # forks share the memory of what their collections of garbage leave alone
    job = serve(listener, owner)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os._exit(end_of(job))


if __name__ == "__main__":
    main()
