"""Chooses the next job's prompt for the engine, and when a lane should claim and open more jobs."""

from collections import deque
from collections.abc import Iterator, Sequence

from jobs.tasks import Request
from worker.io_thread.held.held_jobs import HeldJob, JobState
from worker.io_thread.held.job_guard import JobGuard


def samples_of(request: Request) -> int:
    """Return a request's sequences in the batch; a value the engine will refuse counts as one."""
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

    The engine gets a little more than it can run, so that a freed slot is filled in the next step; the rest stays in
    the jobs' lazy streams. That reserve is `prefetch` sequences, or twice what lately left the engine between refills,
    since completions of equal length end together. It is refilled when half of it is gone. Within a lane jobs are
    served in the order in which their tasks were open. A lane counts only itself and more urgent lanes: a full bulk
    batch never holds back a high prompt. Every lane may keep `prefetch` sequences in the engine; its scheduler gives a
    waiting lower lane its share.
    """

    def __init__(self, num_lanes: int, slots: int, prefetch: int, max_functions: int, max_files: int) -> None:
        """max_functions, max_files: run and opened at the same time, at most."""
        self.slots = slots
        self._floor = self._reserve = max(1, prefetch)
        self._max_functions, self._max_files = max_functions, max_files
        self._streams: list[deque[HeldJob]] = [deque() for _ in range(num_lanes)]
        self._in_engine = [0] * num_lanes
        self._opening, self._finishing = set[HeldJob](), set[HeldJob]()
        self._functions = set[HeldJob]()
        self._dry: list[HeldJob] = []
        self._left = 0
        self._bursts: deque[int] = deque(maxlen=_BURSTS_REMEMBERED)

    def opening(self, job: HeldJob) -> None:
        """Note that a file of unknown size is being opened."""
        self._opening.add(job)

    def opened(self, job: HeldJob) -> None:
        """Note that the file is open, or could not be opened."""
        self._opening.discard(job)

    @property
    def free_files(self) -> int:
        """The number of files that the worker can still open at the same time."""
        return self._max_files - len(self._opening)

    def finishing(self, job: HeldJob) -> None:
        """Note that all answers of this file are held until its part is written."""
        self._finishing.add(job)

    def finished(self, job: HeldJob) -> None:
        """Note that the part is written, or could not be."""
        self._finishing.discard(job)

    @property
    def _is_behind(self) -> bool:
        """Return whether parts are written more slowly than they are answered, which would fill the memory."""
        num_requests = sum(max(1, job.next_index) for job in self._finishing)
        return len(self._finishing) >= self._max_files and num_requests >= self.slots

    def claimable_files(self, lane: int) -> int:
        """Return how many files the lane may claim: none while a file of unknown size opens, which may fill the batch.

        A slow one is not waited for. None either while answered ones wait to be written.
        """
        waits = any(job.lane == lane and not job.is_slow for job in self._opening)
        return 0 if waits or self._is_behind else max(0, self.free_files)

    def stream(self, job: HeldJob) -> None:
        """Serve a job's requests after those of the jobs before it on its lane."""
        job.count_requests()
        self._streams[job.lane].append(job)

    def stream_on(self, job: HeldJob) -> None:
        """Serve a job whose stream had ended, before the others of its lane: its prefixes are cached."""
        job.count_requests()
        self._streams[job.lane].appendleft(job)

    @property
    def free_functions(self) -> int:
        """The number of functions that the worker may still take, of any lane."""
        return self._max_functions - len(self._functions)

    def function_started(self, job: HeldJob) -> None:
        """Count a function: it takes a thread, not a slot of the engine."""
        self._functions.add(job)

    def function_ended(self, job: HeldJob) -> None:
        """Free the thread."""
        self._functions.discard(job)

    def free_places(self, job: HeldJob) -> None:
        """Free a job's room outside the engine, unless a thread still works on it."""
        if job.call is None:
            for places in (self._opening, self._finishing, self._functions):
                places.discard(job)

    def forget(self, job: HeldJob) -> None:
        """Drop a stopped or lost job's stream and its sequences in the engine."""
        if job in self._streams[job.lane]:
            self._streams[job.lane].remove(job)
        self._in_engine[job.lane] -= job.in_engine
        job.in_engine = 0

    def delivered(self, job: HeldJob, sequences: int) -> None:
        """Count sequences of a job that have left the engine."""
        self._left += sequences
        self._in_engine[job.lane] -= sequences
        job.in_engine -= sequences

    def claim_room(self, lane: int) -> int:
        """Return how many more sequences' worth of jobs the lane should claim now.

        Opening a file takes many steps, so the next one is claimed when less than one batch is left. Functions and
        unopened files take no room.
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
        """Return the lane's room, once half of the reserve, or of its own places, is free."""
        if 2 * self._shared_room(lane) >= self._reserve or 2 * self._in_engine[lane] <= self._floor:
            return self._room(lane)
        return 0

    def pull(self, guard: JobGuard) -> Iterator[tuple[HeldJob, int, Request]]:
        """Yield (job, index, request) to send to the engine now, the most urgent lane first.

        Call it after every delivery. A job whose stream ends here is told so, and may then be complete.
        """
        self._adapt_reserve()
        for lane, streams in enumerate(self._streams):
            while streams and self._room(lane) > 0:
                job, request = streams[0], None
                with guard.around(job):
                    request = self._next_of(job, lane)
                if request is not None:
                    yield job, job.next_index - 1, request
                elif streams and streams[0] is job:
                    self._dry.append(streams.popleft())

    def _next_of(self, job: HeldJob, lane: int) -> Request | None:
        """Take the next request of a job's stream, and count its sequences. None at the stream's end."""
        request = _next_request(job)
        if request is None:
            return None
        job.count_requests()
        index, wanted = job.next_index, samples_of(request)
        job.next_index += 1
        job.open_requests[index], job.samples[index] = [], wanted
        job.unscheduled.add(index)
        job.in_engine += wanted
        self._in_engine[lane] += wanted
        return request

    def take_dry(self) -> list[HeldJob]:
        """Return jobs whose streams have ended since the last call, well or not."""
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
        """The number of sequences in the engine, by lane."""
        return tuple(self._in_engine)


