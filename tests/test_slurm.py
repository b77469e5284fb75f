"""Run `examples/slurm.sh` with srun, scontrol, trl-qurl and accelerate replaced by scripts that
record their calls.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from itertools import pairwise

import pytest
from documents import ROOT
from support.commands import check_accelerate, check_trl_qurl

SCRIPT = ROOT / "examples" / "slurm.sh"

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_GPUS_ON_NODE": "8",
    "NODES": "n1 n2 n3",
}
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
[ -z "${TRAINS_ON-}" ] || trap 'echo "training ended" >> "$LOG"; exit 143' TERM
echo "rank $SLURM_PROCID on $NODE" >> "$LOG"; printf '%s\\n' "$@" > "$LOG.rank$SLURM_PROCID"
[ -n "${TRAINS_ON-}" ] || { sleep "${TRAINS_FOR-0.3}"; exit "${STATUS-0}"; }
while :; do sleep 0.05; done""",
}


class Job:
    """One run of the script in a directory, on nodes n1, n2 and n3."""

    def __init__(self, directory, arguments, variables):
        self.log = directory / "log"
        programs = directory / "programs"
        programs.mkdir(exist_ok=True)
        for name, text in STUBS.items():
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "LOG": str(self.log)} | SLURM
        self.process = subprocess.Popen(
            ["bash", SCRIPT, *arguments],
            cwd=directory,
            env=environment | variables,
            process_group=0,
        )

    def lines(self, program=""):
        """What was called, or the words that a program was given."""
        path = self.log.with_suffix(program)
        return path.read_text().splitlines() if path.exists() else []

    def options(self, program):
        """What a program was given, each word with the one behind it."""
        return dict(pairwise(self.lines(program)))


@pytest.fixture
def start(tmp_path):
    """Start the script, and kill its processes after the test."""
    jobs = []

    def start(*arguments, **variables):
        jobs.append(Job(tmp_path, arguments, variables))
        return jobs[-1]

    yield start
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)


def test_server_and_trainers_find_each_other_and_get_valid_options(start, tmp_path):
    """The server dies once, and is started again."""
    job = start(
        "--max_steps", "5", TENSOR_PARALLEL="2", STATUS="7", SERVER_DIES="1", TRAINS_FOR="2"
    )
    assert job.process.wait(30) == 7, "the exit status of the training"
    assert {"rank 0 on n1", "rank 1 on n2", "server ended"} <= set(job.lines())
    assert job.lines().count("server on n3") == 2
    assert "scontrol requeue 7" not in job.lines()
    server = job.options(".server")
    assert (server["--host"], server["--port"]) == ("10.0.0.3", "8000"), "not loopback"
    assert (server["--tensor-parallel-size"], server["--data-parallel-size"]) == ("2", "4")
    for rank in (0, 1):
        trainer = job.options(f".rank{rank}")
        expected = {
            "--machine_rank": str(rank),
            "--num_machines": "2",
            "--num_processes": "16",
            "--main_process_ip": "10.0.0.1",
            "--vllm_server_base_url": "http://10.0.0.3:8000",
            "--rollout_quantization": server["--scheme"],
            "--rollout_checkpoint_dir": f"{tmp_path}/policy.rollouts",
            "--max_steps": "5",
        }
        assert expected.items() <= trainer.items()
    check_trl_qurl(job.lines(".server"))
    check_accelerate(job.lines(".rank0"))


def test_a_job_near_its_time_limit_is_requeued_and_resumes(start, tmp_path):
    job = start(TRAINS_ON="yes")
    deadline = time.monotonic() + 20
    while not {"rank 0 on n1", "rank 1 on n2"} <= set(job.lines()):
        assert time.monotonic() < deadline
        assert job.process.poll() is None
        time.sleep(0.05)
    job.process.send_signal(signal.SIGUSR1)
    job.process.wait(30)
    *before, last = job.lines()
    assert last == "scontrol requeue 7"
    assert "server ended" in before
    assert before.count("training ended") == 2
    assert "--resume_from_checkpoint" not in job.lines(".rank0")
    for step in (9, 10, 11):
        checkpoint = tmp_path / "policy" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        if step != 11:  # it was being saved when the job ended
            (checkpoint / "trainer_state.json").write_text("{}")
    again = start(SLURM_RESTART_COUNT="1")
    again.process.wait(30)
    resumed = again.options(".rank0")["--resume_from_checkpoint"]
    assert resumed == str(tmp_path / "policy" / "checkpoint-10")
