"""Faults of HTTP between trainer and server, with a stub in place of vLLM: each is one error, in
time, sent once.
"""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trl_qurl.rollout.engine import guard
from trl_qurl.rollout.engine.served import ServedEngine
from trl_qurl.rollout.errors import ServerError
from trl_qurl.rollout.wire import WeightUpdate

START = {"/health": {}, "/v1/models": {"data": [{"id": "model"}]}}
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
HTML = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 20\r\n\r\n<html>sign in</html>"
)
DEAD = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 15\r\n\r\nEngineDeadError"


@contextmanager
def faulty(fault, limit=30.0, start=START, delay=0):
    """A client, and the requests that reached its server, which answers with bytes once the client
    has connected.
    """
    asked = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            asked.append((self.path, self.headers["Authorization"]))
            if self.path in start:
                body = json.dumps(start[self.path]).encode()
                head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
                self.wfile.write(head + body)
                return
            self.close_connection = True
            time.sleep(delay)
            # Else the client's next request would race with the end of this connection.
            self.wfile.write(fault.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))

        do_POST = do_GET

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            client = ServedEngine(base_url=url, request_timeout=limit)
            paths = [path for path, _ in asked]
            assert paths == list(START), "TRL's client waits too, and without a limit"
            asked.clear()
            yield client, asked
        finally:
            server.shutdown()


def version(client):
    return client.version()


def generate(client):
    return client.generate([[1, 2]], max_tokens=2)


def load_adapter(client):
    return client.load_adapter(Path("adapter"), WeightUpdate("v1"))


READING = (version, generate, ServedEngine.clear_caches, ServedEngine.get_world_size)  # JSON
ALL = (*READING, load_adapter)
FAULTS = {
    "cut short": (JSON + b'Content-Length: 100\r\n\r\n{"results": ["a', ALL, "did not answer"),
    "page of a proxy": (HTML, READING, "did not answer"),
    "401": (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", ALL, "VLLM_API_KEY"),
    "500": (DEAD, ALL, "HTTP 500: check the .*EngineDeadError"),
    "503, later": (b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n", ALL, "503"),
    "no answer": (b"", ALL, "did not answer"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_an_error_and_nothing_is_sent_twice(name):
    fault, calls, message = FAULTS[name]
    with faulty(fault) as (client, asked):
        for call in calls:
            with pytest.raises(ServerError, match=message):
                call(client)
            with pytest.raises(ServerError, match=message):
                version(client)  # what is queued behind it
            assert len(asked) == 1, f"{call.__name__} was sent again, or what came after it"
            asked.clear()
            client._failure = None


def test_requests_stop_after_one_has_failed():
    with faulty(DEAD) as (client, asked):
        with pytest.raises(ServerError) as error:
            client.generate([[1, 2]] * 500)
        assert error.value.status == 500
        assert error.value.args == (str(error.value),)
        assert len(asked) <= 64


def test_a_server_that_hangs_when_a_run_starts():
    hangs = faulty(b"", limit=0.5, start={"/health": {}}, delay=2)
    said = "did not answer /v1/models .*vllm_request_timeout"
    with pytest.raises(ServerError, match=said), hangs:
        pass


def test_a_redirect_is_not_followed():
    with faulty(HTML) as (other, asked_elsewhere):
        redirect = f"HTTP/1.1 302 Found\r\nLocation: {other.base_url}/there\r\nContent-Length: 0\r\n\r\n".encode()
        with faulty(redirect) as (client, asked):
            with pytest.raises(ServerError, match="redirect"):
                version(client)
            assert len(asked) == 1
            assert not asked_elsewhere


def test_no_request_goes_to_a_proxy(monkeypatch):
    with faulty(HTML) as (proxy, seen_by_proxy):
        for name in ("http_proxy", "all_proxy", "HTTPS_PROXY"):
            monkeypatch.setenv(name, proxy.base_url)
        with faulty(HTML) as (client, asked):
            with pytest.raises(ServerError):
                version(client)
            assert len(asked) == 1
            assert not seen_by_proxy


@pytest.mark.parametrize("key", ["sec ret", "secret\r\nX-Other: 1", "schlüssel€secret"])
def test_a_key_that_no_header_can_carry_is_refused_by_its_name(key, monkeypatch):
    said = f"^{guard.API_KEY_VARIABLE} has a space, a line break or"
    with faulty(HTML) as (client, asked):
        monkeypatch.setenv(guard.API_KEY_VARIABLE, key)
        for call in (version, lambda client: ServedEngine(base_url=client.base_url)):
            with pytest.raises(ValueError, match=said) as error:
                call(client)
            assert "secret" not in str(error.value)
        assert not asked
    with pytest.raises(ValueError, match=said):
        guard.require_key()  # as `trl-qurl serve` does
