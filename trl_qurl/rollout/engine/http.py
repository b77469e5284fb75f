"""HTTP to the server: requests that are bounded in time, and sent once."""

from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from trl_qurl.rollout.engine.guard import read_key


def add_key(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Add the key, if it is set, to a request; for the `auth` of a session."""
    key = read_key()
    if key:
        request.headers["Authorization"] = f"Bearer {key}"
    return request


class BoundedRequests(HTTPAdapter):
    """Limits the time of every request, in seconds; sends none again, and none to a proxy.

    Only a connection that was not made is tried again, because the server cannot have acted on that
    request. TRL's client would repeat requests five times: it would wait for a hung server six
    times over, and a server restarted in the meantime would answer from other weights. The proxies
    of the environment would see the key.
    """

    def __init__(self, limit: float, connections: int = 3) -> None:
        retries = Retry(
            total=connections,
            read=False,
            other=0,  # as a broken TLS connection
            backoff_factor=1,
            allowed_methods=None,
            respect_retry_after_header=False,
        )
        super().__init__(max_retries=retries, pool_maxsize=64)
        self._limit = limit

    def send(self, *args: Any, **kwargs: Any) -> requests.Response:
        """Send a request, and wait this long for each part of its answer."""
        return super().send(*args, **kwargs | {"timeout": self._limit, "proxies": {}})


def open_session(limit: float, connections: int = 3) -> requests.Session:
    """Return a session of `BoundedRequests` that sends the key, and follows no redirect."""
    session = requests.Session()
    session.auth = add_key
    session.max_redirects = 0
    for prefix in ("http://", "https://"):
        session.mount(prefix, BoundedRequests(limit, connections))
    return session
