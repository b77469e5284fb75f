"""HTTP between trainer and server: the API key that every request needs, and a time limit for requests.

Both sides read the key from `VLLM_API_KEY`, which is hidden from other users, unlike a command line. The --api-key of
vLLM protects only some paths, not those that replace weights, so `KeyGuard` runs in the server, in front of all.
"""

import hmac
import os
from typing import TYPE_CHECKING, Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

API_KEY_VARIABLE = "VLLM_API_KEY"  # same as for vLLM's own server
OPEN_PATH = "/health"  # polled by waiting trainers and batch systems; it reveals only that the server is up


def require_key() -> None:
    """Raise `ValueError` unless a server's key is set."""
    if not os.environ.get(API_KEY_VARIABLE):
        raise ValueError(
            f"{API_KEY_VARIABLE} is not set. Without a key, others could replace the server's weights: run `export "
            f"{API_KEY_VARIABLE}=$(openssl rand -hex 32)`, and set the same value for the trainer."
        )


def add_key(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Add the key, if it is set, to a request; for the `auth` of a session."""
    if key := os.environ.get(API_KEY_VARIABLE):
        request.headers["Authorization"] = f"Bearer {key}"
    return request


class KeyGuard:
    """ASGI middleware that answers 401 to every request without the key, on every path except `/health`."""

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[API_KEY_VARIABLE]}".encode()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Forward the request, or reject it."""
        is_open = scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] == OPEN_PATH)
        if is_open or hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"www-authenticate", b"Bearer"), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Missing or invalid API key."}'})
        else:
            await send({"type": "websocket.close", "code": 1008})


KEY_GUARD = f"{__name__}.{KeyGuard.__name__}"  # for vLLM's `--middleware`


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
