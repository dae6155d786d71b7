"""Which runs Redis knows, without a look through its keys: an index that each submission writes.

It only lists; what a run is stands in the run's own keys.
"""

import time
from typing import Any

from redis import Redis

from jobs.common import stored
from jobs.common.keys import RUN_TTL_S, RUNS_KEY

#: A run's keys live for RUN_TTL_S from its last part on, which may come long after its submission.
KEPT_S = 2 * RUN_TTL_S


def list_in_index(connection: Redis, run: str) -> None:
    """Put a run that is submitted or planned now first; drop those of long ago."""
    now_ms = int(time.time() * 1000)
    with connection.pipeline() as pipe:
        pipe.zadd(RUNS_KEY, {run: now_ms})
        pipe.zremrangebyscore(RUNS_KEY, "-inf", now_ms - KEPT_S * 1000)
        pipe.expire(RUNS_KEY, KEPT_S)
        pipe.execute()


def newest_runs(connection: Redis, limit: int) -> list[str]:
    """Return the runs that were submitted last, the last one first."""
    found: Any = connection.zrevrange(RUNS_KEY, 0, limit - 1)
    return list(map(stored.text, found))
