"""Chooses the next prompts for the engine, and decides when a lane claims and opens more jobs."""

from collections import deque
from collections.abc import Iterator, Sequence

from jobs.tasks import Request
from worker.io_thread.held.held_jobs import HeldJob, JobState
from worker.io_thread.held.job_guard import JobGuard


def samples_of(request: Request) -> int:
    """Return a request's number of sequences. A value that the engine will refuse counts as one."""
    n = request.sampling.get("n", 1)
    return n if type(n) is int and n > 0 else 1


def _next_request(job: HeldJob) -> Request | None:
    """Return the next request of a job's stream. If the stream has ended or raised, note that and return None."""
    assert job.requests is not None
    try:
        return next(job.requests)
    except StopIteration:
        job.state = JobState.SENT
    except Exception as error:  # noqa: BLE001  # one job's stream must not stop other jobs
        job.error = error
    return None


_REFILLS_REMEMBERED = 16
"""The number of refills for which the packer remembers how many sequences had left the engine."""


class Packer:
    """Streams the prompts of claimed jobs into the engine, across jobs and lanes.

    The engine gets a few more sequences than it can run, so that a freed slot is filled in the next step. These further
    sequences are the reserve. All other requests stay in the jobs' lazy streams.

    The reserve is refilled when half of it is gone. Its size is at least `prefetch`. Completions of equal length end
    together, so the packer counts the sequences that leave the engine between two refills. The reserve is twice the
    largest of the last counts.

    A lane is the rank of a queue; 0 is the most urgent. A lane's jobs are served in the order in which their tasks were
    opened. A lane's room depends only on its own sequences and the sequences of more urgent lanes. So a full batch of
    a less urgent lane never holds back an urgent prompt. Every lane may have `prefetch` sequences in the engine. The
    engine's scheduler gives a less urgent lane its share.
    """

    def __init__(
        self, num_lanes: int, slots: int, prefetch: int, max_functions: int, max_files: int
    ) -> None:
        """Set the limits.

        slots: the sequences that the engine runs at once. prefetch: the smallest reserve. max_functions: the most
        functions that run at the same time. max_files: the most files that are opened at the same time.
        """
        self.slots = slots
        self._prefetch = max(1, prefetch)
        self._reserve = self._prefetch
        self._max_functions = max_functions
        self._max_files = max_files
        # By lane: the jobs with requests that are still to be sent.
        self._streaming: list[deque[HeldJob]] = [deque() for _ in range(num_lanes)]
        # By lane: the number of sequences in the engine.
        self._in_engine = [0] * num_lanes
        self._opening = set[HeldJob]()  # files that are being opened
        self._finishing = set[HeldJob]()  # files whose parts are being written
        self._functions = set[HeldJob]()  # functions that have a thread or wait for one
        self._ended_streams: list[HeldJob] = []
        # How many sequences have left the engine since the last refill.
        self._num_departed = 0
        # For each of the last refills: how many sequences had left the engine since the refill before it.
        self._departures: deque[int] = deque(maxlen=_REFILLS_REMEMBERED)

    def note_opening(self, job: HeldJob) -> None:
        """Note that this job's file is being opened. Its number of rows is not known yet."""
        self._opening.add(job)

    def note_opened(self, job: HeldJob) -> None:
        """Note that this job's file is open, or could not be opened."""
        self._opening.discard(job)

    @property
    def free_files(self) -> int:
        """The number of files that the worker can still open at the same time."""
        return self._max_files - len(self._opening)

    def note_finishing(self, job: HeldJob) -> None:
        """Note that all answers for this job's file are here. They stay in memory until the part is written."""
        self._finishing.add(job)

    def note_finished(self, job: HeldJob) -> None:
        """Note that this job's part is written, or could not be written."""
        self._finishing.discard(job)

    @property
    def _is_behind(self) -> bool:
        """Whether too many answered rows wait for their parts to be written. More rows could fill the memory."""
        # A job's `next_index` is the number of its requests so far. A job without requests counts as one.
        num_requests = sum(max(1, job.next_index) for job in self._finishing)
        return len(self._finishing) >= self._max_files and num_requests >= self.slots

    def claimable_files(self, lane: int) -> int:
        """Return how many files the lane may claim.

        The lane may claim no file while one of its files is being opened, because that file may fill the batch. A file
        that opens slowly does not count. The lane may also claim no file while too many answered rows wait to be
        written.
        """
        is_opening = any(job.lane == lane and not job.is_slow for job in self._opening)
        if is_opening or self._is_behind:
            return 0
        return max(0, self.free_files)

    def stream(self, job: HeldJob) -> None:
        """Put a job at the end of its lane. Its requests are served after those of the other jobs."""
        job.count_requests()
        self._streaming[job.lane].append(job)

    def stream_on(self, job: HeldJob) -> None:
        """Put a job that has further requests at the front of its lane, because their prefixes are still cached."""
        job.count_requests()
        self._streaming[job.lane].appendleft(job)

    @property
    def free_functions(self) -> int:
        """The number of further functions that the worker may take, for all lanes together."""
        return self._max_functions - len(self._functions)

    def add_function(self, job: HeldJob) -> None:
        """Count a job's function, which takes a thread but no slot of the engine."""
        self._functions.add(job)

    def remove_function(self, job: HeldJob) -> None:
        """Stop counting a job's function."""
        self._functions.discard(job)

    def free_places(self, job: HeldJob) -> None:
        """Stop counting a job as a file or a function, unless a thread still works on it."""
        if job.call is None:
            self._opening.discard(job)
            self._finishing.discard(job)
            self._functions.discard(job)

    def forget(self, job: HeldJob) -> None:
        """Drop the stream of a stopped or lost job, and stop counting its sequences."""
        if job in self._streaming[job.lane]:
            self._streaming[job.lane].remove(job)
        self._in_engine[job.lane] -= job.num_in_engine
        job.num_in_engine = 0

    def note_departed(self, job: HeldJob, num_sequences: int) -> None:
        """Count sequences of a job that have left the engine."""
        self._num_departed += num_sequences
        self._in_engine[job.lane] -= num_sequences
        job.num_in_engine -= num_sequences

    def claim_room(self, lane: int) -> int:
        """Return for how many more sequences the lane should claim jobs now.

        While requests of open jobs are left, the lane claims nothing, with one exception. If its newest job is a file,
        and fewer requests are left than the engine has slots, the lane claims the next file early, because opening a
        file takes many steps.
        Functions, and files that are not open yet, do not count: they have no requests in the lane.
        """
        num_unread = sum(job.num_unread for job in self._streaming[lane])
        if num_unread == 0:
            return self._refill_room(lane)
        newest_job = self._streaming[lane][-1]
        if newest_job.is_file and num_unread < self.slots:
            # `num_unread` is a float, because a job may not know how many requests it has.
            return self.slots - int(num_unread)
        return 0

    def _room(self, lane: int) -> int:
        """Return how many further sequences of the lane the engine may take."""
        # Even if the engine is full, every lane may have `prefetch` sequences there.
        own_room = self._prefetch - self._in_engine[lane]
        return max(self._shared_room(lane), own_room, 0)

    def _shared_room(self, lane: int) -> int:
        """Return how many more sequences this lane and more urgent lanes may have in the engine together."""
        return self.slots + self._reserve - sum(self._in_engine[: lane + 1])

    def _refill_room(self, lane: int) -> int:
        """Return the lane's room if half of the reserve, or half of the lane's own `prefetch`, is free; otherwise 0."""
        is_reserve_low = 2 * self._shared_room(lane) >= self._reserve
        is_lane_low = 2 * self._in_engine[lane] <= self._prefetch
        if is_reserve_low or is_lane_low:
            return self._room(lane)
        return 0

    def pull(self, guard: JobGuard) -> Iterator[tuple[HeldJob, int, Request]]:
        """Yield the requests to send to the engine now, the most urgent lane first, as (job, index, request).

        Call it after every delivery. A job whose stream ends here becomes SENT, and may then be complete.
        """
        self._adapt_reserve()
        for lane, jobs in enumerate(self._streaming):
            while jobs and self._room(lane) > 0:
                job = jobs[0]
                index = job.next_index
                request = None
                with guard.around(job):
                    request = self._take_request(job, lane)
                if request is not None:
                    yield job, index, request
                    continue
                # The job's stream has ended. Or the guard has failed the job, and its stream is gone already.
                if jobs and jobs[0] is job:
                    self._ended_streams.append(jobs.popleft())

    def _take_request(self, job: HeldJob, lane: int) -> Request | None:
        """Take the next request of a job's stream and count its sequences. Returns None at the stream's end."""
        request = _next_request(job)
        if request is None:
            return None
        job.count_requests()
        index = job.next_index
        num_samples = samples_of(request)
        job.next_index += 1
        job.open_requests[index] = []
        job.num_samples[index] = num_samples
        job.unscheduled.add(index)
        job.num_in_engine += num_samples
        self._in_engine[lane] += num_samples
        return request

    def take_ended_streams(self) -> list[HeldJob]:
        """Return the jobs whose streams have ended or raised since the last call."""
        jobs = self._ended_streams
        self._ended_streams = []
        return jobs

    def _adapt_reserve(self) -> None:
        """Adapt the reserve to the number of sequences that have left the engine since the last refill."""
        if not any(self._in_engine):
            # An idle worker begins with a small reserve, so that other workers get some of the next jobs.
            self._departures.clear()
            self._num_departed = 0
            self._reserve = self._prefetch
        elif self._num_departed:
            self._departures.append(self._num_departed)
            self._num_departed = 0
            # A refill comes when half of the reserve is gone. The other half must replace the largest departure.
            wanted_reserve = 2 * max(self._departures)
            self._reserve = max(self._prefetch, min(self.slots, wanted_reserve))

    @property
    def in_engine(self) -> Sequence[int]:
        """The number of sequences in the engine, by lane."""
        return tuple(self._in_engine)


