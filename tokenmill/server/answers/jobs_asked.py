"""Enqueues the jobs of calls, and waits for their results."""

import asyncio
import logging
from base64 import b64decode
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from redis import Redis
from redis import asyncio as redis_asyncio
from redis.client import Pipeline
from redis.exceptions import RedisError, ResponseError
from starlette.concurrency import run_in_threadpool

from jobs.common import rq_jobs
from jobs.common.keys import MODEL_FIELD, STREAM_FIELD, text_stream_key
from jobs.common.rq_jobs import JobStatus, ResultType
from jobs.runs.job_cancel import cancel_job
from jobs.runs.redis_state.state import transact
from tokenmill.server.answers.bodies import Call
from tokenmill.server.answers.shared_writes import SharedWrites
from tokenmill.server.errors import ApiError, job_error
from tokenmill.server.idempotency import KEPT_S, Made
from tokenmill.serving import REDIS_TIMEOUT_S

logger = logging.getLogger("tokenmill")

#: The seconds for which Redis holds a result, so that the server can read it.
RESULT_TTL_S = 300
#: The seconds for which Redis holds the result of a request with an Idempotency-Key, for later requests with that key.
KEPT_RESULT_TTL_S = KEPT_S + RESULT_TTL_S
#: The most milliseconds for which a read waits for results. Jobs that are enqueued meanwhile join the next read.
READ_MS = 20
#: The pause before each read, in seconds for each key that it names. A read of many keys is costly, so it is made
#: rarely, when there is more to read.
PAUSE_S_OF_KEY = 10e-6
#: The most pieces of a text that are read at once.
MAX_PIECES = 1000
#: The seconds between two checks whether the awaited jobs still exist.
LOOK_S = 1.0
#: The statuses of jobs that have ended without a result.
_OVER = (JobStatus.CANCELED, JobStatus.STOPPED)


class TextPiece(NamedTuple):
    """A piece of a sample's text, as workers write it (see worker.store.records.text_piece).

    part: "text" or "reasoning". offset: where in the text of that part the piece begins.
    """

    sample: int
    part: str
    offset: int
    text: str

    def follows(self, other: "TextPiece") -> bool:
        """Whether this piece begins where another piece of the same text ends."""
        is_same_text = self.sample == other.sample and self.part == other.part
        return is_same_text and self.offset == other.offset + len(other.text)


@dataclass(eq=False)
class _Awaited:
    """A request that awaits the result of a job. Several requests with the same Idempotency-Key await the same job.

    ended: a future of the result's entry. is_followed: whether pieces of the text are read. pieces: pieces that were
    read and not taken yet. last_id: the id of the last read piece. changed: set when a piece or the result comes.
    """

    ended: asyncio.Future[Mapping[bytes, bytes]]
    is_followed: bool = False
    pieces: list[TextPiece] = field(default_factory=list)
    last_id: bytes = b"0"
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take_pieces(self) -> list[TextPiece]:
        """Return the pieces that were not taken yet, and empty the list. Join pieces that follow each other.

        So a client that reads slowly gets fewer and longer pieces.
        """
        joined: list[TextPiece] = []
        for piece in self.pieces:
            last = joined[-1] if joined else None
            if last is not None and piece.follows(last):
                joined[-1] = last._replace(text=last.text + piece.text)
            else:
                joined.append(piece)
        self.pieces = []
        return joined


