"""Requests on their way into the engine: so much work before a step and no more, urgent lanes first.

Tokenizing takes about a microsecond a character. So that no step waits for a pile of prompts, or for a long
one, short prompts are tokenized here, some in each turn, and the others in threads meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from engine import (
    Completion,
    EngineError,
    InvalidRequest,
    RequestParams,
    SamplingParams,
    ScoringParams,
    request_params,
)
from worker.engine_thread.engine_like import EngineLike
from worker.engine_thread.orders import Add
from worker.engine_thread.preparer import Preparer

SHORT = 2_048
"""Characters, or token ids, up to which tokenizing takes little more than handing a prompt to a thread."""
LONG = 65_536
"""Longer prompts have a thread of their own: no other one waits seconds for them."""
TURN = 65_536
"""Characters of short prompts that a turn tokenizes: more than a step computes, in some 50 ms."""
OVERHEAD = 64
"""What a prompt, or a message of a chat, takes beside its characters, in the time of as many."""
THREADS = 2
LEAVE_S = 1.0
"""How long a worker that leaves waits for the thread that is in the middle of a prompt."""


class _Waiting:
    """One request until it is in the engine. number: its place among all that came.

    is_ready: nothing is left to do that takes long. prepared: prompt and sampling for `Engine.add`, from a
    thread. error: what preparing them raised.
    """

    __slots__ = ("add", "engine", "error", "is_ready", "lane", "number", "prepared", "size")

    def __init__(self, engine: EngineLike, add: Add, number: int) -> None:
        self.engine, self.add, self.number = engine, add, number
        self.lane, self.size = add.lane, _size(add)
        self.is_ready = self.size <= SHORT and not add.sampling.get("structured_outputs")
        self.prepared: tuple[Any, RequestParams] | None = None
        self.error: BaseException | None = None

    def read(self) -> tuple[Any, RequestParams]:
        """Prompt and sampling of the request. Raises InvalidRequest, or what a chat's template raises."""
        params = request_params(self.add.kind, self.add.sampling)
        prompt = self.add.prompt
        if self.add.messages is not None:
            options = {**self.add.chat_options, **_truncation(params)}
            prompt = self.engine.chat_token_ids(self.add.messages, **options)
        if prompt is None:
            raise InvalidRequest("the request has neither a prompt nor messages")
        return prompt, params

    def prepare(self) -> None:
        """In a thread: all that takes time with the length of the prompt."""
        try:
            prompt, params = self.read()
            if isinstance(params, SamplingParams) and params.structured_outputs is not None:
                self.engine.prepare_grammar(params)
            options: dict[str, Any] = {}
            if not isinstance(params, SamplingParams):
                options["scoring" if isinstance(params, ScoringParams) else "pooling"] = params
            self.prepared = self.engine.prepare(prompt, **_truncation(params), **options), params
        except BaseException as error:  # noqa: BLE001  # the engine's thread looks what it is
            self.error = error.with_traceback(None)  # which would hold on to this request
        self.is_ready = True


