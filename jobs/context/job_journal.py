"""Keeps the journal of a job of prompts: a key in Redis with the progress of its prompts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from redis import Redis, WatchError

from jobs.common.keys import JOURNAL_TTL_S, JOURNALS_KEY, executions_key, journal_key

#: The most bytes of one job's journal. Each write replaces the whole journal, and a claim of the job reads it.
MAX_BYTES = 256 << 10


def hash_of_owner(owner: str) -> str:
    """Return a hash of a journal's owner. Sent tokens are stored with this hash. owner: see JobJournal."""
    return blake2b(owner.encode(), digest_size=8).hexdigest()


class SentTokens(NamedTuple):
    """Tokens of a sample that were sent to a client. num_before: how many tokens of the sample come before them."""

    sample: int
    num_before: int
    token_ids: Sequence[int]


@dataclass(frozen=True)
class JobJournal:
    """The journal of a job, as one execution reads and writes it.

    The first line names the journal's owner. Each further line is the record of a prompt, as JSON.
    owner: a text that names the job, its time of creation, its payload and its model.
    stored: the journal when the job was claimed; None if there was none.
    execution_id: the execution that must hold the job while the journal is written; None if this is not required.
    sent: the tokens that earlier executions have sent to a client that follows the job, in the order of sending.
    """

    connection: Redis
    job_id: str
    owner: str
    stored: bytes | None
    execution_id: str | None = None
    sent: Sequence[SentTokens] = ()

    @property
    def owner_digest(self) -> str:
        """Return the hash of the journal's owner."""
        return hash_of_owner(self.owner)

    def read(self) -> list[Any]:
        """Return the prompts' records as they were written; [] if the journal is damaged or has another owner."""
        owner, *lines = (self.stored or b"").decode(errors="replace").split("\n")
        if owner != self.owner:
            return []
        try:
            return [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            # A job that lacks its journal computes its prompts again. Nothing else is lost.
            return []

    def with_sent(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """Return the tokens of a prompt's samples, from the journal and from what was sent to a client.

        tokens: the journal's tokens, by sample. Where they differ from the sent tokens, the sent tokens are taken.
        """
        merged: dict[int, list[int]] = {}
        for sample, token_ids in tokens.items():
            if token_ids:
                merged[sample] = list(token_ids)
        for sent in self.sent:
            known_ids = merged.get(sent.sample, [])
            if len(known_ids) < sent.num_before:  # the tokens in between are not known
                continue
            end = sent.num_before + len(sent.token_ids)
            if known_ids[sent.num_before : end] != sent.token_ids:
                # The journal's later tokens continue tokens that were not sent, so the later tokens are dropped.
                merged[sent.sample] = [*known_ids[: sent.num_before], *sent.token_ids]
        return merged

    def write(self, records: Iterable[Sequence[Any]]) -> None:
        """Write the records that fit into MAX_BYTES, unless the execution has lost its job."""
        contents = self.owner
        for record in records:
            line = json.dumps(record)
            if len(contents) + len(line) < MAX_BYTES:
                contents += "\n" + line
        executions = executions_key(self.job_id)
        with self.connection.pipeline() as pipe:
            # The worker that ends the job deletes the journal, and removes the execution from the watched set. If this
            # happens after the next line, the write below fails.
            pipe.watch(executions)  # type: ignore[no-untyped-call]
            if self.execution_id is not None and pipe.zscore(executions, self.execution_id) is None:
                return
            pipe.multi()
            pipe.set(journal_key(self.job_id), contents, ex=JOURNAL_TTL_S)
            pipe.sadd(JOURNALS_KEY, self.job_id)
            with suppress(WatchError):
                pipe.execute()