class JobsAsked:
    """Enqueues jobs and reads their results, for all requests together. timeout_s: how long a job may wait and run."""

    def __init__(self, redis_url: str, connection: Redis, queue: str, timeout_s: int) -> None:
        self._connection = connection
        self._queue = queue
        self._timeout_s = timeout_s
        self._reader = redis_asyncio.Redis.from_url(
            redis_url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
        )
        self._writes = SharedWrites(connection)
        self._awaited: dict[str, list[_Awaited]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def ask(self, made: Made, call: Call) -> bytes:
        """Enqueue a job, and return its value as JSON.

        If the caller is cancelled, so is the job, unless a later request may get its result (`made.is_kept`). Raises
        RedisError, and ApiError if the job fails, is cancelled or takes too long.
        """
        async with self._enqueued(made, call) as awaited:
            await asyncio.wait({awaited.ended}, timeout=self._timeout_s)
            return _value_of(self._result_of(awaited))

    async def whole(self, made: Made, call: Call) -> AsyncGenerator[TextPiece | bytes, None]:
        """Enqueue a job, and yield its value as JSON. Raises what `ask` raises."""
        yield await self.ask(made, call)

    async def follow(self, made: Made, call: Call) -> AsyncGenerator[TextPiece | bytes, None]:
        """Enqueue a job, and yield pieces of its text as they come, and then its value as JSON.

        Raises what `ask` raises.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        async with self._enqueued(made, call, is_followed=True) as awaited:
            while not awaited.ended.done() or awaited.pieces:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        await awaited.changed.wait()
                awaited.changed.clear()
                for piece in awaited.take_pieces():
                    yield piece
                if loop.time() >= deadline:
                    break
            yield _value_of(self._result_of(awaited))

    def _result_of(self, awaited: _Awaited) -> Mapping[bytes, bytes]:
        """Return the entry of a job's result. Raises ApiError if the job has not ended, or has no result."""
        if not awaited.ended.done():
            raise ApiError(
                504, f"no answer within {self._timeout_s} s: ask for less, or raise --timeout"
            )
        return awaited.ended.result()

    @asynccontextmanager
    async def _enqueued(
        self, made: Made, call: Call, *, is_followed: bool = False
    ) -> AsyncIterator[_Awaited]:
        """A context manager that enqueues a job, and cancels it if the block ends before the job.

        If `made.is_kept`, the job is enqueued only if an earlier request has not done so, and it goes on when its
        client leaves.
        """
        awaited = _Awaited(asyncio.get_running_loop().create_future(), is_followed)
        awaited.ended.add_done_callback(lambda _: awaited.changed.set())
        goes_on = False
        try:
            if made.is_kept:
                await run_in_threadpool(self._enqueue_once, made, call, is_followed)
            else:
                await self._writes.send(partial(self._enqueue, made, call, is_followed))
            call.let_arguments_go()
            # The job is awaited only from here on, because an awaited job that is not in Redis is taken for deleted.
            self._awaited.setdefault(made.id, []).append(awaited)
            self._ensure_reading()
            yield awaited
        except (asyncio.CancelledError, GeneratorExit):
            goes_on = made.is_kept
            raise
        finally:
            self._leave(made.id, awaited)
            awaited.ended.cancel()  # changes nothing if the job has ended
            has_no_result = awaited.ended.cancelled() or awaited.ended.exception() is not None
            if has_no_result and not goes_on:
                await asyncio.shield(run_in_threadpool(self._cancel, made.id))

    def _leave(self, job_id: str, awaited: _Awaited) -> None:
        """Remove a request from those that await a job."""
        others = [other for other in self._awaited.get(job_id, ()) if other is not awaited]
        if others:
            self._awaited[job_id] = others
        else:
            self._awaited.pop(job_id, None)

    def _cancel(self, job_id: str) -> None:
        """Cancel a job. If Redis does not answer, log that: the job ends by its own time limit."""
        try:
            cancel_job(self._connection, job_id)
        except RedisError as error:
            logger.warning("%s: its job cannot be cancelled: %s", job_id, error)

    def _enqueue_once(self, made: Made, call: Call, is_followed: bool) -> None:
        """Enqueue a job, unless an earlier request has enqueued it."""
        job_key = rq_jobs.job_key(made.id)

        def enqueue(pipe: Pipeline) -> None:
            if not pipe.exists(job_key, rq_jobs.results_key(made.id)):
                pipe.multi()
                self._enqueue(made, call, is_followed, pipe)

        transact(self._connection, enqueue, job_key)

    def _enqueue(self, made: Made, call: Call, is_followed: bool, pipe: Pipeline) -> None:
        """Add a job to a transaction, with its fields, so that only a worker of its model takes it."""
        job_id = made.id
        job = rq_jobs.prepared_job(
            call.function,
            kwargs=call.arguments,
            timeout=self._timeout_s,
            # A second longer, because a job that expires before the call ends looks as if it were deleted.
            ttl=self._timeout_s + 1,
            result_ttl=KEPT_RESULT_TTL_S if made.is_kept else RESULT_TTL_S,
            failure_ttl=RESULT_TTL_S,
            description=call.function,
            meta={"producer": call.producer},
            job_id=job_id,
        )
        rq_jobs.job_queue(self._connection, self._queue).enqueue_many([job], pipeline=pipe)
        fields: dict[Any, Any] = {}
        if call.model is not None:
            fields[MODEL_FIELD] = call.model
        if is_followed:
            fields[STREAM_FIELD] = "1"
        if fields:
            pipe.hset(rq_jobs.job_key(job_id), mapping=fields)

    def _ensure_reading(self) -> None:
        """Start the task that reads results, unless it runs."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Read results until no job is awaited. Look for lost jobs every LOOK_S."""
        loop = asyncio.get_running_loop()
        looked_at = loop.time()
        while self._is_any_open():
            try:
                await self._read_once()
                now = loop.time()
                if now - looked_at >= LOOK_S:
                    looked_at = now
                    await self._look_for_lost()
            except RedisError:
                # Redis cannot be reached. The results can be read once it answers again.
                await asyncio.sleep(LOOK_S)

    def _is_any_open(self) -> bool:
        """Whether any request awaits a result that has not come."""
        requests = chain.from_iterable(self._awaited.values())
        return any(not awaited.ended.done() for awaited in requests)

    async def _read_once(self) -> None:
        """Read the new pieces and results of all awaited jobs. If there are none yet, wait for READ_MS at most."""
        # By key of a Redis stream: the id of the entry after which to read.
        positions: dict[Any, Any] = {}
        job_ids_by_text_key: dict[bytes, str] = {}
        for job_id, requests in self._awaited.items():
            open_requests = [awaited for awaited in requests if not awaited.ended.done()]
            if not open_requests:
                # The job's result has been read. It comes after all pieces, so nothing is left to read.
                continue
            last_ids = [awaited.last_id for awaited in open_requests if awaited.is_followed]
            if last_ids:
                key = text_stream_key(job_id)
                positions[key] = min(last_ids, key=_order)
                job_ids_by_text_key[key.encode()] = job_id
            positions[rq_jobs.results_key(job_id)] = b"0"

        pause_s = len(positions) * PAUSE_S_OF_KEY
        await asyncio.sleep(min(pause_s, READ_MS / 1000))
        try:
            replies: Any = await self._reader.xread(positions, count=MAX_PIECES, block=READ_MS)
        except ResponseError:
            if not await self._end_unreadable(list(positions)):
                raise
            return

        # A job writes its pieces before its result. So the pieces are handled before the results.
        for key, entries in replies:
            if key in job_ids_by_text_key:
                self._take_pieces(job_ids_by_text_key[key], entries)
        for key, entries in replies:
            if key not in job_ids_by_text_key:
                job_id = key.decode().rpartition(":")[2]
                _, result = entries[0]
                self._end(job_id, result)

    def _take_pieces(
        self, job_id: str, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]
    ) -> None:
        """Give the pieces of a job's text to the requests that follow it. entries: new entries of the job's stream."""
        followers = [awaited for awaited in self._awaited.get(job_id, ()) if awaited.is_followed]
        for entry_id, fields in entries:
            try:
                piece = TextPiece(
                    int(fields[b"sample"]),
                    fields[b"part"].decode(),
                    int(fields[b"offset"]),
                    fields[b"text"].decode(),
                )
            except (KeyError, ValueError):
                self._fail(job_id, ApiError(500, "a piece of its text cannot be read"))
                return
            for awaited in followers:
                if _order(awaited.last_id) < _order(entry_id):
                    awaited.last_id = entry_id
                    awaited.pieces.append(piece)
                    awaited.changed.set()

    async def _end_unreadable(self, keys: Sequence[str]) -> bool:
        """Fail the jobs that have a key with a value of a wrong type. Return whether there were any.

        Other programs may have written such a value. One of them makes the read for all jobs fail.
        """
        pipe = self._reader.pipeline(transaction=False)
        for key in keys:
            pipe.type(key)
        types = await pipe.execute()
        has_failed_any = False
        for key, redis_type in zip(keys, types, strict=True):
            if redis_type not in (b"none", b"stream"):
                has_failed_any = True
                job_id = key.rpartition(":")[2]
                self._fail(job_id, ApiError(500, "its key in Redis holds another kind of value"))
        return has_failed_any

    async def _look_for_lost(self) -> None:
        """Fail the awaited jobs that were cancelled or deleted, because they leave no result."""
        job_ids = list(self._awaited)
        pipe = self._reader.pipeline(transaction=False)
        for job_id in job_ids:
            pipe.hget(rq_jobs.job_key(job_id), "status")
            pipe.exists(rq_jobs.results_key(job_id))
        replies = await pipe.execute()
        raw_statuses = replies[0::2]
        have_results = replies[1::2]
        for job_id, raw_status, has_result in zip(job_ids, raw_statuses, have_results, strict=True):
            status = rq_jobs.job_status(raw_status)
            if not has_result and (status is None or status in _OVER):
                lost = ApiError(503, "the job was cancelled, or its queue was emptied: ask again")
                self._fail(job_id, lost)

    def _end(self, job_id: str, result: Mapping[bytes, bytes]) -> None:
        """Give the result of a job to the requests that await it."""
        for awaited in self._awaited.get(job_id, ()):
            if not awaited.ended.done():
                awaited.ended.set_result(result)

    def _fail(self, job_id: str, error: ApiError) -> None:
        """Raise an error in the requests that await a job."""
        for awaited in self._awaited.get(job_id, ()):
            if not awaited.ended.done():
                awaited.ended.set_exception(error)

    async def close(self) -> None:
        """Stop reading, and close the connection for reads."""
        if self._reading is not None:
            self._reading.cancel()
        await self._reader.aclose()


def _order(entry_id: bytes) -> tuple[int, int]:
    """Return the two numbers of a stream entry's id, by which the entries are sorted."""
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number or b"0")


def _value_of(result: Mapping[bytes, bytes]) -> bytes:
    """Return the value of a job as JSON. Raises ApiError if the job failed. result: the entry of its result."""
    if rq_jobs.result_type(result) is not ResultType.SUCCESSFUL:
        raise job_error(rq_jobs.error_text(result))
    value = b64decode(result.get(b"return_value") or b"")
    return value or b"null"
