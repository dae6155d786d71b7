"""What a job leaves when it ends, and what of it is too much: for the limits, or for the server."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from rq import Callback, Retry
from rq.job import JobStatus

from jobs.errors import ResultTooLarge
from tests.rq_workers import Workers, leftovers, text_of, wait_until
from worker.io_thread.held.end_writer import EndWriter
from worker.io_thread.held.held_job import HeldJob
from worker.store.records.outcome import Outcome
from worker.store.records.results import pack

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
def test_a_result_that_the_server_does_not_take_fails_its_own_job_and_no_other(workers: Workers) -> None:
    queue = workers.queue("bulk")
    bad = queue.enqueue(F + "give", "text", 2 * MIB)
    good = [queue.enqueue("jobs.complete", "a", max_tokens=1) for _ in range(3)]
    process = workers.start()
    assert [text_of(workers.result(job)) for job in good] == ["echo:a"] * 3
    text = str(workers.result(bad).exc_string)
    assert "EndNotTaken: the job has ended, but Redis does not take the 2097154 bytes of its end" in text
    assert text.endswith("tokenmill: client\n")
    assert bad.get_status() == JobStatus.FAILED
    process.terminate()
    assert process.wait(timeout=60) == 0
    assert leftovers(workers.redis, "bulk") == []


@pytest.mark.usefixtures("small_server")
def test_a_worker_told_to_stop_ends_while_the_server_does_not_take_a_result(workers: Workers) -> None:
    bad = workers.queue("bulk").enqueue(F + "give", "text", 2 * MIB)
    process = workers.start()
    wait_until(lambda: f"job {bad.id}: Redis does not take its end" in workers.log(process))
    process.terminate()
    assert process.wait(timeout=60) == 0
    assert bad.get_status() == JobStatus.FAILED


def test_a_result_beyond_its_bound_fails_its_own_job_at_once(workers: Workers) -> None:
    queue = workers.queue("bulk")
    kinds = ("text", "numbers", "nested", "itself")
    bad = [queue.enqueue(F + "give", kind, 2000, retry=Retry(2)) for kind in kinds]
    bad.append(queue.enqueue("jobs.complete", ["a", "x" * 1000, "b"], max_tokens=1))
    good = [queue.enqueue(F + "give", "text", 900), queue.enqueue("jobs.complete", "a", max_tokens=1)]
    log = workers.burst(TOKENMILL_MAX_RESULT_BYTES="1024")
    for job in bad:
        [result] = job.results()
        assert "the job's result has more than the limit of 1024 bytes" in str(result.exc_string)
        assert str(result.exc_string).endswith("tokenmill: client\n")
    assert log.count("failed: ResultTooLarge: the job's result") == len(bad)
    assert [job.get_status() for job in good] == [JobStatus.FINISHED] * 2


def test_a_failure_callback_hears_of_a_result_beyond_its_bound(workers: Workers) -> None:
    hook = Callback(F + "on_failure")
    job = workers.queue("bulk").enqueue(F + "give", "text", 2000, on_failure=hook)
    workers.burst(TOKENMILL_MAX_RESULT_BYTES="1024")
    assert "more than the limit of 1024 bytes" in str(workers.result(job).exc_string)
    assert workers.wait_for("callbacks") == f"failure:{job.id}:ResultTooLarge"


def test_a_long_traceback_keeps_its_ends(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue(F + "boom", "x" * 200_000 + " the end")
    workers.burst()
    text = str(workers.result(job).exc_string)
    assert len(text) < 1 << 17
    assert text.startswith("Traceback")
    assert "characters are left out here]" in text
    assert text.endswith("the end\n")


def test_an_error_that_takes_long_to_show_holds_up_no_other_job(workers: Workers) -> None:
    bad = workers.queue("bulk").enqueue(F + "raise_what_waits_to_be_shown", "go")
    process = workers.start()
    workers.wait_for("go:asked")
    prompt = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1)
    assert text_of(workers.result(prompt)) == "echo:a"
    workers.redis.rpush("go", "")
    assert "Waits: shown" in str(workers.result(bad).exc_string)
    process.terminate()
    assert process.wait(timeout=60) == 0


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
JSON = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner))


@settings(max_examples=30)
@given(JSON.filter(lambda value: value is not None), st.booleans())
def test_a_value_is_packed_as_its_json_up_to_its_bound(value: Any, known_small: bool) -> None:
    text = json.dumps(value).encode()
    assert pack(value, len(text), known_small) == text
    with pytest.raises(ResultTooLarge):
        pack(value, len(text) - 1, known_small)


def test_a_value_of_many_is_packed_like_one_of_few() -> None:
    value = [{"a": [number, None, "é"]} for number in range(5000)]
    assert pack(value, MIB) == json.dumps(value).encode()
    with pytest.raises(ResultTooLarge):
        pack(value, 100_000)


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
        self.writer = EndWriter(self._written, logging.getLogger("test"), lambda: self.now)
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
def test_an_end_that_is_not_taken_becomes_a_failure_and_holds_up_no_other(error: RedisError) -> None:
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


def test_a_small_end_is_never_to_blame_for_a_connection_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.MIB", 5)
    ends = Ends(Server(RedisConnectionError("reset")), 10)
    ends.flush(20)
    monkeypatch.setattr(f"{__name__}.MIB", 50)
    ends.flush()
    assert ends.server.taken == [("a", "finished")]


def test_a_failure_that_is_not_taken_either_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.MIB", 5)
    ends = Ends(Server(ResponseError("no")), 10)
    ends.flush(8)
    assert ends.replies == {"a": "refused"}
