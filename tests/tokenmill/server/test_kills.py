"""Servers, workers and Redis are killed in turn while clients run batches and streams: nothing is lost or doubled."""

import io
import json
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from jobs.api_keys import add_key
from tests.faults.servers import DurableRedis
from tests.forking import ForkedWorkers
from tests.rq_workers import wait_until
from tests.tokenmill.server.server_process import client, start_server

NUM_PROJECTS = 4
BATCHES = 5
LINES = 1200
NUM_STRIKES = 60
NUM_WORKERS = 2


class Site:
    """A Redis, two workers and two servers, each of which may be killed and started again."""

    def __init__(self, folder: Path, redis: DurableRedis) -> None:
        self.folder = folder
        self.redis = redis
        self.workers = ForkedWorkers(redis.url, folder)
        self.servers: list[subprocess.Popen[bytes]] = []
        self.ports: list[int] = []
        for _ in range(2):
            self.start_server()
        self.keep_workers()

    def keep_workers(self) -> None:
        """Start workers, as a supervisor does, for those that left because Redis was away when they started."""
        alive = [process for process in self.workers.processes if process.poll() is None]
        for _ in range(NUM_WORKERS - len(alive)):
            self.start_worker()

    def start_worker(self) -> None:
        self.workers.start(
            queues=("prompts", "bulk"),
            TOKENMILL_DATA_ROOTS=str(self.folder),
            TOKENMILL_LEASE_S="2",
            TOKENMILL_JOURNAL_S="0.5",
            TOKENMILL_MAX_WORKER_DEATHS="1000",
        )

    def start_server(self, port: int = 0) -> None:
        log = self.folder / f"server-{time.monotonic_ns()}.log"
        process, address = start_server(
            self.redis.url, log, "--folder", str(self.folder / "api"), port=port
        )
        self.servers.append(process)
        self.ports.append(int(address.rpartition(":")[2]))

    def strike(self, rng: random.Random, kind: str) -> None:
        if kind == "redis":
            self.redis.kill()
            self.redis.restart()
        elif kind == "worker":
            alive = [each for each in self.workers.processes if each.poll() is None]
            rng.choice(alive).kill()
        else:
            number = rng.randrange(len(self.servers))
            process = self.servers.pop(number)
            port = self.ports.pop(number)
            process.kill()
            process.wait()
            self.start_server(port)

    def close(self) -> None:
        self.workers.close()
        for process in self.servers:
            process.kill()
            process.wait()


@contextmanager
def running_site(folder: Path) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="r") as short:
        redis = DurableRedis(Path(short))
        try:
            site = Site(folder, redis)
            try:
                yield site
            finally:
                site.close()
        finally:
            redis.close()


def until_answered(call: Any) -> Any:
    """Call until there is an answer, as clients do."""
    while True:
        try:
            return call()
        except (openai.APIConnectionError, openai.InternalServerError):
            time.sleep(0.2)


def run_batches(site: Site, port: int, key: str, name: str) -> list[tuple[list[str], Any, Any]]:
    """Run a project's batches; return the ids of each one's lines, and those of its two files."""
    api = client(f"http://127.0.0.1:{port}", key)
    batches = []
    for number in range(BATCHES):
        ids = [f"{name}-{number}-{line}" for line in range(LINES)]
        lines = []
        for place, custom_id in enumerate(ids):
            body = {"prompt": "refuse" if place % 50 == 7 else custom_id, "max_tokens": 20}
            line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions"}
            lines.append(json.dumps({**line, "body": body}))
        data = "\n".join(lines).encode()

        def upload(data: bytes = data) -> Any:
            return api.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")

        file = until_answered(upload)
        batch = until_answered(
            lambda file=file: api.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
        )
        batches.append((ids, batch))

    found = []
    for ids, batch in batches:
        while batch.status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing"), batch
            time.sleep(0.2)
            batch = until_answered(lambda batch=batch: api.batches.retrieve(batch.id))
        names = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            text = until_answered(lambda file_id=file_id: api.files.content(file_id).text)
            names.append([json.loads(line)["custom_id"] for line in text.splitlines()])
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (
            LINES,
            len(names[0]),
            len(names[1]),
        )
        found.append((ids, *names))
    return found


@pytest.mark.long  # it kills for minutes
@pytest.mark.timeout(900)
def test_each_line_is_answered_once_through_kills(tmp_path: Path) -> None:
    rng = random.Random(7)
    with running_site(tmp_path) as site:
        keys = [add_key(site.workers.redis, f"p{number}", "") for number in range(NUM_PROJECTS)]
        results: list[list[tuple[list[str], list[str], list[str]]]] = []
        errors: list[BaseException] = []

        def run(number: int) -> None:
            try:
                port = site.ports[number % 2]
                results.append(run_batches(site, port, keys[number], f"p{number}"))
            except BaseException as error:  # noqa: BLE001  # shown below
                errors.append(error)

        clients = [
            threading.Thread(target=run, args=(number,), daemon=True)
            for number in range(NUM_PROJECTS)
        ]
        for each in clients:
            each.start()
        num_strikes = 0
        while any(each.is_alive() for each in clients) and not errors:
            site.keep_workers()
            if num_strikes < NUM_STRIKES:
                site.strike(rng, ("server", "worker", "redis")[num_strikes % 3])
                num_strikes += 1
            time.sleep(rng.uniform(0.05, 0.4))
        for each in clients:
            each.join()
        assert not errors, errors
        assert num_strikes > 3
        assert len(results) == NUM_PROJECTS
        for project in results:
            for ids, answered, failed in project:
                expected = [custom_id for place, custom_id in enumerate(ids) if place % 50 == 7]
                assert failed == expected
                assert answered == [custom_id for custom_id in ids if custom_id not in expected]
        wait_until(lambda: not site.workers.redis.exists("rq:wip:bulk"))
        cut = [path for path in tmp_path.glob("api/*/files/*") if path.name.startswith(".")]
        assert len(cut) <= num_strikes  # uploads that were cut; they expire
