"""The key of a server: how it is made, demanded of every request, and found by a trainer of the same user.

vLLM's own `--api-key` guards only some paths, not those that replace weights. `KeyGuard` runs inside the server, in
front of all paths. The key travels to it in the environment, which other users cannot read, unlike a command line.
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

API_KEY_VARIABLE = "VLLM_API_KEY"  # as in vLLM's server
KEY_FILE_VARIABLE = "TRL_QURL_KEY_FILE"  # where the server keeps its key while it runs
KEY_GUARD = f"{__name__}.KeyGuard"  # for vLLM's `--middleware`
OPEN_PATH = "/health"  # asked by a trainer that waits, and by batch systems; it tells nothing but that a server is up

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
        """Pass the request on, or refuse it."""
        if scope["type"] == "lifespan":
            with shared(self._key, self._file):
                await self._app(scope, receive, send)
        elif (scope["type"] == "http" and scope["path"] == OPEN_PATH) or self._is_authorized(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"www-authenticate", b"Bearer"), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "This server wants its API key."}'})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_authorized(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {self._key}".encode())


class ServerKey(AuthBase):
    """Adds a server's key to requests: `VLLM_API_KEY`, or what a server of the same user has shared.

    It is looked up for every request, because a server that starts again has another.
    """

    def __init__(self, base_url: str) -> None:
        url = urlsplit(base_url)
        self.file = key_file(url.hostname or "", url.port or {"https": 443}.get(url.scheme, 80))

    def __call__(self, request: PreparedRequest) -> PreparedRequest:
        """Add the key, where one is known."""
        key = given_key()
        with suppress(OSError):  # there is no such file, or it is another user's
            key = key or self.file.read_text()
        if key:
            request.headers["Authorization"] = f"Bearer {key}"
        return request


def new_key() -> str:
    """A random key."""
    return secrets.token_urlsafe(32)


def given_key() -> str | None:
    """The key that the user has set in the environment."""
    return os.environ.get(API_KEY_VARIABLE) or None


def key_file(host: str, port: int) -> Path:
    """Where the server at an address keeps its key. Homes may be shared, so a loopback address is the machine's."""
    if not host or is_loopback(host) or host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "trl-qurl" / "keys" / f"{host}-{port}".replace(":", ".")


@contextmanager
def shared(key: str, file: Path) -> Iterator[None]:
    """Keep the key in a file that only this user can read, inside the block."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=file.parent)  # readable by this user only
    with os.fdopen(descriptor, "w") as opened:
        opened.write(key)
    os.replace(draft, file)
    try:
        yield
    finally:
        with suppress(OSError):
            if file.read_text() == key:  # not that of a server which has taken its place
                file.unlink()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
