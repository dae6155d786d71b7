"""Adapters: loads the adapters that requests name, keeps those in use, and lets the others go as room is needed."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from engine.checkpoint.adapter_folder import Adapter, AdapterFolder
from engine.errors import AdapterGone, RankFailed
from engine.run.forward.runner import Runner
from engine.schedule.prepared_prompt import ROOT
from engine.schedule.sequence import Sequence, SequenceStatus

#: The most requests that go before one that waits for a place.
MAX_OVERTAKES = 64

#: Roots of adapters begin here: no block's content has such a number.
FIRST_ROOT = 1 << 63


@dataclass
class _Request:
    """A request with its adapter.

    held: the sequences that go to the scheduler once the adapter is loaded. num_overtaken: later requests that went
    before this one.
    """

    adapter: Adapter
    seqs: list[Sequence]
    held: list[Sequence]
    num_overtaken: int = 0

    @property
    def lane(self) -> int:
        """The lane of the request: all its sequences have the same."""
        return self.seqs[0].lane

    @property
    def is_dropped(self) -> bool:
        """Whether the request was aborted meanwhile."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self.held)

    @property
    def is_finished(self) -> bool:
        """Whether no sequence needs the adapter any more."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self.seqs)

    @property
    def queued(self) -> list[Sequence]:
        """The sequences in the scheduler's queue, if the request can wait for its adapter again; else an empty list.

        It cannot while one of its sequences runs, or while a step in flight computes a token of one. A request with
        pictures cannot either.
        """
        queued = []
        for seq in self.seqs:
            is_running = seq.status in (SequenceStatus.RUNNING, SequenceStatus.ENDING)
            if is_running or seq.num_pending_tokens or seq.pictures is not None:
                return []
            if seq.status is SequenceStatus.WAITING:
                queued.append(seq)
        return queued


@dataclass
class _Place:
    """A place for one loaded adapter. users: requests that have it; last_used: orders places by use."""

    number: int
    adapter: Adapter | None = None
    users: list[_Request] = field(default_factory=list)
    last_used: int = 0

    def let_go_finished(self) -> None:
        """Forget the requests that are finished."""
        self.users = [request for request in self.users if not request.is_finished]


class Adapters:
    """Owns the places for loaded adapters. A request waits until its adapter is loaded, urgent lanes first.

    If all places are in use, the first request waits for one. MAX_OVERTAKES later ones of its lane whose adapters are
    loaded may go before it, and no more: so none waits for ever. Requests of later lanes that do not run wait again
    behind it, so the next place that comes free is its own. `find` and `root` are for any thread.
    """

    def __init__(
        self, folder: AdapterFolder, runner: Runner, most: int, hold: Callable[[Sequence], None]
    ) -> None:
        """most: adapters that are loaded at a time. hold: takes a sequence out of the scheduler's queue."""
        self.folder = folder
        self._hold = hold
        self._runner: Runner | None = runner
        self._places = [_Place(number) for number in range(most)]
        self._loaded: dict[str, _Place] = {}  # by fingerprint
        self._waiting: list[_Request] = []
        self._roots: dict[str, int] = {}
        self._numbers = count(FIRST_ROOT)
        self._uses = count(1)

    def __len__(self) -> int:
        """Return the number of requests that wait for their adapter."""
        return len(self._waiting)

    def close(self) -> None:
        """Let go of the runner, so that its memory is free. No call may follow."""
        self._runner = None

    def find(self, name: str | None) -> Adapter | None:
        """Return the adapter of a name; None for no name. Raises UnknownAdapter or AdapterRefused."""
        return None if name is None else self.folder.find(name)

    def root(self, adapter: Adapter | None) -> int:
        """Return the number that stands before the first block of a sequence with this adapter."""
        if adapter is None:
            return ROOT
        return self._roots.setdefault(adapter.fingerprint, next(self._numbers))

    def add(self, adapter: Adapter, seqs: list[Sequence]) -> None:
        """Have a request's sequences wait until their adapter is loaded."""
        held = [seq for seq in seqs if seq.status is SequenceStatus.WAITING]
        for seq in held:
            seq.status = SequenceStatus.HELD
        insort(self._waiting, _Request(adapter, seqs, held), key=lambda request: request.lane)

    def look(self) -> list[Sequence]:
        """Return sequences whose adapter is there now, or which have failed.

        One adapter at most is loaded, so that running sequences do not wait for long.
        """
        ready: list[Sequence] = []
        may_load = True
        while self._waiting:
            request = self._waiting[0]
            place = self._loaded.get(request.adapter.fingerprint)
            if place is None and not request.is_dropped:
                place = self._free_place()
                if place is None:
                    self._hold_later(request.lane)
                    place = self._free_place()
                if place is None or not may_load:
                    break
                is_loaded = self._load(place, request)
                may_load = not is_loaded
            del self._waiting[0]
            if place is not None:
                ready += self._admit(request, place)
        return ready + self._overtake()

    def _hold_later(self, lane: int) -> None:
        """Have queued requests of later lanes wait for their adapters again. Requests that run keep theirs."""
        held: list[_Request] = []
        for place in self._places:
            for request in list(place.users):
                if request.lane <= lane:
                    continue
                queued = request.queued
                if not queued:
                    continue
                for seq in queued:
                    self._hold(seq)
                place.users.remove(request)
                request.held = queued
                held.append(request)
        self._waiting = sorted(held + self._waiting, key=lambda request: request.lane)

    def _overtake(self) -> list[Sequence]:
        """Let later requests whose adapters are loaded go before the first one, which waits for a place."""
        ready: list[Sequence] = []
        if not self._waiting:
            return ready
        first = self._waiting[0]
        staying = [first]
        for request in self._waiting[1:]:
            place = self._loaded.get(request.adapter.fingerprint)
            may_overtake = request.lane == first.lane and first.num_overtaken < MAX_OVERTAKES
            if place is not None and may_overtake:
                first.num_overtaken += 1
                ready += self._admit(request, place)
            else:
                staying.append(request)
        self._waiting = staying
        return ready

    def _admit(self, request: _Request, place: _Place) -> list[Sequence]:
        """Give a request the adapter of a place, if one is loaded there; return the sequences to schedule."""
        held = [seq for seq in request.held if seq.status is SequenceStatus.HELD]
        for seq in held:
            seq.status = SequenceStatus.WAITING
        if place.adapter is not None:
            place.last_used = next(self._uses)
            place.let_go_finished()
            place.users.append(request)
            for seq in request.seqs:
                seq.adapter = place.number
        return held

    def _free_place(self) -> _Place | None:
        """Return the least recently used place of those that no request uses now; None if all are in use."""
        for place in self._places:
            place.let_go_finished()
        free = [place for place in self._places if not place.users]
        return min(free, key=lambda place: place.last_used, default=None)

    def _load(self, place: _Place, request: _Request) -> bool:
        """Load a request's adapter in place of the one before. If that fails, fail the request and return False."""
        adapter = request.adapter
        if place.adapter is not None:
            del self._loaded[place.adapter.fingerprint]
            place.adapter = None
        assert self._runner is not None, "it is closed"
        error: Exception | None = None
        try:
            self._runner.load_adapter(place.number, adapter)
        except RankFailed:
            raise
        except Exception as raised:  # noqa: BLE001 - whatever one adapter's files make it raise
            error = raised
        try:
            self.folder.find(adapter.pinned)
        except AdapterGone as gone:
            error = gone  # counts first: the files that were read are not those that were asked for
        except Exception as raised:  # noqa: BLE001 - as above
            error = error or raised
        if error is not None:
            for seq in request.held:
                seq.fail(error)
            return False
        place.adapter = adapter
        self._loaded[adapter.fingerprint] = place
        return True
