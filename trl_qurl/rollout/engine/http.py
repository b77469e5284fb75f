"""Requests to a server that are bounded in time."""

from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry


class BoundedRequests(HTTPAdapter):
    """Gives every request a time limit, in seconds, and retries none whose answer never came.

    TRL's client retries those five times: a server that hangs would be waited for six times over, and one that
    restarted meanwhile would answer from other weights.
    """

    def __init__(self, limit: float) -> None:
        retries = Retry(total=3, read=False, status_forcelist=[502, 503], backoff_factor=1, allowed_methods=None)
        super().__init__(max_retries=retries, pool_maxsize=64)
        self._limit = limit

    def send(self, *args: Any, **kwargs: Any) -> requests.Response:  # noqa: D102
        return super().send(*args, **{**kwargs, "timeout": kwargs.get("timeout") or self._limit})
