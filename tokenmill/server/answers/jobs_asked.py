"""Puts jobs on the queue of prompts, and waits for their results."""

import asyncio
import json
import logging
from base64 import b64decode
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
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

#: How long a result is kept for the server to read it.
RESULT_TTL_S = 300
#: How long one is kept for further requests with the same Idempotency-Key.
KEPT_RESULT_TTL_S = KEPT_S + RESULT_TTL_S
#: How long a read of results waits for one. Jobs that are enqueued meanwhile join the next read.
READ_MS = 20
#: A read of many keys costs Redis and this process much, so it waits until more has come of them.
PAUSE_S_OF_KEY = 10e-6
#: The most pieces of a text that are read at once.
MAX_PIECES = 1000
#: Seconds between two looks at whether the awaited jobs are still there.
LOOK_S = 1.0
#: The statuses of jobs that end without a result.
_OVER = (JobStatus.CANCELED, JobStatus.STOPPED)


class TextPiece(NamedTuple):
    """A piece of a sample's text; see worker.store.records.text_piece."""

    sample: int
    part: str
    offset: int
    text: str

    def follows(self, other: "TextPiece") -> bool:
        """Whether the text goes on where another piece ends."""
        is_same = (self.sample, self.part) == (other.sample, other.part)
        return is_same and self.offset == other.offset + len(other.text)


