"""Calls on a separate thread, which does not keep the process alive."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def in_background(
    call: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Future[Result]:
    """Call a function on a separate thread, with the caller's current device."""
    device = None
    if torch.accelerator.is_available():
        device = torch.accelerator.current_device_index()
    future: Future[Result] = Future()

    def run() -> None:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)  # each thread has its own
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
