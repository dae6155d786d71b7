"""Outcome: how a job ended, for the store to write. Values and errors are in RQ's form and have limited sizes."""

from __future__ import annotations

import io
import json
import traceback
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from rq.defaults import UNSERIALIZABLE_RETURN_VALUE_PAYLOAD
from rq.job import Job, Retry

from jobs.errors import ResultTooLarge
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.next_step import NextStep, Policy, next_step

EndStatus = Literal["finished", "failed", "stopped"]
FinishReply = Literal["done", "again", "lost", "dependents", "refused"]
"""Redis' reply to an end, see finish.lua. "refused" means that Redis takes this end in no form."""

MAX_TRACEBACK_CHARS = 1 << 16
"""The most characters of a traceback in Redis."""

_HEAD_CHARS = 1 << 14
"""How many characters a shortened traceback keeps of its beginning. It keeps more of its end, which says most."""

_MAX_FRAMES = 30
"""The most calls of a traceback that are logged."""

_SMALL_BYTES = 1 << 18
"""The most bytes of a small value, which is packed within a few milliseconds."""

_SMALL_VALUES = 5000
"""The most values within a small value."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended, for `JobStore.finish`."""

    claimed: ClaimedJob
    status: EndStatus
    value: Any
    """The return value of a finished job, or the traceback of a failed or stopped one."""
    ended_at: datetime
    working_s: float
    began_at: datetime | None = None
    """None for a job that ended before it began."""
    may_retry: bool = False
    """Whether a failed job uses one of its retries, if it has any left."""
    packed: bytes | None = None
    """The value as JSON, once it is packed. None also stands for the value None."""
    changed_policy: Policy | None = None
    """The policy in the user code's copy of the job; None if there is no copy."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the packed value or traceback; 0 while a value is not packed."""
        if self.packed is not None:
            return len(self.packed)
        if self.status != "finished" and isinstance(self.value, str):
            return len(self.value)
        return 0

    @property
    def is_final(self) -> bool:
        """Whether a failed or stopped job has ended for good, because it is not retried."""
        return not (self.may_retry and self.policy.has_retries)

    @property
    def returned_retry(self) -> Retry | None:
        """The `Retry` that the job returned, if any."""
        return self.value if isinstance(self.value, Retry) else None

    @property
    def policy(self) -> Policy:
        """The job's own settings about running again and being kept, with the changes of user code."""
        if self.changed_policy is not None:
            return self.changed_policy
        return self.claimed.record.policy

    def next_step(self, default_result_ttl_s: int) -> NextStep:
        """Return what becomes of the job now. default_result_ttl_s: see next_step.py."""
        return next_step(
            self.policy,
            is_finished=self.status == "finished",
            returned_retry=self.returned_retry,
            may_retry=self.may_retry,
            default_result_ttl_s=default_result_ttl_s,
        )

    def with_policy_of(self, job: Job | None) -> Outcome:
        """Return the outcome with the policy that user code has left in its copy of the job.

        job: the copy; None if there is none.
        Raises an error of any class if the policy cannot be used, for example if `result_ttl` is a text.
        """
        if job is None and self.claimed.damage is None:
            return self  # the policy was checked when the job was read
        outcome = self
        if job is not None:
            outcome = replace(self, changed_policy=Policy.of(job))
        outcome.policy.check()
        outcome.next_step(0)  # raises if the policy gives no next step
        return outcome

    def unwritable(self, error: Exception) -> Outcome:
        """Return the outcome to write instead, because this one could not be written. The job fails, as it does in RQ.

        error: what `with_policy_of` raised.
        """
        text = traceback_text(error)
        return replace(
            self, status="failed", value=text, may_retry=False, packed=None, changed_policy=Policy()
        )


@dataclass(frozen=True)
class CaughtError:
    """An error of user code, and its traceback as text.

    The text is made in the user code's thread, because an error's methods are user code too.
    """

    error: BaseException
    text: str


