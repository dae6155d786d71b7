"""Groups failed jobs by their cause, and says whether trying a job again can help."""

import re
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from hashlib import blake2b

from jobs.errors import fault_of
from jobs.runs.watching.failures import error_line

#: The most characters of an error's last line that are compared.
MAX_FOLDED_CHARS = 300
#: The characters at the end of an error in which its last line is searched.
MAX_TAIL_CHARS = 2000

_KIND = re.compile(r"(?:[^\W\d]\w*\.)*([^\W\d]\w*): ?")
_ID = re.compile(r"\b(?:0x)?(?=[a-f]*\d)[0-9a-f]{6,}(?:-[0-9a-f]+)*\b")
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")


class Remedy(Enum):
    """Whether trying a failed job again can help. The value is the sentence that a person reads."""

    CLIENT = "Trying again does not help: what the job asks for is wrong."
    SETTING = "Trying again can help, once the workers' settings allow what the job asks for."
    SERVER = "Trying again can help, once the cause is mended."
    CANCELLED = "Somebody stopped it. It runs if it is put back."
    UNKNOWN = "It is not known whether trying again helps: the error is not one of Tokenmill's."


#: The error of a worker whose settings do not allow what a job asks for. It names the setting.
NOT_ALLOWED = "NotAllowed"

_REMEDIES = {"client": Remedy.CLIENT, "server": Remedy.SERVER, "cancelled": Remedy.CANCELLED}


@dataclass(frozen=True)
class Cause:
    """Why a job failed.

    kind: the class of the error; "" if the error names none. folded: the message without ids and numbers, so that it is
    the same for similar jobs. message: the message itself.
    """

    kind: str
    folded: str
    remedy: Remedy
    message: str = field(default="", compare=False)

    @cached_property
    def key(self) -> str:
        """Return a short text that identifies the cause in addresses."""
        text = f"{self.kind}\n{self.folded}\n{self.remedy.name}"
        return blake2b(text.encode(errors="backslashreplace"), digest_size=8).hexdigest()


#: The cause of jobs that a cancel has stopped.
STOPPED = Cause("", "stopped by a cancel", Remedy.CANCELLED)


def cause_of(error: str, *, is_stopped: bool = False) -> Cause:
    """Return why a job failed. error: the job's error; "" for none. is_stopped: whether a cancel stopped the job."""
    remedy = _REMEDIES.get(fault_of(error), Remedy.UNKNOWN)
    if is_stopped or remedy is Remedy.CANCELLED:
        return STOPPED
    line = error_line(error[-MAX_TAIL_CHARS:])[:MAX_FOLDED_CHARS]
    kind = ""
    message = line
    match = _KIND.match(line)
    if match is not None:
        kind = match[1]
        message = line[match.end() :]
    if remedy is Remedy.CLIENT and kind == NOT_ALLOWED:
        remedy = Remedy.SETTING
    return Cause(kind, fold(message), remedy, message)


def fold(message: str) -> str:
    """Replace the ids in a message by "…" and the numbers by "#", so that similar messages become the same."""
    without_ids = _ID.sub("…", message)
    return _NUMBER.sub("#", without_ids)


#: A failed job: (queue, job id).
Job = tuple[str, str]


@dataclass
class Group:
    """The failed jobs of one queue that have one cause.

    jobs: by id, when the job ended, in Unix seconds; None if that is not known.
    message: the message of the newest job, with its numbers. message_job: the id of the newest job.
    Once the newest job is gone, `message` is the cause's folded message, without numbers, and `message_job` is "".
    """

    queue: str
    cause: Cause
    jobs: dict[str, float | None] = field(default_factory=dict)
    message: str = ""
    message_job: str = ""
    _newest_first: list[tuple[float, Job]] | None = None

    def add(self, job_id: str, ended_at: float | None, message: str) -> None:
        """Add a job. message: the message of the job's error."""
        newest_at = self.jobs.get(self.message_job) or 0.0
        if not self.message_job or (ended_at or 0.0) > newest_at:
            self.message = message
            self.message_job = job_id
        self.jobs[job_id] = ended_at
        self._newest_first = None

    def remove(self, job_id: str) -> None:
        """Remove a job."""
        del self.jobs[job_id]
        if job_id == self.message_job:
            self.message = self.cause.folded
            self.message_job = ""
        self._newest_first = None

    def newest_first(self) -> list[tuple[float, Job]]:
        """Return (time, job) for each job, the latest time first.

        The time is when the job ended, in Unix seconds; 0 if that is not known.
        """
        if self._newest_first is None:
            timed_jobs = []
            for job_id, ended_at in self.jobs.items():
                timed_jobs.append((ended_at or 0.0, (self.queue, job_id)))
            # The jobs were added in about this order, so there is little to sort.
            timed_jobs.sort(key=lambda timed_job: -timed_job[0])
            self._newest_first = timed_jobs
        return self._newest_first
