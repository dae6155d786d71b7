"""Waits for a run and shows its progress."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import ConnectionError, TimeoutError

from jobs.errors import UnknownRun
from jobs.runs.watching.snapshot import REFUSED, RunSnapshot, expired_text, needs

#: The pause between two readings of a run's state.
POLL_S = 0.5


class End(enum.Enum):
    """How a run ended. The value is the sentence that a user is shown."""

    FINISHED = "it is finished"
    CANCELLED = "it was cancelled: submit it again to resume it"
    PLAN_FAILED = "planning failed: repair what is named above, then submit again"
    SHARDS_FAILED = "shards failed: repair what is named above, then submit again"
    STRANDED = "nothing is left to run, and the run did not finish: submit it again, which also repairs its end"
    FORGOTTEN = "this Redis no longer knows the run, and perhaps lost its data: submit it again to resume it"


#: The sentence for a finished run whose new submission was refused.
REFUSED_BUT_FINISHED = "this submit was refused, as is named above; the run is finished as before"


@dataclass(frozen=True)
class Followed:
    """The last snapshot of a run, and how the run ended."""

    snapshot: RunSnapshot
    end: End

    @property
    def problem(self) -> str | None:
        """Say what went wrong, or return None if the run ended well."""
        snapshot = self.snapshot
        if self.end is End.FINISHED:
            if snapshot.too_many_errors is not None:
                return f"it is finished, but {snapshot.too_many_errors}"
            if snapshot.expired:
                return f"it is expired: {expired_text(snapshot)}"
            return None

        if self.end is End.CANCELLED and snapshot.stopped is not None:
            return f"it was stopped: {snapshot.stopped}"
        if self.end is End.PLAN_FAILED and snapshot.finished:
            return REFUSED_BUT_FINISHED
        return str(self.end.value)


class Watch:
    """Reads a run's state and remembers what the run waits for.

    read: reads the run's state.
    waits_for: a sentence about what the run waits for; None if it waits for nothing.
    """

    def __init__(self, read: Callable[[], RunSnapshot]) -> None:
        self._read = read
        self.waits_for: str | None = None

    def __call__(self) -> RunSnapshot:
        """Return the run's state, and note what the run waits for. Raises the errors of `read`."""
        try:
            snapshot = self._read()
        except (ConnectionError, TimeoutError) as error:
            self.waits_for = f"no answer from Redis ({error})"
            raise
        unmet_needs = needs(snapshot)
        self.waits_for = unmet_needs[0] if unmet_needs else None
        return snapshot


def follow(
    read: Callable[[], RunSnapshot],
    sleep: Callable[[float], None],
    show: Callable[[RunSnapshot], None] = lambda snapshot: None,
    warn: Callable[[str], None] = lambda text: None,
) -> Followed:
    """Read a run's state again and again until the run ends. If Redis or the workers are away, wait for them.

    read: reads the run's state. Errors of its first call are raised.
    show: called with each state. warn: called with a sentence when the run begins to wait for something.
    """
    snapshot = read()
    previous: RunSnapshot | None = None
    warned_needs: list[str] = []
    is_redis_away = False

    while True:
        show(snapshot)
        end = _end(snapshot, previous)
        if end is not None:
            return Followed(snapshot, end)

        unmet_needs = needs(snapshot)
        for need in unmet_needs:
            if need not in warned_needs:
                warn(f"{need}; still waiting")
        warned_needs = unmet_needs

        sleep(POLL_S)
        try:
            latest = read()
        except UnknownRun:
            return Followed(snapshot, End.FORGOTTEN)
        except (ConnectionError, TimeoutError) as error:
            if not is_redis_away:
                warn(f"no answer from Redis ({error}); still waiting")
            is_redis_away = True
        else:
            previous = snapshot
            snapshot = latest
            is_redis_away = False


def _end(snapshot: RunSnapshot, previous: RunSnapshot | None) -> End | None:
    """Return how the run ended; None if it goes on.

    previous: the snapshot that was read before this one; None for the first snapshot.
    """
    if snapshot.cancelled and not snapshot.finished:
        return End.CANCELLED
    if snapshot.plan_status in REFUSED:
        return End.PLAN_FAILED  # this submission was refused, even if the run had finished before
    if snapshot.finished and not snapshot.is_planning:
        return End.FINISHED
    if not snapshot.is_idle:
        return None
    if snapshot.failed_jobs:
        return End.SHARDS_FAILED

    # A snapshot is made of several replies of Redis, and the last shard may end between two of them. So a run counts as
    # stranded only when two snapshots in a row show it idle.
    was_idle = previous is not None and previous.is_idle
    return End.STRANDED if was_idle else None
