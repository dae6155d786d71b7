"""The journal of a job of prompts: a key in Redis with what another worker needs to go on where this one was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from redis import Redis

from jobs.common.keys import JOURNAL_TTL_S, journal_key
from jobs.context.under_way import UnderWay

#: Of one job: it is written whole each time, and comes with the job's claim.
MAX_BYTES = 256 << 10


class LeftPrompt(NamedTuple):
    """How far a prompt was, and for each answer that it had the reason why a check did not take it."""

    under_way: UnderWay
    reasons: Sequence[str | None]


class JobJournal:
    """What one execution of a job has found, and writes: a line that says whose it is, and one for each prompt.

    whose: job, payload and model. found: the key's value at its claim, None for none. lease: a sorted set, and its
    member while this execution holds the job.
    """

    def __init__(
        self, connection: Redis, job_id: str, whose: str, found: bytes | None, lease: tuple[str, str] | None = None
    ) -> None:
        self._connection, self._key, self._whose = connection, journal_key(job_id), whose
        self._found, self._lease = found, lease

    def read(self) -> dict[int, LeftPrompt]:
        """Return what is left of the job's prompts, by their places: nothing of another job or model."""
        whose, *lines = (self._found or b"").decode(errors="replace").split("\n")
        try:
            prompts = list(map(json.loads, lines if whose == self._whose else ()))
            return {place: LeftPrompt(UnderWay.from_json(was), reasons) for place, was, reasons in prompts}
        except (ValueError, TypeError, KeyError):  # damaged: it only saves time
            return {}

    def write(self, prompts: Iterable[tuple[int, LeftPrompt]]) -> None:
        """Write it anew, unless the job was taken over; what goes beyond its bound is left out."""
        contents = self._whose
        for place, (was, reasons) in prompts:
            line = json.dumps([place, was.to_json(), reasons])
            if len(contents) + len(line) < MAX_BYTES:
                contents += "\n" + line
        if self._lease is None or self._connection.zscore(*self._lease) is not None:
            self._connection.set(self._key, contents, ex=JOURNAL_TTL_S)