class Intake:
    """Owner of the requests that wait for the engine. Those of a lane enter it in the order they came.

    All methods belong to the engine's thread. report: called in other threads when a prompt is prepared.
    """

    def __init__(self, engine: EngineLike, report: Callable[[], None]) -> None:
        self._engine = engine
        self._lanes: dict[int, deque[_Waiting]] = {}
        self._ids: dict[str, _Waiting] = {}
        self._numbers = count()
        self._preparer = Preparer(THREADS, "tokenmill-prompts", report)
        self._long_preparer = Preparer(1, "tokenmill-long-prompts", report)

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._lanes.values()))

    @property
    def has_ready(self) -> bool:
        """Whether `admit` has something to do now."""
        return any(queue[0].is_ready for queue in self._lanes.values())

    def put(self, add: Add) -> None:
        """Queue a request in its lane."""
        waiting = _Waiting(self._engine, add, next(self._numbers))
        self._lanes.setdefault(add.lane, deque()).append(waiting)
        self._ids[add.request_id] = waiting
        if not waiting.is_ready:
            self._pool_of(waiting).submit(waiting)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests; ids that do not wait are left alone."""
        dropped = {waiting for id_ in request_ids if (waiting := self._ids.pop(id_, None)) is not None}
        for waiting in dropped:
            self._pool_of(waiting).drop(waiting)
        for lane in {waiting.lane for waiting in dropped}:
            self._lanes[lane] = deque(each for each in self._lanes[lane] if each not in dropped)
            self._forget_if_empty(lane)

    def admit(self) -> list[Completion]:
        """Give the engine what is ready, as far as a turn's work goes; return what it refused.

        Those that get in do so in the order they came, also across lanes: the engine's scheduler owes a lane
        its share of what came after it.
        """
        refused: list[Completion] = []
        for waiting in sorted(self._choose(), key=lambda waiting: waiting.number):
            self._ids.pop(waiting.add.request_id, None)
            refused += self._add(waiting)
        return refused

    def _choose(self) -> Iterator[_Waiting]:
        """Take a turn's work from the lanes, the urgent ones first, and one request at least from each."""
        left = TURN
        for lane in sorted(self._lanes):
            for waiting in _ready(self._lanes[lane]):
                yield waiting
                left -= OVERHEAD if waiting.prepared else OVERHEAD + waiting.size
                if left <= 0:
                    break
            self._forget_if_empty(lane)

    def close(self) -> None:
        """Drop what waits; wait for the threads, not long."""
        self._lanes.clear()
        self._ids.clear()
        pools = (self._preparer, self._long_preparer)
        for pool in pools:
            pool.close()
        until = time.monotonic() + LEAVE_S
        for pool in pools:
            pool.join(max(0.0, until - time.monotonic()))

    def _pool_of(self, waiting: _Waiting) -> Preparer:
        return self._long_preparer if waiting.size > LONG else self._preparer

    def _forget_if_empty(self, lane: int) -> None:
        if not self._lanes[lane]:
            del self._lanes[lane]

    def _add(self, waiting: _Waiting) -> list[Completion]:
        request_id = waiting.add.request_id
        if waiting.error is not None:
            return [_refused(request_id, waiting.error)]
        try:
            prompt, params = waiting.prepared or waiting.read()
            continued = waiting.add.continued
            self._engine.add(request_id, prompt, params, lane=waiting.lane, continued=continued)
        except Exception as error:  # noqa: BLE001  # what a request may hold is open
            return [_refused(request_id, error)]
        return []


def _ready(queue: deque[_Waiting]) -> Iterator[_Waiting]:
    """Take the first requests of a lane, up to one that a thread has not come to the end of."""
    while queue and queue[0].is_ready:
        yield queue.popleft()


def _refused(request_id: str, error: BaseException) -> Completion:
    """The end of a request for what it raised; raises that where it is the engine's fault."""
    if isinstance(error, InvalidRequest):
        return Completion.refused(request_id, error)
    if isinstance(error, EngineError) or not isinstance(error, Exception):
        raise error
    return Completion.refused(request_id, InvalidRequest(f"{type(error).__name__}: {error}"))


def _truncation(params: RequestParams) -> dict[str, Any]:
    """What preparing a prompt needs to know of its sampling values."""
    most = params.truncate_prompt_tokens
    return {} if most is None else {"truncate_prompt_tokens": most}


def _size(add: Add) -> int:
    """Characters or token ids; of a chat also what rendering it takes, and of what is scored the texts."""
    continuations = 0 if add.kind == "generate" else _chars(list(add.sampling.values()))
    if add.messages is None:
        return len(add.prompt or "") + len(add.continued) + continuations
    return _chars(add.messages) + _chars(add.chat_options) + len(add.continued) + continuations


def _chars(value: object) -> int:
    """Characters of the texts in it, however deep, and what each object takes."""
    size, left = 0, [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, Mapping):
            size += OVERHEAD
            left += each.values()
        elif isinstance(each, list):
            left += each
    return size
