"""HTTP servers in threads of a test: stubs of vLLM's server, and proxies of one."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JSONHandler(BaseHTTPRequestHandler):
    """Passes each request to `respond`, and answers in JSON."""

    protocol_version = "HTTP/1.1"

    def respond(self, path: str, body: bytes) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.respond(self.path.split("?")[0], body)

    do_POST = do_GET

    def send(self, status: int, answer: Any) -> None:
        """Answer with bytes as they are, nothing for an empty
        string, and JSON for anything else.
        """
        text = (
            answer
            if isinstance(answer, bytes)
            else b""
            if answer == ""
            else json.dumps(answer).encode()
        )
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        if status == 500:  # as uvicorn, which closes the connection after it has logged the error
            self.close_connection = True
            time.sleep(0.1)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server with this handler, which ends with the block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
