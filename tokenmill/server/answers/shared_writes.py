"""Sends what several calls write to Redis in one transaction, as a trip there costs more than a job."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from redis import Redis
from redis.client import Pipeline
from starlette.concurrency import run_in_threadpool

#: The most calls of one transaction.
MAX_TOGETHER = 50

Write = Callable[[Pipeline], None]


@dataclass(frozen=True)
class _Waiting:
    """A call's commands, which are not sent yet. sent: ends when they are, or could not be."""

    write: Write
    sent: asyncio.Future[None]


class SharedWrites:
    """Gathers commands while earlier ones are being sent."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._waiting: list[_Waiting] = []
        self._sending: asyncio.Task[None] | None = None

    async def send(self, write: Write) -> None:
        """Send the commands that `write` gives a pipeline. Raises RedisError, and what `write` raises.

        A caller that is cancelled goes on only once they are sent, so that it can take them back.
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
                sent.exception()  # asyncio would log one that nobody has looked at
            raise

    async def _send_all(self) -> None:
        while self._waiting:
            together = self._waiting[:MAX_TOGETHER]
            del self._waiting[:MAX_TOGETHER]
            writes = [waiting.write for waiting in together]
            try:
                problems = await run_in_threadpool(self._send, writes)
            except asyncio.CancelledError:  # the server ends
                for waiting in together + self._waiting:
                    waiting.sent.cancel()
                raise
            for waiting, problem in zip(together, problems, strict=True):
                if problem is None:
                    waiting.sent.set_result(None)
                else:
                    waiting.sent.set_exception(problem)

    def _send(self, writes: list[Write]) -> list[Exception | None]:
        """Send commands; return why each call's could not be sent."""
        problems: list[Exception | None] = []
        with self._connection.pipeline() as pipe:
            for write in writes:
                try:
                    write(pipe)
                    problems.append(None)
                except Exception as problem:  # noqa: BLE001  # it costs its own call alone
                    problems.append(problem)
            try:
                pipe.execute()
            except Exception as problem:  # noqa: BLE001  # RedisError as a rule; each call has to end
                return [earlier or problem for earlier in problems]
        return problems
