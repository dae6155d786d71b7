"""What the worker reads of a job's hash is what RQ's own client reads of it, and what follows from it."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis
from rq.job import Job
from rq.serializers import JSONSerializer

from tests.examples import examples
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.job_record import CALLBACKS, JobRecord, read_record
from worker.store.records.next_step import NextStep, Policy, next_step
from worker.store.records.outcome import Outcome
from worker.store.records.stored_job import job_of

MAX_BYTES = 1 << 20
CALL = json.dumps(["mine.add", None, [1], {"b": 2}]).encode()
NUMBERS = st.sampled_from([b"", b"0", b"1", b"-1", b"007", b"1.5", b"x", b"\xff", b"9" * 30])
TEXTS = st.sampled_from([b"", b"mine.done", b"caf\xc3\xa9", b"\xff"])
LISTS = st.sampled_from([b"", b"[]", b"[1, 2]", b'["x"]', b"{", b"null", b"[null]", b"\xff"])
DATES = st.sampled_from([b"", b"2026-01-02T03:04:05.000006Z", b"yesterday", b"\xff"])
HOOK = {"url": "http://a/", "job_status": "failed", "method": "POST", "headers": None, "timeout": 1}
FIELDS: dict[str, Any] = {
    **dict.fromkeys(
        ["timeout", "result_ttl", "failure_ttl", "ttl", "retries_left", "repeats_left"], NUMBERS
    ),
    **dict.fromkeys(
        ["number_of_retries", "enqueue_at_front", "enqueue_at_front_on_retry"], NUMBERS
    ),
    **dict.fromkeys(["allow_dependency_failures", "success_callback_timeout"], NUMBERS),
    **dict.fromkeys(
        ["origin", "description", "worker_name", "dependency_id", *CALLBACKS.values()], TEXTS
    ),
    **dict.fromkeys(["retry_intervals", "repeat_intervals", "dependency_ids", "meta"], LISTS),
    "webhooks": st.sampled_from([b"", json.dumps([HOOK]).encode(), b'[{"url": 1}]', b"{"]),
    "status": st.sampled_from([b"", b"queued", b"started", b"lost"]),
    **dict.fromkeys(["enqueued_at", "started_at", "created_at"], DATES),
}


def rq_job(values: dict[bytes, bytes]) -> Job:
    job = Job(connection=Redis())
    job.serializer = JSONSerializer
    job._id = "j"
    job.restore(values)
    return job


def claimed(record: JobRecord) -> ClaimedJob:
    return ClaimedJob("j", "e", "bulk", "w", record)


@settings(max_examples=examples(100))
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_any_hash_is_read_as_rq_reads_it(found: dict[str, bytes]) -> None:
    values = {b"data": CALL, **{name.encode(): value for name, value in found.items()}}
    record, damage = read_record(values, MAX_BYTES)
    try:
        expected = rq_job(values)
    except Exception:  # noqa: BLE001  # RQ raises what it likes
        assert damage is not None
        return
    if damage is None:
        assert record.policy == Policy.of(expected)
        assert record.timeout_s == expected.timeout
        assert record.meta == expected.meta
        assert list(record.webhooks) == expected.webhooks
        names = {role: getattr(expected, f"_{field}") for role, field in CALLBACKS.items()}
        assert record.callbacks == {role: name for role, name in names.items() if name is not None}
    job = job_of(claimed(record), Redis())
    for name in (
        "origin",
        "enqueued_at",
        "started_at",
        "_status",
        "meta",
        "timeout",
        "func_name",
        "kwargs",
    ):
        assert getattr(job, name) == getattr(expected, name), name


def test_the_end_of_a_job_whose_policy_is_damaged_is_not_written_with_it() -> None:
    values = {b"data": CALL, b"retries_left": b"1", b"retry_intervals": b'["x"]'}
    record, damage = read_record(values, MAX_BYTES)
    failed = Outcome(
        replace(claimed(record), damage=damage),
        "failed",
        "",
        datetime.now(UTC),
        0.0,
        may_retry=True,
    )
    with pytest.raises(ValueError, match="invalid literal"):
        failed.with_policy_of(None)


@pytest.mark.parametrize(
    ("ttl", "kept_s"), [(None, 77), (0, 0), (60, 60), (-1, -1), (-5, -1), (10**12, 3650 * 86_400)]
)
def test_a_result_is_kept_as_long_as_its_job_says(ttl: int | None, kept_s: int) -> None:
    step = next_step(Policy(result_ttl=ttl), is_finished=True, default_result_ttl_s=77)
    assert step == NextStep(kept_s)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(result_ttl="soon"),  # type: ignore[arg-type]
        Policy(failure_ttl={"soon": 1}),  # type: ignore[arg-type]
        Policy(retries_left=1, retry_intervals=[]),
        Policy(retries_left=1, retry_intervals=["soon"]),  # type: ignore[list-item]
        Policy(repeats_left=1, repeat_intervals=[None]),  # type: ignore[list-item]
    ],
)
def test_a_policy_that_no_end_can_be_written_with_is_told_before(policy: Policy) -> None:
    with pytest.raises((TypeError, ValueError, IndexError)):
        policy.check()
