"""A vLLM server in memory: the requests of a real client, answered by a real worker.

In place of what needs a server's processes or a GPU: HTTP, NCCL between two threads, and a model
that only keeps what it is given. Tokens come from a model of transformers.
"""

import copy
import json
import queue
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)

from trl_qurl.quantization.storage import read_tensors
from trl_qurl.rollout.engine.served import ServedEngine
from trl_qurl.rollout.engine.worker import RolloutWorker
from trl_qurl.rollout.errors import ServerError
from trl_qurl.rollout.wire import WORKER_EXTENSION

URL = "http://in.memory"


class HandedOver:
    """NCCL between two threads of one process."""

    def __init__(self):
        self.tensors = queue.Queue()

    def sender(self):
        def broadcast(tensor, src, stream):
            assert tensor.dtype == torch.uint8
            assert tensor.is_contiguous()
            self.tensors.put(tensor.clone())

        return SimpleNamespace(
            broadcast=broadcast, destroy=lambda: None, group=SimpleNamespace(store=None)
        )

    def receiver(self):
        def broadcast(tensor, src):
            tensor.copy_(self.tensors.get(timeout=20))

        return SimpleNamespace(broadcast=broadcast, device=torch.device("cpu"))


class NoStream:
    """In place of a CUDA stream."""

    def synchronize(self):
        pass


class Loading(torch.nn.Module):
    """A model that only keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.ParameterDict({"weight": torch.zeros(1)})
        self.loaded = {}

    def load_weights(self, weights):
        for name, tensor in weights:
            self.loaded[name] = tensor.clone()


class Worker(RolloutWorker):
    """The real worker, in place of vLLM's own methods and its adapters."""

    def __init__(self, server):
        self.config = server.config
        self.vllm_config = server.vllm_config
        self.model = Loading()
        self.weight_transfer_engine = NCCLWeightTransferEngine(
            None, server.vllm_config, torch.device("cpu"), self.model
        )
        self.reloads = 0
        self.adapters = {}
        manager = SimpleNamespace(list_adapters=lambda: server.worker.adapters)
        self.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))

    def get_model(self):
        return self.model

    def reload_weights(self, weights_iterator):
        self.reloads += 1
        self.model.load_weights(weights_iterator)

    def describe_config(self):
        return self.config

    def load_adapter(self, path):
        tensors = read_tensors(Path(path))
        matrices = {name: SimpleNamespace(lora_a=each, lora_b=None) for name, each in tensors}
        self.adapters = {1: SimpleNamespace(loras=matrices)}


class FakeServer:
    """What a server holds and says.

    Args:
        checkpoint: What it started from; `None` for one in 16 bits that nobody looks at.
        rank: The largest of an adapter; 0 for a server without adapters.
        policy: Samples the tokens.
    """

    def __init__(self, checkpoint=None, rank=0, policy=None):
        quantization = None
        if checkpoint is not None:
            config = json.loads((checkpoint / "config.json").read_text())
            quantization = CompressedTensorsConfig.from_config(config["quantization_config"])
        lora = None
        if rank:
            lora = SimpleNamespace(max_lora_rank=rank, lora_dtype=torch.float32)
        self.vllm_config = SimpleNamespace(
            quant_config=quantization,
            parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0),
            model_config=SimpleNamespace(
                model=str(checkpoint or ""), dtype=torch.float32, max_model_len=64
            ),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            lora_config=lora,
        )
        self.config = {
            "parallel_config": {"worker_extension_cls": WORKER_EXTENSION},
            "weight_transfer_config": {},
            "model_config": {"logprobs_mode": "processed_logprobs"},
        }
        self.policy = policy
        self.asked = []
        self.is_up = True
        self.between = HandedOver()
        self.before_answer = lambda asked: None
        self.restart()

    def restart(self):
        """Start in place of the last one: with a worker that has loaded nothing."""
        self.worker = Worker(self)

    def client(self, **settings):
        """A client of this server."""
        return self.client_class()(base_url=URL, **settings)

    def client_class(self):
        """The class of its clients."""
        return type("Client", (InMemoryClient,), {"server": self})

    def connect(self, client):
        """Open a stream from a client to the worker."""
        client.communicator = self.between.sender()
        self.worker.weight_transfer_engine.model_update_group = self.between.receiver()

    def forget(self):
        """Drop what a load left half done, and what was sent for it."""
        self.between.tensors = queue.Queue()
        # The thread of a load that was left may still fail, which must not reach the next load.
        self.worker = copy.copy(self.worker)
        self.worker.rollout_load_failed = False

    def answer(self, path, body):
        asked = body["method"] if path == "/collective_rpc" else path
        self.asked.append(asked)
        answer = self.before_answer(asked)
        if answer is not None:
            return answer
        try:
            if path == "/collective_rpc":
                return {"results": [getattr(self.worker, asked)(**body["kwargs"])]}
            if path == "/v1/load_lora_adapter":
                self.worker.load_adapter(body["lora_path"])
        except (AttributeError, RuntimeError) as error:
            raise ServerError(str(error), 500) from None
        if path == "/v1/completions":
            return {"choices": self._choices(**body)}
        if path == "/init_weight_transfer_engine" and body["init_info"]:
            engine = self.worker.weight_transfer_engine
            engine.init_transfer_engine(engine.parse_init_info(body["init_info"]))
        return {
            "data": [{"id": "model"}],
            "success": True,
            "world_size": 1,
        }

    def _choices(self, prompt, n, max_tokens, logprobs, **kwargs):
        choices = []
        for start in prompt:
            continued = self._continued(start, max_tokens, max(1, logprobs))
            choices += [continued] * n
        return choices

    @torch.no_grad()
    def _continued(self, start, steps, top):
        tokens = list(start)
        rows = []
        for _ in range(steps):
            logits = self.policy(torch.tensor([tokens])).logits
            logps = logits[0, -1].log_softmax(-1)
            best = logps.topk(top).indices.tolist()
            rows.append({f"token_id:{token}": logps[token].item() for token in best})
            tokens.append(best[0])
        logprobs = {
            "tokens": [next(iter(row)) for row in rows],
            "token_logprobs": [max(row.values()) for row in rows],
            "top_logprobs": rows,
        }
        return {
            "prompt_token_ids": start,
            "token_ids": tokens[len(start) :],
            "logprobs": logprobs,
        }


class InMemoryClient(ServedEngine):
    """The real client, whose requests its class's `server` answers."""

    def _is_healthy(self):
        return self.server.is_up

    def _answer(self, verb, path, json=None, **kwargs):
        return self.server.answer(path, json or {})