_TURN_BYTES = 1 << 20
"""Of payloads that are unpacked and parsed for a lane in one turn of the I/O thread, and one more."""


class PayloadBudget:
    """Decides when a claimed job's payload is unpacked. Used by the I/O thread only.

    max_held_bytes: of hashes and unpacked payloads that the open jobs of a lane hold; the next one waits, packed, for
    room. A lane without open jobs always opens one.
    """

    def __init__(self, num_lanes: int, max_held_bytes: int) -> None:
        self._most = max_held_bytes
        self._waiting: list[deque[HeldJob]] = [deque() for _ in range(num_lanes)]
        self._held = [0] * num_lanes
        self._bytes: dict[int, int] = {}

    def add(self, job: HeldJob) -> None:
        """Count a claimed job."""
        self._waiting[job.lane].append(job)

    def forget(self, job: HeldJob) -> None:
        """Drop a job that has ended or left this worker."""
        self._held[job.lane] -= self._bytes.pop(job.number, 0)
        if job in self._waiting[job.lane]:
            self._waiting[job.lane].remove(job)

    def keep(self, job: HeldJob, num_bytes: int) -> None:
        """Count only so many bytes of an open job."""
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
        """Yield the jobs to open now, the most urgent lane's first.

        The caller opens each before it takes the next, and calls `opening` and `opened` around that.
        """
        for lane, waiting in enumerate(self._waiting):
            num_bytes = 0
            while waiting and num_bytes < _TURN_BYTES and self._held[lane] < self._most:
                job = waiting.popleft()
                yield job
                num_bytes += job.payload_bytes

    def opening(self, job: HeldJob) -> None:
        """Count the size of a job's hash, before it is opened."""
        self._count(job, job.claimed.record.hash_bytes)

    def opened(self, job: HeldJob) -> None:
        """Count its unpacked payload too, unless the job was let go at once."""
        if job.number in self._bytes:
            self._count(job, job.payload_bytes)

    def _count(self, job: HeldJob, num_bytes: int) -> None:
        self._bytes[job.number] = self._bytes.get(job.number, 0) + num_bytes
        self._held[job.lane] += num_bytes
