"""ClaimedJob: a job that this worker holds. ClaimRequest and Claim: the arguments and the result of a claim."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from worker.errors import BadPayload, JobRefused, TooLarge
from worker.store.records.job_record import MAX_HASH_FIELDS, JobRecord, max_hash_bytes, read_record

CLAIM_BATCH = 200
"""A claim takes no further job once its jobs have this many sequences."""

Hold = Literal["", "suspended", "restored"]
"""Why no worker may claim; "" if workers may. "restored": Redis came back with older data that nobody has confirmed."""

Mode = Literal["given_back", "engine_died", "fault", "abandoned"]
"""Why a job goes back into its queue. Except for "given_back", each reason counts as a death of the job's worker."""


def job_address(queue: str, job_id: str, execution_id: str) -> dict[str, str]:
    """Return the arguments by which the Lua scripts find a job that a worker holds."""
    return {"queue": queue, "id": job_id, "eid": execution_id}


@dataclass(frozen=True)
class ClaimedJob:
    """A job that this worker holds: its record, and the one execution that may end it."""

    job_id: str
    execution_id: str
    queue_name: str
    worker_name: str
    record: JobRecord = field(default_factory=JobRecord)
    damage: Exception | None = None
    """The error that reading the job's hash raised; None if there was none. A job with damage can only be failed."""
    has_ended: bool = False
    """Whether the job's end is written. Then only its dependents may still have to be queued."""
    deaths: int = 0
    """How many workers have died with the job."""
    left_before: str = ""
    """The id of the nearest earlier job that the claim left in the queue for lack of a thread; "" for none."""
    journal: bytes | None = None
    """The journal that an earlier execution has left; None if there is none."""
    pieces: Sequence[Any] = ()
    """The pieces of the job's text that earlier executions have sent, as entries of its stream."""
    kind: str = ""
    """FUNCTION or FILE if this worker has no thread for the job; else ""."""

    def check_hash(self) -> None:
        """Raise JobRefused if the job's hash could not be read."""
        if isinstance(self.damage, JobRefused):
            raise self.damage
        if self.damage is not None:
            reason = f"{type(self.damage).__name__}: {self.damage}".removesuffix(": ")
            raise BadPayload(f"its hash in Redis is damaged ({reason}): enqueue it again")

    @property
    def address(self) -> dict[str, str]:
        """The arguments by which scripts find the job."""
        return job_address(self.queue_name, self.job_id, self.execution_id)


@dataclass(frozen=True)
class ClaimRequest:
    """A request to claim jobs of one queue.

    most: the claim takes no further job once its jobs have this many sequences.
    max_functions, max_files: the most jobs of these two kinds in the claim.
    token: 24 hex digits. If a claim is sent again with the same token, it takes no further jobs.
    takes_suspects: whether the claim may take a job with which workers have died (see claim.lua).
    num_takers: how many workers share the queue's jobs. num_held: how many of these jobs this worker holds already.
    The claim takes no further job once this worker has its share.
    rounds_up: whether this share is rounded up for jobs with several sequences.
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
    """How many jobs were left in the queue because another model or version must run them."""
    first_left: str = ""
    """The id of the first job that was left to other workers as their share; "" for none."""
    hold: Hold = ""
    """Why nothing was claimed; "" if claims are allowed."""
    num_newer: int = 0
    """How many of the `num_foreign` jobs were planned by a newer version of Tokenmill."""

    @property
    def is_suspended(self) -> bool:
        """Whether `rq suspend` has suspended all workers."""
        return self.hold == "suspended"


def read_claimed_job(
    queue_name: str, reply: Sequence[Any], worker_name: str, max_job_bytes: int
) -> ClaimedJob:
    """Return the job in a reply of open_execution.lua. max_job_bytes: the most bytes of an unpacked payload."""
    job_id, execution_id, fields, deaths, left_before, journal, pieces = reply
    record = JobRecord()
    damage: Exception | None = None
    try:
        values = _values(fields, max_job_bytes)
    except Exception as error:  # noqa: BLE001  # a hash may hold anything, and must not stop other jobs
        damage = error
    else:
        record, damage = read_record(values, max_job_bytes)

    return ClaimedJob(
        job_id.decode(errors="replace"),
        execution_id.decode(),
        queue_name,
        worker_name,
        record,
        damage,
        deaths=deaths,
        left_before=left_before.decode(errors="replace"),
        journal=journal,
        pieces=pieces,
    )


def _values(fields: Any, max_job_bytes: int) -> dict[bytes, bytes]:
    """Return the hash that job_hash.lua read. Raises TooLarge if it returned the size of the hash instead."""
    if isinstance(fields, int):
        hash_bytes = fields
        limit = max_hash_bytes(max_job_bytes)
        if hash_bytes <= limit:  # the size is not the problem, so there are too many fields
            raise TooLarge(
                f"the job's hash in Redis has more than the limit of {MAX_HASH_FIELDS} fields: enqueue it "
                "again, and keep your own values in its meta"
            )
        raise TooLarge(
            f"the job takes {hash_bytes} bytes in Redis, more than the limit of {limit}: shorten its arguments, "
            "description or meta, or raise TOKENMILL_MAX_JOB_BYTES"
        )
    names = fields[::2]
    values = fields[1::2]
    return dict(zip(names, values, strict=True))
