"""Decides in which order the jobs of a queue are claimed, so that runs and prompts share the queue's workers fairly.

Each run that waits in a queue gets a share of the rows that the queue's workers finish. A run's share is in proportion
to its priority. All prompts of the queue together get the share of a run with priority 1. This is weighted fair
queueing: a job's place depends on how many rows of its own run come before it.

A run is urgent if its share is too small to meet its deadline, but the run can meet the deadline by coming first.
Urgent runs come first, in the order of their deadlines. The rest of the queue keeps a tenth of the workers, so that
nothing starves.

Source: Demers, Keshav, Shenker, "Analysis and Simulation of a Fair Queueing Algorithm" (SIGCOMM 1989).
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import NamedTuple

URGENT_SHARE = 0.9
"""The share of the workers that all urgent runs get together."""

MARGIN = 1.25
"""A run counts as too slow if it would miss its deadline by taking this many times the expected time."""

PROMPTS = ""
"""Stands for the run of a job that belongs to no run."""


class WaitingJob(NamedTuple):
    """A job in a queue. run: the job's run, or PROMPTS. rows: the job's rows. priority: the run's priority."""

    id: str
    run: str
    rows: float
    priority: int = 1


@dataclass(frozen=True)
class RunInQueue:
    """A run with jobs in a queue.

    shard_rows: the rows of one shard. rows_left: the run's rows without an answer.
    deadline: in Unix seconds; None if the run has no deadline.
    priority: the run's share is this many times the share of a run with priority 1.
    """

    run: str
    shard_rows: float
    rows_left: float
    deadline: float | None = None
    priority: int = 1


def urgent_runs(runs: Collection[RunInQueue], rows_per_s: float, now: float) -> list[str]:
    """Return the urgent runs, in the order of their deadlines.

    A run is urgent if its share of the queue's workers is too small to meet its deadline. A run that cannot meet its
    deadline even by coming first is left out, because it would only delay the other runs.
    rows_per_s: the rows that the workers finish in a second, for all runs of the queue together; 0 if not known.
    """
    if rows_per_s <= 0:
        return []
    open_deadlines = []
    for run in runs:
        if run.deadline is not None and run.deadline > now:
            open_deadlines.append((run.deadline, run.run, run))
    open_deadlines.sort()  # by deadline, then by the run's id, which is unique

    total_priority = sum(run.priority for run in runs)
    rows_before = 0.0  # rows left in the urgent runs so far
    urgent = []
    for deadline, run_id, run in open_deadlines:
        seconds_left = deadline - now
        share_of_rate = rows_per_s * run.priority / total_priority
        seconds_at_share = run.rows_left * MARGIN / share_of_rate
        seconds_if_first = (rows_before + run.rows_left) / (rows_per_s * URGENT_SHARE)
        if seconds_if_first <= seconds_left < seconds_at_share:
            urgent.append(run_id)
            rows_before += run.rows_left
    return urgent


class PlacedJob(NamedTuple):
    """A job with its place in the order. The job with the smallest end comes first.

    end: the virtual time at which the job is done if each run gets its share. Virtual time is counted in rows: it is
    the number of rows done so far for a run with priority 1.
    number: the job's earlier position in the queue, which decides between equal ends.
    """

    end: float
    number: int
    id: str


class _Streams:
    """Computes the end of each job (see `PlacedJob`). Each run is a stream of jobs; all urgent runs are one stream.

    urgent_weight: the urgent runs together get this many times the share of a run with priority 1.
    waited: for each run, the virtual time for which its first job has waited. The run begins earlier by this time.
    """

    def __init__(
        self, urgent: Collection[str], urgent_weight: float, waited: Mapping[str, float]
    ) -> None:
        self._urgent = urgent
        self._urgent_weight = urgent_weight
        # For each stream, the virtual time at which its last placed job ends.
        self._ends: defaultdict[str, float] = defaultdict(float)
        # A run whose first job has waited begins earlier than the others, by the virtual time of the wait.
        for run, virtual_wait in waited.items():
            self._ends[f"run {run}"] = -virtual_wait

    def place(self, job: WaitingJob, not_before: float) -> float:
        """Place a job behind the earlier jobs of its stream. Returns the job's end, which is `not_before` or later."""
        stream = f"run {job.run}"
        weight: float = job.priority
        if job.run in self._urgent:
            stream = "urgent"
            weight = self._urgent_weight or 1  # `_urgent_weight` is 0 if no other run waits
        end = self._ends[stream] + job.rows / weight
        self._ends[stream] = max(not_before, end)
        return self._ends[stream]


def fair_order(
    in_order: Sequence[WaitingJob],
    new: Sequence[WaitingJob],
    urgent: Sequence[str] = (),
    waited: Mapping[str, float] | None = None,
) -> list[PlacedJob]:
    """Return a queue's jobs in the order in which they are to be claimed.

    in_order: jobs that were put in order before. They keep that order. new: the jobs behind them in the queue.
    urgent: the runs that come first, in their order. When the urgent runs or the priorities have changed, the caller
    passes all jobs as new.
    waited: for each run, the virtual time for which its first job has waited. This time brings the run's jobs forward.
    Without it, small jobs that come again and again would pass a large one for ever.
    """
    if urgent:
        new = _by_urgency(new, urgent)
    priorities = {job.run: job.priority for job in (*in_order, *new)}
    other_runs = priorities.keys() - set(urgent)
    priority_of_others = sum(priorities[run] for run in other_runs)
    # With this weight, the urgent runs together get URGENT_SHARE of the workers.
    urgent_weight = priority_of_others * URGENT_SHARE / (1 - URGENT_SHARE)
    streams = _Streams(urgent, urgent_weight, waited or {})

    # Jobs that were in order keep their order, so no such job ends before the job ahead of it.
    latest_end = 0.0
    placed = []
    for number, job in enumerate(in_order):
        latest_end = streams.place(job, not_before=latest_end)
        placed.append(PlacedJob(latest_end, number, job.id))
    placed_new = []
    for number, job in enumerate(new, len(placed)):
        end = streams.place(job, not_before=0.0)
        placed_new.append(PlacedJob(end, number, job.id))
    placed_new.sort()
    return list(merge(placed, placed_new))


def _by_urgency(jobs: Sequence[WaitingJob], urgent: Sequence[str]) -> list[WaitingJob]:
    """Return the jobs, with the jobs of urgent runs in the order of `urgent`.

    `fair_order` places the jobs of all urgent runs as one stream, so their order counts. Each other run is a stream of
    its own. Its jobs keep their order, but may stand anywhere among the jobs of other runs.
    """
    positions = {run: position for position, run in enumerate(urgent)}
    return sorted(jobs, key=lambda job: positions.get(job.run, 0))
