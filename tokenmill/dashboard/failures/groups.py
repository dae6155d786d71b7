"""Says which failed jobs failed for the same reason, and whether trying again can help."""

import re
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from hashlib import blake2b

from jobs.errors import fault_of
from jobs.runs.watching.failures import error_line

#: The most characters of an error by which jobs are grouped.
MAX_FOLDED_CHARS = 300
#: The end of an error in which its last line is looked for.
MAX_TAIL_CHARS = 2000

_KIND = re.compile(r"(?:[^\W\d]\w*\.)*([^\W\d]\w*): ?")
_ID = re.compile(r"\b(?:0x)?(?=[a-f]*\d)[0-9a-f]{6,}(?:-[0-9a-f]+)*\b")
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")


class Remedy(Enum):
    """Whether trying a failed job again can help. The value is the sentence that a person reads."""

    CLIENT = "Trying again does not help: what the job asks for is wrong."
    SERVER = "Trying again can help, once the cause is mended."
    CANCELLED = "Somebody stopped it. It runs if it is put back."
    UNKNOWN = "It is not known whether trying again helps: the error is no error of Tokenmill's."


_REMEDIES = {"client": Remedy.CLIENT, "server": Remedy.SERVER, "cancelled": Remedy.CANCELLED}


@dataclass(frozen=True)
class Cause:
    """What a job failed with.

    kind: the error's class, "" if there is none. folded: its message without ids and numbers. message: the message
    itself, which differs from job to job.
    """

    kind: str
    folded: str
    remedy: Remedy
    message: str = field(default="", compare=False)

    @cached_property
    def key(self) -> str:
        """Return a short text that stands for the cause in addresses."""
        whole = "\n".join((self.kind, self.folded, self.remedy.name))
        return blake2b(whole.encode(errors="backslashreplace"), digest_size=8).hexdigest()


#: The cause of jobs that a cancel has stopped.
STOPPED = Cause("", "stopped by a cancel", Remedy.CANCELLED)


def cause_of(error: str, *, is_stopped: bool = False) -> Cause:
    """Return what a job failed with. error: the text that it left; "" for none."""
    remedy = _REMEDIES.get(fault_of(error), Remedy.UNKNOWN)
    if is_stopped or remedy is Remedy.CANCELLED:
        return STOPPED
    line = error_line(error[-MAX_TAIL_CHARS:])[:MAX_FOLDED_CHARS]
    match = _KIND.match(line)
    kind = match[1] if match else ""
    message = line[match.end() :] if match else line
    return Cause(kind, fold(message), remedy, message)


def fold(message: str) -> str:
    """Return a message without what differs from job to job: ids become "…", and numbers become "#"."""
    return _NUMBER.sub("#", _ID.sub("…", message))


#: A failed job: its queue and its id.
Job = tuple[str, str]


@dataclass
class Group:
    """Failed jobs of one queue with one cause.

    jobs: when each ended, in Unix seconds, by its id; None if that is unknown. message: that of the newest job, with
    its numbers; the folded one if that job is gone. message_job: that job, "" if it is gone.
    """

    queue: str
    cause: Cause
    jobs: dict[str, float | None] = field(default_factory=dict)
    message: str = ""
    message_job: str = ""
    _newest_first: list[tuple[float, Job]] | None = None

    def add(self, job_id: str, ended_at: float | None, message: str) -> None:
        """Add a job. message: what it failed with."""
        newest_at = self.jobs.get(self.message_job) or 0.0
        if not self.message_job or (ended_at or 0.0) > newest_at:
            self.message = message
            self.message_job = job_id
        self.jobs[job_id] = ended_at
        self._newest_first = None

    def remove(self, job_id: str) -> None:
        """Take a job away."""
        del self.jobs[job_id]
        if job_id == self.message_job:
            self.message = self.cause.folded
            self.message_job = ""
        self._newest_first = None

    def newest_first(self) -> list[tuple[float, Job]]:
        """Return the jobs, those that ended last first, each behind its time. The time is 0 if it is unknown."""
        if self._newest_first is None:
            jobs = [
                (ended_at or 0.0, (self.queue, job_id)) for job_id, ended_at in self.jobs.items()
            ]
            # They were read in about this order, so there is little to sort.
            jobs.sort(key=lambda entry: -entry[0])
            self._newest_first = jobs
        return self._newest_first
