"""Calls on a separate thread, which does not keep the process alive."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch


def in_background(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
    """Call a function on a separate thread, with the caller's current device."""
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
    future: Future = Future()

    def run() -> None:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)  # each thread has its own
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
