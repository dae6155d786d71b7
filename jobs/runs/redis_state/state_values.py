"""What a run's keys in Redis say, as RunState returns it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PartCount:
    """done: shards with a recorded part. total: shards of the run, None when Redis lost the run's keys.
    failed: shards whose jobs have failed for good, where that is kept (RunState.record_failed)."""

    done: int
    total: int | None
    failed: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether each shard has a part."""
        return self.total is not None and self.done >= self.total

    @property
    def has_failed(self) -> bool:
        """Whether nothing is left to run, and some of it has failed."""
        return self.total is not None and self.failed > 0 and self.done + self.failed >= self.total


@dataclass(frozen=True)
class End:
    """Whether a run is marked finished, and how often such a mark was withdrawn."""

    finished: bool
    withdrawals: int


@dataclass(frozen=True)
class Verdict:
    """Why a run is to be stopped, and the submission whose limit says so."""

    reason: str
    submission: int
