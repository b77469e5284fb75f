"""The lines about processor, memory, ports and variables. Nothing heavy is imported."""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import socket
from pathlib import Path

from trl_qurl.cli.allocator import describe_allocator
from trl_qurl.lab.doctor.lines import Line, failed, note, ok

GIB = 1024**3
MIB = 1024**2

CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16", "asimddp", "bf16")
"""Instructions that decide the speed of 8-bit and 16-bit products, as Linux names them."""

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}

LEAST_SHARED = 64 * MIB
"""Free space in /dev/shm below which vLLM's processes and NCCL fail; a container's default is exactly this much."""
ENOUGH_SHARED = GIB
LITTLE_MEMORY = 4 * GIB

DEFAULT_PORTS = {
    8000: "`trl-qurl serve` takes another --port, and the trainer the same one in vllm_server_base_url",
    29500: "`accelerate launch` takes another --main_process_port",
    51216: "the trainer streams weights over it: set another vllm_group_port",
}
"""Ports that are used unless others are given, and how to give others."""

RELEVANT = re.compile(
    r"(ACCELERATE|CUDA|FSDP|GLOO|HF|KMP|MALLOC|MASTER|MKL|NCCL|OMP|PYTORCH|TOKENIZERS|TORCH|TRANSFORMERS|TRL|VLLM)_"
    r"|LD_PRELOAD|(LOCAL_)?RANK|PYTHONWARNINGS|WORLD_SIZE"
)
"""Beginnings of the names of variables that are shown."""

HARMLESS = re.compile(
    r"CUDA_(LAUNCH_BLOCKING|VISIBLE_DEVICES)|HF_HUB_OFFLINE|NCCL_DEBUG|(LOCAL_)?RANK|WORLD_SIZE|OMP_NUM_THREADS"
    r"|MALLOC_\w+_|PYTHONWARNINGS|PYTORCH_(CUDA_)?ALLOC_CONF|TOKENIZERS_PARALLELISM|TRANSFORMERS_VERBOSITY"
    r"|TRL_QURL_DEBUG"
    r"|VLLM_(CPU_KVCACHE_SPACE|CPU_OMP_THREADS_BIND|DISABLED_KERNELS|ENABLE_V1_MULTIPROCESSING|LOGGING_LEVEL)"
)
"""Variables whose values are shown too."""


def check_cpu() -> Line:
    """The processor, its cores and instructions."""
    first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    entries = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.split("\n"))}
    flags = set((entries.get("flags") or entries.get("Features") or "").split())
    known = [flag for flag in CPU_FLAGS if flag in flags]
    model, cores = entries.get("model name", platform.machine()), len(os.sched_getaffinity(0))
    text = f"{model}, {cores} cores available, {' '.join(known) or 'no instructions for short numbers'}"
    data = {"model": model, "cores": cores, "instructions": known}
    if BF16_FLAGS.isdisjoint(flags):
        advice = "16-bit rollouts and bf16 training are emulated on this CPU: train in float32 (--bf16 false)."
        return note("cpu", f"{text}; none multiplies bfloat16.", advice, **data)
    return ok("cpu", text, **data)


def check_memory() -> Line:
    """Memory that is free, of the machine or of the container."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    size = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, free = size["MemTotal"], size["MemAvailable"]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (bound := limit.read_text().strip()) != "max":
        total, free = min(total, int(bound)), min(free, int(bound) - int(used.read_text()))
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    if free < LITTLE_MEMORY:
        return note("memory", f"{text}.", "Trainer and engine of a small model take about 4 GiB: free some.")
    return ok("memory", text, free=free, total=total)


def check_allocator() -> Line:
    """What malloc does with freed memory, which on a CPU decides half of a step's time (docs/performance.md)."""
    preloaded = [Path(path).name for path in re.split(r"[: ]", os.environ.get("LD_PRELOAD", "")) if path]
    return ok("allocator", describe_allocator(), preloaded=preloaded)


def check_threads() -> Line:
    """Settings of threads against the cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    threads, bind = (os.environ.get(name) for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"))
    text = f"{cores} cores, OMP_NUM_THREADS {threads or 'not set'}, VLLM_CPU_OMP_THREADS_BIND {bind or 'not set'}"
    if threads and threads.isdigit() and (int(threads) > cores or int(threads) == 1 < cores):
        advice = f"Set OMP_NUM_THREADS to the cores of one process ({cores} for one process), or unset it."
        return note("threads", f"{text}.", advice, cores=cores)
    return ok("threads", text, cores=cores)


def check_shm() -> Line:
    """Free space in /dev/shm, through which processes exchange weights."""
    advice = "Start a container with --shm-size=8g or --ipc=host; elsewhere remove old files from /dev/shm."
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return failed("shm", f"/dev/shm cannot be used ({error.strerror}).", advice)
    text = f"/dev/shm has {free / MIB:,.1f} MiB free"
    if free < LEAST_SHARED:
        why = f"{text}; vLLM's server and NCCL need at least {LEAST_SHARED // MIB} MiB there."
        return failed("shm", why, advice, free=free)
    if free < ENOUGH_SHARED:
        return note("shm", f"{text}, so checkpoints for the engine may go to the disk.", advice, free=free)
    return ok("shm", text, free=free)


def check_ports(port: int | None = None) -> Line:
    """Whether ports on this machine are free: those used by default, `port`, and that of a launcher."""
    launcher = os.environ.get("MASTER_PORT", "")
    needed = {}
    if port is not None:
        needed[port] = "start the server with another --port, or end what listens there"
    if launcher.isdigit() and int(launcher) and "RANK" not in os.environ:  # a rank's own launcher has it
        needed[int(launcher)] = "unset MASTER_PORT, or set another one"
    taken = [number for number in {**DEFAULT_PORTS, **needed} if _is_taken(number)]
    if blocked := [number for number in taken if number in needed]:
        return failed("ports", f"Port {blocked[0]} is taken.", f"{_sentence(needed[blocked[0]])}", taken=taken)
    if taken:
        advice = " ".join(_sentence(DEFAULT_PORTS[number]) for number in taken)
        named = f"Port {taken[0]} is" if len(taken) == 1 else f"Ports {', '.join(map(str, taken))} are"
        return note("ports", f"{named} taken, which something would use by default.", advice, taken=taken)
    free = ", ".join(map(str, {**DEFAULT_PORTS, **needed}))
    return ok("ports", f"{free} are free", taken=[])


def check_variables() -> Line:
    """Variables that change what runs; values only of those that are known to be harmless."""
    shown = []
    for name in sorted(name for name in os.environ if RELEVANT.match(name)):
        value = os.environ[name]
        harmless = HARMLESS.fullmatch(name) and len(value) < 80 and "/" not in value and "@" not in value
        shown.append(f"{name}={value}" if harmless else f"{name} (set)")
    return ok("variables", ", ".join(shown) or "none that matter are set", variables=shown)


def _is_taken(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, after one that has just ended
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        return False


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text[0] != "`" else f"{text}."
