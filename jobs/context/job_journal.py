"""Keeps the journal of a job of prompts: a key in Redis with the progress of its prompts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from redis import Redis

from jobs.common.keys import JOURNAL_TTL_S, JOURNALS_KEY, journal_key

#: The most bytes of one job's journal. It is written whole each time, and read with the job's claim.
MAX_BYTES = 256 << 10


class SentTokens(NamedTuple):
    """Tokens of a sample whose text somebody may have read. num_before: the sample's tokens before these."""

    sample: int
    num_before: int
    token_ids: Sequence[int]


class JobJournal:
    """The journal of one execution of a job. Its first line names the owner; each other line is a prompt's record.

    owner: a text that names the job, its time of creation, its payload and its model. stored: the key's value when the
    job was claimed. lease: a sorted set, and the execution's member in it. owner_digest: a short name of the owner.
    sent: what earlier executions of a followed job have sent, in that order.
    """

    def __init__(
        self,
        connection: Redis,
        job_id: str,
        owner: str,
        stored: bytes | None,
        lease: tuple[str, str] | None = None,
        *,
        owner_digest: str = "",
        sent: Sequence[SentTokens] = (),
    ) -> None:
        self.owner_digest = owner_digest
        self._sent = sent
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

    def with_sent(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """Return the tokens of a prompt's samples, gone on with by those that were sent.

        tokens: what the journal has, by sample. Where it has others, the sent ones stand.
        """
        merged = {sample: list(token_ids) for sample, token_ids in tokens.items()}
        for sample, num_before, token_ids in self._sent:
            known = merged.setdefault(sample, [])
            end = num_before + len(token_ids)
            if num_before <= len(known) and known[num_before:end] != token_ids:
                merged[sample] = [*known[:num_before], *token_ids]
        return {sample: token_ids for sample, token_ids in merged.items() if token_ids}

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
