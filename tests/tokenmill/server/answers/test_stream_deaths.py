"""A stream goes on behind what was sent, also where the next worker would compute another text."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore

import pytest
from openai import OpenAI

from tests.forking import ForkedWorkers
from tests.redis_server import running_redis_server
from tests.rq_workers import Workers, wait_until
from tests.tokenmill.server.server_process import client, running_server

NUM_STREAMS = 20
NUM_TOKENS = 300
NUM_KILLS = 2


class Site:
    """Workers whose engine is unsteady, and a client of their server."""

    def __init__(self, workers: Workers, api: OpenAI) -> None:
        self.workers = workers
        self.api = api

    def start(self) -> None:
        self.workers.start(
            queues=("prompts",),
            worker_class="tests.tokenmill.server.answers.unsteady_engine.UnsteadyWorker",
            FAKE_STEP_S="0.02",
            TOKENMILL_JOURNAL_S="3600",  # what was sent is all that the next worker has
            TOKENMILL_MAX_WORKER_DEATHS="1000",
        )


@pytest.fixture
def site(redis_executable: str, tmp_path: Path) -> Iterator[Site]:
    with running_redis_server(executable=redis_executable) as url:
        workers = ForkedWorkers(url, tmp_path)
        try:
            with running_server(url, tmp_path / "server.log") as address:
                served = Site(workers, client(address))
                served.start()
                wait_until(lambda: served.api.models.list().data)
                yield served
        finally:
            workers.close()


def test_streams_go_on_behind_what_was_sent(site: Site) -> None:
    """Each text is the answer's, or its stream would end in an error."""
    has_text = Semaphore(0)

    def stream(number: int) -> str:
        text = ""
        chunks = site.api.completions.create(
            model="fake", prompt=f"prompt {number}", max_tokens=NUM_TOKENS, stream=True
        )
        for chunk in chunks:
            text += chunk.choices[0].text
            has_text.release()
        return text

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(stream, number) for number in range(NUM_STREAMS)]
        for _ in range(NUM_KILLS):
            for _ in range(3 * NUM_STREAMS):
                assert has_text.acquire(timeout=30)
            assert not any(each.done() for each in streams)
            site.workers.processes[-1].kill()
            site.start()
        texts = [each.result(timeout=60) for each in streams]

    assert [len(text) for text in texts] == [NUM_TOKENS] * NUM_STREAMS
    assert not list(site.workers.redis.scan_iter("tokenmill:text:*"))
