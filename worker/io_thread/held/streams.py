"""Sends the requests of open jobs to the engine, and gives the completions to the jobs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any
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
"""The answers that are inspected at the same time. Each thread waits for a child process of its own."""


class Inspections:
    """Calls `OpenTask.inspect` in threads. Used by the I/O thread only.

    The tasks' inspections take turns, so a task with long checks delays another task by one check only.
    post: queues a call for the I/O thread.
    checks: the child processes in which tasks check answers. `end` closes them, and then no task uses them any more.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None], checks: Checks) -> None:
        self._post = post
        self._checks = checks
        self._pool = FunctionPool(THREADS, "tokenmill-checks")
        self._current_turn = 0  # the turn of the inspection that began last
        self._last_turn_of: WeakKeyDictionary[OpenTask, int] = WeakKeyDictionary()

    def submit(
        self,
        task: OpenTask,
        index: int,
        completions: Sequence[Completion],
        is_wanted: Callable[[], bool],
        then: Callable[[BaseException | None], None],
    ) -> None:
        """Have a task inspect an answer, and call `then` with the task's error or None.

        is_wanted: called when the inspection's turn has come. Returns whether the inspection is still needed.
        """
        # In each turn, every task has at most one inspection. This inspection gets the first turn that is after the
        # task's last inspection and has not begun yet.
        turn = 1 + max(self._current_turn, self._last_turn_of.get(task, 0))
        self._last_turn_of[task] = turn

        def inspect() -> None:
            """Note that this turn has begun, and inspect the answer if still needed. Called in a thread of the pool."""
            self._current_turn = turn
            if is_wanted():
                task.inspect(index, completions)

        def done(_: Any, error: BaseException | None) -> None:
            """Have the I/O thread call `then`. Called in the pool's thread."""
            self._post(lambda: then(error))

        self._pool.submit(inspect, done, is_interruptible=False, order=turn)

    def end(self) -> None:
        """Let the threads and processes end after their current work."""
        self._pool.end()
        self._checks.close()


class Streams:
    """Routes requests and completions by their ids, `<number>.<index>`. Used by the I/O thread only."""

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
        self._inspections = inspections
        self._tally = tally
        self._jobs = jobs
        self._guard = guard
        self._packer = packer
        self._beginnings = beginnings
        self._orders = orders
        self._changed: dict[int, HeldJob] = {}  # the jobs for the next `feed`, by number
        self.completion_tokens = 0
        """Tokens of answers since the worker's start."""

    def open(self, job: HeldJob) -> None:
        """Begin to send the requests of a job whose task is open."""
        job.begin_stream()
        self._packer.stream(job)

    def feed(self) -> Iterator[HeldJob]:
        """Send requests to the engine, as far as it has room. Yields the jobs that have changed since the last call."""
        for job, index, request in self._packer.pull(self._guard):
            with self._guard.around(job):
                is_followed = job.claimed.record.is_followed
                self._orders.put(Add(job.request_id(index), request, job.lane, is_followed))
        for job in self._packer.take_ended_streams():
            self._changed[job.number] = job

        changed = self._changed
        self._changed = {}
        for job in changed.values():
            if job in self._jobs and not job.is_ending:
                yield job

    def note_started(self, request_ids: Iterable[str], moment: float) -> None:
        """Note that the first sequences of these requests were scheduled, at `moment` (monotonic seconds)."""
        for request_id in request_ids:
            job, index = self._jobs.of_request(request_id)
            if job is None or job.is_ending:
                continue
            with self._guard.around(job):
                self._beginnings.note_begun(job, moment)
                job.unscheduled.discard(index)
                if not job.needs_payload:  # the runner drops the payload of such a job
                    self._changed[job.number] = job

    def deliver(self, completions: Iterable[Completion], moment: float) -> None:
        """Give completions to their jobs. moment: monotonic seconds when the engine's step began."""
        for completion in completions:
            job, index = self._jobs.of_request(completion.request_id)
            if job is None or index not in job.open_requests:
                continue  # the job was stopped or lost meanwhile
            with self._guard.around(job):
                # The engine never schedules a request that it refuses. So the job of a refused request may begin here.
                self._beginnings.note_begun(job, moment)
                self._take_completion(job, index, completion)

    def _take_completion(self, job: HeldJob, index: int, completion: Completion) -> None:
        """Note a completion. If it is the last one of its request, hand the request's samples to the task."""
        self._tally.count_sample(completion)
        if job.trace is not None:
            job.trace.note_sample(completion)
        num_generated = len(completion.token_ids) - completion.num_continued
        self.completion_tokens += num_generated
        job.unscheduled.discard(index)
        samples = job.open_requests[index]
        samples.append(completion)
        has_failed = completion.finish_reason == "error"  # the request gets no further samples
        has_all = len(samples) == job.num_samples[index]
        if has_failed or has_all:
            self._hand_over(job, index, samples)

    def _hand_over(self, job: HeldJob, index: int, samples: list[Completion]) -> None:
        """Give a request's samples to its task, after an inspection if the task wants one."""
        num_samples = job.num_samples.pop(index)
        self._packer.note_departed(job, num_samples)
        del job.open_requests[index]
        samples_in_order = sorted(samples, key=lambda sample: sample.index)
        assert job.open_task is not None
        if not job.open_task.inspects:
            self._deliver(job, index, samples_in_order)
            return
        job.being_inspected[index] = samples_in_order

        def is_wanted() -> bool:
            """Whether the job still waits for this answer; False if the job was stopped or lost meanwhile."""
            return index in job.being_inspected

        def then(error: BaseException | None) -> None:
            """Deliver the answer. Called in the I/O thread."""
            self._guard.call(job, self._deliver_inspected, job, index, samples_in_order, error)

        self._inspections.submit(job.open_task, index, samples_in_order, is_wanted, then)

    def _deliver_inspected(
        self, job: HeldJob, index: int, samples: list[Completion], error: BaseException | None
    ) -> None:
        """Deliver an inspected answer, or fail its job. error: raised by the task."""
        if index not in job.being_inspected:
            return  # the job was stopped or lost meanwhile
        del job.being_inspected[index]
        if error is None:
            self._deliver(job, index, samples)
            return
        self._changed[job.number] = job
        if not isinstance(error, Exception):  # an error such as SystemExit fails the job too
            error = RuntimeError(message_of(error))
        job.error = error

    def _deliver(self, job: HeldJob, index: int, samples: list[Completion]) -> None:
        """Give an answer to the job's task. If the task has further requests now, stream them."""
        self._changed[job.number] = job
        assert job.open_task is not None
        try:
            job.open_task.deliver(index, samples)
            job.count_requests()
            if job.state is JobState.SENT and job.open_task.has_more:
                job.begin_stream()
                self._packer.stream_on(job)
        except Exception as error:  # noqa: BLE001  # fails this job, not the worker
            job.error = error

    def withdraw(self, job: HeldJob) -> None:
        """Take a job's requests back from the engine, and send no further ones."""
        if job.request_ids:
            self._orders.put(Abort(job.request_ids))
        self._packer.forget(job)
