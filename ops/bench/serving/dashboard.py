"""How long the dashboard's pages take, and what they cost Redis: python -m ops.bench.serving.dashboard.

It fills a Redis with the scene of ops/documents/scene.py, and asks a dashboard for each page, as browsers do: first for
the whole page, then for its inside. Then Redis is full, and it is asked again. The commands are those of one page that
looks at Redis anew. A page that is asked for within a second of another one shares its look.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import click
from redis import Redis, UnixDomainSocketConnection
from starlette.testclient import TestClient

from ops.documents.screens import paths, running_scene
from tests.tokenmill.dashboard.dashboard_process import ask
from tokenmill.dashboard.app import Dashboard, Options
from tokenmill.dashboard.seen import watcher


class CountingConnection(UnixDomainSocketConnection):
    """Counts the commands that it sends."""

    num_commands = 0

    def pack_command(self, *args: Any) -> Any:
        """Count one command."""
        CountingConnection.num_commands += 1
        return super().pack_command(*args)  # type: ignore[no-untyped-call]

    def pack_commands(self, commands: Any) -> Any:
        """Count the commands of a pipeline."""
        told = list(commands)
        CountingConnection.num_commands += len(told)
        return super().pack_commands(told)  # type: ignore[no-untyped-call]


@click.command(help=__doc__)
@click.option("--waiting", default=100_000, show_default=True, help="How many jobs wait.")
@click.option("--requests", default=100, show_default=True, help="How many are sent for each page.")
def main(waiting: int, requests: int) -> None:
    """Print a table."""
    with running_scene(waiting) as (address, scene):
        pages = paths(scene)
        charts = {"overview": "", "queue": "bulk", "worker": "gpu-1", "run": scene.runs["running"]}
        for of, name in charts.items():
            for range_ in ("1h", "7d"):
                asked = f"/series.json?of={of}&name={quote(name)}&range={range_}"
                pages[f"{of}: charts, {range_}"] = asked
        commands = count_commands(scene.connection, pages)
        times = {name: timed(address, path, requests) for name, path in pages.items()}
        with full(scene.connection):
            times_full = {name: timed(address, path, requests) for name, path in pages.items()}
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {waiting:,} jobs wait")
    print("| page | p50, ms | p95, ms | p95 with a full Redis, ms | commands |")
    print("|---|---|---|---|---|")
    for name in pages:
        middle, late = times[name]
        _, late_full = times_full[name]
        print(f"| {name} | {middle:.0f} | {late:.0f} | {late_full:.0f} | {commands[name]} |")


def timed(address: str, path: str, count: int) -> tuple[float, float]:
    """Return the 50th and the 95th percentile of the time of a page in milliseconds."""
    seconds = []
    for number in range(count):
        headers = {"HX_Request": "true"} if number % 2 else {}
        began = time.perf_counter()
        answer = ask(address, path, **headers)
        seconds.append(time.perf_counter() - began)
        if answer.status not in (200, 404):
            raise SystemExit(f"{path}: {answer.status}")
    seconds.sort()
    return 1000 * seconds[len(seconds) // 2], 1000 * seconds[int(0.95 * len(seconds))]


def count_commands(connection: Redis, pages: dict[str, str]) -> dict[str, int]:
    """Return how many commands each page sends to Redis."""
    watcher.LOOK_SHARE = float("inf")
    path = connection.connection_pool.connection_kwargs["path"]
    counted = Redis(unix_socket_path=path)
    counted.connection_pool.connection_class = CountingConnection
    commands = {}
    for name, page in pages.items():
        app = Dashboard(counted, Options()).app()
        with TestClient(app, base_url="http://127.0.0.1:9181") as client:
            if not page.startswith("/series"):
                client.get(page)  # the first look also reads what workers have told before
            time.sleep(watcher.LOOK_S)
            began = CountingConnection.num_commands
            client.get(page)
            commands[name] = CountingConnection.num_commands - began
    return commands


@contextmanager
def full(connection: Redis) -> Iterator[None]:
    """Let Redis refuse what needs memory."""
    connection.config_set("maxmemory", "1mb")
    try:
        yield
    finally:
        connection.config_set("maxmemory", "0")


if __name__ == "__main__":
    main()
