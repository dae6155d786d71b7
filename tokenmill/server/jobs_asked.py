"""Puts jobs on the queue of prompts, and waits for their results."""

import asyncio
import json
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from redis import Redis
from redis import asyncio as redis_asyncio
from redis.exceptions import RedisError
from starlette.concurrency import run_in_threadpool

from jobs.common import rq_jobs
from jobs.common.keys import MODEL_FIELD
from jobs.common.rq_jobs import JobStatus, ResultType
from jobs.runs.job_cancel import cancel_job
from tokenmill.server.errors import ApiError, job_error

#: How long a result is kept for the server to read it.
RESULT_TTL_S = 300
#: How long one read of results waits for the first of them. A job that was asked since joins the next read.
READ_MS = 20
#: Seconds between two looks at whether the awaited jobs are still there.
LOOK_S = 1.0
#: The statuses of jobs that end without a result.
_OVER = (JobStatus.CANCELED, JobStatus.STOPPED)


class JobsAsked:
    """The jobs of this server that are not answered yet. All but `ask` and `close` is private to it.

    timeout_s: how long a job may wait and run.
    """

    def __init__(self, redis_url: str, connection: Redis, queue: str, timeout_s: int) -> None:
        self._connection = connection
        self._queue = queue
        self._timeout_s = timeout_s
        self._reader = redis_asyncio.Redis.from_url(redis_url, socket_connect_timeout=5.0)
        self._awaited: dict[str, asyncio.Future[Mapping[bytes, bytes]]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def ask(
        self, job_id: str, function: str, arguments: Mapping[str, Any], model: str | None
    ) -> bytes:
        """Enqueue a job and return its value, as JSON. model: the only one that may answer.

        Raises ApiError for a job that fails or is cancelled, and RedisError. A job whose caller is cancelled is
        cancelled too.
        """
        future = asyncio.get_running_loop().create_future()
        self._awaited[job_id] = future
        try:
            await run_in_threadpool(self._enqueue, job_id, function, arguments, model)
            self._read_on()
            async with asyncio.timeout(self._timeout_s):
                entry = await future
        except TimeoutError:
            await run_in_threadpool(cancel_job, self._connection, job_id)
            raise ApiError(
                504, f"no answer within {self._timeout_s} s: ask for less, or raise --timeout"
            ) from None
        except asyncio.CancelledError:
            await asyncio.shield(run_in_threadpool(cancel_job, self._connection, job_id))
            raise
        finally:
            self._awaited.pop(job_id, None)
        return _value_of(entry)

    def _enqueue(
        self, job_id: str, function: str, arguments: Mapping[str, Any], model: str | None
    ) -> None:
        """Write the job and its model in one transaction, so that no worker of another model takes it."""
        job = rq_jobs.prepared_job(
            function,
            kwargs=dict(arguments),
            timeout=self._timeout_s,
            ttl=self._timeout_s,
            result_ttl=RESULT_TTL_S,
            failure_ttl=RESULT_TTL_S,
            description=function,
            job_id=job_id,
        )
        with self._connection.pipeline() as pipe:
            if model is not None:
                pipe.hset(rq_jobs.job_key(job_id), MODEL_FIELD, model)
            rq_jobs.job_queue(self._connection, self._queue).enqueue_many([job], pipeline=pipe)
            pipe.execute()

    def _read_on(self) -> None:
        """Have results read while some are awaited."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        looked_at = asyncio.get_running_loop().time()
        while self._awaited:
            try:
                await self._read_results()
                now = asyncio.get_running_loop().time()
                if now - looked_at >= LOOK_S:
                    looked_at = now
                    await self._look_for_lost()
            except RedisError:
                await asyncio.sleep(LOOK_S)  # the server is away; results wait there

    async def _read_results(self) -> None:
        streams: dict[Any, Any] = {rq_jobs.results_key(job_id): "0" for job_id in self._awaited}
        replies: Any = await self._reader.xread(streams, count=1, block=READ_MS)
        for key, entries in replies:
            job_id = key.decode().rpartition(":")[2]
            self._end(job_id, entries[0][1])

    async def _look_for_lost(self) -> None:
        """Fail the calls whose jobs were cancelled or deleted: they leave no result."""
        job_ids = list(self._awaited)
        pipe = self._reader.pipeline(transaction=False)
        for job_id in job_ids:
            pipe.hget(rq_jobs.job_key(job_id), "status")
            pipe.exists(rq_jobs.results_key(job_id))
        replies = await pipe.execute()
        for number, job_id in enumerate(job_ids):
            status = rq_jobs.job_status(replies[2 * number])
            has_result = replies[2 * number + 1]
            future = self._awaited.get(job_id)
            if future is None or future.done() or has_result:
                continue
            if status is None or status in _OVER:
                future.set_exception(
                    ApiError(503, "the job was cancelled, or its queue was emptied: ask again")
                )

    def _end(self, job_id: str, entry: Mapping[bytes, bytes]) -> None:
        future = self._awaited.get(job_id)
        if future is not None and not future.done():
            future.set_result(entry)

    async def close(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()
        await self._reader.aclose()


def _value_of(entry: Mapping[bytes, bytes]) -> bytes:
    """Return the JSON that a job returned. Raises ApiError if it failed."""
    if rq_jobs.result_type(entry) is not ResultType.SUCCESSFUL:
        raise job_error(rq_jobs.error_text(entry))
    return b64decode(entry.get(b"return_value") or b"") or json.dumps(None).encode()
