"""Which job's prompt goes to the engine next, and when a lane should claim and open more jobs."""

from collections import deque
from collections.abc import Iterator, Sequence

from jobs.tasks import Request
from worker.io_thread.held.held_jobs import HeldJob, JobState


def samples_of(request: Request) -> int:
    """Sequences that a request takes in the batch; a value the engine will refuse counts as one."""
    n = request.sampling.get("n", 1)
    return n if type(n) is int and n > 0 else 1


def _next_request(job: HeldJob) -> Request | None:
    """Advance a job's stream; None when it has ended, well or not."""
    assert job.requests is not None
    try:
        return next(job.requests)
    except StopIteration:
        job.state = JobState.SENT
    except Exception as error:  # noqa: BLE001  # one job's stream must not stop the others
        job.error = error
    return None


_BURSTS_REMEMBERED = 16
"""Refills over which the largest number of sequences that left together is kept in mind."""


class Packer:
    """Streams the prompts of claimed jobs into the engine, across jobs and lanes.

    The engine gets a little more than it can run, so that a freed slot is filled in the next step; the rest
    stays in the jobs' lazy streams, where it costs nothing. That reserve is `prefetch` sequences, or twice
    what lately left the engine from one refill to the next, where that is more: completions of equal length
    end together. It is refilled when half of it is gone. Within a lane jobs are served in the order in which
    their tasks were open. A lane counts only itself and more urgent lanes: a full bulk batch never holds back
    a high prompt. Every lane may keep `prefetch` sequences in the engine whatever the others do; its
    scheduler then gives a waiting lower lane its share.
    """

    def __init__(self, num_lanes: int, slots: int, prefetch: int, max_functions: int, max_files: int) -> None:
        """max_functions, max_files: that run, and that are opened, at the same time at most."""
        self.slots = slots
        self._floor = self._reserve = max(1, prefetch)
        self._max_functions, self._max_files = max_functions, max_files
        self._streams: list[deque[HeldJob]] = [deque() for _ in range(num_lanes)]
        self._in_engine = [0] * num_lanes
        self._opening: list[set[HeldJob]] = [set() for _ in range(num_lanes)]
        self._slow: set[HeldJob] = set()
        self._finishing: set[HeldJob] = set()
        self._functions = 0
        self._dry: list[HeldJob] = []
        self._left = 0
        self._bursts: deque[int] = deque(maxlen=_BURSTS_REMEMBERED)

    def opening(self, job: HeldJob) -> None:
        """A file is being opened: how many prompts it holds is not known yet."""
        self._opening[job.lane].add(job)

    def opens_slowly(self, job: HeldJob) -> None:
        """The lane waits for this file no longer: it may take the next one."""
        self._opening[job.lane].discard(job)
        self._slow.add(job)

    def opened(self, job: HeldJob) -> None:
        """The file is open, or could not be opened."""
        self._opening[job.lane].discard(job)
        self._slow.discard(job)

    def opening_now(self) -> list[HeldJob]:
        """The files that are being opened, but for slow ones."""
        return [job for jobs in self._opening for job in jobs]

    @property
    def num_opening(self) -> int:
        """Files that are being opened, of all lanes."""
        return len(self._slow) + sum(map(len, self._opening))

    @property
    def free_files(self) -> int:
        """How many more files the worker can open at the same time."""
        return self._max_files - self.num_opening

    def finishing(self, job: HeldJob) -> None:
        """All answers of this file are in: they are held until its part is written."""
        self._finishing.add(job)

    def finished(self, job: HeldJob) -> None:
        """The part is written, or could not be."""
        self._finishing.discard(job)

    @property
    def _is_behind(self) -> bool:
        """Whether parts are written more slowly than they are answered: as many wait as files may be opened
        at once, and one batch of requests at least. Further ones would fill the memory, and are for workers
        whose disk is faster. A file counts as one request where none of its rows needed any."""
        num_requests = sum(max(1, job.next_index) for job in self._finishing)
        return len(self._finishing) >= self._max_files and num_requests >= self.slots

    def claimable_files(self, lane: int) -> int:
        """How many files the lane may claim now: none while one opens whose size is not known.

        It may fill the batch; the next ones are for other workers to take. None either while those that were
        answered wait to be written.
        """
        return 0 if self._opening[lane] or self._is_behind else max(0, self.free_files)

    def stream(self, job: HeldJob) -> None:
        """Serve a job's requests after those of the jobs before it on its lane."""
        self._streams[job.lane].append(job)

    def stream_on(self, job: HeldJob) -> None:
        """Serve what has come to a job whose stream had ended, before the others of its lane: it is older
        than they are, and the prefixes of its requests are in the cache."""
        self._streams[job.lane].appendleft(job)

    @property
    def free_functions(self) -> int:
        """How many more functions the worker may take, of any lane: no more than begin at once."""
        return self._max_functions - self._functions

    def function_started(self, job: HeldJob) -> None:
        """A plain function takes a thread, not a slot of the engine."""
        self._functions += 1

    def function_ended(self, job: HeldJob) -> None:
        """The thread is free again."""
        self._functions -= 1

    def forget(self, job: HeldJob) -> None:
        """Drop a job's stream and what it has in the engine, because it was stopped or lost."""
        if job in self._streams[job.lane]:
            self._streams[job.lane].remove(job)
        self._in_engine[job.lane] -= job.in_engine
        job.in_engine = 0

    def delivered(self, job: HeldJob, sequences: int) -> None:
        """Sequences of a job have left the engine."""
        self._left += sequences
        self._in_engine[job.lane] -= sequences
        job.in_engine -= sequences

    def claim_room(self, lane: int) -> int:
        """How many more sequences' worth of jobs the lane should claim now.

        After a file the next one is claimed before the last row is read, when less than one batch is left:
        it takes many steps to open. Functions neither take room nor wait for it, and a file takes none before
        it is open: prompts behind it are claimed (see `claimable_files`).
        """
        unread = sum(job.unread for job in self._streams[lane])
        if unread == 0:
            return self._refill(lane)
        if unread < self.slots and self._streams[lane][-1].is_file:
            return self.slots - int(unread)
        return 0

    def _room(self, lane: int) -> int:
        return max(self._shared_room(lane), self._floor - self._in_engine[lane], 0)

    def _shared_room(self, lane: int) -> int:
        return self.slots + self._reserve - sum(self._in_engine[: lane + 1])

    def _refill(self, lane: int) -> int:
        """The lane's room, once half of the reserve, or of the lane's own places, is free."""
        if 2 * self._shared_room(lane) >= self._reserve or 2 * self._in_engine[lane] <= self._floor:
            return self._room(lane)
        return 0

    def pull(self) -> Iterator[tuple[HeldJob, int, Request]]:
        """Yield (job, index, request) to send to the engine now, the most urgent lane first.

        A job whose stream ends here is told so; it may then be complete already. Call it after
        every delivery: what was delivered since the last call is what the reserve has to bridge.
        """
        self._adapt_reserve()
        for lane, streams in enumerate(self._streams):
            while streams and self._room(lane) > 0:
                job = streams[0]
                request = _next_request(job)
                if request is None:
                    self._dry.append(streams.popleft())
                    continue
                index, wanted = job.next_index, samples_of(request)
                job.next_index += 1
                job.open_requests[index], job.samples[index] = [], wanted
                job.unscheduled.add(index)
                job.in_engine += wanted
                self._in_engine[lane] += wanted
                yield job, index, request

    def take_dry(self) -> list[HeldJob]:
        """Jobs whose streams have ended since the last call, well or not."""
        dry, self._dry = self._dry, []
        return dry

    def _adapt_reserve(self) -> None:
        if not any(self._in_engine):  # idle: what comes next may be for other workers
            self._bursts.clear()
            self._left, self._reserve = 0, self._floor
        elif self._left:
            self._bursts.append(self._left)
            self._left = 0
            self._reserve = max(self._floor, min(self.slots, 2 * max(self._bursts)))

    @property
    def in_engine(self) -> Sequence[int]:
        """Sequences in the engine, by lane."""
        return tuple(self._in_engine)


