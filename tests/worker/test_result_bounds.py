"""What a job leaves when it ends, and what of it is too much: for the limits, or for the server."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from rq import Retry
from rq.job import JobStatus

from tests.rq_workers import Workers, leftovers, text_of
from tests.worker.guards import open_guard
from worker.io_thread.held.end_writer import EndWriter
from worker.io_thread.held.held_jobs import HeldJob
from worker.store.records.outcome import Outcome

F = "tests.worker.functions."
MIB = 1 << 20


@pytest.fixture
def small_server(workers: Workers) -> Iterator[None]:
    """The server takes no value of more than 1 MiB."""
    before = workers.redis.config_get("proto-max-bulk-len")
    workers.redis.config_set("proto-max-bulk-len", MIB)
    yield
    workers.redis.config_set("proto-max-bulk-len", before["proto-max-bulk-len"])


@pytest.mark.usefixtures("small_server")
def test_a_result_that_the_server_does_not_take_fails_its_own_job_and_no_other(
    workers: Workers,
) -> None:
    queue = workers.queue("bulk")
    bad = queue.enqueue(F + "give", "text", 2 * MIB)
    good = [queue.enqueue("jobs.complete", "a", max_tokens=1) for _ in range(3)]
    process = workers.start()
    assert [text_of(workers.result(job)) for job in good] == ["echo:a"] * 3
    text = str(workers.result(bad).exc_string)
    assert (
        "EndNotTaken: the job has run, but Redis does not take the 2097154 bytes of its result"
        in text
    )
    assert text.endswith("tokenmill: client\n")
    assert bad.get_status() == JobStatus.FAILED
    process.terminate()
    assert process.wait(timeout=60) == 0
    assert leftovers(workers.redis, "bulk") == []


def test_a_result_beyond_its_bound_fails_its_own_job_at_once(workers: Workers) -> None:
    queue = workers.queue("bulk")
    kinds = ("text", "numbers", "nested", "itself")
    bad = [queue.enqueue(F + "give", kind, 2000, retry=Retry(2)) for kind in kinds]
    bad.append(queue.enqueue("jobs.complete", ["a", "x" * 1000, "b"], max_tokens=1))
    good = [
        queue.enqueue(F + "give", "text", 900),
        queue.enqueue("jobs.complete", "a", max_tokens=1),
    ]
    log = workers.burst(TOKENMILL_MAX_RESULT_BYTES="1024")
    for job in bad:
        [result] = job.results()
        assert "the job's result has more than the limit of 1024 bytes" in str(result.exc_string)
        assert str(result.exc_string).endswith("tokenmill: client\n")
    assert log.count("failed: ResultTooLarge: the job's result") == len(bad)
    assert [job.get_status() for job in good] == [JobStatus.FINISHED] * 2


def test_a_long_traceback_keeps_its_ends(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue(F + "boom", "x" * 200_000 + " the end")
    workers.burst()
    text = str(workers.result(job).exc_string)
    assert len(text) < 1 << 17
    assert text.startswith("Traceback")
    assert "characters are left out here]" in text
    assert text.endswith("the end\n")


class Server:
    """Takes no batch with an end of more than 1 MiB, and nothing while it is out."""

    def __init__(self, error: RedisError) -> None:
        self.error, self.is_out, self.taken = error, False, []  # type: ignore[var-annotated]

    def finish(self, outcomes: list[Outcome]) -> list[str]:
        if self.is_out or any(outcome.num_bytes > MIB for outcome in outcomes):
            raise self.error
        self.taken += [(outcome.claimed.job_id, outcome.status) for outcome in outcomes]
        return ["done"] * len(outcomes)

    def renew(self, held: list[Any]) -> list[Any]:
        if self.is_out:
            raise self.error
        return []


class Ends:
    """Ends of jobs a, b, ... of these sizes, written to a server."""

    def __init__(self, server: Server, *sizes: int) -> None:
        self.server, self.now, self.replies = server, 0.0, {}  # type: ignore[var-annotated]
        self.writer = EndWriter(
            self._written, open_guard(), logging.getLogger("test"), lambda: self.now
        )
        for number, size in enumerate(sizes):
            claimed: Any = SimpleNamespace(job_id="abcdef"[number])
            packed = b"x" * size
            outcome = Outcome(claimed, "finished", "", datetime.now(UTC), 0.0, packed=packed)
            self.writer.add(HeldJob(number, claimed, 0), outcome)

    def _written(self, job: HeldJob, outcome: Outcome, reply: str) -> None:
        self.replies[job.claimed.job_id] = reply

    def flush(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 1
            with suppress(RedisError):
                self.writer.flush(self.server)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [RedisConnectionError("reset"), ResponseError("too long")])
def test_an_end_that_is_not_taken_becomes_a_failure_and_holds_up_no_other(
    error: RedisError,
) -> None:
    ends = Ends(Server(error), 10, 2 * MIB, 10)
    ends.flush(2)
    assert ends.server.taken == [("a", "finished"), ("c", "finished")]
    ends.flush(3)
    assert ends.server.taken[2:] == [("b", "failed")]


def test_an_outage_turns_no_end_into_a_failure() -> None:
    ends = Ends(Server(RedisConnectionError("reset")), 10, MIB)
    ends.server.is_out = True
    ends.flush(20)
    assert ends.replies == {}
    ends.server.is_out = False
    ends.flush()
    assert ends.server.taken == [("a", "finished"), ("b", "finished")]
