"""Keeps the journal of a job of prompts: a key in Redis with the progress of its prompts."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from redis import Redis

from jobs.common.keys import JOURNAL_TTL_S, JOURNALS_KEY, journal_key

#: The most bytes of one job's journal. It is written whole each time, and read with the job's claim.
MAX_BYTES = 256 << 10


class JobJournal:
    """The journal of one execution of a job. Its first line names the owner; each other line is a prompt's record.

    owner: a text that names the job, its time of creation, its payload and its model. stored: the key's value when the
    job was claimed. lease: a sorted set, and the execution's member in it.
    """

    def __init__(
        self,
        connection: Redis,
        job_id: str,
        owner: str,
        stored: bytes | None,
        lease: tuple[str, str] | None = None,
    ) -> None:
        self._connection = connection
        self._job_id = job_id
        self._owner = owner
        self._stored = stored
        self._lease = lease

    def read(self) -> list[Any]:
        """Return the prompts' records as they were written. Empty if it is damaged, or another job's."""
        owner, *lines = (self._stored or b"").decode(errors="replace").split("\n")
        if owner != self._owner:
            return []
        try:
            return [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # it only saves time
            return []

    def write(self, records: Iterable[Sequence[Any]]) -> None:
        """Write the records that have room, unless the execution has lost its job."""
        contents = self._owner
        for record in records:
            line = json.dumps(record)
            if len(contents) + len(line) < MAX_BYTES:
                contents += "\n" + line
        if self._lease is None or self._connection.zscore(*self._lease) is not None:
            with self._connection.pipeline(transaction=False) as pipe:
                pipe.set(journal_key(self._job_id), contents, ex=JOURNAL_TTL_S)
                pipe.sadd(JOURNALS_KEY, self._job_id)
                pipe.execute()
