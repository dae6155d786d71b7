"""Stores that refuse, and listings without an end."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("obstore", reason="the extra `cloud` is not installed")
pytest.importorskip("moto", reason="moto, a server of the S3 protocol for tests, is not installed")

from jobs.parquet.files import object_requests
from jobs.parquet.files.filesystem import StoreRefused
from jobs.parquet.files.storage import Storage
from tests.jobs.s3_server import CREDENTIALS, use_environment

pytestmark = pytest.mark.processes

ROOT = "s3://bucket/data"
SECRET = b"what only that host may tell"
Answer = Callable[[BaseHTTPRequestHandler], None]

PAGE = """<ListBucketResult><IsTruncated>true</IsTruncated>
<NextContinuationToken>again</NextContinuationToken>{objects}</ListBucketResult>"""
OBJECT = """<Contents><Key>data/{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>
<ETag>"e"</ETag><Size>1</Size></Contents>"""


@contextmanager
def serving(host: str, answer: Answer) -> Iterator[str]:
    """Lend the URL of a server whose requests are answered so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        do_HEAD = do_PUT = do_POST = do_GET

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *arguments: object) -> None:
            """Who asked has gone."""

    with Server((host, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://{host}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Storage]]:
    """A storage on a store that answers so, with a session's token."""
    with ExitStack() as servers:

        def make(answer: Answer, timeout_s: float = 4.0) -> Storage:
            url = servers.enter_context(serving("127.0.0.1", answer))
            environment = {**CREDENTIALS, "AWS_SESSION_TOKEN": "token", "AWS_ENDPOINT_URL": url}
            use_environment(monkeypatch, environment)
            object_requests.opened_store.cache_clear()
            return Storage([ROOT], timeout_s=timeout_s)

        yield make
    object_requests.opened_store.cache_clear()


def reply(handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


@pytest.mark.parametrize("asked", ["names", "stat"])
def test_of_a_refusal_its_code_is_told_and_no_more(
    asked: str, store: Callable[..., Storage]
) -> None:
    body = b"<Error><Code>AccessDenied</Code><Message>%s</Message></Error>" % SECRET
    for said, told in ((body, "AccessDenied"), (SECRET, "status code: 403")):
        found = store(lambda handler, said=said: reply(handler, 403, said))  # type: ignore[misc]
        with pytest.raises(StoreRefused, match=told) as caught:
            getattr(found, asked)(f"{ROOT}/x")
        assert SECRET.decode() not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "objects"),
    [
        ("names", 0),
        ("written_at", 1000),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [("names", 1000), ("written_at", 0)]
        ),
    ],
)
def test_a_listing_that_repeats_itself_is_refused(
    objects: int, asked: str, store: Callable[..., Storage]
) -> None:
    page = PAGE.format(
        objects="".join(OBJECT.format(name=number) for number in range(objects))
    ).encode()
    found = store(lambda handler: reply(handler, 200, page), timeout_s=2.0)
    with pytest.raises(StoreRefused, match="listing went on for more than 2 s"):
        getattr(found, asked)(ROOT)


def test_a_listing_whose_body_has_no_end_takes_a_bounded_memory(
    store: Callable[..., Storage],
) -> None:
    """The process that lists it ends, and the next listing has another one."""
    sent = 0

    def pour(handler: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        handler.send_response(200)
        handler.end_headers()
        part = b" " * (1 << 20)
        while True:
            handler.wfile.write(part)
            sent += len(part)

    with pytest.raises(StoreRefused, match=r"listing took more than|listing ended its process"):
        store(pour, timeout_s=200.0).names(ROOT)
    assert sent < 1 << 30
    empty = store(lambda handler: reply(handler, 200, b"<ListBucketResult></ListBucketResult>"))
    assert empty.names(ROOT) == []
