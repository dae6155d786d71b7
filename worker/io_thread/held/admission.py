"""Admits a job only if its payload is JSON and calls a function whose name is on the list of allowed functions."""

from collections.abc import Collection
from difflib import get_close_matches

from worker.errors import NotAllowed, TooLarge
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.job_record import FunctionCall, JobRecord, parse_call

MAX_ID_CHARS = 255
"""The most characters of a job's id. The id is part of a dozen keys' names, of the answer and of the log."""


class Admission:
    """Decides whether a function may run here. No module is imported for a job before this decision.

    The function's exact name must be on a list. A pattern such as `jobs.*` would let `jobs.os.system` through, because
    RQ resolves a name attribute by attribute. Callbacks must be on the same list. A job may not call a method of an
    object.
    """

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(allowed)

    def admit(self, claimed: ClaimedJob, payload: bytes) -> FunctionCall:
        """Return the job's call. payload: the job's unpacked payload. Raises BadPayload, TooLarge or NotAllowed."""
        if len(claimed.job_id) > MAX_ID_CHARS:
            raise TooLarge(
                f"the job's id has {len(claimed.job_id)} characters, more than the limit of {MAX_ID_CHARS}: "
                "enqueue it with a shorter id, or without an id: then RQ makes one"
            )
        call = parse_call(payload, claimed.record.max_job_bytes)
        if call.name not in self._allowed:
            raise NotAllowed("function", call.name, self._hint(call.name))
        for role, name in claimed.record.callbacks.items():
            if name not in self._allowed:
                raise NotAllowed(role, name, self._hint(name))
        return call

    def with_allowed_callbacks(self, record: JobRecord) -> JobRecord:
        """Return the record, but without callbacks if one of them may not run here."""
        if any(name not in self._allowed for name in record.callbacks.values()):
            return record.without_callbacks()
        return record

    def _hint(self, name: str) -> str:
        """Return a hint with the allowed name that is most similar to `name`; "" if none is similar."""
        similar = get_close_matches(name[:MAX_ID_CHARS], self._allowed, n=1, cutoff=0.8)
        return f"; did you mean {similar[0]!r}?" if similar else ""
