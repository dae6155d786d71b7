"""Intake: takes requests into the engine, urgent lanes first, with limited work before each step.

Tokenizing takes about a microsecond a character. So that no step waits for long, each turn tokenizes some short prompts
in the engine's thread; other threads tokenize the rest. A grammar may take seconds to compile. Meanwhile the request
that needs the grammar is overtaken by other requests of its lane.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from itertools import count
from typing import TYPE_CHECKING, Any

from engine import Completion, EngineError, InvalidRequest, RequestParams, request_params
from jobs.tasks import Request
from sandbox.exhausted import is_exhausted
from worker.engine_thread.orders import Add
from worker.engine_thread.pictures import decode_pictures, has_pictures
from worker.threads.functions import FunctionPool

if TYPE_CHECKING:
    from engine import Engine, PreparedPrompt

MAX_SHORT_CHARS = 2_048
"""The most characters, or token ids, of a short prompt. Handing one to a thread takes as long as tokenizing it."""

MAX_MEDIUM_CHARS = 65_536
"""The most characters of a prompt that is not long. Long prompts have their own thread, so that other prompts do not
wait for them."""

MAX_TURN_CHARS = 65_536
"""The most characters of short prompts that one turn tokenizes, about 50 ms of work. One step of the engine reads fewer
characters."""

OVERHEAD_CHARS = 64
"""The extra work for each prompt and each message of a chat, counted in characters."""

PICTURE_CHARS = 8_192
"""The work for decoding a picture, counted in characters."""

PICTURES_AHEAD = 8
"""The most requests of a lane that wait with decoded pictures. Each may take some hundred megabytes. Further requests
hold only the bytes of their picture files, and do not delay the prompts behind them."""

THREADS = 2
"""Threads that prepare requests which are not long. Long requests have one more thread."""

URGENT_TURNS = 20
"""While two neighbouring lanes wait, the less urgent lane gets one turn of tokenizing for 20 of the more urgent lane.
The engine's scheduler shares steps in the same way."""

LEAVE_S = 1.0
"""Seconds that a leaving worker waits for the threads that prepare requests."""


class _WaitingRequest:
    """A request that is not in the engine yet.

    number: the request's number in the order of arrival. size: the work to prepare it, counted in characters.
    awaits_thread: a thread still has to prepare it. False for a short request, which the engine's thread prepares.
    grammar: the future of the request's grammar, set when a thread prepares the request; None without a grammar.
    """

    def __init__(self, engine: Engine, add: Add, number: int) -> None:
        self.engine = engine
        self.number = number
        self.is_dropped = False
        self.request_id = add.request_id
        self.request = add.request
        self.lane = add.lane
        self.size = _size(add.request)
        sampling = add.request.sampling
        has_grammar = bool(sampling.get("structured_outputs") or sampling.get("tool_choice"))
        has_adapter = sampling.get("adapter") is not None
        # Compiling a grammar may take long. The first request with an adapter reads the adapter's files, which may
        # take long too.
        self.awaits_thread = self.size > MAX_SHORT_CHARS or has_grammar or has_adapter
        self.prepared: tuple[PreparedPrompt, RequestParams] | None = None
        self.grammar: Future[Any] | None = None
        self.error: BaseException | None = None

    def prepare(self) -> None:
        """Do all work that grows with the length of the prompt. Called in a thread."""
        if self.is_dropped:
            return
        try:
            prompt, params = prepared_request(self.engine, self.request)
            self.prepared = prompt, params
            self.grammar = self.engine.prepare_grammar(params)
        except BaseException as error:  # noqa: BLE001  # the engine's thread looks at the error's type
            self.error = error.with_traceback(None)  # a traceback would keep this request in memory
        self.awaits_thread = False

    @property
    def is_ready(self) -> bool:
        """Whether the request can enter the engine without waiting."""
        has_compiled = self.grammar is None or self.grammar.done()
        return has_compiled and not self.awaits_thread


