from collections.abc import Callable, Iterator

import pytest
from redis import Redis
from starlette.testclient import TestClient

from tokenmill.dashboard.app import Dashboard, Options
from tokenmill.dashboard.guard import SHARED_LOGIN

Open = Callable[..., TestClient]

TOKEN = "a token of many characters"


@pytest.fixture
def open_page(redis: Redis) -> Iterator[Open]:
    """A browser's side of a dashboard with these options. Nothing looks at Redis but for its requests."""
    opened = []
    dashboards = []

    def open_(
        connection: Redis | None = None, token: str | None = None, **options: object
    ) -> TestClient:
        if token is not None:
            options["tokens"] = {SHARED_LOGIN: token}
        dashboards.append(Dashboard(connection or redis, Options(**options)))  # type: ignore[arg-type]
        app = dashboards[-1].app()
        opened.append(TestClient(app, base_url="http://127.0.0.1:9181", follow_redirects=False))
        return opened[-1]

    yield open_
    for client in opened:
        client.close()
    for dashboard in dashboards:
        dashboard.close()


@pytest.fixture
def page(open_page: Open) -> TestClient:
    return open_page()
