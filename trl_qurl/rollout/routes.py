"""Choose how weights are sent to an engine, and say why.

As a stream, as the files of a checkpoint, or as an adapter alone. Settings request a way, and the trainer, the model
and the server may rule it out.
"""

import torch


def choose_route(
    requested: str, device: torch.device, obstacle: str | None, is_sharded: bool = False
) -> tuple[str, str]:
    """Choose how to send weights to a server, `"stream"` or `"checkpoint"`, and give the reason.

    `requested` is the config's `weight_sync`, `device` the trainer's, `obstacle` why the server accepts no stream, and
    `is_sharded` whether processes hold parts of the policy. Raises `ValueError` if a requested stream is not possible.
    """
    if device.type != "cuda":
        obstacle = f"NCCL needs a CUDA device, and the trainer's is {device.type!r}"
    if requested == "stream" and obstacle:
        raise ValueError(
            f"weight_sync='stream' is not possible: {obstacle}. Start the server with `trl-qurl serve` where it sees "
            "a GPU, or set weight_sync='checkpoint' (or 'auto')."
        )
    if requested != "auto":
        return "stream" if requested == "stream" else "checkpoint", f"weight_sync={requested!r} requests it"
    if is_sharded and not obstacle:
        obstacle = "streaming a sharded policy is untested on GPUs (weight_sync='stream' forces it)"
    return ("checkpoint", obstacle) if obstacle else ("stream", "the trainer and the server both have NCCL")


def choose_adapter(
    requested: str, obstacle: str | None, rank: int, served_rank: int | None, restart: str = ""
) -> tuple[bool, str]:
    """Choose whether to send an adapter without its base, and give the reason.

    `requested` is the config's `weight_sync`, `obstacle` why the adapter cannot be sent alone. A server accepts
    adapters up to `served_rank` (0: none), or larger ones once restarted with the command `restart`; `None` means a
    colocated engine. Raises `ValueError` if a requested adapter is not possible, and also for whole weights to a
    server that accepts adapters, because its layers are not the ones that whole weights are loaded into.
    """
    if obstacle is None and served_rank is not None and rank > served_rank:
        limit = f"only adapters up to rank {served_rank}" if served_rank else "no adapters"
        obstacle = f"the server accepts {limit}, but this one has rank {rank}: start it with {restart}"
    if requested == "adapter" and obstacle:
        raise ValueError(
            f"weight_sync='adapter' is not possible: {obstacle}. Or set weight_sync='auto', which merges the "
            "adapter into the weights."
        )
    if requested == "adapter":
        return True, "weight_sync='adapter' requests it"
    if served_rank and (requested != "auto" or obstacle):
        raise ValueError(
            "The server accepts adapters (--enable-lora), but this run would send whole weights "
            f"({obstacle or f'weight_sync={requested!r}'}): start it without --enable-lora."
        )
    if served_rank:
        return True, "the server accepts adapters"
    return False, obstacle or "vLLM generates faster without one"
