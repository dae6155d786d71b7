"""Remembers from one look at a queue to the next how fast its runs go, and how long each run's first job has waited."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from worker.store.fair_order import PlacedJob

_RATE_OVER_S = 600.0
"""Seconds over which the rate of rows is measured. Deadlines are judged by this rate."""

_SAMPLE_EVERY_S = 20.0
"""Seconds between two samples that are kept."""

_RESTED_S = 20.0
"""Seconds without a look after which the samples are dropped, because no run was waiting."""

_MOST_REMEMBERED = 200
"""The most jobs at the queue's front whose places are remembered. If more jobs than that are claimed between two looks,
the time that the others have waited counts less."""


class Sample(NamedTuple):
    """How many rows the queue's runs had finished at a moment. at: Unix seconds."""

    at: float
    rows: float


@dataclass
class OrderMemory:
    """What the last look at a queue leaves for the next one.

    last: the last job that was put in order. urgent: the runs that came first. rows_of: the finished rows of each run.
    samples: the earliest first. front: the ids of the first jobs, each with its PlacedJob.end. heads: each run's
    first job, with the virtual time for which this job was the first. priorities: by run, without those that are 1.
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
        """Read what the last look has left. Returns an empty memory if that cannot be read."""
        try:
            samples = [Sample(float(at), float(rows)) for at, rows in fields["samples"]]
            rows_of = {str(run): int(rows) for run, rows in fields["rows_of"].items()}
            front = [(str(job_id), float(end)) for job_id, end in fields["front"]]
            heads = {}
            for run, (job_id, waited) in fields["heads"].items():
                heads[str(run)] = (str(job_id), float(waited))
            priorities = {
                str(run): int(priority) for run, priority in fields.get("priorities", {}).items()
            }
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
        """Return the rate of the queue's runs; 0 if it is not known."""
        if len(self.samples) < 2:
            return 0.0
        first = self.samples[0]
        last = self.samples[-1]
        if last.at <= first.at:
            return 0.0
        return (last.rows - first.rows) / (last.at - first.at)

    def see(self, rows_of: dict[str, int], now: float) -> None:
        """Count the rows that were finished since the last look."""
        if self.samples and now - self.samples[-1].at > _RESTED_S:
            self.samples.clear()
        total_rows = self.samples[-1].rows if self.samples else 0.0
        for run, finished_rows in rows_of.items():
            # A run that is new here adds nothing.
            rows_before = self.rows_of.get(run, finished_rows)
            total_rows += max(0, finished_rows - rows_before)
        self.rows_of = rows_of

        self.samples = [sample for sample in self.samples if now - sample.at <= _RATE_OVER_S]
        # If the last but one sample is too recent, the new sample replaces the last one.
        if len(self.samples) > 1 and now - self.samples[-2].at < _SAMPLE_EVERY_S:
            self.samples.pop()
        self.samples.append(Sample(now, total_rows))

    def waited(self, run_of: Mapping[str, str]) -> dict[str, float]:
        """Return the virtual time for which each run's first job has waited. Notes the first jobs.

        Virtual time counts the rows that a run with priority 1 has had meanwhile.

        run_of: the run of each job in the queue, in the queue's order.
        """
        # The virtual time starts anew at each look. So the end of the last claimed job says how much of it has passed
        # since the last look.
        claimed_ends = [end for job_id, end in self.front if job_id not in run_of]
        passed = max(claimed_ends, default=0.0)
        heads: dict[str, tuple[str, float]] = {}
        for job_id, run in run_of.items():
            if run in heads:
                continue
            head_before, waited_before = self.heads.get(run, ("", 0.0))
            waited = 0.0
            if head_before == job_id:
                waited = waited_before + passed
            heads[run] = (job_id, waited)
        self.heads = heads
        return {run: waited for run, (_, waited) in heads.items()}

    def note(
        self, placed: Sequence[PlacedJob], urgent: list[str], priorities: dict[str, int]
    ) -> None:
        """Remember the order that was made."""
        self.last = placed[-1].id
        self.urgent = urgent
        self.priorities = priorities
        self.front = [(job.id, job.end) for job in placed[:_MOST_REMEMBERED]]