_TURN_BYTES = 1 << 20
"""Of payloads that are unpacked and parsed for a lane in one turn of the I/O thread, and one more."""


class PayloadBudget:
    """Decides when a claimed job's payload is unpacked. The I/O thread's.

    max_held_bytes: of hashes and unpacked payloads that the open jobs of a lane hold, most of them until
    all of it is in the batch; the next one waits as it came, packed, until there is room. Each lane has a
    budget of its own, so none waits for another, and opens a job whenever it has none.
    """

    def __init__(self, num_lanes: int, max_held_bytes: int) -> None:
        self._most = max_held_bytes
        self._waiting: list[deque[HeldJob]] = [deque() for _ in range(num_lanes)]
        self._held = [0] * num_lanes
        self._bytes: dict[int, int] = {}

    def add(self, job: HeldJob) -> None:
        """A job was claimed."""
        self._waiting[job.lane].append(job)

    def forget(self, job: HeldJob) -> None:
        """A job has ended, or is not this worker's any more."""
        self._held[job.lane] -= self._bytes.pop(job.number, 0)
        if job in self._waiting[job.lane]:
            self._waiting[job.lane].remove(job)

    def keep(self, job: HeldJob, num_bytes: int) -> None:
        """An open job has let go of all but so many bytes."""
        if job.number in self._bytes:
            self._count(job, num_bytes - self._bytes[job.number])

    def has_room(self, lane: int) -> bool:
        """Whether a lane may claim more jobs."""
        return not self._waiting[lane] and self._held[lane] < self._most

    @property
    def can_open(self) -> bool:
        """Whether `take` would yield a job."""
        return any(waiting and self._held[lane] < self._most for lane, waiting in enumerate(self._waiting))

    def take(self) -> Iterator[HeldJob]:
        """Yield the jobs to open now, the most urgent lane's first; each is opened before the next."""
        for lane, waiting in enumerate(self._waiting):
            opened = 0
            while waiting and opened < _TURN_BYTES and self._held[lane] < self._most:
                job = waiting.popleft()
                self._count(job, job.claimed.record.hash_bytes)
                yield job
                opened += job.payload_bytes
                if job.number in self._bytes:  # else it was let go of at once
                    self._count(job, job.payload_bytes)

    def _count(self, job: HeldJob, num_bytes: int) -> None:
        self._bytes[job.number] = self._bytes.get(job.number, 0) + num_bytes
        self._held[job.lane] += num_bytes
