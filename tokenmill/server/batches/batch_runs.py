"""Batches of a project. Each is a run over an uploaded file, in a folder of its own.

    <project>/batches/<id>/batch.json     what was asked for
    <project>/batches/<id>/run/           the run's output
    <project>/batches/<id>/answered/      the lines of a cancelled batch that were answered

The state of a batch is read from its run each time.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any, Self

from redis import Redis

from jobs.client import Run
from jobs.errors import JobsError, RunResubmitted, UnknownRun
from jobs.runs.control import submit_run
from jobs.runs.plans.names import MANIFEST, OPENAI_BATCH, SUCCESS
from jobs.runs.plans.spec import RunSpec
from jobs.runs.watching.api_records import OPEN_STATUSES, BatchRecord, batch_status, record_batch
from jobs.runs.watching.snapshot import RunSnapshot
from tokenmill.server.answers.live_models import living_workers
from tokenmill.server.batches.answered_lines import write_answered_lines
from tokenmill.server.batches.file_store import (
    NUM_READERS,
    FileStore,
    check_id,
    missing,
    new_id,
    page_of,
)
from tokenmill.server.batches.folders import read_json, write_json
from tokenmill.server.errors import ApiError

logger = logging.getLogger("tokenmill")

#: What the lines of a batch may ask for.
EMBEDDINGS = "/v1/embeddings"
BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", EMBEDDINGS, "/v1/responses")
#: The longest value, and the most entries, of `metadata`; OpenAI's.
MAX_METADATA_CHARS, MAX_METADATA = 512, 16
#: The most earlier batches whose answers a batch takes.
MAX_REUSED = 20
#: How compressed files begin.
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh")
_WINDOW = re.compile(r"(\d{1,3})([hd])")
_HOUR_S = 3600


@dataclass(frozen=True)
class Batch:
    """What a client asked for. Times are Unix seconds. input_path: where the file lies."""

    id: str
    input_file_id: str
    input_path: str
    endpoint: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None = None
    cancelling_at: int | None = None
    reused: tuple[str, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class Standing:
    """How a batch stands.

    status: OpenAI's state. total, done, failed: numbers of lines. reason: why it failed. began_at, ended_at: Unix
    seconds. usage: the tokens of all finished lines.
    """

    status: str
    total: int = 0
    done: int = 0
    failed: int = 0
    reason: str = ""
    began_at: int | None = None
    ended_at: int | None = None
    usage: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, snapshot: RunSnapshot) -> Self:
        """Return how the batch of a run stands."""
        return cls(
            batch_status(snapshot),
            snapshot.rows or 0,
            snapshot.rows_done,
            snapshot.errors,
            snapshot.plan_error or snapshot.stopped or "its jobs have failed",
            None if snapshot.began_at is None else int(snapshot.began_at),
            None if snapshot.ended_at is None else int(snapshot.ended_at),
            _usage(snapshot),
        )


class Batches:
    """Makes, reads and cancels batches. Its methods block, and are called in threads."""

    def __init__(
        self,
        connection: Redis,
        files: FileStore,
        queue: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._connection = connection
        self._files = files
        self._folder = files.folder
        self._queue = queue
        self._clock = clock

    def new_id(self) -> str:
        """Return an id for a batch. It sorts behind those of all earlier batches."""
        return new_id("batch_", self._clock())

    def create(
        self,
        project: str,
        body: Any,
        max_open: int | None = None,
        *,
        batch_id: str | None = None,
        admit: Callable[[str, IO[bytes], str], None] | None = None,
    ) -> dict[str, Any]:
        """Make a batch of an uploaded file. max_open: how many open batches the project may have.

        batch_id: of `new_id`. If it has been made before, it is returned as it stands. admit: called with a new batch's
        id, its lines and its endpoint; it may raise ApiError. Raises ApiError, RedisError, OSError, StoreError.
        """
        if batch_id is None:
            batch_id = self.new_id()
        known = self._find(project, batch_id)
        if known is not None:
            return self._shown(project, known)
        if not isinstance(body, dict):
            raise ApiError(400, "the body is no JSON object")
        endpoint = body.get("endpoint")
        if endpoint not in BATCH_ENDPOINTS:
            raise _wrong("endpoint", endpoint, " or ".join(BATCH_ENDPOINTS))
        file_id = body.get("input_file_id")
        if not isinstance(file_id, str):
            raise _wrong("input_file_id", file_id, "the id of an uploaded file")
        window_s = _window_s(body.get("completion_window"))
        metadata = _metadata(body.get("metadata"))
        file = self._files.find(project, file_id)
        if not file.bytes:
            raise ApiError(400, f"{file_id} has no lines", code="empty_file", param="input_file_id")

        if max_open is not None:
            self._check_open(project, max_open)
        try:
            with self._folder.open(file.content) as lines:
                _refuse_compressed(lines)
                if admit is not None:
                    admit(batch_id, lines, endpoint)
        except FileNotFoundError:  # it was deleted meanwhile
            raise missing("file", file_id) from None

        reused: tuple[str, ...] = ()
        if (metadata or {}).get("reuse") == "true":
            reused = tuple(self._finished_runs(project))
        now = self._clock()
        batch = Batch(
            id=batch_id,
            input_file_id=file.id,
            input_path=self._folder.path(file.content),
            endpoint=endpoint,
            completion_window=body["completion_window"],
            created_at=int(now),
            expires_at=int(now) + window_s,
            metadata=metadata,
            reused=reused,
        )
        # The record comes first. If this server dies before it submits the run, the next look submits it.
        self._write(project, batch)
        try:
            self._submit(project, batch)
        except JobsError as error:  # nothing was enqueued, and another try would fail too
            self._folder.remove(f"{_name(project, batch.id)}/batch.json")
            raise ApiError(400, str(error)) from None
        return self._shown(project, batch)

    def is_open(self, project: str, batch_id: str) -> bool:
        """Whether a project's batch has not ended."""
        batch = self._find(project, batch_id)
        if batch is None:
            return False
        return self._standing(project, batch).status in (*OPEN_STATUSES, "cancelling")

    def _check_open(self, project: str, max_open: int) -> None:
        standings = [self._standing(project, batch) for batch in self._all(project)]
        num_open = sum(standing.status in OPEN_STATUSES for standing in standings)
        if num_open >= max_open:
            raise ApiError(
                429,
                f"project {project!r} has {num_open} open batches, and {max_open} are allowed: wait for one",
                code="batch_limit_exceeded",
            )

    def _submit(self, project: str, batch: Batch) -> None:
        """Submit a batch's run, or resume it, and record the batch. Raises JobsError."""
        run = submit_run(
            self._connection,
            self._queue,
            max_errors="100%",
            deadline=batch.expires_at,
            reuse=list(batch.reused) or None,
            **self._run_arguments(project, batch),
        )
        record = BatchRecord(batch.id, project, run, batch.created_at, batch.expires_at)
        record_batch(self._connection, record)

    def retrieve(self, project: str, batch_id: str) -> dict[str, Any]:
        """Return how a batch stands. Raises ApiError if there is none."""
        return self._shown(project, self._read(project, batch_id))

    def page(
        self, project: str, after: str | None, limit: int
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return a page of a project's batches, the latest first, and whether there are more. See page_of."""
        batches, has_more = page_of(self._all(project), after, limit)
        return [self._shown(project, batch) for batch in batches], has_more

    def cancel(self, project: str, batch_id: str) -> dict[str, Any]:
        """Cancel a batch; one that has ended stays as it is. Raises ApiError if there is none."""
        batch = self._read(project, batch_id)
        shown = self._shown(project, batch)
        if shown["status"] in OPEN_STATUSES:
            batch = Batch(**{**asdict(batch), "cancelling_at": int(self._clock())})
            self._write(project, batch)
            # A run that Redis has lost counts as cancelled by the record alone.
            try:
                self._run(project, batch).cancel()
            except UnknownRun:
                pass
            except RunResubmitted as error:
                raise ApiError(409, str(error)) from None
            shown = self._shown(project, batch)
        return shown

    def _find(self, project: str, batch_id: str) -> Batch | None:
        record = read_json(self._folder, f"{_name(project, batch_id)}/batch.json")
        return None if record is None else Batch(**record)

    def _read(self, project: str, batch_id: str) -> Batch:
        check_id(batch_id, "batch")
        batch = self._find(project, batch_id)
        if batch is None:
            raise missing("batch", batch_id)
        return batch

    def _write(self, project: str, batch: Batch) -> None:
        write_json(self._folder, f"{_name(project, batch.id)}/batch.json", asdict(batch))

    def _all(self, project: str) -> list[Batch]:
        """Return a project's batches, the latest first."""
        ids = self._folder.names(f"{project}/batches")
        ids.reverse()
        with ThreadPoolExecutor(NUM_READERS) as readers:
            found = list(readers.map(lambda batch_id: self._find(project, batch_id), ids))
        return [batch for batch in found if batch is not None]

    def _finished_runs(self, project: str) -> list[str]:
        """Return the outputs of a project's finished batches, the latest first."""
        runs = []
        for batch in self._all(project):
            run = f"{_name(project, batch.id)}/run"
            if self._folder.stat(f"{run}/{MANIFEST}") is not None:
                runs.append(self._folder.path(run))
            if len(runs) == MAX_REUSED:
                break
        return runs

    def _run_arguments(self, project: str, batch: Batch) -> dict[str, Any]:
        """Return the arguments that the id of a batch's run is made of."""
        return {
            "input": [batch.input_path],
            "output": self._folder.path(f"{_name(project, batch.id)}/run"),
            "input_format": OPENAI_BATCH,
            "inline_pictures": True,  # a client of the server names no file on a worker's disk
            "batch_endpoint": batch.endpoint,
        }

    def _run(self, project: str, batch: Batch) -> Run:
        arguments = self._run_arguments(project, batch)
        run = RunSpec.from_arguments(**arguments).run
        return Run(run, self._connection, arguments["output"])

    def _ended(self, project: str, batch: Batch) -> Standing | None:
        """Return how the batch stands by its run's folder, if the run has ended."""
        run = f"{_name(project, batch.id)}/run"
        if self._folder.stat(f"{run}/{SUCCESS}") is None:
            return None
        manifest = read_json(self._folder, f"{run}/{MANIFEST}")
        if manifest is None or manifest["run"] != self._run(project, batch).id:
            return None
        status = "expired" if manifest["expired"] else "completed"
        return Standing(
            status,
            total=manifest["rows"],
            done=manifest["rows"],
            failed=manifest["errors"],
            began_at=int(manifest["started_at"]),
            ended_at=int(manifest["ended_at"]),
        )

    def _standing(self, project: str, batch: Batch) -> Standing:
        """Read how the batch stands. One whose window has ended while no worker is alive is expired."""
        standing = self._run_standing(project, batch)
        is_late = standing.status in OPEN_STATUSES and self._clock() >= batch.expires_at
        if is_late and not living_workers(self._connection, self._queue):
            return replace(standing, status="expired")
        return standing

    def _run_standing(self, project: str, batch: Batch) -> Standing:
        """Read how the run stands, and submit one that Redis does not know."""
        run = self._run(project, batch)
        try:
            standing = Standing.of(run.status())
        except UnknownRun:
            pass
        else:
            # A planning that goes on after Redis has lost the run does not know of the cancel, and fails.
            has_lost_cancel = standing.status == "failed" and batch.cancelling_at is not None
            return replace(standing, status="cancelled") if has_lost_cancel else standing
        ended = self._ended(project, batch)
        if ended is not None:  # Redis has forgotten the run, and the folder has it whole
            return ended
        if batch.cancelling_at is not None:
            return Standing("cancelled")
        # Redis was lost, or a server died before it submitted the run. Parts that are there stay.
        try:
            self._submit(project, batch)
            return Standing.of(run.status())
        except JobsError as error:
            return Standing("failed", reason=str(error))

    def _answered_files(self, project: str, batch: Batch) -> set[str]:
        """Return the names of a cancelled batch's files. It has none if its parts cannot be read, or the disk is full.

        Other batches are listed with it, so that is no error.
        """
        try:
            return write_answered_lines(self._folder, _name(project, batch.id))
        except (JobsError, OSError) as error:
            logger.warning("%s: its answered lines cannot be written: %s", batch.id, error)
            return set()

    def _shown(self, project: str, batch: Batch) -> dict[str, Any]:
        """Return OpenAI's object of a batch."""
        standing = self._standing(project, batch)
        status = standing.status
        # Without an end its files are not written yet: no worker was alive when its window ended.
        has_ended = status in ("completed", "expired") and standing.ended_at is not None
        num_completed = max(0, standing.done - standing.failed)
        has_output = has_ended and num_completed > 0
        has_errors = has_ended and standing.failed > 0
        if status == "cancelled":
            written = self._answered_files(project, batch)
            has_output = "output.jsonl" in written
            has_errors = "errors.jsonl" in written
        file_id = batch.id.replace("batch_", "file-", 1)
        reason = standing.reason.replace(batch.input_path, batch.input_file_id)
        error = {"code": "batch_failed", "message": reason, "param": None, "line": None}
        return {
            "id": batch.id,
            "object": "batch",
            "endpoint": batch.endpoint,
            "errors": {"object": "list", "data": [error]} if status == "failed" else None,
            "input_file_id": batch.input_file_id,
            "completion_window": batch.completion_window,
            "status": status,
            "output_file_id": f"{file_id}-output" if has_output else None,
            "error_file_id": f"{file_id}-errors" if has_errors else None,
            "created_at": batch.created_at,
            "in_progress_at": standing.began_at,
            "expires_at": batch.expires_at,
            "finalizing_at": standing.ended_at if has_ended else None,
            "completed_at": standing.ended_at if status == "completed" else None,
            "failed_at": standing.ended_at or batch.created_at if status == "failed" else None,
            "expired_at": (standing.ended_at or batch.expires_at) if status == "expired" else None,
            "cancelling_at": batch.cancelling_at,
            "cancelled_at": batch.cancelling_at if status == "cancelled" else None,
            "request_counts": {
                "total": standing.total,
                "completed": num_completed,
                "failed": standing.failed,
            },
            "usage": standing.usage,
            "metadata": None if batch.metadata is None else dict(batch.metadata),
        }


def _name(project: str, batch_id: str) -> str:
    """Return the name of a batch's folder within the server's."""
    return f"{project}/batches/{batch_id}"


def _refuse_compressed(lines: IO[bytes]) -> None:
    """Raise ApiError for a compressed file, which workers would unpack."""
    beginning = lines.read(4)
    lines.seek(0)
    if beginning.startswith(_COMPRESSED):
        raise ApiError(
            400, "the file is compressed: upload its lines as they are", param="input_file_id"
        )


def _usage(snapshot: RunSnapshot) -> dict[str, Any]:
    return {
        "input_tokens": snapshot.prompt_tokens,
        "input_tokens_details": {"cached_tokens": snapshot.cached_tokens},
        "output_tokens": snapshot.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": snapshot.prompt_tokens + snapshot.completion_tokens,
    }


def _window_s(value: object) -> int:
    match = _WINDOW.fullmatch(value) if isinstance(value, str) else None
    seconds = int(match[1]) * _HOUR_S * (24 if match[2] == "d" else 1) if match else 0
    if not _HOUR_S <= seconds <= 7 * 24 * _HOUR_S:
        raise _wrong("completion_window", value, 'from "1h" to "7d"')
    return seconds


def _metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    is_sound = (
        isinstance(value, dict)
        and len(value) <= MAX_METADATA
        and all(
            isinstance(text, str) and len(text) <= MAX_METADATA_CHARS
            for entry in value.items()
            for text in entry
        )
    )
    if not is_sound:
        raise ApiError(
            400,
            f"metadata is no object of at most {MAX_METADATA} texts of {MAX_METADATA_CHARS} characters",
            param="metadata",
        )
    assert isinstance(value, dict)
    return value


def _wrong(name: str, value: object, expected: str) -> ApiError:
    return ApiError(400, f"{name} is {str(value)[:80]!r}, expected {expected}", param=name)
