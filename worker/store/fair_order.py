"""In which order the jobs of a queue are claimed, so that runs and prompts share its workers fairly.

Each run that waits in a queue gets a share of the queue's workers, counted in rows. A run's share is in proportion to
its priority. All prompts of the queue together get the share of a run with priority 1. This is weighted fair queueing:
a job's place depends on the rows of its own run that stand before it.

A run that would miss its deadline at its share comes first, if it can still meet the deadline. The earliest
deadline comes before the others. Meanwhile the rest of the queue keeps a tenth of the workers, so that nothing starves.

Source: Demers, Keshav, Shenker, "Analysis and Simulation of a Fair Queueing Algorithm" (SIGCOMM 1989).
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import NamedTuple

URGENT_SHARE = 0.9
"""The share of the workers for runs that would otherwise miss their deadlines."""

MARGIN = 1.25
"""A run is urgent if it would miss its deadline when it takes this many times longer than expected."""

PROMPTS = ""
"""Stands for the run of a job that belongs to no run."""


class WaitingJob(NamedTuple):
    """A job in a queue. run: its run, or PROMPTS. rows: how many it has. priority: its run's."""

    id: str
    run: str
    rows: float
    priority: int = 1


@dataclass(frozen=True)
class RunInQueue:
    """What is known of a run with jobs in a queue.

    shard_rows: the rows of one shard. rows_left: rows without an answer. deadline: in Unix seconds; None if it has
    none. priority: the run's share is this many times that of a run with priority 1.
    """

    run: str
    shard_rows: float
    rows_left: float
    deadline: float | None = None
    priority: int = 1


def urgent_runs(runs: Collection[RunInQueue], rows_per_s: float, now: float) -> list[str]:
    """Return the runs that come first, in their order.

    These are the runs that would miss their deadline at their share of the queue's workers. A run that cannot meet
    its deadline even if it comes first is left out, because it would only delay the others. rows_per_s: the rows that
    the workers finish for all runs of the queue; 0 if that is not known.
    """
    if rows_per_s <= 0 or not runs:
        return []
    with_deadline = [run for run in runs if run.deadline is not None and run.deadline > now]
    with_deadline.sort(key=lambda run: (run.deadline, run.run))
    total_priority = sum(run.priority for run in runs)
    rows_before = 0.0
    urgent = []
    for run in with_deadline:
        assert run.deadline is not None
        left_s = run.deadline - now
        share_of_rate = rows_per_s * run.priority / total_priority
        at_its_share_s = run.rows_left * MARGIN / share_of_rate
        if_first_s = (rows_before + run.rows_left) / (rows_per_s * URGENT_SHARE)
        if if_first_s <= left_s < at_its_share_s:
            urgent.append(run.run)
            rows_before += run.rows_left
    return urgent


class PlacedJob(NamedTuple):
    """A job in its place.

    end: the virtual time at which it is done if each run gets its share. Virtual time counts the rows that a run with
    priority 1 has had. number: its place in the queue before, which decides between equal ends.
    """

    end: float
    number: int
    id: str


def fair_order(
    in_order: Sequence[WaitingJob],
    new: Sequence[WaitingJob],
    urgent: Sequence[str] = (),
    waited: Mapping[str, float] | None = None,
) -> list[PlacedJob]:
    """Return a queue's jobs in the order in which they are to be claimed.

    in_order: jobs that were put in order before. They keep that order. new: the jobs behind them in the queue.
    urgent: the runs that come first. When these runs or priorities have changed, the caller passes all jobs as new.
    waited: for each run, the virtual time for which its first job has waited. This time brings the run's jobs forward.
    Without it, small jobs that come again and again would pass a large one for ever.
    """
    if urgent:
        # The urgent runs are one stream below, so its jobs must come in the order of the runs. Where the other runs'
        # jobs stand between them does not matter.
        places = {run: place for place, run in enumerate(urgent)}
        new = sorted(new, key=lambda job: places.get(job.run, 0))
    priorities = {job.run: job.priority for job in (*in_order, *new)}
    others_priority = sum(priorities[run] for run in priorities.keys() - set(urgent))
    # The urgent runs together get this many times the share of a run with priority 1.
    urgent_weight = others_priority * URGENT_SHARE / (1 - URGENT_SHARE)

    # By stream: the end of its last job that has a place. The urgent runs are one stream, each other run is one.
    ends: defaultdict[str, float] = defaultdict(float)
    for run, virtual_time in (waited or {}).items():
        ends[f"run {run}"] = -virtual_time

    def place(job: WaitingJob, not_before: float) -> float:
        """Place a job behind the others of its stream. Returns its end, see PlacedJob."""
        stream = f"run {job.run}"
        weight: float = job.priority
        if job.run in urgent:
            stream = "urgent"
            weight = urgent_weight or 1  # 0 if no other run waits
        ends[stream] = max(not_before, ends[stream] + job.rows / weight)
        return ends[stream]

    latest_end = 0.0
    placed = []
    for number, job in enumerate(in_order):
        latest_end = place(job, not_before=latest_end)
        placed.append(PlacedJob(latest_end, number, job.id))
    placed_new = []
    for number, job in enumerate(new, len(placed)):
        end = place(job, not_before=0.0)
        placed_new.append(PlacedJob(end, number, job.id))
    placed_new.sort()
    return list(merge(placed, placed_new))
