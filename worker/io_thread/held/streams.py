"""Requests of open jobs on their way to the engine, and completions on their way back."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from weakref import WeakKeyDictionary

from engine import Completion
from jobs.common.display import message_of
from jobs.context.checks import Checks
from jobs.tasks import OpenTask
from worker.engine_thread.orders import Abort, Add, Order
from worker.io_thread.held.beginnings import Beginnings
from worker.io_thread.held.held_jobs import HeldJob, HeldJobs, JobState
from worker.io_thread.held.job_guard import JobGuard
from worker.io_thread.held.packing import Packer
from worker.metrics.tally import Tally
from worker.threads.functions import FunctionPool

THREADS = 2
"""So many answers are looked at at once; each thread waits for a process of its own."""


class Inspections:
    """Calls `OpenTask.inspect` in threads, from which `post` queues calls; its methods belong to the I/O thread.

    Tasks take turns, so that long checks of one delay another's by one check only. checks: given to tasks; each call
    ends within its limit of time.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None], checks: Checks) -> None:
        self._post, self._checks = post, checks
        self._pool = FunctionPool(THREADS, "tokenmill-checks")
        self._turn = 0  # of the inspection that has begun last
        self._turns: WeakKeyDictionary[OpenTask, int] = WeakKeyDictionary()  # of each task's last one

    def submit(
        self,
        task: OpenTask,
        index: int,
        completions: Sequence[Completion],
        is_wanted: Callable[[], bool],
        then: Callable[[BaseException | None], None],
    ) -> None:
        """Have a task inspect an answer, unless `is_wanted` says no in its turn; then call `then` with its error."""
        turn = self._turns[task] = 1 + max(self._turn, self._turns.get(task, 0))

        def inspect() -> None:
            self._turn = turn
            if is_wanted():
                task.inspect(index, completions)

        self._pool.submit(inspect, lambda _, error: self._post(lambda: then(error)), raises=False, order=turn)

    def end(self) -> None:
        """Let threads and processes end after their present work."""
        self._pool.end()
        self._checks.close()


class Streams:
    """Routes requests and completions by `<number>.<index>`. Used by the I/O thread only."""

    def __init__(
        self,
        jobs: HeldJobs,
        guard: JobGuard,
        packer: Packer,
        beginnings: Beginnings,
        orders: SimpleQueue[Order],
        inspections: Inspections,
        tally: Tally,
    ) -> None:
        self._inspections, self._tally = inspections, tally
        self._jobs, self._guard = jobs, guard
        self._packer, self._beginnings, self._orders = packer, beginnings, orders
        self._changed: dict[int, HeldJob] = {}
        self.completion_tokens = 0
        """Handed out since the start."""

    def open(self, job: HeldJob) -> None:
        """Serve a job whose task is open."""
        job.stream()
        self._packer.stream(job)

    def feed(self) -> Iterator[HeldJob]:
        """Send the engine requests; yield the jobs that have changed, for the caller to look at."""
        for job, index, request in self._packer.pull(self._guard):
            with self._guard.around(job):
                self._orders.put(Add(job.request_id(index), request, job.lane))
        self._changed.update((job.number, job) for job in self._packer.take_dry())
        changed, self._changed = self._changed, {}
        for job in changed.values():
            if job in self._jobs and not job.is_ending:
                yield job

    def started(self, request_ids: Iterable[str], moment: float) -> None:
        """Note that the first sequences of these requests were scheduled, at `moment` (monotonic seconds)."""
        for request_id in request_ids:
            job, index = self._jobs.of_request(request_id)
            if job is None or job.is_ending:
                continue
            with self._guard.around(job):
                self._beginnings.began(job, moment)
                job.unscheduled.discard(index)
                if not job.needs_payload:
                    self._changed[job.number] = job

    def deliver(self, completions: Iterable[Completion], moment: float) -> None:
        """Route the completions of the step of `moment` to their jobs."""
        for completion in completions:
            job, index = self._jobs.of_request(completion.request_id)
            if job is None or index not in job.open_requests:
                continue  # stopped or lost while the engine was at it
            with self._guard.around(job):
                self._beginnings.began(job, moment)  # a refused request was never scheduled
                self._take(job, index, completion)

    def _take(self, job: HeldJob, index: int, completion: Completion) -> None:
        self._tally.completed(completion)
        if job.trace is not None:
            job.trace.completed(completion)
        self.completion_tokens += len(completion.token_ids) - completion.num_continued
        job.unscheduled.discard(index)
        samples = job.open_requests[index]
        samples.append(completion)
        if completion.finish_reason == "error" or len(samples) == job.samples[index]:
            self._hand_over(job, index, samples)

    def _hand_over(self, job: HeldJob, index: int, samples: list[Completion]) -> None:
        """Hand over a request with all its samples, or one that failed."""
        self._packer.delivered(job, job.samples.pop(index))
        del job.open_requests[index]
        ordered = sorted(samples, key=lambda sample: sample.index)
        assert job.open_task is not None
        if not job.open_task.inspects:
            self._deliver(job, index, ordered)
            return
        job.inspected[index] = ordered
        self._inspections.submit(
            job.open_task,
            index,
            ordered,
            lambda: index in job.inspected,
            lambda error: self._guard.call(job, self._inspected, job, index, ordered, error),
        )

    def _inspected(self, job: HeldJob, index: int, samples: list[Completion], error: BaseException | None) -> None:
        """Take the result of an inspection. error: raised by the task."""
        if index not in job.inspected:
            return  # the job was stopped or lost meanwhile
        del job.inspected[index]
        if error is None:
            self._deliver(job, index, samples)
            return
        self._changed[job.number] = job
        job.error = error if isinstance(error, Exception) else RuntimeError(message_of(error))

    def _deliver(self, job: HeldJob, index: int, samples: list[Completion]) -> None:
        self._changed[job.number] = job
        assert job.open_task is not None
        try:
            job.open_task.deliver(index, samples)
            job.count_requests()
            if job.state is JobState.SENT and job.open_task.has_more:
                job.stream()
                self._packer.stream_on(job)
        except Exception as error:  # noqa: BLE001  # fails this job, not the worker
            job.error = error

    def withdraw(self, job: HeldJob) -> None:
        """Take a job's requests back from the engine, and send no more."""
        if job.request_ids:
            self._orders.put(Abort(job.request_ids))
        self._packer.forget(job)
