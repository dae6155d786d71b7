"""What the worker reads of a job's hash is what RQ's own client reads of it, and what user code then gets."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.job_record import CALLBACKS, JobRecord, read_record
from worker.store.records.next_step import Policy, next_step
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
    **dict.fromkeys(["timeout", "result_ttl", "failure_ttl", "ttl", "retries_left", "repeats_left"], NUMBERS),
    **dict.fromkeys(["number_of_retries", "enqueue_at_front", "enqueue_at_front_on_retry"], NUMBERS),
    **dict.fromkeys(["allow_dependency_failures", "success_callback_timeout"], NUMBERS),
    **dict.fromkeys(["origin", "description", "worker_name", "dependency_id", *CALLBACKS.values()], TEXTS),
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


@settings(max_examples=400, deadline=None)
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_any_hash_is_read_as_rq_reads_it(found: dict[str, bytes]) -> None:
    values = {b"data": CALL, **{name.encode(): value for name, value in found.items()}}
    record, damage = read_record("j", values, MAX_BYTES)
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
    for name in ("origin", "enqueued_at", "started_at", "_status", "meta", "timeout", "func_name", "kwargs"):
        assert getattr(job, name) == getattr(expected, name), name


def test_what_is_taken_from_a_record_its_job_does_not_have() -> None:
    hooks = {name.encode(): b"mine.done" for name in CALLBACKS.values()}
    values = {b"data": CALL, b"retries_left": b"3", b"webhooks": json.dumps([HOOK]).encode(), **hooks}
    record, damage = read_record("j", values, MAX_BYTES)
    assert damage is None
    whole, stripped = job_of(claimed(record), Redis()), job_of(claimed(record.without_hooks()), Redis())
    assert (whole.retries_left, len(whole.webhooks), whole._failure_callback_name) == (3, 1, "mine.done")
    assert (stripped.retries_left, stripped.webhooks, stripped._failure_callback_name) == (None, [], None)
    assert record.policy.retries_left == 3, "a record is never changed"


def test_a_record_without_its_payload_still_says_what_its_job_calls() -> None:
    record, _ = read_record("j", {b"data": CALL, b"meta": b'{"a": 1}', b"description": b"x" * 99}, MAX_BYTES)
    small = record.without_payload(keeps_meta=True)
    assert small.hash_bytes == len(b'{"a": 1}')
    assert small.meta == {"a": 1}
    assert job_of(claimed(small), Redis(), "mine.add").func_name == "mine.add"
    assert record.without_payload(keeps_meta=False).meta == {}


def test_letting_go_of_a_payload_is_worth_it_once_and_where_there_is_much_of_it() -> None:
    light, _ = read_record("j", {b"data": CALL}, MAX_BYTES)
    heavy, _ = read_record("j", {b"data": CALL, b"description": b"x" * 4000}, MAX_BYTES)
    large_rest, _ = read_record("j", {b"data": CALL, b"webhooks": b"x" * 4000}, MAX_BYTES)
    assert (light.is_heavy, heavy.is_heavy, large_rest.is_heavy) == (False, True, True)
    assert not heavy.without_payload(keeps_meta=False).is_heavy
    assert not large_rest.without_payload(keeps_meta=False).is_heavy


@settings(max_examples=400, deadline=None)
@given(st.fixed_dictionaries({}, optional=FIELDS), st.booleans(), st.booleans())
def test_an_end_can_be_written_with_any_record_that_is_not_damaged(
    found: dict[str, bytes], is_finished: bool, may_retry: bool
) -> None:
    values = {b"data": CALL, **{name.encode(): value for name, value in found.items()}}
    record, damage = read_record("j", values, MAX_BYTES)
    if damage is None:  # as Outcome.as_left_by takes for granted
        assert next_step(record.policy, is_finished=is_finished, may_retry=may_retry)


def test_the_end_of_a_job_whose_policy_is_damaged_is_not_written_with_it() -> None:
    values = {b"data": CALL, b"retries_left": b"1", b"retry_intervals": b'["x"]'}
    record, damage = read_record("j", values, MAX_BYTES)
    failed = Outcome(
        replace(claimed(record), damage=damage), "failed", "", datetime.now(UTC), 0.0, retries=True
    )
    with pytest.raises(ValueError, match="invalid literal"):
        failed.as_left_by(None)


@pytest.mark.parametrize("owner", [ClaimedJob, JobRecord, Policy])
def test_nothing_that_a_claim_brings_can_be_changed(owner: Any) -> None:
    record, _ = read_record("j", {b"data": CALL}, MAX_BYTES)
    each = {ClaimedJob: claimed(record), JobRecord: record, Policy: record.policy}[owner]
    for field in fields(each):
        with pytest.raises(AttributeError):
            setattr(each, field.name, None)
    with pytest.raises(TypeError):
        record.fields[b"data"] = b""  # type: ignore[index]


def test_the_copy_of_user_code_shows_when_its_job_began() -> None:
    job = job_of(claimed(read_record("j", {b"data": CALL, b"status": b"queued"}, MAX_BYTES)[0]), Redis())
    began_at = datetime.now(UTC)
    job.show_started("w", began_at)
    assert (job._status, job.worker_name, job.started_at) == (JobStatus.STARTED, "w", began_at)
