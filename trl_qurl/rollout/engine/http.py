"""HTTP requests with a time limit."""

from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry


class BoundedRequests(HTTPAdapter):
    """Adds a timeout, in seconds, to every request, and never retries one that got no response.

    TRL's client would retry it five times: it would wait for a hung server six times over, and a server restarted in
    the meantime would answer from other weights.
    """

    def __init__(self, limit: float) -> None:
        retries = Retry(total=3, read=False, status_forcelist=[502, 503], backoff_factor=1, allowed_methods=None)
        super().__init__(max_retries=retries, pool_maxsize=64)
        self._limit = limit

    def send(self, *args: Any, **kwargs: Any) -> requests.Response:  # noqa: D102
        return super().send(*args, **{**kwargs, "timeout": kwargs.get("timeout") or self._limit})
