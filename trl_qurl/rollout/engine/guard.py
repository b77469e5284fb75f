"""The API key of a server, and what checks it inside vLLM's server, in front of its paths.

Both sides read the key from `VLLM_API_KEY`, which is hidden from other users, unlike a command
line. The --api-key of vLLM protects only some paths, not those that replace weights, so `KeyGuard`
protects all.
"""

import hmac
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

API_KEY_VARIABLE = "VLLM_API_KEY"  # same as for vLLM's own server
# Polled by waiting trainers and batch systems. It reveals only that the server is up.
OPEN_PATH = "/health"


def read_key() -> str:
    """Return the key, empty if it is not set.

    Raises `ValueError`, without the key, if no header can carry it.
    """
    key = os.environ.get(API_KEY_VARIABLE, "")
    if not all("!" <= character <= "~" for character in key):
        raise ValueError(
            f"{API_KEY_VARIABLE} has a space, a line break or a character outside ASCII, which a "
            f"key cannot have: remove it, or make a key with `export {API_KEY_VARIABLE}=$(openssl "
            "rand -hex 32)`."
        )
    return key


def require_key() -> None:
    """Raise `ValueError` unless a server's key is set."""
    if not read_key():
        raise ValueError(
            f"{API_KEY_VARIABLE} is not set. Without a key, others could replace the server's "
            f"weights: run `export {API_KEY_VARIABLE}=$(openssl rand -hex 32)`, and set the same "
            "value for the trainer."
        )


class KeyGuard:
    """ASGI middleware that answers 401 to every request without the key, except to `/health`."""

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[API_KEY_VARIABLE]}".encode()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Forward the request, or reject it."""
        if self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            from starlette.responses import JSONResponse

            error = {"error": "Missing or invalid API key."}
            refusal = JSONResponse(error, status_code=401, headers={"www-authenticate": "Bearer"})
            await refusal(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _may_pass(self, scope: "Scope") -> bool:
        if scope["type"] == "lifespan":
            return True
        if scope["type"] == "http" and scope["path"] == OPEN_PATH:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)


KEY_GUARD = f"{__name__}.{KeyGuard.__name__}"  # for vLLM's `--middleware`