def prepared_request(engine: Engine, request: Request) -> tuple[PreparedPrompt, RequestParams]:
    """Return a request's prepared prompt and its parameters. Raises InvalidRequest, or any error of a chat template."""
    chat_options = request.chat_options
    params = request_params(request.kind, request.sampling, tools=chat_options.get("tools"))
    if request.messages is not None:
        messages = decode_pictures(request.messages)
        return engine.prepare_chat(messages, params, **chat_options), params
    if request.prompt is None:
        raise InvalidRequest("the request has neither a prompt nor messages")
    prompt = request.prompt
    if not isinstance(prompt, str):
        prompt = decode_pictures(prompt)
    return engine.prepare(prompt, params), params


class _Preparers(FunctionPool):
    """Threads that prepare requests, urgent lanes first. report: called in a thread after each request.

    Each request gets a virtual start time, and a thread takes the request that starts first. Within a lane, a request
    starts URGENT_TURNS ** lane later than the request before it. This is start-time fair queueing (Goyal et al. 1996).
    """

    def __init__(self, threads: int, name: str, report: Callable[[], None]) -> None:
        super().__init__(threads, name)
        self._report = report
        # The latest start time of a request that has begun.
        self._virtual_time = 0
        # By lane: the earliest start time that the lane's next request may get.
        self._next_start = dict[int, int]()

    def submit_request(self, waiting: _WaitingRequest) -> None:
        """Queue a request, to be prepared in a thread."""
        # A lane that was empty for a while starts at the present virtual time. It gets no extra turns for that while.
        start = max(self._virtual_time, self._next_start.get(waiting.lane, 0))
        self._next_start[waiting.lane] = start + URGENT_TURNS**waiting.lane

        def prepare() -> None:
            """Note that the request has begun, and prepare it. Called in a thread."""
            self._virtual_time = max(self._virtual_time, start)
            waiting.prepare()

        self.submit(prepare, lambda *_: self._report(), is_interruptible=False, order=start)


