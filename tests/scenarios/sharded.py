"""A sync from weights that several processes hold in parts; prints what each process's engine then
says of the probe.

accelerate turns neither FSDP2 nor ZeRO-3 on for CPUs, so the model is split by PyTorch and
DeepSpeed themselves, and the generation backend is told so.
"""

import argparse
import json

import torch
import train
from accelerate.utils import gather_object
from child import run_all
from tiny import KEPT
from transformers.integrations.deepspeed import unset_hf_deepspeed_config


def split_by_fsdp2(model, generation):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from trl_qurl.quantization.merging import model_parameters

    generation._dist.fsdp_version = 2
    # As at a trainer's start, before accelerate splits the model: a colocated engine starts from
    # these weights.
    whole = {name: parameter.clone() for name, parameter in model_parameters(model, merges=True)}
    assert all(torch.equal(whole[name], parameter) for name, parameter in model.named_parameters())
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def split_by_zero3(model, generation):
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    settings = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    KEPT.append(HfDeepSpeedConfig(settings))  # as accelerate does at the start
    deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())
    generation._dist.zero_stage = 3


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir")
    parser.add_argument("way", choices=["fsdp2", "zero3"])
    parser.add_argument("--export", required=True)
    parser.add_argument("--config", default="{}", help="JSON of more config fields")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict:
    config = {"per_device_train_batch_size": 4, "uaq_scale": 1.0, "sync_check_interval": 1}
    config |= json.loads(options.config)
    trainer = train.build(train.parse([options.output_dir, "--config", json.dumps(config)]))
    KEPT.append(trainer)
    generation = trainer.vllm_generation
    generation.sync_weights()
    before = gather_object([train.engine_logps(trainer)])

    torch.manual_seed(1)  # the same update on every process
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
    if trainer.accelerator.is_main_process:
        train.export(trainer, options.export)
    trainer.accelerator.wait_for_everyone()
    whole = sum(parameter.numel() for parameter in trainer.model.parameters())
    {"fsdp2": split_by_fsdp2, "zero3": split_by_zero3}[options.way](trainer.model, generation)
    held = sum(
        parameter.numel() if options.way == "zero3" else parameter.to_local().numel()
        for parameter in trainer.model.parameters()
    )
    generation.sync_weights()
    trainer.save_quantized(f"{options.export}-saved")
    unset_hf_deepspeed_config()  # else the next model is split from its start
    return {
        "before": before,
        "after": gather_object([train.engine_logps(trainer)]),
        "processes": trainer.accelerator.num_processes,
        "held_share": held / whole,
        "probed": generation.cost.take().check_s > 0,
    }


if __name__ == "__main__":
    run_all(lambda arguments: run(parse(arguments)))
