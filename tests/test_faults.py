"""What goes wrong with a server, done to a real one: the run continues as if nothing had happened, or stops with one
sentence, and a new one goes on.

tests/reliability.md and docs/reliability.md list the same, fault by fault.
"""

import functools
import json
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
from conftest import SCENARIOS, Server, child_environment, free_port, group_members, kill_group
from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer
from transformers import TrainerCallback

from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer
from trl_qurl.rollout import recovery
from trl_qurl.rollout.engine.http import add_key
from trl_qurl.rollout.engine.served import ServedEngine
from trl_qurl.rollout.errors import ServerError, ServerLostError, SyncError

# In this order, since a server takes long to start: those that lose it come last.
pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("faults")]


COMPUTED = (
    "loss",
    "grad_norm",
    "reward",
    "mismatch/kl_k3",
)


class Deployment:
    """A model, a server of it that can be lost and started again in its place, and trainers that use it."""

    def __init__(self, directory: Path, python: Path, *options: str) -> None:
        self.directory, self.python = directory, python
        self.options = options or ("--scheme", "int8")
        self.model = directory / "model"
        tiny_model().save_pretrained(self.model)
        tiny_tokenizer().save_pretrained(self.model)
        self.rollouts = directory / "rollouts"
        self.port = free_port()
        self.server: Server | None = None
        self.end = threading.Timer(0, lambda: None)

    def start(self) -> Server:
        self.server = Server(self.model, self.directory, *self.options, port=self.port, python=self.python)
        threading.Thread(target=self._restart, args=[self.server], daemon=True).start()
        return self.server

    def _restart(self, server: Server) -> None:
        """Start another server when this one ends, as a user's loop or service manager does."""
        server.process.wait()
        with suppress(ProcessLookupError):
            server.send(signal.SIGKILL)  # vLLM's engine survives a server that is killed alone
        if self.server is server:
            self.start()

    def up(self) -> Server:
        """The server, once it has come back if a test has lost it."""
        if self.end.is_alive():
            self.end.join()
        return (self.server or self.start()).wait_until_healthy()

    def close(self) -> None:
        """End the server for good."""
        server, self.server = self.server, None
        if server:
            server.stop()

    def replace(self) -> None:
        """Kill the server, and return when another one has been started."""
        lost = self.server
        lost.kill()
        while self.server is lost:
            time.sleep(0.05)

    def lose(self) -> None:
        """Stop the server from answering what is on its way, and kill it a second later."""
        self.server.send(signal.SIGSTOP)
        self.end = threading.Timer(1.0, self.replace)
        self.end.start()

    def lose_and_wait(self) -> None:
        """Kill the server, and go on when another one has taken its place."""
        self.replace()
        self.server.wait_until_healthy()

    def hang(self, seconds: float) -> None:
        """Stop the server for a while."""
        self.server.send(signal.SIGSTOP)
        self.end = threading.Timer(seconds, self.server.send, [signal.SIGCONT])
        self.end.start()

    def config(self, **settings):
        return {
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 8,
            "max_steps": 4,
            "learning_rate": 1e-3,
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "save_strategy": "no",
            "vllm_mode": "server",
            "vllm_server_base_url": f"http://127.0.0.1:{self.port}",
            "rollout_checkpoint_dir": str(self.rollouts),
            "vllm_request_timeout": 60.0,
            "logging_steps": 1,
            **settings,
        }

    def trainer(self, model=None, peft_config=None, **settings):
        trainer = QuRLGRPOTrainer(
            model=model or str(self.model),
            reward_funcs=lambda completions, **kwargs: [len(set(completion)) / 8 for completion in completions],
            args=QuRLGRPOConfig(str(self.directory / "out"), **self.config(**settings)),
            train_dataset=Dataset.from_dict({"prompt": ["ab", "cd", "e", "fgh"] * 4}),
            processing_class=tiny_tokenizer(),
            peft_config=peft_config,
        )
        # So that runs can be compared: without it, the order in which a server's requests arrive decides. As a setting
        # it is refused.
        trainer.vllm_generation.generation_kwargs["seed"] = 7
        return trainer


