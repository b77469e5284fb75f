"""Run `examples/slurm.sh` with srun, scontrol, trl-qurl and accelerate replaced by scripts that
record their calls.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from documents import ROOT
from support.commands import check_accelerate, check_trl_qurl

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
[ -z "${TRAINS_ON-}" ] || trap 'echo "training ended" >> "$LOG"; exit 143' TERM
echo "rank $SLURM_PROCID on $NODE" >> "$LOG"; printf '%s\\n' "$@" > "$LOG.rank$SLURM_PROCID"
[ -n "${TRAINS_ON-}" ] || { sleep "${TRAINS_FOR-0.3}"; exit "${STATUS-0}"; }
while :; do sleep 0.05; done""",
}


class Job:
    """One run of the script."""

    def __init__(
        self, directory: Path, *arguments: str, nodes: str = "n1 n2 n3", **variables: str
    ) -> None:
        self.log = directory / "log"
        self.log.unlink(missing_ok=True)
        programs = directory / "programs"
        programs.mkdir(exist_ok=True)
        for name, text in STUBS.items():
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_GPUS_ON_NODE": "8"}
        environment = (
            slurm
            | {"PATH": f"{programs}:/usr/bin:/bin", "LOG": str(self.log), "NODES": nodes}
            | variables
        )
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
        """Wait until the script ends, and return its output."""
        return self.process.communicate(timeout=30)[0]

    def words(self, which: str) -> list[str]:
        return Path(f"{self.log}.{which}").read_text().splitlines()


@pytest.fixture
def start(tmp_path):
    """Start the script, and kill its processes after the test."""
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


def test_server_and_trainers_find_each_other_and_get_valid_options(start):
    job = start("--max_steps", "5", TENSOR_PARALLEL="2", STATUS="7")
    job.end()
    assert job.process.returncode == 7, "the exit status of the training"
    lines = set(job.log.read_text().splitlines())
    assert {"server on n3", "rank 0 on n1", "rank 1 on n2", "server ended"} <= lines
    assert "scontrol requeue" not in job.log.read_text()
    server, ranks = job.words("server"), [job.words("rank0"), job.words("rank1")]
    assert (value_of("--host", server), value_of("--port", server)) == ("10.0.0.3", "8000"), (
        "not loopback"
    )
    assert (
        value_of("--tensor-parallel-size", server),
        value_of("--data-parallel-size", server),
    ) == ("2", "4")
    assert [value_of("--machine_rank", words) for words in ranks] == ["0", "1"]
    for words in ranks:
        assert (
            value_of("--num_machines", words) == "2" and value_of("--num_processes", words) == "16"
        )
        assert value_of("--main_process_ip", words) == "10.0.0.1"
        assert value_of("--vllm_server_base_url", words) == "http://10.0.0.3:8000"
        assert Path(value_of("--rollout_checkpoint_dir", words)).is_dir() and words[-2:] == [
            "--max_steps",
            "5",
        ]
    assert value_of("--rollout_quantization", ranks[0]) == value_of("--scheme", server)
    check_trl_qurl(server)
    check_accelerate(ranks[0])


def test_a_job_near_its_time_limit_is_requeued_and_resumes(start, tmp_path):
    job = start(TRAINS_ON="yes")
    job.wait_for("rank 0")
    job.wait_for("rank 1")
    job.process.send_signal(signal.SIGUSR1)
    job.end()
    *_, last = job.log.read_text().splitlines()
    assert last == "scontrol requeue 7" and job.log.read_text().count("training ended") == 2
    assert "server ended" in job.log.read_text() and "--resume_from_checkpoint" not in job.words(
        "rank0"
    )
    for step in (9, 10, 11):
        (tmp_path / "policy" / f"checkpoint-{step}").mkdir(parents=True)
        if step != 11:  # it was being saved when the job ended
            (tmp_path / "policy" / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    again = start(SLURM_RESTART_COUNT="1")
    assert "checkpoint-10" in again.end()
    assert value_of("--resume_from_checkpoint", again.words("rank0")) == str(
        tmp_path / "policy" / "checkpoint-10"
    )


@pytest.mark.parametrize(("deaths", "starts", "status"), [("2", 3, 0), ("100", 10, 1)])
def test_a_server_is_restarted_at_most_ten_times(deaths, starts, status, start):
    job = start(
        nodes="n1 n2",
        SERVER_DIES=deaths,
        **({"TRAINS_ON": "yes"} if status else {"TRAINS_FOR": "3"}),
    )
    printed = job.end()
    assert (
        job.log.read_text().splitlines().count("server on n2") == starts
        and job.process.returncode == status
    )
    assert (
        "The server ended ten times" in printed and "training ended" in job.log.read_text()
    ) == bool(status)