@dataclass(eq=False)
class _Awaited:
    """A request that awaits the answer of a job. Requests with one Idempotency-Key await the same job.

    ended: gets the entry of its result. is_followed: whether its text is read as it grows. pieces: the pieces that were
    read and not taken yet. last_id: the id of the last piece that was read. changed: set when a piece or the result
    comes.
    """

    ended: asyncio.Future[Mapping[bytes, bytes]]
    is_followed: bool = False
    pieces: list[TextPiece] = field(default_factory=list)
    last_id: bytes = b"0"
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take_pieces(self) -> list[TextPiece]:
        """Return the pieces that wait. Those that follow each other are one: a client that is behind gets fewer."""
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
    """The jobs of this server that are not answered yet. timeout_s: how long a job may wait and run."""

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
        """Enqueue a job and return its value, as JSON.

        Raises ApiError for a job that fails or is cancelled, and RedisError. A job whose caller is cancelled is
        cancelled too, unless it is kept for a later request.
        """
        async with self._enqueued(made, call) as awaited:
            await asyncio.wait({awaited.ended}, timeout=self._timeout_s)
            return _value_of(self._result_of(awaited))

    async def whole(self, made: Made, call: Call) -> AsyncGenerator[TextPiece | bytes, None]:
        """Enqueue a job; yield its value, as JSON. Raises as `ask`."""
        yield await self.ask(made, call)

    async def follow(self, made: Made, call: Call) -> AsyncGenerator[TextPiece | bytes, None]:
        """Enqueue a job; yield pieces of its text as they come, then its value, as JSON. Raises as `ask`."""
        end_by = asyncio.get_running_loop().time() + self._timeout_s
        async with self._enqueued(made, call, is_followed=True) as awaited:
            while not awaited.ended.done() or awaited.pieces:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(end_by):
                        await awaited.changed.wait()
                awaited.changed.clear()
                for piece in awaited.take_pieces():
                    yield piece
                if asyncio.get_running_loop().time() >= end_by:
                    break
            yield _value_of(self._result_of(awaited))

    def _result_of(self, awaited: _Awaited) -> Mapping[bytes, bytes]:
        """Return the entry of a job's result. Raises ApiError if there is none yet, or what reading it raised."""
        if not awaited.ended.done():
            raise ApiError(
                504, f"no answer within {self._timeout_s} s: ask for less, or raise --timeout"
            )
        return awaited.ended.result()

    @asynccontextmanager
    async def _enqueued(
        self, made: Made, call: Call, *, is_followed: bool = False
    ) -> AsyncIterator[_Awaited]:
        """Enqueue a job, and cancel it if the block ends before the job does.

        A job that is kept goes on when its client leaves. If it is in Redis already, it is only awaited.
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
            # Only now, because an awaited job that is not in Redis counts as lost.
            self._awaited.setdefault(made.id, []).append(awaited)
            self._read_on()
            yield awaited
        except (asyncio.CancelledError, GeneratorExit):
            goes_on = made.is_kept
            raise
        finally:
            self._leave(made.id, awaited)
            awaited.ended.cancel()  # changes nothing if the job has ended
            is_open = awaited.ended.cancelled() or awaited.ended.exception() is not None
            if is_open and not goes_on:
                await asyncio.shield(run_in_threadpool(self._cancel, made.id))

    def _leave(self, job_id: str, awaited: _Awaited) -> None:
        """Await a job no longer."""
        others = [other for other in self._awaited.get(job_id, ()) if other is not awaited]
        if others:
            self._awaited[job_id] = others
        else:
            self._awaited.pop(job_id, None)

    def _cancel(self, job_id: str) -> None:
        try:
            cancel_job(self._connection, job_id)
        except RedisError as error:  # the job ends by its own time limit
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
        """Write the job and its fields in one transaction, so that no worker of another model takes it."""
        job_id = made.id
        job = rq_jobs.prepared_job(
            call.function,
            kwargs=call.arguments,
            timeout=self._timeout_s,
            ttl=self._timeout_s
            + 1,  # a job that expires before the call looks as if it were deleted
            result_ttl=KEPT_RESULT_TTL_S if made.is_kept else RESULT_TTL_S,
            failure_ttl=RESULT_TTL_S,
            description=call.function,
            meta={"producer": call.producer},
            job_id=job_id,
        )
        fields: dict[Any, Any] = {} if call.model is None else {MODEL_FIELD: call.model}
        if is_followed:
            fields[STREAM_FIELD] = "1"
        rq_jobs.job_queue(self._connection, self._queue).enqueue_many([job], pipeline=pipe)
        if fields:
            pipe.hset(rq_jobs.job_key(job_id), mapping=fields)

    def _read_on(self) -> None:
        """Start the reading of results, unless it goes on."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        looked_at = asyncio.get_running_loop().time()
        while self._has_open:
            try:
                await self._read_once()
                now = asyncio.get_running_loop().time()
                if now - looked_at >= LOOK_S:
                    looked_at = now
                    await self._look_for_lost()
            except RedisError:
                await asyncio.sleep(LOOK_S)  # the server is away; results wait there

    @property
    def _has_open(self) -> bool:
        """Whether a result is awaited that has not come."""
        return any(
            not awaited.ended.done() for requests in self._awaited.values() for awaited in requests
        )

    async def _read_once(self) -> None:
        """Read the results and pieces of all awaited jobs. If there are none, wait shortly for the first."""
        positions: dict[Any, Any] = {}
        job_of: dict[bytes, str] = {}
        for job_id, requests in self._awaited.items():
            waiting = [awaited for awaited in requests if not awaited.ended.done()]
            if not waiting:
                continue  # its pieces came before its result, or are in it
            last_ids = [awaited.last_id for awaited in waiting if awaited.is_followed]
            if last_ids:
                key = text_stream_key(job_id)
                positions[key] = min(last_ids, key=_order)
                job_of[key.encode()] = job_id
            positions[rq_jobs.results_key(job_id)] = b"0"
        await asyncio.sleep(min(len(positions) * PAUSE_S_OF_KEY, READ_MS / 1000))
        try:
            replies: Any = await self._reader.xread(positions, count=MAX_PIECES, block=READ_MS)
        except ResponseError:
            if not await self._end_unreadable(list(positions)):
                raise
            return
        for key, entries in replies:
            if key in job_of:
                self._take_pieces(job_of[key], entries)
        # A result comes after the pieces that were written before it.
        for key, entries in replies:
            if key not in job_of:
                self._end(key.decode().rpartition(":")[2], entries[0][1])

    def _take_pieces(
        self, job_id: str, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]
    ) -> None:
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
                self._end_with(job_id, ApiError(500, "a piece of its text cannot be read"))
                return
            for awaited in followers:
                if _order(awaited.last_id) < _order(entry_id):
                    awaited.last_id = entry_id
                    awaited.pieces.append(piece)
                    awaited.changed.set()

    async def _end_unreadable(self, keys: Sequence[str]) -> bool:
        """End the jobs with a key that holds no stream; return whether there was one.

        Other programs may write such a key, and one read is made for all jobs.
        """
        pipe = self._reader.pipeline(transaction=False)
        for key in keys:
            pipe.type(key)
        kinds = await pipe.execute()
        unreadable = [
            key for key, kind in zip(keys, kinds, strict=True) if kind not in (b"none", b"stream")
        ]
        for key in unreadable:
            job_id = key.rpartition(":")[2]
            self._end_with(job_id, ApiError(500, "its key in Redis holds another kind of value"))
        return bool(unreadable)

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
            if not has_result and (status is None or status in _OVER):
                lost = ApiError(503, "the job was cancelled, or its queue was emptied: ask again")
                self._end_with(job_id, lost)

    def _end(self, job_id: str, entry: Mapping[bytes, bytes]) -> None:
        for awaited in self._awaited.get(job_id, ()):
            if not awaited.ended.done():
                awaited.ended.set_result(entry)

    def _end_with(self, job_id: str, error: ApiError) -> None:
        for awaited in self._awaited.get(job_id, ()):
            if not awaited.ended.done():
                awaited.ended.set_exception(error)

    async def close(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()
        await self._reader.aclose()


def _order(entry_id: bytes) -> tuple[int, int]:
    """Return the two numbers by which a stream's entries are in order."""
    moment, _, number = entry_id.partition(b"-")
    return int(moment), int(number or b"0")


def _value_of(entry: Mapping[bytes, bytes]) -> bytes:
    """Return the JSON that a job returned. Raises ApiError if it failed."""
    if rq_jobs.result_type(entry) is not ResultType.SUCCESSFUL:
        raise job_error(rq_jobs.error_text(entry))
    return b64decode(entry.get(b"return_value") or b"") or json.dumps(None).encode()
