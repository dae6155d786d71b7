"""Sends the writes of several calls to Redis in one transaction, because a round trip costs more than a job."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from redis import Redis
from redis.client import Pipeline
from starlette.concurrency import run_in_threadpool

#: The most calls whose writes are sent in one transaction.
MAX_TOGETHER = 50

#: A function that adds commands to a pipeline.
Write = Callable[[Pipeline], None]


@dataclass(frozen=True)
class _Waiting:
    """A write that was not sent yet. sent: a future that ends when the write was sent or has failed."""

    write: Write
    sent: asyncio.Future[None]


class SharedWrites:
    """Collects writes while earlier ones are being sent, and then sends them together."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._waiting: list[_Waiting] = []
        self._sending: asyncio.Task[None] | None = None

    async def send(self, write: Write) -> None:
        """Send the commands that `write` adds to a pipeline. Raises RedisError, and what `write` raises.

        If the caller is cancelled, CancelledError is raised only after the commands were sent. So the caller can undo
        them.
        """
        sent = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(write, sent))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())
        try:
            await asyncio.shield(sent)
        except asyncio.CancelledError:
            await asyncio.wait({sent})
            if not sent.cancelled():
                sent.exception()  # read it, because asyncio logs an exception that nobody reads
            raise

    async def _send_all(self) -> None:
        """Send the waiting writes, MAX_TOGETHER at a time, until none waits."""
        while self._waiting:
            batch = self._waiting[:MAX_TOGETHER]
            del self._waiting[:MAX_TOGETHER]
            writes = [waiting.write for waiting in batch]
            try:
                errors = await run_in_threadpool(self._send, writes)
            except asyncio.CancelledError:  # the server ends
                for waiting in batch + self._waiting:
                    waiting.sent.cancel()
                raise
            for waiting, error in zip(batch, errors, strict=True):
                if error is None:
                    waiting.sent.set_result(None)
                else:
                    waiting.sent.set_exception(error)

    def _send(self, writes: list[Write]) -> list[Exception | None]:
        """Send writes. Return for each write why it failed, or None."""
        errors: list[Exception | None] = []
        with self._connection.pipeline() as pipe:
            for write in writes:
                try:
                    write(pipe)
                    errors.append(None)
                except Exception as error:  # noqa: BLE001  # only this write fails
                    errors.append(error)
            try:
                pipe.execute()
            except Exception as error:  # noqa: BLE001  # mostly RedisError; every write has to end
                return [earlier_error or error for earlier_error in errors]
        return errors