@pytest.fixture(scope="module")
def deployment(warm_python, tmp_path_factory):
    deployment = Deployment(tmp_path_factory.mktemp("deployment"), warm_python)
    yield deployment
    deployment.close()


def before(call, act):
    """`call`, with `act` done first, once."""
    acts = [act]

    def wrapped(*args, **kwargs):
        if acts:
            acts.pop()()
        return call(*args, **kwargs)

    return wrapped


def interrupt(owner, method, act):
    """Let `act` come before a method's next call."""
    setattr(owner, method, before(getattr(owner, method), act))


def history(trainer):
    """What a run computed."""
    return [[row.get(name) for name in COMPUTED] for row in trainer.state.log_history if "loss" in row]


def recoveries(trainer):
    return sum(row.get("sync/recoveries", 0) for row in trainer.state.log_history)


@pytest.fixture(scope="module")
def undisturbed(deployment):
    """What a run computes to which nothing happens."""
    deployment.up()
    trainer = deployment.trainer()
    trainer.train()
    assert recoveries(trainer) == 0
    assert all(grad_norm > 0 for _, grad_norm, *_ in history(trainer)), "there is nothing to compare"
    assert all(value is not None for row in history(trainer)[1:] for value in row)
    return history(trainer)


def at_step(step, act):
    class Act(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                act()

    return Act()


def held_version(deployment):
    return ServedEngine(base_url=deployment.server.url).version()


def test_not_up_yet_is_waited_for(deployment, caplog):
    threading.Timer(3.0, deployment.start).start()
    trainer = deployment.trainer(vllm_server_timeout=240.0)
    waited = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Waiting")]
    assert waited == [f"Waiting up to 240 seconds for the vLLM server at {deployment.server.url}."]
    trainer.train()
    assert trainer.state.global_step == 4


def test_hangs_too_long(deployment, monkeypatch):
    deployment.up()
    monkeypatch.setattr(recovery, "MAX_RECOVERIES", 0)
    trainer = deployment.trainer(vllm_request_timeout=10.0)
    trainer.add_callback(at_step(2, functools.partial(deployment.hang, 12.0)))
    started = time.monotonic()
    with pytest.raises(ServerError, match="did not answer /.* within 10 seconds: it hangs, or needs a larger vllm_"):
        trainer.train()
    assert time.monotonic() - started < 60, "a hanging server was waited for again and again"
    deployment.up()
    deployment.trainer(max_steps=1).train()  # nothing of the broken run is in the way


@pytest.mark.parametrize("method", ["generate", "load_checkpoint"])
def test_hangs_for_a_while(deployment, undisturbed, method):
    deployment.up()
    trainer = deployment.trainer(vllm_request_timeout=2.0)
    client = trainer.vllm_generation.vllm_client
    trainer.add_callback(at_step(2, lambda: interrupt(client, method, functools.partial(deployment.hang, 3.0))))
    trainer.train()
    assert recoveries(trainer) >= 1
    assert history(trainer) == undisturbed


def test_the_noise_follows_from_the_seed_and_the_step(deployment):
    """One request for one completion: there is no order of arrival."""
    deployment.up()

    def sampled(trainer, step):
        trainer.state.global_step = step
        trainer.vllm_generation.sync_weights()
        client = trainer.vllm_generation.vllm_client
        first, second = (client.generate([[40, 41]], max_tokens=12)["completion_ids"] for _ in range(2))
        assert first != second
        return first, second

    trainer, other = deployment.trainer(seed=1), deployment.trainer(seed=2)
    noise = [sampled(trainer, 3), sampled(trainer, 4), sampled(other, 3)]
    assert len({str(tokens) for tokens in noise}) == 3
    deployment.lose_and_wait()
    assert sampled(deployment.trainer(seed=1), 3) == noise[0], "a server that was started again, or a resumed run"


def test_two_trainers_on_one_server(deployment):
    deployment.up()
    first, second = deployment.trainer(), deployment.trainer()
    first.add_callback(at_step(2, second.vllm_generation.sync_weights))
    first.vllm_generation.sync_weights()
    # The second's weights come between a sync of the first and the generation that relies on it.
    generation = first.vllm_generation
    generation.generate = before(generation.generate, second.vllm_generation.sync_weights)
    with pytest.raises(SyncError, match="another run uses it. Use one server per run"):
        first.train()
    second.train()  # the other goes on


def test_wrong_model_on_the_server(deployment):
    deployment.up()
    # Neither of other width or depth, nor with the same tensors and another function.
    for overrides in ({"hidden_size": 64, "num_attention_heads": 2}, {"num_hidden_layers": 3}):
        with pytest.raises(ValueError, match="sends other layers or another model: .* tensors differ, first"):
            deployment.trainer(model=tiny_model(**overrides))
    with pytest.raises(SyncError, match="log-probabilities of the probe differ"):
        deployment.trainer(model=tiny_model(rms_norm_eps=1.0)).train()
    deployment.trainer(max_steps=1).train()  # the right one repairs what the wrong ones left


def test_full_disk(deployment, tmp_path):
    deployment.up()
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs privileges")
    try:
        trainer = deployment.trainer(rollout_checkpoint_dir=str(disk))

        def fill():
            with (disk / "others").open("wb") as file, pytest.raises(OSError):
                file.write(bytes(2**22))

        trainer.add_callback(at_step(2, fill))
        with pytest.raises(OSError, match="cannot be written .*No space left on device.*free space there"):
            trainer.train()
        assert held_version(deployment).endswith("step1-sync2"), "the server took what could not be written"
        left = {path.parent.name for path in disk.rglob("*.safetensors")}
        assert left == {"sync-2"}, "half a checkpoint was left where the server could read it"
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # the trainer still has its lock there


def test_trainer_is_killed_during_a_sync(deployment):
    server = deployment.up()
    config = {**deployment.config(max_steps=40, save_strategy="steps", save_steps=1), "per_device_train_batch_size": 8}
    directory = deployment.directory / "killed"
    others = {*deployment.rollouts.glob("*/[0-9]")}  # of trainers of other tests, which are freed when Python likes to
    command = [deployment.python, SCENARIOS / "train.py", directory, "--model", deployment.model]
    command += ["--config", json.dumps(config)]
    trainer = subprocess.Popen(list(map(str, command)), env=child_environment(), process_group=0)
    try:
        deadline = time.monotonic() + 120
        while not (directory / "checkpoint-2" / "trainer_state.json").exists():
            assert time.monotonic() < deadline and trainer.poll() is None
            time.sleep(0.01)
        seen = {path.name for path in deployment.rollouts.glob("*/*/sync-*")}
        while {path.name for path in deployment.rollouts.glob("*/*/*sync-*")} == seen:
            assert time.monotonic() < deadline and trainer.poll() is None
    finally:
        kill_group(trainer)  # a checkpoint has just been begun
        while group_members(trainer.pid):  # a fork ends a moment after what stands in for it
            time.sleep(0.01)
    left = {*deployment.rollouts.glob("*/[0-9]")} - others
    assert left, "it was not killed in time: it had a chance to clean up"
    for path in left:
        (path / "left-behind").touch()
    resumed = deployment.trainer(max_steps=4)
    assert not list(deployment.rollouts.glob("*/*/left-behind")), "the killed run's files are still in memory"
    resumed.train(resume_from_checkpoint=str(directory / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert server.process.poll() is None
    assert held_version(deployment) == resumed.vllm_generation.sync.version


def test_restarts_with_old_weights(deployment, undisturbed):
    deployment.up()
    trainer = deployment.trainer(sync_check_interval=0)  # so that only what is sent again is checked
    # Between a sync and the generation that relies on it.
    generation = trainer.vllm_generation
    trainer.add_callback(at_step(2, lambda: interrupt(generation, "generate", deployment.lose_and_wait)))
    trainer.train()
    assert recoveries(trainer) == 1
    assert history(trainer) == undisturbed
    assert held_version(deployment) == generation.sync.version
    checks = [row["time/sync_check_s"] for row in trainer.state.log_history if "loss" in row]
    assert [seconds > 0 for seconds in checks] == [False, False, True, False]


@pytest.mark.parametrize("method", ["generate", "load_checkpoint"])
def test_dies(deployment, undisturbed, method, caplog):
    deployment.up()
    trainer = deployment.trainer()
    client = trainer.vllm_generation.vllm_client
    trainer.add_callback(at_step(2, lambda: interrupt(client, method, deployment.lose)))
    trainer.train()
    assert recoveries(trainer) == 1
    assert history(trainer) == undisturbed
    said = [record.getMessage() for record in caplog.records if "Recovery 1 of at most 3" in record.getMessage()]
    assert len(said) == 1 and f"server at {deployment.server.url} is gone" in said[0]


def test_two_processes_recover_together(deployment, train, tmp_path):
    config = {name: value for name, value in deployment.config().items() if name != "max_steps"}
    arguments = [tmp_path, "--model", deployment.model, "--config", json.dumps(config), "--request-seed", "7"]
    server = deployment.up().process.pid
    undisturbed, disturbed = train(arguments, [*arguments, "--kill-before-generation", server], processes=2)
    assert disturbed["processes"] == 2
    rows = [[row for row in record["history"] if "loss" in row] for record in (undisturbed, disturbed)]
    computed = [[[row.get(name) for name in COMPUTED] for row in run] for run in rows]
    assert computed[0] == computed[1] and len(computed[0]) == 4
    assert [sum(row["sync/recoveries"] for row in run if "sync/recoveries" in row) for run in rows] == [0, 1]


@contextmanager
def answering_500(deployment, failures):
    """The address of a proxy that answers so many requests of a path with an error, instead of the server."""

    class Handler(BaseHTTPRequestHandler):
        def forward(self):
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            if failures.get(self.path, 0):
                failures[self.path] -= 1
                return self.answer(500, b"EngineGenerateError")
            url, headers = deployment.server.url, {"Content-Type": "application/json"}
            answer = requests.request(self.command, url + self.path, data=body, headers=headers, auth=add_key)
            self.answer(answer.status_code, answer.content)

        do_GET = do_POST = forward

        def answer(self, status, content):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}"
        proxy.shutdown()


def test_answers_500_three_times(deployment, undisturbed):
    deployment.up()
    failures = {}
    with answering_500(deployment, failures) as url:
        trainer = deployment.trainer(vllm_server_base_url=url)
        trainer.add_callback(at_step(1, lambda: failures.update({"/v1/completions": 2, "/collective_rpc": 1})))
        trainer.train()
    assert failures == {"/v1/completions": 0, "/collective_rpc": 0} and recoveries(trainer) == 3
    assert history(trainer) == undisturbed


def test_is_gone_for_good(deployment):
    server = deployment.up()
    trainer = deployment.trainer(vllm_server_timeout=3.0)
    trainer.add_callback(at_step(2, deployment.close))
    with pytest.raises(ServerLostError, match=f"No vLLM server answers at {server.url} after 3 s.*Before that: "):
        trainer.train()
    assert trainer.state.global_step == 2


def test_answers_500():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200, {"data": [{"id": "model"}]})

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(self.path)
            self.answer(500, {"error": {"message": "EngineDeadError: look at the log"}})

        def answer(self, status, content):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *arguments):
            pass

    asked: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as stub:
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        client = ServedEngine(base_url=f"http://127.0.0.1:{stub.server_port}")
        with pytest.raises(ServerError, match="answered /v1/completions with HTTP 500: check the .*EngineDeadError"):
            client.generate([[1, 2]] * 500)
        assert len(asked) <= 64, "requests went on after one had failed"
        stub.shutdown()