_TURN_BYTES = 1 << 20
"""Once a lane has unpacked this many bytes of payloads, its next payload waits for the next turn of the I/O thread."""


class PayloadBudget:
    """Decides when claimed jobs are opened. Opening a job unpacks its payload. Used by the I/O thread only.

    A lane is the rank of a queue; 0 is the most urgent.
    max_held_bytes: while the hashes and unpacked payloads of a lane's open jobs have at least this many bytes, the
    lane's next job waits with its payload packed. So a lane without open jobs can always open a job.
    """

    def __init__(self, num_lanes: int, max_held_bytes: int) -> None:
        self._max_held_bytes = max_held_bytes
        self._waiting: list[deque[HeldJob]] = [deque() for _ in range(num_lanes)]
        self._held_bytes = [0] * num_lanes
        self._job_bytes: dict[int, int] = {}  # by the number of each open job

    def add(self, job: HeldJob) -> None:
        """Let a claimed job wait until `take` yields it."""
        self._waiting[job.lane].append(job)

    def forget(self, job: HeldJob) -> None:
        """Drop a job that has ended or left this worker."""
        self._held_bytes[job.lane] -= self._job_bytes.pop(job.number, 0)
        if job in self._waiting[job.lane]:
            self._waiting[job.lane].remove(job)

    def set_bytes(self, job: HeldJob, num_bytes: int) -> None:
        """Count an open job as `num_bytes` from now on."""
        if job.number in self._job_bytes:
            self._add_bytes(job, num_bytes - self._job_bytes[job.number])

    def has_room(self, lane: int) -> bool:
        """Whether a lane may claim more jobs."""
        return not self._waiting[lane] and self._held_bytes[lane] < self._max_held_bytes

    @property
    def can_open(self) -> bool:
        """Whether `take` would yield a job."""
        for lane, waiting in enumerate(self._waiting):
            if waiting and self._held_bytes[lane] < self._max_held_bytes:
                return True
        return False

    def take(self) -> Iterator[HeldJob]:
        """Yield the jobs to open now. The jobs of the most urgent lane come first.

        For each job the caller calls `note_opening`, opens the job and calls `note_opened`. Then it takes the next job.
        """
        for lane, waiting in enumerate(self._waiting):
            unpacked_bytes = 0
            while (
                waiting
                and unpacked_bytes < _TURN_BYTES
                and self._held_bytes[lane] < self._max_held_bytes
            ):
                job = waiting.popleft()
                yield job
                unpacked_bytes += job.payload_bytes

    def note_opening(self, job: HeldJob) -> None:
        """Count the bytes of a job's hash, before the job is opened."""
        self._add_bytes(job, job.claimed.record.hash_bytes)

    def note_opened(self, job: HeldJob) -> None:
        """Count the job's unpacked payload too, unless the job was let go while it was opened."""
        if job.number in self._job_bytes:
            self._add_bytes(job, job.payload_bytes)

    def _add_bytes(self, job: HeldJob, num_bytes: int) -> None:
        """Add `num_bytes` to the bytes that are counted for a job."""
        self._job_bytes[job.number] = self._job_bytes.get(job.number, 0) + num_bytes
        self._held_bytes[job.lane] += num_bytes