class Intake:
    """Owns the requests that wait for the engine. Requests of the same lane enter the engine in order.

    A lane is the rank of a queue; 0 is the most urgent. All methods belong to the engine's thread.
    report: called in other threads when a prompt is prepared.
    """

    def __init__(self, engine: Engine, report: Callable[[], None]) -> None:
        self._engine = engine
        self._report = report
        # Requests whose grammars are being compiled. They are in no lane.
        self._compiling: set[_WaitingRequest] = set()
        # Requests whose grammars are ready. Other threads append to this queue.
        self._compiled: deque[_WaitingRequest] = deque()
        # Requests with undecoded pictures, by lane.
        self._pictured = defaultdict[int, deque[_WaitingRequest]](deque)
        # By request id: the lane of each request whose pictures were given to a thread, until the request runs.
        self._decoded: dict[str, int] = {}
        # All other waiting requests, by lane. A lane without requests is left out.
        self._lanes: dict[int, deque[_WaitingRequest]] = {}
        # All requests above, by their ids.
        self._by_id: dict[str, _WaitingRequest] = {}

        self._faults: list[tuple[str, BaseException]] = []
        self._arrival_numbers = count()
        self._preparers = _Preparers(THREADS, "tokenmill-prompts", report)
        self._long_preparers = _Preparers(1, "tokenmill-long-prompts", report)

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        num_waiting = len(self._compiling)
        for queue in (*self._lanes.values(), *self._pictured.values()):
            num_waiting += len(queue)
        return num_waiting

    @property
    def has_ready(self) -> bool:
        """Whether `admit` has something to do now."""
        if self._compiled:
            return True
        return any(not queue[0].awaits_thread for queue in self._lanes.values())

    def put(self, add: Add) -> None:
        """Queue a request in its lane."""
        waiting = _WaitingRequest(self._engine, add, next(self._arrival_numbers))
        self._by_id[add.request_id] = waiting
        request = add.request
        is_text = isinstance(request.prompt, str)
        if not is_text and (has_pictures(request.messages) or has_pictures(request.prompt)):
            self._pictured[add.lane].append(waiting)
            self._prepare_pictured()
        else:
            self._lanes.setdefault(add.lane, deque()).append(waiting)
            self._prepare(waiting)

    def _prepare(self, waiting: _WaitingRequest) -> None:
        """Have a thread prepare a request. A short request is left to the engine's thread."""
        if not waiting.awaits_thread:
            return
        preparers = self._long_preparers if waiting.size > MAX_MEDIUM_CHARS else self._preparers
        preparers.submit_request(waiting)

    def note_begun_or_ended(self, request_ids: Iterable[str]) -> None:
        """Note which requests run or have ended. Then the next requests with pictures can be prepared."""
        for request_id in request_ids:
            self._decoded.pop(request_id, None)
        self._prepare_pictured()

    def _prepare_pictured(self) -> None:
        """Prepare the next requests with pictures, up to PICTURES_AHEAD for each lane."""
        num_decoded = Counter(self._decoded.values())  # by lane
        for lane, queue in self._pictured.items():
            while queue and num_decoded[lane] < PICTURES_AHEAD:
                num_decoded[lane] += 1
                waiting = queue.popleft()
                self._decoded[waiting.request_id] = lane
                self._put_in_lane(waiting)
                self._prepare(waiting)

    def drop(self, request_ids: Collection[str]) -> None:
        """Forget requests. Unknown ids are ignored."""
        dropped = set()
        for request_id in request_ids:
            waiting = self._by_id.pop(request_id, None)
            if waiting is not None:
                waiting.is_dropped = True
                dropped.add(waiting)

        lanes = {waiting.lane for waiting in dropped}
        for lane in lanes & self._pictured.keys():
            self._pictured[lane] = _without(self._pictured[lane], dropped)
        for lane in lanes & self._lanes.keys():
            self._lanes[lane] = _without(self._lanes[lane], dropped)
            self._forget_if_empty(lane)
        self._compiling -= dropped
        # Dropped requests have ended too, and make room for further requests with pictures.
        self.note_begun_or_ended(request_ids)

    def admit(self) -> list[Completion]:
        """Give the engine the requests that are ready, up to one turn's work.

        Returns the completions of the requests that the engine refuses.
        Requests enter the engine in the order in which they came, also across lanes. The engine's scheduler needs this
        order to give each lane its share.
        """
        self._take_back()
        refused: list[Completion] = []
        for waiting in sorted(self._choose(), key=lambda waiting: waiting.number):
            self._by_id.pop(waiting.request_id, None)
            refused += self._add(waiting)
        self.note_begun_or_ended([completion.request_id for completion in refused])
        return refused

    def _choose(self) -> Iterator[_WaitingRequest]:
        """Yield the requests that enter the engine in this turn, urgent lanes first.

        Every lane with a ready request yields at least one.
        """
        work_left = MAX_TURN_CHARS
        for lane in sorted(self._lanes):
            for waiting in self._ready(self._lanes[lane]):
                yield waiting
                work_left -= OVERHEAD_CHARS
                if waiting.prepared is None:
                    work_left -= waiting.size
                if work_left <= 0:
                    break  # the next lanes still yield one request each
            self._forget_if_empty(lane)

    def _ready(self, queue: deque[_WaitingRequest]) -> Iterator[_WaitingRequest]:
        """Take and yield the first requests of a lane, up to a request that a thread still prepares."""
        while queue and not queue[0].awaits_thread:
            waiting = queue.popleft()
            if waiting.is_ready:
                yield waiting
            else:
                self._set_aside(waiting)

    def _set_aside(self, waiting: _WaitingRequest) -> None:
        """Keep a request out of its lane until its grammar is compiled."""

        def note_compiled(_: Future[Any]) -> None:
            """Tell the engine's thread to put the request back into its lane. Called in another thread."""
            self._compiled.append(waiting)
            self._report()

        assert waiting.grammar is not None
        self._compiling.add(waiting)
        waiting.grammar.add_done_callback(note_compiled)

    def _take_back(self) -> None:
        """Put the requests whose grammars are ready back into their lanes."""
        while self._compiled:
            waiting = self._compiled.popleft()
            if waiting in self._compiling:
                self._compiling.remove(waiting)
                self._put_in_lane(waiting)

    def _put_in_lane(self, waiting: _WaitingRequest) -> None:
        """Put a request into its lane, where requests stand in the order of arrival."""
        requests = [waiting, *self._lanes.get(waiting.lane, ())]
        requests.sort(key=lambda request: request.number)
        self._lanes[waiting.lane] = deque(requests)

    def close(self) -> None:
        """Drop the waiting requests, and wait briefly for the threads."""
        self.drop(list(self._by_id))
        until = time.monotonic() + LEAVE_S
        for pool in (self._preparers, self._long_preparers):
            pool.close(max(0.0, until - time.monotonic()))

    def _forget_if_empty(self, lane: int) -> None:
        """Forget a lane if nothing waits in it any more."""
        if not self._lanes[lane]:
            del self._lanes[lane]

    def _add(self, waiting: _WaitingRequest) -> list[Completion]:
        """Give the engine a request. Returns the completion of a refused request; otherwise the list is empty."""
        request_id = waiting.request_id
        request = waiting.request
        if waiting.error is not None:
            return self._refuse(request_id, waiting.error)

        try:
            if waiting.prepared is None:  # no thread has prepared the request, because it is short
                waiting.prepared = prepared_request(self._engine, request)
            prompt, params = waiting.prepared
            self._engine.add(
                request_id,
                prompt,
                params,
                lane=waiting.lane,
                continued=request.continued,
                resumed=request.resumed,
            )
        except Exception as error:  # noqa: BLE001  # a request may hold anything
            return self._refuse(request_id, error)
        return []

    def _refuse(self, request_id: str, error: BaseException) -> list[Completion]:
        """Return the completion of a refused request. If this worker is at fault, note the fault and return nothing."""
        if is_exhausted(error):
            self._faults.append((request_id, error))
            return []
        return [_refused_completion(request_id, error)]

    def take_faults(self) -> list[tuple[str, BaseException]]:
        """Return the requests that this worker could not prepare for lack of memory, descriptors or disk.

        Each request is returned once, as its id and the error.
        """
        faults = self._faults
        self._faults = []
        return faults


