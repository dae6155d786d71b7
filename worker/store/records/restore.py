"""Makes a claimed job of what a script has read of its hash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker.errors import TooLarge
from worker.store.records.bounds import MAX_HASH_FIELDS, max_hash_bytes
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.job_record import JobRecord, read_record


def restore(queue_name: str, reply: Sequence[Any], worker_name: str, max_job_bytes: int) -> ClaimedJob:
    """reply: what open_execution.lua returns, in a claim with the job that was left before this one.

    max_job_bytes: of the payload, unpacked.
    """
    job_id, execution_id, fields, deaths = reply[0].decode(), reply[1].decode(), reply[2], reply[3]
    left_before = reply[4].decode() if len(reply) > 4 else ""
    record = JobRecord()
    damage: Exception | None = None
    try:
        values = _values(fields, max_job_bytes)
    except Exception as error:  # noqa: BLE001  # a hash may hold anything; it must not stop the others
        damage = error
    else:
        record, damage = read_record(job_id, values, max_job_bytes)
    return ClaimedJob(
        job_id, execution_id, queue_name, worker_name, record, damage, deaths=deaths, left_before=left_before
    )


def _values(fields: Any, max_job_bytes: int) -> dict[bytes, bytes]:
    """The hash that job_hash.lua returned. Raises TooLarge where it gave its size instead."""
    if isinstance(fields, int):
        limit = max_hash_bytes(max_job_bytes)
        if fields <= limit:
            raise TooLarge(
                f"the job's hash in Redis has more than the limit of {MAX_HASH_FIELDS} fields: enqueue it "
                "again, and keep what is your own in its meta"
            )
        raise TooLarge(
            f"the job takes {fields} bytes in Redis, more than the limit of {limit}: shorten its arguments, "
            "description or meta, or raise TOKENMILL_MAX_JOB_BYTES"
        )
    return dict(zip(fields[::2], fields[1::2], strict=True))
