"""Lines about processor, memory, ports and environment variables, without heavy imports."""

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
"""Instruction sets that determine the speed of 8-bit and 16-bit products, by their Linux names."""

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}

LEAST_SHARED = 64 * MIB
"""Minimum free space in /dev/shm for vLLM's processes and NCCL; exactly the default size in a container."""
ENOUGH_SHARED = GIB
LITTLE_MEMORY = 4 * GIB

DEFAULT_PORTS = {
    8000: "start `trl-qurl serve` with another --port, and set the same port in the trainer's vllm_server_base_url",
    29500: "start `accelerate launch` with another --main_process_port",
    51216: "set another vllm_group_port, over which the trainer streams weights",
}
"""Default ports, and how to change each."""

RELEVANT = re.compile(
    r"(ACCELERATE|CUDA|FSDP|GLOO|HF|KMP|MALLOC|MASTER|MKL|NCCL|OMP|PYTORCH|TOKENIZERS|TORCH|TRANSFORMERS|TRL|VLLM)_"
    r"|LD_PRELOAD|(LOCAL_)?RANK|PYTHONWARNINGS|WORLD_SIZE"
)
"""Prefixes of the variables to show."""

HARMLESS = re.compile(
    r"CUDA_(LAUNCH_BLOCKING|VISIBLE_DEVICES)|HF_HUB_OFFLINE|NCCL_DEBUG|(LOCAL_)?RANK|WORLD_SIZE|OMP_NUM_THREADS"
    r"|MALLOC_\w+_|PYTHONWARNINGS|PYTORCH_(CUDA_)?ALLOC_CONF|TOKENIZERS_PARALLELISM|TRANSFORMERS_VERBOSITY"
    r"|TRL_QURL_DEBUG"
    r"|VLLM_(CPU_KVCACHE_SPACE|CPU_OMP_THREADS_BIND|DISABLED_KERNELS|ENABLE_V1_MULTIPROCESSING|LOGGING_LEVEL)"
)
"""Variables to show with their values."""


def check_cpu() -> Line:
    """Report the processor, its cores and instruction sets."""
    first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    entries = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.split("\n"))}
    flags = set((entries.get("flags") or entries.get("Features") or "").split())
    instructions = [flag for flag in CPU_FLAGS if flag in flags]
    model, cores = entries.get("model name", platform.machine()), len(os.sched_getaffinity(0))
    text = f"{model}, {cores} cores available, {' '.join(instructions) or 'no 8-bit or 16-bit instructions'}"
    data = {"model": model, "cores": cores, "instructions": instructions}
    if BF16_FLAGS.isdisjoint(flags):
        advice = "16-bit rollouts and bf16 training are emulated on this CPU: train in float32 (--bf16 false)."
        return note("cpu", f"{text}; no native bfloat16 multiplication.", advice, **data)
    return ok("cpu", text, **data)


def check_memory() -> Line:
    """Report the free memory of the machine or the container."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    size = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, free = size["MemTotal"], size["MemAvailable"]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (bound := limit.read_text().strip()) != "max":
        total, free = min(total, int(bound)), min(free, int(bound) - int(used.read_text()))
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    if free < LITTLE_MEMORY:
        return note("memory", f"{text}.", "Trainer and engine of a small model need about 4 GiB: free some memory.")
    return ok("memory", text, free=free, total=total)


def check_allocator() -> Line:
    """Report whether malloc keeps freed memory: half of a step's time on a CPU (docs/performance.md)."""
    preloaded = [Path(path).name for path in re.split(r"[: ]", os.environ.get("LD_PRELOAD", "")) if path]
    return ok("allocator", describe_allocator(), preloaded=preloaded)


def check_threads() -> Line:
    """Compare thread settings with the cores available to this process."""
    cores = len(os.sched_getaffinity(0))
    threads, bind = (os.environ.get(name) for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"))
    text = f"{cores} cores, OMP_NUM_THREADS {threads or 'not set'}, VLLM_CPU_OMP_THREADS_BIND {bind or 'not set'}"
    if threads and threads.isdigit() and (int(threads) > cores or int(threads) == 1 < cores):
        advice = f"Set OMP_NUM_THREADS to the number of cores per process ({cores} for one process), or unset it."
        return note("threads", f"{text}.", advice, cores=cores)
    return ok("threads", text, cores=cores)


def check_shm() -> Line:
    """Check the free space in /dev/shm, through which processes exchange weights."""
    advice = "Start the container with --shm-size=8g or --ipc=host; outside a container, delete old files in /dev/shm."
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return failed("shm", f"/dev/shm is not usable ({error.strerror}).", advice)
    text = f"/dev/shm has {free / MIB:,.1f} MiB free"
    if free < LEAST_SHARED:
        problem = f"{text}; vLLM's server and NCCL need at least {LEAST_SHARED // MIB} MiB there."
        return failed("shm", problem, advice, free=free)
    if free < ENOUGH_SHARED:
        return note("shm", f"{text}, so engine checkpoints may be written to disk instead.", advice, free=free)
    return ok("shm", text, free=free)


def check_ports(port: int | None = None) -> Line:
    """Check that the default ports, `port` and the launcher's port are free on this machine."""
    launcher = os.environ.get("MASTER_PORT", "")
    needed = {}
    if port is not None:
        needed[port] = "start the server with another --port, or stop the process that listens there"
    if launcher.isdigit() and int(launcher) and "RANK" not in os.environ:  # in a rank, the launcher is using it
        needed[int(launcher)] = "unset MASTER_PORT, or set another port"
    taken = [number for number in {**DEFAULT_PORTS, **needed} if _is_taken(number)]
    if blocked := [number for number in taken if number in needed]:
        return failed("ports", f"Port {blocked[0]} is taken.", f"{_sentence(needed[blocked[0]])}", taken=taken)
    if taken:
        advice = " ".join(_sentence(DEFAULT_PORTS[number]) for number in taken)
        text = f"Default port {taken[0]} is" if len(taken) == 1 else f"Default ports {', '.join(map(str, taken))} are"
        return note("ports", f"{text} taken.", advice, taken=taken)
    free = ", ".join(map(str, {**DEFAULT_PORTS, **needed}))
    return ok("ports", f"{free} are free", taken=[])


def check_variables() -> Line:
    """List the variables that affect a run, with values only if they are harmless to publish."""
    variables = []
    for name in sorted(name for name in os.environ if RELEVANT.match(name)):
        value = os.environ[name]
        harmless = HARMLESS.fullmatch(name) and len(value) < 80 and "/" not in value and "@" not in value
        variables.append(f"{name}={value}" if harmless else f"{name} (set)")
    return ok("variables", ", ".join(variables) or "no relevant variables are set", variables=variables)


def _is_taken(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like servers, to ignore one that just ended
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        return False


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text[0] != "`" else f"{text}."
