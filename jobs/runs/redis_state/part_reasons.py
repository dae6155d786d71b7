"""Why rows of a run's parts have errors, as Redis keeps it while the run goes on."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from jobs.common.keys import RUN_TTL_S, run_errors_key
from jobs.runs.statistics.reasons import Reasons, read_reasons, reasons_text

if TYPE_CHECKING:
    from redis import Redis

#: Of a part as many kinds of reasons are kept, and of a run those of as many parts.
MAX_OF_PART, MAX_PARTS = 5, 1000


def record_reasons(connection: Redis, run: str, shard: int, reasons: Reasons) -> None:
    """Keep a part's reasons; without any, forget what was kept of an earlier one."""
    key = run_errors_key(run)
    with connection.pipeline() as pipe:
        pipe.hdel(key, str(shard))
        pipe.hlen(key)
        _, length = pipe.execute()
        if reasons.rows and length < MAX_PARTS:
            pipe.hset(key, str(shard), reasons_text(reasons, MAX_OF_PART))
            pipe.expire(key, RUN_TTL_S)
            pipe.execute()


def recorded_reasons(connection: Redis, run: str) -> Reasons:
    """Return what is kept of a run's parts: of more than MAX_PARTS with errors not of all."""
    found: Any = connection.hgetall(run_errors_key(run))
    return read_reasons(islice(found.values(), 2 * MAX_PARTS))