def _without(
    queue: deque[_WaitingRequest], dropped: Collection[_WaitingRequest]
) -> deque[_WaitingRequest]:
    """Return the requests of a queue that are not dropped."""
    return deque(waiting for waiting in queue if waiting not in dropped)


def _refused_completion(request_id: str, error: BaseException) -> Completion:
    """Return the completion of a refused request. Raises `error` if the engine is at fault."""
    if isinstance(error, InvalidRequest):
        return Completion.refused(request_id, error)
    if isinstance(error, EngineError) or not isinstance(error, Exception):
        raise error
    return Completion.refused(request_id, InvalidRequest(f"{type(error).__name__}: {error}"))


def _size(request: Request) -> int:
    """Return the work for a request, counted in characters or token ids.

    Sampling values, a chat's options and the tokens of an unfinished answer count too, because they may be many.
    """
    size = len(request.continued)
    for token_ids in request.resumed.values():
        size += len(token_ids)
    for value in request.sampling.values():
        size += _chars(value)
    if request.messages is None:
        return size + _chars(request.prompt or "")
    return size + _chars(request.messages) + _chars(request.chat_options)


def _chars(value: object) -> int:
    """Count the characters and token ids in a value, at any depth.

    A picture counts as PICTURE_CHARS characters. An object, such as a message, counts as OVERHEAD_CHARS characters and
    its values.
    """
    size = 0
    uncounted = [value]
    while uncounted:
        item = uncounted.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, bytes):  # the file of a picture
            size += PICTURE_CHARS
        elif isinstance(item, Mapping):
            size += OVERHEAD_CHARS
            uncounted += item.values()
        elif isinstance(item, list):
            holds_token_ids = bool(item) and isinstance(item[0], int)
            if holds_token_ids:
                size += len(item)
            else:
                uncounted += item
    return size
