"""The server as an application: its paths, and the handling that all requests share."""

import asyncio
import errno
import json
import logging
import secrets
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from redis import Redis
from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from jobs.common.display import safe_name
from jobs.common.workers import WorkerSample
from jobs.parquet.files.filesystem import StoreError
from jobs.prompts.openai_responses import PATH as RESPONSES
from jobs.runs.watching.api_records import record_limited
from tokenmill.server.answers.bodies import ENDPOINTS, Call, call_of
from tokenmill.server.answers.event_streams import EventStream
from tokenmill.server.answers.jobs_asked import JobsAsked, TextPiece
from tokenmill.server.answers.live_models import LiveModels
from tokenmill.server.answers.response_bodies import response_call
from tokenmill.server.answers.response_stream import ResponseStream
from tokenmill.server.batches.batch_runs import Batches
from tokenmill.server.batches.calls import BatchCalls
from tokenmill.server.batches.file_store import FileStore
from tokenmill.server.batches.folders import Folder
from tokenmill.server.errors import ApiError
from tokenmill.server.idempotency import IdempotencyKeys, Made
from tokenmill.server.metrics import ENDPOINT, Metered, Metrics
from tokenmill.server.metrics import PATH as METRICS
from tokenmill.server.projects import Project, Projects
from tokenmill.server.queued_tokens import QueuedTokens
from tokenmill.server.request_bodies import Bodies

logger = logging.getLogger("tokenmill")
T = TypeVar("T")

#: A function that answers a request. Its arguments: the request, the request's project and the request's id.
Answer = Callable[[Request, Project, str], Awaitable[Response]]
#: A function that turns the parts of an answer into server-sent events.
Events = Callable[[AsyncIterator[TextPiece | bytes]], AsyncIterator[bytes]]
#: The fewest seconds between two records in Redis that a project was refused at the same limit.
LIMITED_S = 1.0
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True)
class ServerOptions:
    """The options of the server.

    is_local: whether only this machine reaches the server. prompts_queue, runs_queue: the queues of calls and of
    batches. timeout_s: how long an answer may take. folder: the folder of files and batches; None for a server without
    them.
    """

    is_local: bool
    prompts_queue: str = "prompts"
    runs_queue: str = "bulk"
    timeout_s: int = 600
    folder: Folder | None = None


