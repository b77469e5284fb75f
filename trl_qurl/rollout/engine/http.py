"""HTTP to the server: requests that are bounded in time, and answers that are vLLM's."""

import json
import re
import threading
from concurrent.futures import Future, wait
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
        """Return the answer with all of its body.

        Raises `requests.Timeout` if that takes longer than the limit.
        """
        answer: Future[requests.Response] = Future()

        def exchange() -> None:
            try:
                response = super(BoundedRequests, self).send(*args, **kwargs)
                _ = response.content  # reads it
                answer.set_result(response)
            except BaseException as error:
                answer.set_exception(error)

        # The timeout of requests is for one read, and a byte now and then would renew it.
        kwargs |= {"timeout": self._limit, "stream": True, "proxies": {}}
        threading.Thread(target=exchange, daemon=True).start()
        if not wait([answer], self._limit).done:
            raise requests.Timeout(f"no complete answer within {self._limit} seconds")
        return answer.result()


def open_session(limit: float, connections: int = 3) -> requests.Session:
    """Return a session of `BoundedRequests` that sends the key, and follows no redirect."""
    session = requests.Session()
    session.auth = add_key
    session.max_redirects = 0
    for prefix in ("http://", "https://"):
        session.mount(prefix, BoundedRequests(limit, connections))
    return session


CONTENTS = {
    "/v1/models": "data",
    "/v1/completions": "choices",
    "/v1/chat/completions": "choices",
    "/collective_rpc": "results",
    "/server_info": "vllm_config",
    "/get_world_size": "world_size",
    "/reset_prefix_cache": "success",
}
"""By path, what an answer holds; of other paths, it is any JSON object."""

TEXTS = {"/reset_encoder_cache": "", "/v1/load_lora_adapter": "Success: .*"}
"""By path, the pattern of an answer that is no JSON."""


def read_answer(path: str, body: bytes) -> dict[str, Any]:
    """Return what a path answered with status 200, empty for a text.

    Raises `ValueError` if that is not vLLM's answer: a proxy's page also has that status, and so
    has an answer that lost its end without a `Content-Length`.
    """
    if path in TEXTS:
        if re.fullmatch(TEXTS[path], body.decode()) is None:
            raise ValueError("another text")
        return {}
    answer = json.loads(body)
    if not isinstance(answer, dict):
        raise ValueError("no JSON object")
    if path in CONTENTS and CONTENTS[path] not in answer:
        raise ValueError(f"no {CONTENTS[path]}")
    return answer
