"""Bounds the tokens that a project's clients have under way: of calls that they await, and of open batches.

A token is counted for each four bytes of text, as the server has no tokenizer. The tokens that may be generated are
counted too.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import IO, Any

from redis import Redis
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from jobs.common import rq_jobs, stored
from jobs.common.keys import api_tokens_key
from tokenmill.server.answers.bodies import Call
from tokenmill.server.errors import ApiError
from tokenmill.server.idempotency import Made
from tokenmill.server.projects import Project

#: How many bytes of a text count as a token.
BYTES_PER_TOKEN = 4
#: What a request without `max_tokens` may generate.
DEFAULT_MAX_TOKENS = 256
#: How long the tokens of a batch count at most. A batch that ends before is counted no longer.
BATCH_S = 30 * 24 * 3600
#: Seconds that a call counts longer than it may take, if its server dies.
SPARE_S = 60

_GENERATING = ("jobs.chat", "jobs.complete")
_MAX_NAMES = ("max_tokens", "max_completion_tokens")
_MAX_TOKENS = re.compile(
    rb'"(?:max_tokens|max_completion_tokens|max_output_tokens)"\s*:\s*(\d{1,9})'
)
_PICTURES = ("image", "image_url")
_LINE_BYTES = 8 << 20


class QueuedTokens:
    """Counts tokens in Redis, for all servers. is_open: whether a project's batch with an id has not ended."""

    def __init__(
        self,
        connection: Redis,
        is_open: Callable[[str, str], bool] = lambda project, batch_id: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._connection = connection
        self._is_open = is_open
        self._clock = clock

    @asynccontextmanager
    async def held(
        self, project: Project, made: Made, call: Call, timeout_s: int
    ) -> AsyncIterator[None]:
        """Count a call's tokens while it is awaited. Raises ApiError if the project has no room, and RedisError.

        A job that goes on when its client leaves counts until its end, too.
        """
        if project.limits.tokens_queued is None:
            yield
            return
        num_tokens = tokens_of_call(call)
        await run_in_threadpool(self.admit, project, made.id, num_tokens, timeout_s + SPARE_S)
        goes_on = False
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit, ClientDisconnect):
            goes_on = made.is_kept
            raise
        finally:
            if not goes_on:
                await asyncio.shield(run_in_threadpool(self.leave, project.name, made.id))

    def admit(self, project: Project, name: str, num_tokens: int, most_s: float) -> None:
        """Count the tokens of a call or batch from now on, for most_s seconds at most.

        Raises ApiError if the project has no room, and RedisError.
        """
        most = project.limits.tokens_queued
        if most is None:
            return
        key = api_tokens_key(project.name)
        record = f"{num_tokens} {self._clock() + most_s:.0f}"
        with self._connection.pipeline() as pipe:
            pipe.hset(key, name, record)
            pipe.expire(key, BATCH_S)
            pipe.execute()
        counted = self._counted(project.name)
        if sum(counted.values()) > most:
            counted = self._without_ended(project.name, counted, name)
        total = sum(counted.values())
        is_over = total > most
        if is_over:
            self.leave(project.name, name)
            total -= num_tokens
        project.headers["x-ratelimit-limit-tokens"] = str(most)
        project.headers["x-ratelimit-remaining-tokens"] = str(max(0, most - total))
        if num_tokens > most:
            raise ApiError(
                413,
                f"about {num_tokens} tokens are asked for, more than the {most} that project {project.name!r} may "
                "ever have under way: ask for less at once, or for fewer max_tokens",
                code="tokens_limit_exceeded",
            )
        if is_over:
            raise ApiError(
                429,
                f"about {num_tokens} tokens are asked for, and project {project.name!r} has {total} of "
                f"{most} under way: wait for some",
                code="tokens_limit_exceeded",
                headers={"retry-after": "1"},
            )

    def leave(self, project: str, name: str) -> None:
        """Count the tokens of a call or batch no longer. Raises RedisError."""
        self._connection.hdel(api_tokens_key(project), name)

    def _counted(self, project: str) -> dict[str, int]:
        """Return the tokens by what they are of, and forget those whose time is over."""
        now = self._clock()
        counted: dict[str, int] = {}
        records: Any = self._connection.hgetall(api_tokens_key(project))
        for name, record in records.items():
            num_tokens, _, end = stored.text(record).partition(" ")
            if float(end) < now:
                self.leave(project, stored.text(name))
            else:
                counted[stored.text(name)] = int(num_tokens)
        return counted

    def _without_ended(
        self, project: str, counted: Mapping[str, int], new_name: str
    ) -> dict[str, int]:
        """Return the tokens without those of calls and batches that have ended, and forget these.

        new_name: is not made yet.
        """
        open_tokens: dict[str, int] = {}
        for name, num_tokens in counted.items():
            if name != new_name and self._has_ended(project, name):
                self.leave(project, name)
            else:
                open_tokens[name] = num_tokens
        return open_tokens

    def _has_ended(self, project: str, name: str) -> bool:
        if name.startswith("batch_"):
            return not self._is_open(project, name)
        return bool(self._connection.exists(rq_jobs.results_key(name)))


def tokens_of_call(call: Call) -> int:
    """Return about how many tokens a call reads and may generate."""
    arguments = call.arguments
    num_prompt_tokens = _num_bytes(arguments) // BYTES_PER_TOKEN
    if call.function not in _GENERATING:
        return num_prompt_tokens
    prompt = arguments.get("prompt")
    is_several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    num_prompts = len(prompt) if isinstance(prompt, list) and is_several else 1
    given = [arguments[name] for name in _MAX_NAMES if isinstance(arguments.get(name), int)]
    # A worker refuses negative numbers. Until then they make no room for others.
    max_tokens = max(0, given[0]) if given else DEFAULT_MAX_TOKENS
    n = arguments.get("n")
    num_samples = max(1, n) if isinstance(n, int) else 1
    return num_prompt_tokens + num_prompts * num_samples * max_tokens


def tokens_of_batch(lines: IO[bytes], *, generates: bool) -> int:
    """Return about how many tokens the lines of a batch file read and may generate. Raises OSError, StoreError."""
    num_bytes = 0
    num_generated = 0
    while line := lines.readline(_LINE_BYTES):
        num_bytes += len(line)
        if generates and line.strip():
            found = _MAX_TOKENS.search(line)
            num_generated += int(found[1]) if found else DEFAULT_MAX_TOKENS
    return num_bytes // BYTES_PER_TOKEN + num_generated


def _num_bytes(value: object) -> int:
    """Return the bytes of the texts in a value. A picture counts nothing, a token id as a token."""
    total = 0
    values = [value]
    while values:
        part = values.pop()
        if isinstance(part, str):
            total += len(part.encode("utf-8", "replace"))
        elif isinstance(part, list):
            values += part
        elif isinstance(part, dict):
            values += [value for name, value in part.items() if name not in _PICTURES]
        elif isinstance(part, int):
            total += BYTES_PER_TOKEN
    return total