class ApiServer:
    """Answers all requests."""

    def __init__(self, redis_url: str, connection: Redis, options: ServerOptions) -> None:
        self._connection = connection
        self._options = options
        queue = options.prompts_queue
        self._models = LiveModels(connection, queue)
        self._projects = Projects(connection, is_local=options.is_local)
        self._jobs = JobsAsked(redis_url, connection, queue, options.timeout_s)
        self._keys = IdempotencyKeys(connection)
        self._tokens = QueuedTokens(connection)
        self._metrics = Metrics(connection)
        self._bodies = Bodies()
        #: By project and limit: when a refusal was last recorded in Redis, in Unix seconds.
        self._limits_recorded: dict[tuple[str, str], float] = {}

    def app(self) -> ASGIApp:
        """Return the application with all its routes."""
        routes = [self._route("POST", path, self._ask) for path in ENDPOINTS]
        routes += [
            self._route("POST", RESPONSES, self._respond),
            self._route("GET", "/v1/models", self._list_models),
            self._route("GET", "/v1/models/{model:path}", self._show_model),
            *self._batch_routes(),
            Route("/livez", self._livez),
            Route("/readyz", self._readyz),
            Route(METRICS, self._show_metrics),
            Route("/{path:path}", self._handler("other", self._refuse_path), methods=_METHODS),
        ]
        return Metered(Starlette(routes=routes, lifespan=self._lifespan), self._metrics)

    def _batch_routes(self) -> list[Route]:
        """Return the routes of files and batches; [] for a server without a folder."""
        folder = self._options.folder
        if folder is None:
            return []
        files = FileStore(folder)
        batches = Batches(self._connection, files, self._options.runs_queue)
        self._tokens = QueuedTokens(self._connection, batches.is_open)
        calls = BatchCalls(files, batches, self._bodies, self._keys, self._tokens)
        routes: list[tuple[str, str, Callable[[Request, Project], Awaitable[Response]]]] = [
            ("POST", "/v1/files", calls.upload),
            ("GET", "/v1/files", calls.list_files),
            ("GET", "/v1/files/{id}", calls.show_file),
            ("GET", "/v1/files/{id}/content", calls.file_content),
            ("DELETE", "/v1/files/{id}", calls.delete_file),
            ("POST", "/v1/batches", calls.create_batch),
            ("GET", "/v1/batches", calls.list_batches),
            ("GET", "/v1/batches/{id}", calls.show_batch),
            ("POST", "/v1/batches/{id}/cancel", calls.cancel_batch),
        ]
        return [self._route(method, path, _without_id(call)) for method, path, call in routes]

    def _route(self, method: str, path: str, answer: Answer) -> Route:
        return Route(path, self._handler(path, answer), methods=[method])

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Stop reading results when the application ends."""
        yield
        await self._jobs.close()

    def _handler(self, endpoint: str, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        """Return a function that handles requests with `answer`.

        It gives each request an id, checks the key, turns exceptions into OpenAI's errors, and logs the request.
        endpoint: the name under which the metrics count the requests.
        """

        async def handle(request: Request) -> Response:
            request.scope[ENDPOINT] = endpoint
            request_id = f"req_{secrets.token_hex(16)}"
            began_at = time.monotonic()
            project_name = "-"
            limit_headers: dict[str, str] = {}
            try:
                project = await self._projects.of(request.headers)
                project_name = project.name
                limit_headers = project.headers
                response = await answer(request, project, request_id)
            except ApiError as error:
                response = error.response
                project_name = error.project or project_name
                if error.status == 429:
                    await self._record_limited(project_name, error.code or "other")
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception as error:  # noqa: BLE001  # only this request fails
                response = _logged_error(error, request_id).response
            response.headers.update({**limit_headers, "x-request-id": request_id})
            logger.info(
                "%s %s %s %d, project %s, %d ms",
                request_id,
                request.method,
                safe_name(request.scope["path"]),
                response.status_code,
                project_name,
                round((time.monotonic() - began_at) * 1000),
            )
            return response

        return handle

    async def _record_limited(self, project: str, limit: str) -> None:
        """Count a refusal in the metrics. Record it in Redis too, unless the last record is younger than LIMITED_S."""
        self._metrics.limited.labels(project, limit).inc()
        now = time.time()
        if now - self._limits_recorded.get((project, limit), 0.0) < LIMITED_S:
            return
        self._limits_recorded[project, limit] = now
        try:
            await run_in_threadpool(record_limited, self._connection, project, limit, now)
        except RedisError as error:
            logger.warning("the refusal of a request at a limit cannot be recorded: %s", error)

    async def _ask(self, request: Request, project: Project, request_id: str) -> Response:
        """Answer a call of one of ENDPOINTS with the value of a job."""
        with self._bodies.held() as body:
            await body.read(request)
            call = await body.apply(call_of, request.scope["path"])
            await self._models.check(call.model)
            made = await self._keys.made(request, project.name, body.value, request_id)
            call = replace(call, on_enqueued=body.let_go, producer=project.name)
            if call.is_streamed:
                stream = EventStream(made.id, call, call.model or "")
                return await self._stream(request, project, call, made, stream.events)
            answer = await self._answer(request, project, call, made)
            return Response(answer, media_type="application/json")

    async def _respond(self, request: Request, project: Project, request_id: str) -> Response:
        """Answer a call of `/v1/responses` with the value of a chat's job."""
        with self._bodies.held() as body:
            await body.read(request)
            call = await body.apply(response_call)
            await self._models.check(call.model)
            made = await self._keys.made(request, project.name, body.value, request_id)
            call = replace(call, on_enqueued=body.let_go, producer=project.name)
            settings = {name: value for name, value in body.value.items() if name != "input"}
            stream = ResponseStream(made.id.removeprefix("req_"), settings)
            if call.is_streamed:
                return await self._stream(request, project, call, made, stream.events)
            answer = await self._answer(request, project, call, made)
            return JSONResponse(stream.whole(json.loads(answer)))

    async def _answer(self, request: Request, project: Project, call: Call, made: Made) -> bytes:
        """Enqueue a job and return its value, as JSON.

        If the client closes its connection, the job is cancelled, unless a request with the same key may follow.
        """
        try:
            async with self._tokens.held(project, made, call, self._options.timeout_s):
                return await _while_connected(request, self._jobs.ask(made, call))
        except ApiError as error:
            await self._keys.forget(made, error)
            raise

    async def _parts(
        self, project: Project, call: Call, made: Made
    ) -> AsyncGenerator[TextPiece | bytes, None]:
        """Enqueue a job and yield its answer: first pieces of the text, if the text can grow, then the job's value."""
        ask = self._jobs.follow if call.has_growing_text else self._jobs.whole
        try:
            async with (
                self._tokens.held(project, made, call, self._options.timeout_s),
                aclosing(ask(made, call)) as answer,
            ):
                async for part in answer:
                    yield part
        except ApiError as error:
            await self._keys.forget(made, error)
            raise

    async def _stream(
        self, request: Request, project: Project, call: Call, made: Made, events: Events
    ) -> Response:
        """Answer with a stream of events. An error that comes before the first part is raised, as in `_answer`."""
        answer = self._parts(project, call, made)
        try:
            first_part = await _while_connected(request, anext(answer))
        except BaseException:
            await answer.aclose()
            raise

        async def parts() -> AsyncIterator[TextPiece | bytes]:
            async with aclosing(answer):
                yield first_part
                async for part in answer:
                    yield part

        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(events(parts()), media_type="text/event-stream", headers=headers)

    async def _list_models(self, request: Request, project: Project, request_id: str) -> Response:
        """List the served models by name, and then their adapters by name."""
        samples_by_model = {sample.model: sample for sample in await self._models.serving()}
        samples_by_adapter: dict[str, WorkerSample] = {}
        for sample in samples_by_model.values():
            for adapter in sample.adapters:
                samples_by_adapter.setdefault(adapter, sample)

        models = [_model(sample) for _, sample in sorted(samples_by_model.items())]
        for adapter in sorted(samples_by_adapter):
            models.append(_model_named(samples_by_adapter[adapter], adapter))
        return JSONResponse({"object": "list", "data": models})

    async def _show_model(self, request: Request, project: Project, request_id: str) -> Response:
        """Respond with the model or adapter that has a name."""
        name = request.path_params["model"]
        for sample in await self._models.serving():
            if name in sample.models:
                return JSONResponse(_model_named(sample, name))
        raise ApiError(404, f"the model {name!r} is not served", code="model_not_found")

    async def _refuse_path(self, request: Request, project: Project, request_id: str) -> Response:
        """Raise the ApiError of a path or method that is not served."""
        path = request.scope["path"]
        if path.startswith(("/v1/files", "/v1/batches")) and self._options.folder is None:
            raise ApiError(404, f"{path} needs a server that was started with --folder")
        if path in (*ENDPOINTS, RESPONSES):
            raise ApiError(
                405,
                f"{path} takes POST, and this is {request.method}",
                code="method_not_allowed",
                headers={"allow": "POST"},
            )
        served = ", ".join([*ENDPOINTS, RESPONSES, "/v1/models", "/v1/files", "/v1/batches"])
        raise ApiError(
            404,
            f"{request.method} {safe_name(path)} is not served; the server has {served}",
            code="unknown_url",
        )

    async def _livez(self, _: Request) -> Response:
        """Respond as long as the process lives."""
        return PlainTextResponse("ok\n")

    async def _readyz(self, _: Request) -> Response:
        """Respond with 200 if Redis answers, so that a job can be enqueued, and else with 503."""
        try:
            await run_in_threadpool(self._connection.ping)
        except RedisError:
            return PlainTextResponse("Redis does not answer\n", 503)
        return PlainTextResponse("ok\n")

    async def _show_metrics(self, request: Request) -> Response:
        """Respond with the metrics, for Prometheus."""
        try:
            await self._projects.check_metrics(request.headers)
            accept = request.headers.get("accept", "")
            body, content_type = await run_in_threadpool(self._metrics.exposition, accept)
        except ApiError as error:
            return error.response
        except RedisError:
            return PlainTextResponse("Redis does not answer\n", 503)
        return Response(body, media_type=content_type)


