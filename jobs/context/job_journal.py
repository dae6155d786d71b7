"""Keeps the journal of a job of prompts: a key in Redis with the progress of its prompts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from redis import Redis, WatchError

from jobs.common.keys import JOURNAL_TTL_S, JOURNALS_KEY, executions_key, journal_key

#: The most bytes of one job's journal. The whole journal is written each time, and read with the job's claim.
MAX_BYTES = 256 << 10


def short_name(owner: str) -> str:
    """Return a short name of a journal's owner. It is stored beside sent tokens."""
    return blake2b(owner.encode(), digest_size=8).hexdigest()


class SentTokens(NamedTuple):
    """Tokens of a sample whose text somebody may have read. num_before: how many of its tokens come before these."""

    sample: int
    num_before: int
    token_ids: Sequence[int]


@dataclass(frozen=True)
class JobJournal:
    """The journal of one execution of a job. Its first line names the owner; each other line is a prompt's record.

    owner: a text that names the job, its time of creation, its payload and its model. stored: the key's value when the
    job was claimed; None if it had none. execution_id: the journal is written only while this execution holds the job;
    None if it is always written. sent: the tokens that earlier executions have sent to a client that follows the job,
    in the order of sending.
    """

    connection: Redis
    job_id: str
    owner: str
    stored: bytes | None
    execution_id: str | None = None
    sent: Sequence[SentTokens] = ()

    @property
    def owner_digest(self) -> str:
        """Return a short name of the owner."""
        return short_name(self.owner)

    def read(self) -> list[Any]:
        """Return the prompts' records as they were written; no records if the journal is damaged or of another job."""
        owner, *lines = (self.stored or b"").decode(errors="replace").split("\n")
        if owner != self.owner:
            return []
        try:
            return [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # a journal only saves time
            return []

    def with_sent(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """Return the tokens of a prompt's samples, from the journal and from what was sent to a client.

        tokens: the journal's tokens, by sample. Where the two differ, the sent tokens count.
        """
        merged = {sample: list(token_ids) for sample, token_ids in tokens.items()}
        for sample, num_before, token_ids in self.sent:
            known_ids = merged.setdefault(sample, [])
            end = num_before + len(token_ids)
            has_gap = num_before > len(known_ids)
            if not has_gap and known_ids[num_before:end] != token_ids:
                # The journal's later tokens were computed after other tokens than these.
                merged[sample] = [*known_ids[:num_before], *token_ids]
        return {sample: token_ids for sample, token_ids in merged.items() if token_ids}

    def write(self, records: Iterable[Sequence[Any]]) -> None:
        """Write the records that have room, unless the execution has lost its job."""
        contents = self.owner
        for record in records:
            line = json.dumps(record)
            if len(contents) + len(line) < MAX_BYTES:
                contents += "\n" + line
        executions = executions_key(self.job_id)
        with self.connection.pipeline() as pipe:
            # The worker that ends the job deletes its journal. If that happens from here on, the write below fails.
            pipe.watch(executions)  # type: ignore[no-untyped-call]
            if self.execution_id is not None and pipe.zscore(executions, self.execution_id) is None:
                return
            pipe.multi()
            pipe.set(journal_key(self.job_id), contents, ex=JOURNAL_TTL_S)
            pipe.sadd(JOURNALS_KEY, self.job_id)
            with suppress(WatchError):
                pipe.execute()
