"""No client keeps a connection open for nothing."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from redis import Redis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.rq_workers import wait_until
from tokenmill.server.answers import jobs_asked, live_models
from tokenmill.server.answers.bodies import Call
from tokenmill.server.answers.jobs_asked import JobsAsked
from tokenmill.server.answers.live_models import LiveModels
from tokenmill.server.connections import BoundedConnection
from tokenmill.server.idempotency import Made
from tokenmill.serving import listen

ENDED: list[str] = []


class ImpatientConnection(BoundedConnection):
    """One whose client has little time."""

    head_s = 0.2
    read_s = 0.2


async def endless(request: Request) -> Response:
    async def pieces() -> Iterator[bytes]:  # type: ignore[misc]
        try:
            while True:
                await asyncio.sleep(0)
                yield b"x" * 65536
        finally:
            ENDED.append("endless")

    return StreamingResponse(pieces())


async def slow(request: Request) -> Response:
    await asyncio.sleep(0.5)
    return PlainTextResponse("slow")


async def refused(request: Request) -> Response:
    return PlainTextResponse("no", 401)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    routes = [
        Route("/endless", endless),
        Route("/slow", slow),
        Route("/refused", refused, methods=["POST"]),
    ]
    config = uvicorn.Config(
        Starlette(routes=routes), http=ImpatientConnection, log_level="warning", lifespan="off"
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_until(lambda: server.started)
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(timeout=30)


def answer(port: int, sent: bytes) -> bytes:
    """Return all that comes until the server closes the connection."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(sent)
        try:
            while data := connection.recv(65536):
                received += data
        except ConnectionResetError:
            pass
    return received


@pytest.mark.parametrize("sent", [b"", b"GET /slow HTTP/1.1\r\n", b"GET /slow HTTP/1.1\r\nHost: x"])
def test_a_connection_without_a_request_is_closed(port: int, sent: bytes) -> None:
    assert answer(port, sent) == b""


def test_a_slow_answer_is_not_cut(port: int) -> None:
    assert b"slow" in answer(port, b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")


def test_the_rest_of_an_answered_request_is_not_read_for_ever(port: int) -> None:
    head = b"POST /refused HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(head)

        def is_closed() -> bool:
            try:
                connection.sendall(b"4\r\nabcd\r\n")
            except (BrokenPipeError, ConnectionResetError):
                return True
            return False

        wait_until(is_closed)


def test_a_client_that_does_not_read_is_left(port: int) -> None:
    ENDED.clear()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: ENDED)


def test_a_job_that_is_being_enqueued_is_not_taken_for_lost(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_asked, "LOOK_S", 0.0)
    call = Call("jobs.complete", {"prompt": "x"}, None)

    async def ask() -> None:
        asked = JobsAsked(redis_url, redis, "prompts", timeout_s=1)
        enqueue = asked._enqueue
        look = asked._look_for_lost
        looked = threading.Semaphore(0)

        async def look_and_tell() -> None:
            await look()
            looked.release()

        def enqueue_late(*args: Any, **options: Any) -> None:
            while looked.acquire(blocking=False):
                pass
            for _ in range(2):  # the first may have begun before
                assert looked.acquire(timeout=20)
            enqueue(*args, **options)

        monkeypatch.setattr(asked, "_look_for_lost", look_and_tell)
        first = asyncio.create_task(asked.ask(Made("first"), call))
        await asyncio.to_thread(wait_until, lambda: redis.exists("rq:job:first"))
        monkeypatch.setattr(asked, "_enqueue", enqueue_late)
        try:
            answers = await asyncio.gather(
                first, asked.ask(Made("second"), call), return_exceptions=True
            )
        finally:
            await asked.close()
        assert [each.status for each in answers] == [504, 504]  # type: ignore[union-attr]

    asyncio.run(ask())


def test_requests_that_come_together_await_the_first_look_at_the_workers(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def look(_: Redis, queue: str) -> list[object]:
        looks.append(queue)
        return [object()]

    monkeypatch.setattr(live_models, "living_workers", look)

    async def ask_together() -> list[int]:
        models = LiveModels(redis, "prompts", clock=lambda: 1.0)
        samples = await asyncio.gather(*(models.samples() for _ in range(20)))
        return [len(each) for each in samples]

    assert asyncio.run(ask_together()) == [1] * 20
    assert looks == ["prompts"]


def test_an_answer_is_not_held_back_until_the_client_acknowledges_its_head() -> None:
    with (
        listen("127.0.0.1", 0, backlog=1) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
