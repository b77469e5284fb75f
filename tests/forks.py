"""A `python` that has already imported TRL and vLLM.

1. Importing them takes about ten seconds of processor time, more than most child processes of the
   tests otherwise need. Five files with engines: 1:15 with it, and not half done after 6:40 without.
2. `start` starts one process per test run, which imports everything and then forks (`serve`).
3. `SHIM`, a small program, replaces `python`: it sends arguments, environment and open files there.
4. `supervise` forks again, and reports the fork's number and exit status back to the shim.
5. `become` turns the fork into what `python ARGUMENTS` would be.
6. The shim forwards signals, and ends as the fork ended; a fork ends with its shim or the test run.
7. Programs that start others by `sys.executable` or multiprocessing start forks too, which
   multiprocessing's fork server cannot. Other options than -c and -m start the real Python.
"""

import atexit
import fcntl
import gc
import importlib.util
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path

PRELOADED = (
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
)

# The real Python starts everything else, such as `python -I`.
SHIM = """#!{python} -IS
import json, os, signal, socket, sys

arguments = sys.argv[1:]
while arguments and arguments[0] in ("-B", "-u", "-W"):
    del arguments[: 1 + (arguments[0] == "-W")]
if not arguments or arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
socket.send_fds(server, [json.dumps(job).encode()], files)
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


MESSAGE_BYTES = 2**18
"""Largest message of a shim: arguments, environment, open files."""


def start(directory, environment, owner):
    """Start the process that forks, if it does not run yet, and return the replacement of `python`
    at once.

    Args:
        directory: Private directory of the processes that share the forks.
        environment: Variables of the process; modules read some of them while they are imported.
        owner: When this process ends, all forks are killed.
    """
    shim = directory / "python"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if shim.exists():
            return shim
        address = str(directory / "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(64)
            command = [sys.executable, __file__, str(listener.fileno()), str(owner), str(shim)]
            pipes = {"stdin": subprocess.DEVNULL, "pass_fds": [listener.fileno()]}
            with (directory / "log").open("w") as log:  # messages of libraries during their import
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, **pipes)
        unfinished = shim.with_suffix(".new")
        unfinished.write_text(
            SHIM.format(python=sys.executable, address=address, log=str(directory / "log"))
        )
        unfinished.chmod(0o755)
        unfinished.rename(shim)
    return shim


def serve(listener, owner):
    """Fork twice for every shim that connects. Returns in the forks only: the job of each."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the supervisors
    end_of_owner = os.pidfd_open(owner)
    while end_of_owner not in select.select([listener, end_of_owner], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return supervise(connection, end_of_owner)
        connection.close()
    os._exit(0)


def supervise(connection, end_of_owner):
    """Fork, report the fork's process and exit status to the shim, and kill the fork if the shim or
    the owner ends.
    """
    message, received, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 253)
    if not message:  # the shim was killed
        os._exit(0)
    process = os.fork()
    if process == 0:
        connection.close()
        os.close(end_of_owner)
        return json.loads(message) | {"received": received}
    for descriptor in received:
        os.close(descriptor)
    end = os.pidfd_open(process)
    with suppress(OSError):  # the shim was killed
        connection.sendall(b"%d\n" % process)
        if end not in select.select([connection, end, end_of_owner], [], [])[0]:
            raise OSError
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        os._exit(0)
    kill(process)
    os._exit(0)


def kill(process):
    """Kill a process, and its children if it leads a session."""
    with suppress(ProcessLookupError):
        if os.getsid(process) == process:
            os.killpg(process, signal.SIGKILL)
        else:
            os.kill(process, signal.SIGKILL)


def become(job):
    """Run like `python ARGUMENTS`, in the job's directory, environment and open files."""
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
    sys.path[0] = ""
    if kind not in ("-c", "-m"):
        sys.path[0] = str(Path(kind).resolve().parent)
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [place for place in places if place and place not in sys.path]
    if kind == "-c":
        code, *arguments = further
        sys.argv = ["-c", *arguments]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv = further
        runpy.run_module(further[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = job["arguments"]
        runpy.run_path(kind, run_name="__main__")


def end_of(job):
    """Run the job and Python's exit handlers, and return the exit status; skips the teardown of
    modules.
    """
    status = 0
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


def import_vllm():
    """Import vLLM, and do once what would take each engine half a second."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    class Platform(CpuPlatform):
        """Replaces kernels in all modules once, instead of for each engine."""

        @classmethod
        def register_triton_kernel_overrides(cls):
            if "has_kernels" not in vars(cls):
                super().register_triton_kernel_overrides()
                cls.has_kernels = True

    if vllm.platforms.current_platform.is_cpu():
        vllm.platforms.current_platform = Platform()  # before others import it
    preload()
    with suppress(AttributeError, ImportError):  # missing in older releases
        from vllm.model_executor.layers.quantization import get_quantization_config

        get_quantization_config("compressed-tensors")  # imports every method
        vllm.platforms.current_platform.register_triton_kernel_overrides()
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging

        configure_logging(LoggingConfig())


def preload():
    for name in PRELOADED:
        with suppress(ImportError):
            __import__(name)


def main():
    listener = socket.socket(fileno=int(sys.argv[1]))
    owner = int(sys.argv[2])
    shim = sys.argv[3]
    # Control-C is for the tests, which end this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[0] = os.getcwd()
    # vLLM reads this at its import, for the processes in which it inspects unknown architectures.
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
