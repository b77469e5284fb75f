"""A server's API key: creating it, requiring it in every request, and finding it for a trainer of the same user.

vLLM's own `--api-key` protects only some paths, not those that replace weights. `KeyGuard` runs inside the server, in
front of all paths. It reads the key from the environment, which is hidden from other users, unlike a command line.
"""

import hmac
import ipaddress
import os
import secrets
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from requests import PreparedRequest
from requests.auth import AuthBase

API_KEY_VARIABLE = "VLLM_API_KEY"  # same as for vLLM's own server
KEY_FILE_VARIABLE = "TRL_QURL_KEY_FILE"  # where the server keeps its key while it runs
KEY_GUARD = f"{__name__}.KeyGuard"  # for vLLM's `--middleware`
OPEN_PATH = "/health"  # polled by waiting trainers and batch systems; it reveals only that the server is up

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class KeyGuard:
    """ASGI middleware that answers 401 to every request without the key, on every path except `/health`."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._key = os.environ[API_KEY_VARIABLE]
        self._file = Path(os.environ[KEY_FILE_VARIABLE])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or reject it."""
        if scope["type"] == "lifespan":
            with shared(self._key, self._file):
                await self._app(scope, receive, send)
        elif (scope["type"] == "http" and scope["path"] == OPEN_PATH) or self._is_authorized(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"www-authenticate", b"Bearer"), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Missing or invalid API key."}'})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_authorized(self, scope: Scope) -> bool:
        header = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(header, f"Bearer {self._key}".encode())


class ServerKey(AuthBase):
    """Adds a server's key to requests: `VLLM_API_KEY`, or the key that a server of the same user has shared.

    It is looked up for every request, because a restarted server has a new one.
    """

    def __init__(self, base_url: str) -> None:
        url = urlsplit(base_url)
        self.file = key_file(url.hostname or "", url.port or {"https": 443}.get(url.scheme, 80))

    def __call__(self, request: PreparedRequest) -> PreparedRequest:
        """Add the key, if there is one."""
        key = user_key()
        with suppress(OSError):  # the file does not exist, or belongs to another user
            key = key or self.file.read_text()
        if key:
            request.headers["Authorization"] = f"Bearer {key}"
        return request


def new_key() -> str:
    """Return a random key."""
    return secrets.token_urlsafe(32)


def user_key() -> str | None:
    """Return the key that the user has set in the environment."""
    return os.environ.get(API_KEY_VARIABLE) or None


def key_file(host: str, port: int) -> Path:
    """Return where a server stores its key. Homes may be shared, so a loopback address becomes the host name."""
    if not host or is_loopback(host) or host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "trl-qurl" / "keys" / f"{host}-{port}".replace(":", ".")


@contextmanager
def shared(key: str, file: Path) -> Iterator[None]:
    """Inside the block, store the key in a file that only this user can read."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, tmp = tempfile.mkstemp(dir=file.parent)  # readable by this user only
    with os.fdopen(descriptor, "w") as stream:
        stream.write(key)
    os.replace(tmp, file)
    try:
        yield
    finally:
        with suppress(OSError):
            if file.read_text() == key:  # it may already belong to a newer server
                file.unlink()


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