def traceback_text(error: BaseException) -> str:
    """Return an error's traceback in characters that Redis takes, cut to MAX_TRACEBACK_CHARS."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  # an error's class may have any methods
        text = (
            f"{type(error).__module__}.{type(error).__qualname__}: its traceback cannot be shown\n"
        )
    num_left_out = len(text) - MAX_TRACEBACK_CHARS
    if num_left_out > 0:
        head = text[:_HEAD_CHARS]
        tail = text[_HEAD_CHARS + num_left_out :]
        text = f"{head}\n[{num_left_out} characters are left out here]\n{tail}"
    return text.encode("utf-8", "backslashreplace").decode()


def frames_of(error: BaseException) -> str:
    """Return the calls in which an error was raised, innermost first.

    The error's message is left out, because it may quote a prompt.
    """
    frames = traceback.extract_tb(error.__traceback__)
    frames.reverse()  # the innermost frame comes first
    calls = []
    for frame in frames[:_MAX_FRAMES]:
        calls.append(f"{frame.filename}:{frame.lineno} in {frame.name}")
    return ", ".join(calls)


def is_small(value: Any) -> bool:
    """Whether a value can be packed within a few milliseconds. The value must come from our own code."""
    least_bytes, num_values = _measure(value, _SMALL_BYTES)
    return least_bytes <= _SMALL_BYTES and num_values <= _SMALL_VALUES


def pack(value: Any, max_bytes: int, known_small: bool = False) -> bytes | None:
    """Return a value's JSON: None for the value None, and RQ's placeholder for a value that JSON cannot express.

    known_small: whether the caller knows that `is_small` is true, so that the value is not measured again. Raises
    ResultTooLarge if the JSON has more than `max_bytes` bytes. Other threads can run while a large value is packed.
    """
    if value is None:
        return None
    try:
        text = json.dumps(value) if known_small else _dump(value, max_bytes)
    except ResultTooLarge:
        raise
    except Exception:  # noqa: BLE001  # as RQ does
        text = json.dumps(UNSERIALIZABLE_RETURN_VALUE_PAYLOAD)
    if len(text) > max_bytes:
        raise ResultTooLarge(max_bytes)
    return text.encode()


def _dump(value: Any, max_bytes: int) -> str:
    """Return the JSON of a value of any size. Raises ResultTooLarge, if possible before any JSON is made."""
    least_bytes, num_values = _measure(value, max_bytes)
    if least_bytes > max_bytes:
        raise ResultTooLarge(max_bytes)
    if num_values <= _SMALL_VALUES:
        return json.dumps(value)
    return _dump_in_pieces(value, max_bytes)


def _dump_in_pieces(value: Any, max_bytes: int) -> str:
    """Return a value's JSON, made in pieces. Other threads can run between two pieces. Raises ResultTooLarge."""
    text = io.StringIO()
    for piece in json.JSONEncoder().iterencode(value):
        text.write(piece)
        if text.tell() > max_bytes:
            raise ResultTooLarge(max_bytes)
    return text.getvalue()


def _measure(value: Any, max_bytes: int) -> tuple[int, int]:
    """Return the least bytes that a value's JSON may have, and how many values the value consists of.

    Counting stops once there are more than `max_bytes` bytes.
    """
    num_bytes = 0
    num_values = 0
    unmeasured = [value]
    while unmeasured and num_bytes <= max_bytes:
        item = unmeasured.pop()
        num_values += 1
        if isinstance(item, str):
            num_bytes += len(item) + 2
        elif isinstance(item, (dict, list, tuple)):
            # Each item takes at least a character and a comma. An empty list takes two brackets.
            num_bytes += max(2, 2 * len(item))
            if num_bytes <= max_bytes:
                unmeasured.extend(item)
                if isinstance(item, dict):
                    unmeasured.extend(item.values())
        else:
            num_bytes += 1
    return num_bytes, num_values
