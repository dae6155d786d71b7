"""Makes a claimed job of what a script has read of its hash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis import Redis
from rq.executions import Execution
from rq.serializers import JSONSerializer

from worker.errors import TooLarge
from worker.store.claimed_job import ClaimedJob
from worker.store.held_job import MAX_HASH_FIELDS, HeldJob, check_counts, max_hash_bytes
from worker.store.next_step import Policy


class Restorer:
    """Restores the jobs of one worker. max_job_bytes: of a payload, unpacked."""

    def __init__(self, client: Redis, worker_name: str, max_job_bytes: int) -> None:
        self._client, self._worker_name, self._max_job_bytes = client, worker_name, max_job_bytes

    def restore(self, queue_name: str, reply: Sequence[Any]) -> ClaimedJob:
        """reply: what open_execution.lua returns, in a claim with the job that was left before this one."""
        job_id, execution_id = reply[0].decode(), reply[1].decode()
        fields = reply[2]
        job = HeldJob(connection=self._client)
        job.serializer = JSONSerializer  # given to the constructor it would be inspected, once for each job
        job.max_bytes = self._max_job_bytes
        job._id = job_id  # unchecked: an id that RQ's client would refuse is still a job to end
        damage, deaths = None, 0
        try:
            values = _values(fields, self._max_job_bytes)
            deaths = int(values.get(b"worker_deaths", 0))
            job.restore(values)
            check_counts(values)
            Policy.of(job).check()
        except Exception as error:  # noqa: BLE001  # a hash may hold anything; it must not stop the others
            damage = error
        execution = Execution(execution_id, job_id, self._client, worker_name=self._worker_name)
        left_before = reply[3].decode() if len(reply) > 3 else ""
        return ClaimedJob(job, execution, queue_name, damage, deaths=deaths, left_before=left_before)


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
