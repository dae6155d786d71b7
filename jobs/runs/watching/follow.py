"""Waits for a run and shows its progress."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import ConnectionError, TimeoutError

from jobs.errors import UnknownRun
from jobs.runs.watching.snapshot import REFUSED, RunSnapshot, needs

#: Between two looks at Redis.
POLL_S = 0.5


class End(enum.Enum):
    FINISHED = "it is finished"
    CANCELLED = "it was cancelled: submit it again to resume it"
    PLAN_FAILED = "planning failed: repair what is named above, then submit again"
    SHARDS_FAILED = "shards failed: repair what is named above, then submit again"
    STRANDED = "nothing is left to run, and the run did not finish: submit it again, which also repairs its end"
    FORGOTTEN = "this Redis no longer knows the run, and lost its data perhaps: submit it again to resume it"


REFUSED_AS_BEFORE = "this submit was refused, as is named above; the run is finished as before"


@dataclass(frozen=True)
class Followed:
    """The last look at a run, and how it ended."""

    snapshot: RunSnapshot
    end: End

    @property
    def problem(self) -> str | None:
        """Say what is wrong with how the run ended; None for nothing."""
        snapshot = self.snapshot
        if self.end is End.FINISHED:
            return None if snapshot.too_many_errors is None else f"it is finished, but {snapshot.too_many_errors}"
        if self.end is End.CANCELLED and snapshot.stopped is not None:
            return f"it was stopped: {snapshot.stopped}"
        return REFUSED_AS_BEFORE if self.end is End.PLAN_FAILED and snapshot.finished else self.end.value


class Watch:
    """Looks at a run, and remembers what the run waits for. look: reads the run's state."""

    def __init__(self, look: Callable[[], RunSnapshot]) -> None:
        self._look = look
        self.waits_for: str | None = None

    def __call__(self) -> RunSnapshot:
        try:
            snapshot = self._look()
        except (ConnectionError, TimeoutError) as error:
            self.waits_for = f"no answer from Redis ({error})"
            raise
        lacking = needs(snapshot)
        self.waits_for = lacking[0] if lacking else None
        return snapshot


def follow(
    look: Callable[[], RunSnapshot],
    sleep: Callable[[float], None],
    show: Callable[[RunSnapshot], None] = lambda snapshot: None,
    warn: Callable[[str], None] = lambda text: None,
) -> Followed:
    """Look at a run until it ends, whoever is away. Raises what the first look raises."""
    previous = snapshot = look()
    told, is_away = list[str](), False
    while True:
        show(snapshot)
        if end := _end(snapshot, previous):
            return Followed(snapshot, end)
        lacking = needs(snapshot)
        for each in lacking:
            if each not in told:
                warn(f"{each}; still waiting")
        told = lacking
        sleep(POLL_S)
        try:
            previous, snapshot, is_away = snapshot, look(), False
        except UnknownRun:
            return Followed(snapshot, End.FORGOTTEN)
        except (ConnectionError, TimeoutError) as error:
            if not is_away:
                warn(f"no answer from Redis ({error}); still waiting")
            is_away = True


def _end(snapshot: RunSnapshot, previous: RunSnapshot) -> End | None:
    if snapshot.cancelled and not snapshot.finished:
        return End.CANCELLED
    if snapshot.plan_status in REFUSED:
        return End.PLAN_FAILED  # also of a run that had finished: this submission was refused
    if snapshot.finished and not snapshot.is_planning:
        return End.FINISHED
    if not snapshot.is_idle:
        return None
    if snapshot.failed_jobs:
        return End.SHARDS_FAILED
    # A look is not one instant: the last shard may have ended between two of its reads.
    return End.STRANDED if snapshot is not previous and previous.is_idle else None
