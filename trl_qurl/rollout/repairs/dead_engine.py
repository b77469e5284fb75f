"""Requests to a server whose engine has died wait forever (report 22).

vLLM ends such a request for completions, but one to the workers waits for an answer that cannot
come. The server waits for its last request before it exits: without this repair it closes its port
and stays, and nothing restarts it.
"""

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

REPORTS = (22,)
SEEN_IN = "vllm 0.32"
UNNECESSARY_FROM = None

WATCH_SECONDS = 0.5  # between two looks at the engine while a request waits for it


class EngineWatch:
    """ASGI middleware that ends requests to an engine that has died, or is being shut down."""

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Forward the request, and cancel it once there is no engine to answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        from starlette.responses import JSONResponse

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
            error = {"error": "The engine has died or is shutting down."}
            await JSONResponse(error, status_code=500)(scope, receive, send)


ENGINE_WATCH = f"{__name__}.{EngineWatch.__name__}"  # for vLLM's `--middleware`
