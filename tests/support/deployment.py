"""A real server that tests break while trainers use it."""

import signal
import threading
import time
from contextlib import suppress

import psutil
from conftest import Server, free_port
from datasets import Dataset
from tiny import save_tiny, tiny_tokenizer
from transformers import TrainerCallback

from support.configs import PLAIN
from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer
from trl_qurl.rollout.errors import ServerError

COMPUTED = ("loss", "grad_norm", "reward", "mismatch/kl_k3")
"""The metrics that runs are compared by."""

SETTINGS = {
    **PLAIN,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "save_strategy": "no",
    "vllm_mode": "server",
    "vllm_request_timeout": 60.0,
    "logging_steps": 1,
}


def variety(completions, **kwargs):
    """A reward for characters that differ."""
    return [len(set(completion)) / 8 for completion in completions]


class Deployment:
    """A model, a server of it that is restarted whenever it ends, and trainers that use it."""

    def __init__(self, directory, python, *options):
        self.directory = directory
        self.python = python
        self.options = options or ("--scheme", "int8")
        self.model = save_tiny(directory / "model")
        self.rollouts = directory / "rollouts"
        self.port = free_port()
        self.server = None
        self.end = threading.Timer(0, lambda: None)

    def start(self):
        self.server = Server(
            self.model, self.directory, *self.options, port=self.port, python=self.python
        )
        watch = threading.Thread(target=self._restart, args=[self.server], daemon=True)
        watch.start()
        return self.server

    def _restart(self, server):
        """Start another server when this one ends, as a user's loop or service manager does."""
        server.process.wait()
        with suppress(ProcessLookupError):
            server.send(signal.SIGKILL)  # vLLM's engine survives a server that is killed alone
        if self.server is server:
            self.start()

    def up(self):
        """The server, once it has come back if a test has lost it."""
        if self.end.is_alive():
            self.end.join()
        return (self.server or self.start()).wait_until_healthy()

    def close(self):
        """End the server for good."""
        server = self.server
        self.server = None
        if server:
            server.stop()

    def replace(self):
        """Kill the server, and return when another one has been started."""
        lost = self.server
        lost.kill()
        while self.server is lost:
            time.sleep(0.05)

    def lose(self):
        """Stop the server from answering what is on its way, and kill it a second later."""
        self.server.send(signal.SIGSTOP)
        self.end = threading.Timer(1.0, self.replace)
        self.end.start()

    def lose_engine(self):
        """Stop what is behind the HTTP server, and kill it a second later, as the system does when
        memory is short.
        """
        processes = [psutil.Process(number) for number in self.server.survivors()]
        # stand-ins are small
        large = [process for process in processes if process.memory_info().rss > 10**8]
        behind = [process for process in large if not self._listens(process)]
        assert behind
        assert len(large) > len(behind)
        for process in behind:
            process.suspend()
        self.end = threading.Timer(1.0, lambda: [process.kill() for process in behind])
        self.end.start()

    def _listens(self, process):
        return any(connection.laddr.port == self.port for connection in process.net_connections())

    def lose_and_wait(self):
        """Kill the server, and return when another one answers in its place."""
        self.replace()
        self.server.wait_until_healthy()

    def hang(self, seconds):
        """Stop the server for a while."""
        self.server.send(signal.SIGSTOP)
        self.end = threading.Timer(seconds, self.server.send, [signal.SIGCONT])
        self.end.start()

    def config(self, **settings):
        return {
            **SETTINGS,
            "vllm_server_base_url": f"http://127.0.0.1:{self.port}",
            "rollout_checkpoint_dir": str(self.rollouts),
            **settings,
        }

    def trainer(self, peft_config=None, **settings):
        trainer = QuRLGRPOTrainer(
            model=str(self.model),
            reward_funcs=variety,
            args=QuRLGRPOConfig(str(self.directory / "out"), **self.config(**settings)),
            train_dataset=Dataset.from_dict({"prompt": ["ab", "cd", "e", "fgh"] * 4}),
            processing_class=tiny_tokenizer(),
            peft_config=peft_config,
        )
        # Without a seed per request, the order in which requests arrive would decide. As a setting
        # it is refused.
        trainer.vllm_generation.generation_kwargs["seed"] = 7
        return trainer


def before(call, act):
    """`call`, with `act` before its first call."""
    acts = [act]

    def wrapped(*args, **kwargs):
        if acts:
            acts.pop()()
        return call(*args, **kwargs)

    return wrapped


def interrupt(owner, method, act):
    """Do `act` before a method's next call."""
    setattr(owner, method, before(getattr(owner, method), act))


def history(trainer):
    """`COMPUTED` of each update."""
    updates = []
    for row in trainer.state.log_history:
        if "loss" in row:
            updates.append([row.get(name) for name in COMPUTED])
    return updates


def recoveries(trainer):
    return sum(row.get("sync/recoveries", 0) for row in trainer.state.log_history)


def at_step(step, act):
    """A callback that does `act` at the end of a step."""

    class Act(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                act()

    return Act()


def answer_500(trainer, failures):
    """Let so many requests of each path fail, and count them down."""
    client = trainer.vllm_generation.vllm_client
    answer = client._answer

    def failing(verb, path, **kwargs):
        if failures.get(path, 0):
            failures[path] -= 1
            raise ServerError(f"{path} answered 500", 500)
        return answer(verb, path, **kwargs)

    client._answer = failing
