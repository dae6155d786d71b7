"""The server as an application: paths, and what every request goes through."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jobs.common.workers import WorkerSample
from tokenmill.server.bodies import ENDPOINTS, call_of
from tokenmill.server.errors import ApiError
from tokenmill.server.jobs_asked import JobsAsked
from tokenmill.server.live_models import LiveModels
from tokenmill.server.projects import Projects

#: The most bytes of a body. The pictures of a prompt have at most 20 MiB, a third more in base64.
MAX_BODY_BYTES = 32 << 20
#: Seconds within which a body must have come.
BODY_S = 60.0

logger = logging.getLogger("tokenmill")
Answer = Callable[[Request, str], Awaitable[Response]]


class ApiServer:
    """What the answers share: Redis, the jobs that are asked, and who may ask."""

    def __init__(
        self, redis_url: str, connection: Redis, queue: str, timeout_s: int, *, is_local: bool
    ) -> None:
        self._connection = connection
        self._models = LiveModels(connection, queue)
        self._projects = Projects(connection, is_local=is_local)
        self._asked = JobsAsked(redis_url, connection, queue, timeout_s)

    def app(self) -> Starlette:
        """Return the application."""
        answered = [Route(path, self._answered(self._ask), methods=["POST"]) for path in ENDPOINTS]
        return Starlette(
            routes=[
                *answered,
                Route("/v1/models", self._answered(self._list_models)),
                Route("/v1/models/{model:path}", self._answered(self._show_model)),
                Route("/livez", self._livez),
                Route("/readyz", self._readyz),
                Route(
                    "/{path:path}",
                    self._answered(self._missing),
                    methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
                ),
            ],
            lifespan=self._closing,
        )

    @asynccontextmanager
    async def _closing(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await self._asked.close()

    def _answered(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        """Give each request an id, check its key, and turn what is raised into OpenAI's errors."""

        async def respond(request: Request) -> Response:
            request_id = f"req_{secrets.token_hex(16)}"
            started = time.monotonic()
            project = ""
            try:
                key = await self._projects.of(request.headers)
                project = key.project
                response = await answer(request, request_id)
            except ApiError as error:
                response = error.response
            except RedisError as error:
                logger.warning("%s: Redis does not answer: %s", request_id, error)
                response = ApiError(
                    503, "the queue does not answer: try again", headers={"retry-after": "5"}
                ).response
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception:
                logger.exception("%s: an unforeseen error", request_id)
                response = ApiError(
                    500, f"an unforeseen error; the server's log names it by {request_id}"
                ).response
            response.headers["x-request-id"] = request_id
            milliseconds = round((time.monotonic() - started) * 1000)
            logger.info(
                "%s %s %s %d, project %s, %d ms",
                request_id,
                request.method,
                request.url.path,
                response.status_code,
                project or "-",
                milliseconds,
            )
            return response

        return respond

    async def _ask(self, request: Request, request_id: str) -> Response:
        """Answer a call by a job, and cancel that if the client goes away."""
        body = await _json_body(request)
        call = await run_in_threadpool(call_of, request.url.path, body)
        await self._models.check(call.model)
        asking = asyncio.create_task(
            self._asked.ask(request_id, call.function, call.arguments, call.model)
        )
        leaving = asyncio.create_task(_left(request))
        try:
            await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise ClientDisconnect
            return Response(asking.result(), media_type="application/json")
        finally:
            for task in (asking, leaving):
                task.cancel()

    async def _list_models(self, request: Request, request_id: str) -> Response:
        serving = {sample.model: sample for sample in await self._models.serving()}
        models = [_model(sample) for _, sample in sorted(serving.items())]
        return JSONResponse({"object": "list", "data": models})

    async def _show_model(self, request: Request, request_id: str) -> Response:
        name = request.path_params["model"]
        for sample in await self._models.serving():
            if name in sample.models:
                return JSONResponse(_model(sample) | {"id": name})
        raise ApiError(404, f"the model {name!r} is not served", code="model_not_found")

    async def _missing(self, request: Request, request_id: str) -> Response:
        paths = ", ".join([*ENDPOINTS, "/v1/models"])
        raise ApiError(
            404,
            f"{request.method} {request.url.path} is not served, but {paths}",
            code="unknown_url",
        )

    async def _livez(self, _: Request) -> Response:
        """Say that the process answers."""
        return PlainTextResponse("ok\n")

    async def _readyz(self, _: Request) -> Response:
        """Say whether Redis answers, so that a request could be enqueued."""
        try:
            await run_in_threadpool(self._connection.ping)
        except RedisError:
            return PlainTextResponse("Redis does not answer\n", 503)
        return PlainTextResponse("ok\n")


def _model(sample: WorkerSample) -> dict[str, Any]:
    """Return OpenAI's object of a model, with vLLM's `max_model_len`."""
    return {
        "id": sample.model,
        "object": "model",
        "created": int(sample.started_at),
        "owned_by": "tokenmill",
        "max_model_len": sample.max_model_len,
    }


async def _json_body(request: Request) -> Any:
    """Return a request's body. Raises ApiError for one that is too large, too slow or no JSON."""
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > MAX_BODY_BYTES:
                    raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_S:.0f} s") from None
    try:
        return await run_in_threadpool(json.loads, b"".join(chunks))
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON") from None


async def _left(request: Request) -> None:
    """Return once the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
