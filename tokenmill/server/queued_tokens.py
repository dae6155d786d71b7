"""Bounds the tokens that a project has under way, in its unanswered calls and its open batches.

The tokens of prompts are counted, and the tokens that may be generated. The server has no tokenizer: it counts a token
for every four bytes of text.
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
#: How many generated tokens are counted for a request without `max_tokens`.
DEFAULT_MAX_TOKENS = 256
#: The most seconds for which the tokens of a batch are counted. They are counted until the batch ends.
BATCH_S = 30 * 24 * 3600
#: If the server dies, the tokens of its calls are counted for this many seconds beyond the calls' time limit.
SPARE_S = 60

_GENERATING = ("jobs.chat", "jobs.complete")
_MAX_NAMES = ("max_tokens", "max_completion_tokens")
_MAX_TOKENS = re.compile(
    rb'"(?:max_tokens|max_completion_tokens|max_output_tokens)"\s*:\s*(\d{1,9})'
)
_PICTURES = ("image", "image_url")
_LINE_BYTES = 8 << 20


class QueuedTokens:
    """Counts tokens in Redis, for all servers.

    is_open: a function that says whether a batch has not ended. It gets a project's name and the batch's id.
    clock: Unix seconds.
    """

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
        """A context manager that counts a call's tokens during its block. made: the call's job.

        If the client leaves and the job goes on, the tokens are counted until the job's end. Raises RedisError, and
        ApiError if the call would exceed the project's limit.
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
        """Count the tokens of a call or batch from now on, until `leave`, and for `most_s` seconds at most.

        name: the id of the call or batch. Raises RedisError, and ApiError if this would exceed the project's limit.
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
        tokens_by_name = self._tokens_by_name(project.name)
        if sum(tokens_by_name.values()) > most:
            tokens_by_name = self._without_ended(project.name, tokens_by_name, name)
        total = sum(tokens_by_name.values())
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
        """Stop counting the tokens of a call or batch. Raises RedisError."""
        self._connection.hdel(api_tokens_key(project), name)

    def _tokens_by_name(self, project: str) -> dict[str, int]:
        """Return a project's counted tokens by the id of their call or batch. Remove expired counts."""
        now = self._clock()
        tokens_by_name: dict[str, int] = {}
        records: Any = self._connection.hgetall(api_tokens_key(project))
        for raw_name, record in records.items():
            name = stored.text(raw_name)
            num_tokens, _, expires_at = stored.text(record).partition(" ")
            if float(expires_at) < now:
                self.leave(project, name)
            else:
                tokens_by_name[name] = int(num_tokens)
        return tokens_by_name

    def _without_ended(
        self, project: str, tokens_by_name: Mapping[str, int], new_name: str
    ) -> dict[str, int]:
        """Return the tokens of calls and batches that have not ended, and remove all others.

        new_name: the call or batch that is being admitted. It does not exist yet, so it cannot be looked up.
        """
        open_tokens: dict[str, int] = {}
        for name, num_tokens in tokens_by_name.items():
            if name != new_name and self._has_ended(project, name):
                self.leave(project, name)
            else:
                open_tokens[name] = num_tokens
        return open_tokens

    def _has_ended(self, project: str, name: str) -> bool:
        """Whether a call or batch has ended."""
        if name.startswith("batch_"):
            return not self._is_open(project, name)
        return bool(self._connection.exists(rq_jobs.results_key(name)))


def tokens_of_call(call: Call) -> int:
    """Return about how many tokens the prompts of a call have, plus the most tokens that it may generate."""
    arguments = call.arguments
    num_prompt_tokens = _num_bytes(arguments) // BYTES_PER_TOKEN
    if call.function not in _GENERATING:
        return num_prompt_tokens

    num_prompts = 1
    prompt = arguments.get("prompt")
    # A list of numbers is one prompt of token ids.
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        num_prompts = len(prompt)

    # A worker refuses negative numbers later. Until then they must not make room for other calls.
    num_samples = 1
    n = arguments.get("n")
    if isinstance(n, int):
        num_samples = max(1, n)
    max_tokens = DEFAULT_MAX_TOKENS
    for name in _MAX_NAMES:
        value = arguments.get(name)
        if isinstance(value, int):
            max_tokens = max(0, value)
            break
    return num_prompt_tokens + num_prompts * num_samples * max_tokens


def tokens_of_batch(lines: IO[bytes], *, generates: bool) -> int:
    """Return about how many tokens the lines of a batch file have, plus the most tokens that they may generate.

    generates: whether the lines' endpoint generates text. Raises OSError and StoreError.
    """
    num_bytes = 0
    num_generated = 0
    while line := lines.readline(_LINE_BYTES):
        num_bytes += len(line)
        if generates and line.strip():
            match = _MAX_TOKENS.search(line)
            num_generated += int(match[1]) if match else DEFAULT_MAX_TOKENS
    return num_bytes // BYTES_PER_TOKEN + num_generated


def _num_bytes(value: object) -> int:
    """Return how many bytes the texts in a value have. A token id counts as BYTES_PER_TOKEN, a picture as nothing."""
    total = 0
    values = [value]
    while values:
        part = values.pop()
        if isinstance(part, str):
            total += len(part.encode("utf-8", "replace"))
        elif isinstance(part, list):
            values += part
        elif isinstance(part, dict):
            values += [field for name, field in part.items() if name not in _PICTURES]
        elif isinstance(part, int):
            total += BYTES_PER_TOKEN
    return total