def _without_id(call: Callable[[Request, Project], Awaitable[Response]]) -> Answer:
    """Return an Answer from a function that does not need the request's id."""

    async def answer(request: Request, project: Project, request_id: str) -> Response:
        return await call(request, project)

    return answer


def _logged_error(error: Exception, request_id: str) -> ApiError:
    """Log an exception, and return the error that the client gets."""
    if isinstance(error, RedisError):
        logger.warning("%s: Redis does not answer: %s", request_id, error)
        return ApiError(503, "the queue does not answer: try again", headers={"retry-after": "5"})
    if isinstance(error, StoreError):
        logger.warning("%s: %s", request_id, error)
        return ApiError(
            503, "the server's store does not answer: try again", headers={"retry-after": "5"}
        )
    if isinstance(error, OSError):
        logger.warning("%s: the folder cannot be used: %s", request_id, error)
        return _disk_error(error)
    # The error's text is left out, because it may quote a prompt.
    place = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s: an unforeseen %s:\n%s", request_id, type(error).__name__, place)
    return ApiError(500, f"an unforeseen error; the server's log names it by {request_id}")


def _disk_error(error: OSError) -> ApiError:
    """Return the error that the server's folder cannot be used."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(507, "the server's folder has no room")
    return ApiError(500, "the server's folder cannot be read or written")


def _model(sample: WorkerSample) -> dict[str, Any]:
    """Return the OpenAI object of a worker's model, with `max_model_len` as in vLLM."""
    return {
        "id": sample.model,
        "object": "model",
        "created": int(sample.started_at),
        "owned_by": "tokenmill",
        "max_model_len": sample.max_model_len,
    }


def _model_named(sample: WorkerSample, name: str) -> dict[str, Any]:
    """Return the OpenAI object of a worker's model or adapter. name: any of the names in `sample.models`.

    The `parent` of an adapter is its model.
    """
    model = {**_model(sample), "id": name}
    if name in sample.adapters:
        model["parent"] = sample.model
    return model


async def _while_connected(request: Request, answer: Awaitable[T]) -> T:
    """Await an answer. If the client closes its connection first, cancel the answer and raise ClientDisconnect."""
    answering = asyncio.ensure_future(answer)
    disconnecting = asyncio.create_task(_until_disconnected(request))
    try:
        await asyncio.wait({answering, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        disconnecting.cancel()
        if answering.cancel():
            # A cancelled answer cancels its job before it ends.
            await asyncio.wait({answering})


async def _until_disconnected(request: Request) -> None:
    """Return once the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
