"""Requests on their way into the engine: limited work before a step, urgent lanes first.

Tokenizing takes about a microsecond a character. So that no step waits for long, some short prompts are tokenized
here in each turn, and others in threads. A request whose new form may take seconds to compile is overtaken by
others of its lane.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from itertools import count
from typing import TYPE_CHECKING, Any

from engine import Completion, EngineError, InvalidRequest, RequestParams, SamplingParams, ScoringParams, request_params
from jobs.tasks import Request
from sandbox.exhausted import is_exhausted
from worker.engine_thread.orders import Add
from worker.engine_thread.pictures import decoded, has_pictures
from worker.threads.functions import FunctionPool

if TYPE_CHECKING:
    from engine import Engine, PreparedPrompt

SHORT = 2_048
"""Characters, or token ids, up to which tokenizing takes little more than handing a prompt to a thread."""
LONG = 65_536
"""Longer prompts have a thread of their own: no other one waits seconds for them."""
TURN = 65_536
"""Characters of short prompts that a turn tokenizes: more than a step computes, in some 50 ms."""
OVERHEAD = 64
"""What a prompt, or a message of a chat, takes beside its characters, in the time of as many."""
PICTURE = 8_192
"""What a picture takes to be decoded, in the same measure."""
PICTURES_AHEAD = 8
"""Requests of a lane whose pictures are prepared and that do not run yet: each may hold some hundred megabytes. The
others are the bytes of files, and the texts behind them go on."""
THREADS = 2
TURNS = 20
"""A lane that waits to be tokenized gets one turn in so many, as in the engine's scheduler."""
LEAVE_S = 1.0
"""How long a worker that leaves waits for the thread that is in the middle of a prompt."""


class _Waiting:
    """One request until it is in the engine. number: its place among all. form: its grammar's future."""

    def __init__(self, engine: Engine, add: Add, number: int) -> None:
        self.engine, self.number, self.is_dropped = engine, number, False
        self.request_id, self.request, self.lane = add.request_id, add.request, add.lane
        self.size = _size(add.request)
        has_form = any(add.request.sampling.get(name) for name in ("structured_outputs", "tool_choice"))
        self.is_prepared = self.size <= SHORT and not has_form
        self.prepared: tuple[PreparedPrompt, RequestParams] | None = None
        self.form: Future[Any] | None = None
        self.error: BaseException | None = None

    def prepare(self) -> None:
        """Prepare the request in a thread: all work that takes time with the length of the prompt."""
        if self.is_dropped:
            return
        try:
            self.prepared = _, params = prepared_request(self.engine, self.request)
            if isinstance(params, SamplingParams) and params.has_form:
                self.form = self.engine.prepare_grammar(params)
        except BaseException as error:  # noqa: BLE001  # the engine's thread looks what it is
            self.error = error.with_traceback(None)  # which would hold on to this request
        self.is_prepared = True

    @property
    def is_ready(self) -> bool:
        """Whether it can enter the engine without waiting."""
        return self.is_prepared and (self.form is None or self.form.done())


def prepared_request(engine: Engine, request: Request) -> tuple[PreparedPrompt, RequestParams]:
    """Return the prompt of a request, prepared, and its sampling. Raises InvalidRequest, or a chat template's error."""
    sampling, prompt, options = request.sampling, request.prompt, dict[str, Any]()
    if request.kind == "generate" and request.chat_options.get("tools"):
        sampling = {**sampling, "tools": request.chat_options["tools"]}
    params = request_params(request.kind, sampling)
    if params.truncate_prompt_tokens is not None:
        options["truncate_prompt_tokens"] = params.truncate_prompt_tokens
    if not isinstance(params, SamplingParams):
        options["scoring" if isinstance(params, ScoringParams) else "pooling"] = params
    if request.messages is not None:
        return engine.prepare_chat(decoded(request.messages), **request.chat_options, **options), params
    if prompt is None:
        raise InvalidRequest("the request has neither a prompt nor messages")
    return engine.prepare(decoded(prompt), **options), params


