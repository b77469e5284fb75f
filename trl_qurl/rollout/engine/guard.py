"""What runs inside vLLM's server, in front of its paths: a check of the API key, and a watch over
the engine.

Both sides read the key from `VLLM_API_KEY`, which is hidden from other users, unlike a command
line. The --api-key of vLLM protects only some paths, not those that replace weights, so `KeyGuard`
protects all.
"""

import asyncio
import hmac
import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

API_KEY_VARIABLE = "VLLM_API_KEY"  # same as for vLLM's own server
# polled by waiting trainers and batch systems; it reveals only that the server is up
OPEN_PATH = "/health"
WATCH_SECONDS = 0.5  # between two looks at the engine while a request waits for it


def read_key() -> str:
    """Return the key, empty if it is not set. Raises `ValueError`, without the key, if no header
    can carry it.
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


async def send_error(send: "Send", status: int, error: str, *headers: tuple[bytes, bytes]) -> None:
    """Answer a request with an error, as JSON."""
    content_type = (b"content-type", b"application/json")
    await send(
        {"type": "http.response.start", "status": status, "headers": [content_type, *headers]}
    )
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})


class KeyGuard:
    """ASGI middleware that answers 401 to every request without the key, on every path except
    `/health`.
    """

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[API_KEY_VARIABLE]}".encode()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Forward the request, or reject it."""
        is_open = scope["type"] == "lifespan" or (
            scope["type"] == "http" and scope["path"] == OPEN_PATH
        )
        if is_open or hmac.compare_digest(
            dict(scope["headers"]).get(b"authorization", b""), self._expected
        ):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send_error(
                send, 401, "Missing or invalid API key.", (b"www-authenticate", b"Bearer")
            )
        else:
            await send({"type": "websocket.close", "code": 1008})


class EngineWatch:
    """ASGI middleware that ends requests to an engine whose process has died, or that is being shut
    down.

    vLLM ends such a request for completions, but one to the workers waits for an answer that cannot
    come. The server waits for its last request before it exits: it would close its port and stay,
    and nothing would restart it.
    """

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Forward the request, and cancel it once there is no engine to answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        engine = scope["app"].state.engine_client
        has_begun = False

        async def watched_send(message: "Message") -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        answer = asyncio.ensure_future(self._app(scope, receive, watched_send))
        try:
            while not answer.done():
                is_dead = engine.errored
                await asyncio.wait([answer], timeout=WATCH_SECONDS)
                if is_dead:  # and vLLM has had this time to say so itself
                    answer.cancel()
        finally:
            answer.cancel()
        if not answer.cancelled():
            answer.result()
        elif not has_begun:
            await send_error(send, 500, "The engine has died or is shutting down.")


KEY_GUARD = f"{__name__}.{KeyGuard.__name__}"  # for vLLM's `--middleware`
ENGINE_WATCH = f"{__name__}.{EngineWatch.__name__}"
