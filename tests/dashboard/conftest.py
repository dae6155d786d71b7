from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from redis import Redis
from rq.serializers import DefaultSerializer
from starlette.testclient import TestClient

from tokenmill_dashboard.app import Dashboard, Options

Open = Callable[..., TestClient]

TOKEN = "a token of many characters"


def no_rq_pages(environ: object, start_response: Callable[..., object]) -> list[bytes]:
    """Stands for rq-dashboard."""
    start_response("200 OK", [("Content-Type", "text/html")])
    return [b"rq-dashboard"]


@pytest.fixture(autouse=True)
def _pickles_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dashboard's process has RQ read JSON alone; the tests' processes go on to other tests."""
    monkeypatch.setattr(DefaultSerializer, "loads", DefaultSerializer.loads)
    monkeypatch.setattr(DefaultSerializer, "dumps", DefaultSerializer.dumps)


@pytest.fixture
def open_page(redis: Redis) -> Iterator[Open]:
    """A browser's side of a dashboard with these options. Nothing looks at Redis but for its requests."""
    opened = []

    def open_(connection: Redis | None = None, **options: object) -> TestClient:
        app = Dashboard(connection or redis, Options(**options)).app(no_rq_pages)  # type: ignore[arg-type]
        opened.append(TestClient(app, base_url="http://127.0.0.1:9181", follow_redirects=False))
        return opened[-1]

    yield open_
    for client in opened:
        client.close()


@pytest.fixture
def page(open_page: Open) -> TestClient:
    return open_page()