class _Preparers(FunctionPool):
    """Threads that prepare requests, those of urgent lanes first. report: called in them for each.

    A lane's requests are TURNS times as far apart as those of the lane before it (start-time fair queueing,
    Goyal et al. 1996), from where the threads are when they come.
    """

    def __init__(self, threads: int, name: str, report: Callable[[], None]) -> None:
        super().__init__(threads, name)
        self._report, self._now, self._next = report, 0, dict[int, int]()

    def submit_request(self, waiting: _Waiting) -> None:
        """Prepare it when it is its turn."""
        order = max(self._now, self._next.get(waiting.lane, 0))
        self._next[waiting.lane] = order + TURNS**waiting.lane

        def prepare() -> None:
            self._now = max(self._now, order)
            waiting.prepare()

        self.submit(prepare, lambda *_: self._report(), raises=False, order=order)


class Intake:
    """Owns the requests that wait for the engine, which takes those of a lane in order.

    All methods belong to the engine's thread. report: called in other threads when a prompt is prepared.
    """

    def __init__(self, engine: Engine, report: Callable[[], None]) -> None:
        self._engine, self._report = engine, report
        self._compiling: set[_Waiting] = set()  # which are in no lane meanwhile
        self._compiled: deque[_Waiting] = deque()  # by other threads
        self._pictured = defaultdict[int, deque[_Waiting]](deque)  # by lane; in none of those below
        self._ahead: dict[str, int] = {}  # lanes of requests with pictures, from their preparation to their start
        self._lanes: dict[int, deque[_Waiting]] = {}
        self._ids: dict[str, _Waiting] = {}
        self._faults: list[tuple[str, BaseException]] = []
        self._numbers = count()
        self._preparers = _Preparers(THREADS, "tokenmill-prompts", report)
        self._long_preparers = _Preparers(1, "tokenmill-long-prompts", report)

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return sum(map(len, (*self._lanes.values(), *self._pictured.values(), self._compiling)))

    @property
    def has_ready(self) -> bool:
        """Whether `admit` has something to do now."""
        return bool(self._compiled) or any(queue[0].is_prepared for queue in self._lanes.values())

    def put(self, add: Add) -> None:
        """Queue a request in its lane."""
        waiting = _Waiting(self._engine, add, next(self._numbers))
        self._ids[add.request_id] = waiting
        if has_pictures(add.request.prompt if add.request.messages is None else add.request.messages):
            self._pictured[add.lane].append(waiting)
            self.begun(())
        else:
            self._lanes.setdefault(add.lane, deque()).append(waiting)
            self._prepare(waiting)

    def _prepare(self, waiting: _Waiting) -> None:
        if not waiting.is_prepared:
            (self._long_preparers if waiting.size > LONG else self._preparers).submit_request(waiting)

    def begun(self, request_ids: Iterable[str]) -> None:
        """Note which requests run or have ended; have the pictures of others prepared in their place."""
        for request_id in request_ids:
            self._ahead.pop(request_id, None)
        counts = Counter(self._ahead.values())
        for lane, queue in self._pictured.items():
            for _ in range(min(len(queue), PICTURES_AHEAD - counts[lane])):
                waiting = queue.popleft()
                self._ahead[waiting.request_id] = lane
                self._put_back(waiting)
                self._prepare(waiting)

    def drop(self, request_ids: Collection[str]) -> None:
        """Forget requests; unknown ids are left alone."""
        dropped = {waiting for id_ in request_ids if (waiting := self._ids.pop(id_, None)) is not None}
        for waiting in dropped:
            waiting.is_dropped = True
        lanes = {waiting.lane for waiting in dropped}
        for lane in lanes & self._pictured.keys():
            self._pictured[lane] = deque(each for each in self._pictured[lane] if each not in dropped)
        for lane in lanes & self._lanes.keys():
            self._lanes[lane] = deque(each for each in self._lanes[lane] if each not in dropped)
            self._forget_if_empty(lane)
        self._compiling -= dropped
        self.begun(request_ids)

    def admit(self) -> list[Completion]:
        """Give the engine the requests that are ready, for one turn's work; return the refused ones.

        They enter in the order they came, also across lanes: the engine's scheduler relies on it for a lane's share.
        """
        self._take_back()
        refused: list[Completion] = []
        for waiting in sorted(self._choose(), key=lambda waiting: waiting.number):
            self._ids.pop(waiting.request_id, None)
            refused += self._add(waiting)
        self.begun([each.request_id for each in refused])
        return refused

    def _choose(self) -> Iterator[_Waiting]:
        """Take a turn's work from the lanes, urgent ones first, and at least one request from each."""
        left = TURN
        for lane in sorted(self._lanes):
            for waiting in self._ready(self._lanes[lane]):
                yield waiting
                left -= OVERHEAD if waiting.prepared else OVERHEAD + waiting.size
                if left <= 0:
                    break
            self._forget_if_empty(lane)

    def _ready(self, queue: deque[_Waiting]) -> Iterator[_Waiting]:
        """Take the first requests of a lane, up to one that is still in a thread."""
        while queue and queue[0].is_prepared:
            waiting = queue.popleft()
            if waiting.is_ready:
                yield waiting
            else:
                self._set_aside(waiting)

    def _set_aside(self, waiting: _Waiting) -> None:
        """Keep a request out of its lane until its form is compiled."""

        def tell(_: Future[Any]) -> None:
            self._compiled.append(waiting)
            self._report()

        assert waiting.form is not None
        self._compiling.add(waiting)
        waiting.form.add_done_callback(tell)

    def _take_back(self) -> None:
        """Return to their lanes, each at its place, the requests whose forms are compiled."""
        while self._compiled:
            waiting = self._compiled.popleft()
            if waiting in self._compiling:
                self._compiling.remove(waiting)
                self._put_back(waiting)

    def _put_back(self, waiting: _Waiting) -> None:
        others = self._lanes.get(waiting.lane, ())
        self._lanes[waiting.lane] = deque(sorted([waiting, *others], key=lambda each: each.number))

    def close(self) -> None:
        """Drop the waiting requests; wait briefly for the threads."""
        self.drop(list(self._ids))
        until = time.monotonic() + LEAVE_S
        for pool in (self._preparers, self._long_preparers):
            pool.close(max(0.0, until - time.monotonic()))

    def _forget_if_empty(self, lane: int) -> None:
        if not self._lanes[lane]:
            del self._lanes[lane]

    def _add(self, waiting: _Waiting) -> list[Completion]:
        request_id, request = waiting.request_id, waiting.request
        if waiting.error is not None:
            return self._refuse(request_id, waiting.error)
        try:
            prompt, params = waiting.prepared or prepared_request(self._engine, request)
            self._engine.add(
                request_id, prompt, params, lane=waiting.lane, continued=request.continued, resumed=request.resumed
            )
        except Exception as error:  # noqa: BLE001  # what a request may hold is open
            return self._refuse(request_id, error)
        return []

    def _refuse(self, request_id: str, error: BaseException) -> list[Completion]:
        if is_exhausted(error):
            self._faults.append((request_id, error))
            return []
        return [_refused(request_id, error)]

    def take_faults(self) -> list[tuple[str, BaseException]]:
        """Return new requests that this worker lacked memory, descriptors or disk to prepare."""
        faults, self._faults = self._faults, []
        return faults


def _refused(request_id: str, error: BaseException) -> Completion:
    """Return the end of a refused request; raise an error that is the engine's fault."""
    if isinstance(error, InvalidRequest):
        return Completion.refused(request_id, error)
    if isinstance(error, EngineError) or not isinstance(error, Exception):
        raise error
    return Completion.refused(request_id, InvalidRequest(f"{type(error).__name__}: {error}"))


def _size(request: Request) -> int:
    """Count characters or token ids; a chat adds its rendering, a scored prompt its continuations."""
    continuations = 0 if request.kind == "generate" else _chars(list(request.sampling.values()))
    continuations += len(request.continued) + sum(map(len, request.resumed.values()))
    if request.messages is None:
        return _chars(request.prompt or "") + continuations
    return _chars(request.messages) + _chars(request.chat_options) + continuations


def _chars(value: object) -> int:
    """Count the characters of all texts in it, however deep, token ids, and some for each object and picture."""
    size, left = 0, [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, bytes):
            size += PICTURE
        elif isinstance(each, list) and each and isinstance(each[0], int):
            size += len(each)
        elif isinstance(each, Mapping):
            size += OVERHEAD
            left += each.values()
        elif isinstance(each, list):
            left += each
    return size
