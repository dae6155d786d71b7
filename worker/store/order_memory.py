"""OrderMemory: what is remembered from one ordering of a queue to the next, such as the speed of the queue's runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from worker.store.fair_order import PlacedJob

_RATE_OVER_S = 600.0
"""Seconds over which the rate of finished rows is measured. This rate decides which runs are urgent."""

_SAMPLE_EVERY_S = 20.0
"""The least seconds between two samples that are kept."""

_RESTED_S = 20.0
"""Seconds without an ordering after which the samples are dropped, because no run was waiting."""

_MOST_REMEMBERED = 200
"""The most jobs at the queue's front whose ends are remembered. If more jobs are claimed between two orderings, the
time that the other jobs have waited counts less."""


class Sample(NamedTuple):
    """How many rows the queue's runs together had finished at a moment. at: Unix seconds."""

    at: float
    rows: float


@dataclass
class OrderMemory:
    """What one ordering of a queue leaves for the next one. Redis keeps it as an object with these fields.

    last: the id of the queue's last job. urgent: the urgent runs. rows_of: the finished rows of each run.
    samples: how many rows were finished at earlier moments, the earliest first.
    front: the ids of the queue's first jobs, each with the job's PlacedJob.end.
    heads: for each run, the id of its first job, and for how much virtual time this job has been the run's first.
    priorities: the priority of each run whose priority is not 1.
    """

    last: str = ""
    urgent: list[str] = field(default_factory=list)
    rows_of: dict[str, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    front: list[tuple[str, float]] = field(default_factory=list)
    heads: dict[str, tuple[str, float]] = field(default_factory=dict)
    priorities: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_object(cls, fields: Mapping[str, Any]) -> Self:
        """Read a memory that was kept in Redis. Returns an empty memory if the fields cannot be read."""
        try:
            samples = [Sample(float(at), float(rows)) for at, rows in fields["samples"]]
            rows_of = {str(run): int(rows) for run, rows in fields["rows_of"].items()}
            front = [(str(job_id), float(end)) for job_id, end in fields["front"]]

            heads = {}
            for run, (job_id, waited) in fields["heads"].items():
                heads[str(run)] = (str(job_id), float(waited))
            priorities = {}
            for run, priority in fields.get("priorities", {}).items():
                priorities[str(run)] = int(priority)

            return cls(
                last=str(fields["last"]),
                urgent=list(fields["urgent"]),
                rows_of=rows_of,
                samples=samples,
                front=front,
                heads=heads,
                priorities=priorities,
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return cls()

    @property
    def rows_per_s(self) -> float:
        """The rows that the queue's runs together finish in a second; 0 if that is not known."""
        if len(self.samples) < 2:
            return 0.0
        first = self.samples[0]
        last = self.samples[-1]
        if last.at <= first.at:
            return 0.0
        return (last.rows - first.rows) / (last.at - first.at)

    def note_finished_rows(self, rows_of: dict[str, int], now: float) -> None:
        """Add a sample of how many rows are finished. rows_of: the finished rows of each run. now: Unix seconds."""
        # If no run has waited for some time, the earlier samples say nothing about the present rate.
        if self.samples and now - self.samples[-1].at > _RESTED_S:
            self.samples.clear()
        total_rows = self.samples[-1].rows if self.samples else 0.0
        for run, finished_rows in rows_of.items():
            # A run that was not known before adds nothing.
            rows_before = self.rows_of.get(run, finished_rows)
            total_rows += max(0, finished_rows - rows_before)
        self.rows_of = rows_of

        self.samples = [sample for sample in self.samples if now - sample.at <= _RATE_OVER_S]
        # If the second-to-last sample is recent, the new sample replaces the last one.
        if len(self.samples) > 1 and now - self.samples[-2].at < _SAMPLE_EVERY_S:
            self.samples.pop()
        self.samples.append(Sample(now, total_rows))

    def note_heads(self, run_of: Mapping[str, str]) -> dict[str, float]:
        """Note each run's first job. Returns for each run the virtual time for which its first job has waited.

        Virtual time is counted in rows: it is the number of rows done meanwhile for a run with priority 1.
        run_of: the run of each job in the queue, in the queue's order.
        """
        # Virtual time starts at 0 at each ordering, and a job's end is the virtual time at which the job is done.
        # The jobs of `front` that have left the queue were claimed since the last ordering. So the latest of their
        # ends is the virtual time that has passed.
        claimed_ends = [end for job_id, end in self.front if job_id not in run_of]
        time_passed = max(claimed_ends, default=0.0)
        heads: dict[str, tuple[str, float]] = {}
        waits: dict[str, float] = {}
        for job_id, run in run_of.items():
            if run in heads:
                continue
            earlier_head, earlier_wait = self.heads.get(run, ("", 0.0))
            waited = 0.0
            if earlier_head == job_id:
                waited = earlier_wait + time_passed
            heads[run] = (job_id, waited)
            waits[run] = waited
        self.heads = heads
        return waits

    def note_order(
        self, placed: Sequence[PlacedJob], urgent: list[str], priorities: dict[str, int]
    ) -> None:
        """Note the order that was made. placed: all jobs of the queue, in this order."""
        self.last = placed[-1].id
        self.urgent = urgent
        self.priorities = priorities
        self.front = [(job.id, job.end) for job in placed[:_MOST_REMEMBERED]]
