"""A held job: the arguments and reply of a claim, read for RQ's `Job`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from worker.errors import BadPayload, JobRefused, TooLarge
from worker.store.records.bounds import MAX_HASH_FIELDS, max_hash_bytes
from worker.store.records.job_record import JobRecord, read_record

CLAIM_BATCH = 200
"""Sequences' worth of jobs that one claim takes at most."""

Hold = Literal["", "suspended", "restored"]
"""Why no worker claims: `rq suspend`, or Redis came back with older data and nobody has confirmed it."""

Mode = Literal["given_back", "engine_died", "fault", "abandoned"]
"""Why a job goes back into its queue; all but the first count as a death of its worker."""


def address(queue: str, job_id: str, execution_id: str) -> dict[str, str]:
    """Return a held job's address for the scripts."""
    return {"queue": queue, "id": job_id, "eid": execution_id}


@dataclass(frozen=True)
class ClaimedJob:
    """A job this worker holds: its record, and the one execution that may finish it."""

    job_id: str
    execution_id: str
    queue_name: str
    worker_name: str
    record: JobRecord = field(default_factory=JobRecord)
    damage: Exception | None = None
    """What reading the job's hash raised; the job can only be failed."""
    has_ended: bool = False
    """Whether its end is written, and only its dependents may wait still."""
    deaths: int = 0
    """How many workers have died with it."""
    left_before: str = ""
    """Id of the last job that its claim left in the queue before it, for want of a place."""
    left: bytes | None = None
    """The journal that an execution has left of it."""
    kind: str = ""
    """FUNCTION or FILE for one that was found to be such and has no place on this worker."""

    def check_hash(self) -> None:
        """Raise JobRefused if the job's hash could not be read."""
        if isinstance(self.damage, JobRefused):
            raise self.damage
        if self.damage is not None:
            reason = f"{type(self.damage).__name__}: {self.damage}".removesuffix(": ")
            raise BadPayload(f"its hash in Redis is damaged ({reason}): enqueue it again")

    @property
    def address(self) -> dict[str, str]:
        return address(self.queue_name, self.job_id, self.execution_id)


@dataclass(frozen=True)
class Wanted:
    """A claim on one queue: at most how many sequences' worth of jobs, functions and files.

    The token has 24 hex digits. num_takers: workers that divide the queue; num_held: jobs of it that this worker holds;
    rounds_up: its share of jobs with several sequences is rounded up. A suspect may come to an idle worker.
    """

    queue: str
    most: int
    token: str
    takes_suspects: bool
    max_functions: int = CLAIM_BATCH
    max_files: int = CLAIM_BATCH
    num_takers: int = 1
    num_held: int = 0
    rounds_up: bool = True


@dataclass(frozen=True)
class Claim:
    """The result of a claim on one queue."""

    jobs: list[ClaimedJob]
    num_foreign: int
    """Jobs that were seen and left in the queue, because only another model or version may run them."""
    first_left: str = ""
    """Id of the first job that was left to other workers, because it is their share; "" for none."""
    hold: Hold = ""
    """Why nothing was looked at."""
    num_newer: int = 0
    """Jobs among these that a newer version of Tokenmill planned."""

    @property
    def is_suspended(self) -> bool:
        """Whether `rq suspend` holds all workers."""
        return self.hold == "suspended"


def restore(queue_name: str, reply: Sequence[Any], worker_name: str, max_job_bytes: int) -> ClaimedJob:
    """Read open_execution.lua's reply, in a claim with the job left before this one. max_job_bytes: unpacked."""
    job_id, execution_id, fields, deaths = (reply[0].decode(errors="replace"), reply[1].decode(), reply[2], reply[3])
    left_before, left = reply[4].decode(errors="replace"), reply[5]
    record = JobRecord()
    damage: Exception | None = None
    try:
        values = _values(fields, max_job_bytes)
    except Exception as error:  # noqa: BLE001  # a hash may hold anything; it must not stop the others
        damage = error
    else:
        record, damage = read_record(values, max_job_bytes)
    return ClaimedJob(
        job_id, execution_id, queue_name, worker_name, record, damage, deaths=deaths, left_before=left_before, left=left
    )


def _values(fields: Any, max_job_bytes: int) -> dict[bytes, bytes]:
    """Return the hash of job_hash.lua. Raises TooLarge if that returned its size instead."""
    if isinstance(fields, int):
        limit = max_hash_bytes(max_job_bytes)
        if fields <= limit:
            raise TooLarge(
                f"the job's hash in Redis has more than the limit of {MAX_HASH_FIELDS} fields: enqueue it "
                "again, and keep what is your own in its meta"
            )
        raise TooLarge(
            f"the job takes {fields} bytes in Redis, more than the limit of {limit}: shorten its arguments, "
            "description or meta, or raise TOKENMILL_MAX_JOB_BYTES"
        )
    return dict(zip(fields[::2], fields[1::2], strict=True))
