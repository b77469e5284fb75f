"""Steps of the real trainer, or rollouts of an engine alone, one whenever it is asked for.

`child` runs this in a process of its own.
"""

from __future__ import annotations

import random
import resource
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from trl_qurl.lab.bench.plan import ENGINE_SHARE, Job
from trl_qurl.lab.demo.task import build_tokenizer
from trl_qurl.lab.device import cpu_settings, full_precision, keep_freed_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from vllm import LLM

    from trl_qurl import QuRLGRPOTrainer
    from trl_qurl.quantization.files import PrivateDirectory

PARTS = {"sync": "sync_s", "rollout": "generate_s", "score": "logps_s", "update": "update_s"}
MANY = 10**6  # steps: they end with the process
WHOLE_SHARE = 0.9  # of a GPU, for an engine alone


class EngineClock:
    """Adds up the seconds inside an engine's steps: scheduling, kernels, sampling.

    The rest of a rollout is the caller's: it queues prompts, and makes answers, log-probabilities
    and perhaps text of the tokens. Where the engine schedules ahead, a GPU computes meanwhile.
    """

    def __init__(self, llm: LLM) -> None:
        core = llm.llm_engine.engine_core
        self._get_output = core.get_output
        core.get_output = self._timed
        self._seconds = 0.0

    def _timed(self) -> Any:
        started = time.perf_counter()
        outputs = self._get_output()
        self._seconds += time.perf_counter() - started
        return outputs

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds


class Turns(TrainerCallback):
    """Lets a trainer take a step whenever it is asked to, and answers what the step cost.

    `clock` is that of a colocated engine.
    """

    def __init__(self, updates: int, pipe: Connection, clock: EngineClock | None) -> None:
        self._updates = updates
        self._pipe = pipe
        self._clock = clock
        self._started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait before the first update of a step."""
        if state.global_step % self._updates == 0:
            self._pipe.recv()
            self._started = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Answer after the last update of a step; each of them has logged its parts."""
        if state.global_step % self._updates == 0:
            step = {"step": time.perf_counter() - self._started, "peak": peak()}
            for part, name in PARTS.items():
                rows = state.log_history[-self._updates :]
                step[part] = sum(row.get(f"time/{name}", 0.0) for row in rows)
            if self._clock is not None:
                step["host"] = step["rollout"] - self._clock.take()
            self._pipe.send(step)


def peak() -> float:
    """Return the peak of torch's memory on the GPU, or of this process, in GB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def train(job: Job, directory: str, pipe: Connection) -> None:
    """Take steps of GRPO for as long as the process lives."""
    keep_freed_memory()  # as `trl-qurl grpo` does
    trainer = build_trainer(job, directory)
    generation = trainer.vllm_generation
    clock = EngineClock(generation.llm) if generation.mode == "colocate" else None
    # Before the trainer's own clock starts, or the wait would belong to the step.
    trainer.callback_handler.callbacks.insert(0, Turns(job.load.updates, pipe, clock))
    trainer.train()


def build_trainer(job: Job, directory: str) -> QuRLGRPOTrainer:
    """Build a trainer with the settings of `trl-qurl grpo`, whose completions never end early."""
    from datasets import Dataset

    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer

    load = job.load
    passes = load.batch // load.train_batch
    is_bf16 = full_precision()[0] == "BF16"
    settings: dict[str, Any] = {
        "rollout_quantization": job.formats,
        "quantization_ignore": job.ignore,
        "per_device_train_batch_size": load.train_batch,
        "steps_per_generation": passes,
        "gradient_accumulation_steps": passes // load.updates,
        "num_generations": load.generations,
        "max_completion_length": load.completion_len,
        "generation_kwargs": {"ignore_eos": True},
        "vllm_max_model_length": load.length,
        "max_steps": MANY,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": is_bf16,
        "fp16": not is_bf16,
        **cpu_settings(),
        **job.engine,
    }
    adapter = None
    if load.lora_rank:
        from peft import LoraConfig

        adapter = LoraConfig(r=load.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    if job.has_weights:
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    else:
        model = random_model(job.model, "cuda" if torch.cuda.is_available() else "cpu")
    prompts = ["".join(random.choices("0123456789", k=load.prompt_len)) for _ in range(load.batch)]
    return QuRLGRPOTrainer(
        model,
        lambda completion_ids, **columns: [ids[0] % 2 for ids in completion_ids],
        QuRLGRPOConfig(directory, **settings),
        Dataset.from_dict({"prompt": prompts}),
        processing_class=build_tokenizer(),
        peft_config=adapter,
    )


def random_model(name: str, device: str) -> PreTrainedModel:
    """Make a model with random 32-bit weights: a step takes as long with them."""
    config = AutoConfig.from_pretrained(name)
    config.name_or_path = ""  # where the engine would look for weights
    # As TRL sets it later. Transformers makes the embedding of padding zero, and the config's own
    # token may be a digit of our prompts: a first token of zeros stays zero in all layers, and its
    # gradient overflows, because each norm of zeros multiplies it by 1/√ε.
    config.get_text_config().pad_token_id = build_tokenizer().pad_token_id
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.architectures = [type(model).__name__]
    return model


def generate(job: Job, directory: str, pipe: Connection) -> None:
    """Generate rollouts in an engine with random weights, without a trainer."""
    from vllm import SamplingParams

    from trl_qurl.rollout.samples import sampling_arguments

    load = job.load
    llm, _files = start_engine(job)
    clock = EngineClock(llm)
    prompts = []
    for _ in range(load.batch // load.generations):
        prompt = {"prompt_token_ids": random.choices(range(10), k=load.prompt_len)}
        prompts += [prompt] * load.generations
    asked = sampling_arguments({"ignore_eos": True})
    params = SamplingParams(max_tokens=load.completion_len, logprobs=0, **asked)
    while True:
        pipe.recv()
        llm.reset_prefix_cache()  # as a sync does
        clock.take()
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        rollout = time.perf_counter() - started
        pipe.send({"rollout": rollout, "host": rollout - clock.take(), "peak": peak()})


def start_engine(job: Job) -> tuple[LLM, PrivateDirectory]:
    """Start an engine with random weights, without a tokenizer; it reads the files of its start."""
    from vllm import LLM

    from trl_qurl.quantization.files import PrivateDirectory
    from trl_qurl.quantization.plan import make_plan
    from trl_qurl.quantization.storage import write_config
    from trl_qurl.quantization.stream import WeightStream
    from trl_qurl.rollout.engine.colocated import build_engine, prepare_process

    load = job.load
    model = random_model(job.model, "meta")
    weights = WeightStream(model, make_plan(model, job.formats, job.ignore))
    arguments = job.engine["vllm_engine_kwargs"]
    prepare_process(model, weights, arguments)
    start = PrivateDirectory(None, 0)  # its name lets vLLM find its compilation cache again
    write_config(model, start.path, weights.plan.quantization_config())
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "max_model_len": load.length,
        "max_num_seqs": load.batch,
        "gpu_memory_utilization": WHOLE_SHARE if torch.cuda.is_available() else ENGINE_SHARE,
    }
    return build_engine(LLM, start.path, arguments, load.completion_len, **settings), start
