"""The batches of a project. Each batch is a run over an uploaded file, and has a folder of its own.

    <project>/batches/<id>/batch.json     the request
    <project>/batches/<id>/run/           the run's output
    <project>/batches/<id>/answered/      the lines of a cancelled batch that were answered

The state of a batch is not stored: it is read from the run each time.
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

#: The endpoints that the lines of a batch may call.
EMBEDDINGS = "/v1/embeddings"
BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", EMBEDDINGS, "/v1/responses")
#: OpenAI's limits: the most entries of `metadata`, and the most characters of a name or value.
MAX_METADATA = 16
MAX_METADATA_CHARS = 512
#: The most earlier batches whose answers a batch reuses.
MAX_REUSED = 20
#: The first bytes of compressed files: gzip, Zstandard and bzip2.
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh")
_WINDOW = re.compile(r"(\d{1,3})([hd])")
_HOUR_S = 3600
_DAY_S = 24 * _HOUR_S


@dataclass(frozen=True)
class Batch:
    """A client's request for a batch, as batch.json has it. Times are Unix seconds.

    input_path: the path of the input file for workers. cancelling_at: when the client cancelled the batch.
    reused: the outputs of earlier batches whose answers are reused.
    """

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
class _BatchRequest:
    """The checked body of a request for a batch. window_s: the completion window in seconds."""

    endpoint: str
    file_id: str
    completion_window: str
    window_s: int
    metadata: Mapping[str, str] | None


@dataclass(frozen=True)
class BatchState:
    """The state of a batch.

    status: OpenAI's word. total, done, failed: numbers of lines; `done` counts the failed lines too. reason: why the
    batch failed. began_at, ended_at: Unix seconds. usage: the tokens of all finished lines.
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
    def from_snapshot(cls, snapshot: RunSnapshot) -> Self:
        """Return the state of the batch whose run has this snapshot."""
        return cls(
            status=batch_status(snapshot),
            total=snapshot.rows or 0,
            done=snapshot.rows_done,
            failed=snapshot.errors,
            reason=snapshot.plan_error or snapshot.stopped or "its jobs have failed",
            began_at=None if snapshot.began_at is None else int(snapshot.began_at),
            ended_at=None if snapshot.ended_at is None else int(snapshot.ended_at),
            usage=_usage(snapshot),
        )


class Batches:
    """Makes, reads and cancels batches. Its methods block, and are called in threads. clock: Unix seconds."""

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
        """Return an id for a batch. It sorts behind the ids of all earlier batches."""
        return new_id("batch_", self._clock())

    def create(
        self,
        project: str,
        body: Any,
        *,
        max_open: int | None = None,
        batch_id: str | None = None,
        admit: Callable[[str, IO[bytes], str], None] | None = None,
    ) -> dict[str, Any]:
        """Make a batch of an uploaded file, and return its OpenAI object.

        body: the body of the request. max_open: the most open batches that the project may have. batch_id: an id from
        `new_id`; a batch that has this id already is returned as it is. admit: a function that is called with a new
        batch's id, lines and endpoint, and may raise ApiError. Raises ApiError, RedisError, OSError and StoreError.
        """
        if batch_id is None:
            batch_id = self.new_id()
        known = self._find(project, batch_id)
        if known is not None:
            return self._object(project, known)
        request = _checked_request(body)
        file = self._files.find(project, request.file_id)
        if not file.bytes:
            raise ApiError(
                400, f"{request.file_id} has no lines", code="empty_file", param="input_file_id"
            )

        if max_open is not None:
            self._check_open(project, max_open)
        try:
            with self._folder.open(file.content) as lines:
                _refuse_compressed(lines)
                if admit is not None:
                    admit(batch_id, lines, request.endpoint)
        except FileNotFoundError:  # it was deleted meanwhile
            raise missing("file", request.file_id) from None

        reused: tuple[str, ...] = ()
        if request.metadata is not None and request.metadata.get("reuse") == "true":
            reused = tuple(self._finished_runs(project))
        now = int(self._clock())
        batch = Batch(
            id=batch_id,
            input_file_id=file.id,
            input_path=self._folder.path(file.content),
            endpoint=request.endpoint,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + request.window_s,
            metadata=request.metadata,
            reused=reused,
        )
        # The record is written first. If this server dies before it submits the run, the next call that reads the
        # batch's state submits it.
        self._write(project, batch)
        try:
            self._submit(project, batch)
        except JobsError as error:  # nothing was enqueued, and another try would fail too
            self._folder.remove(f"{_folder_name(project, batch.id)}/batch.json")
            raise ApiError(400, str(error)) from None
        return self._object(project, batch)

    def is_open(self, project: str, batch_id: str) -> bool:
        """Whether a project has a batch of this id that has not ended."""
        batch = self._find(project, batch_id)
        if batch is None:
            return False
        return self._state(project, batch).status in (*OPEN_STATUSES, "cancelling")

    def _check_open(self, project: str, max_open: int) -> None:
        """Raise ApiError if a project has `max_open` open batches or more."""
        num_open = 0
        for batch in self._read_all(project):
            if self._state(project, batch).status in OPEN_STATUSES:
                num_open += 1
        if num_open >= max_open:
            raise ApiError(
                429,
                f"project {project!r} has {num_open} open batches, and {max_open} are allowed: wait for one",
                code="batch_limit_exceeded",
            )

    def _submit(self, project: str, batch: Batch) -> None:
        """Submit or resume a batch's run, and record the batch in Redis. Raises JobsError."""
        run = submit_run(
            self._connection,
            self._queue,
            max_errors="100%",  # a batch completes even if all its lines fail
            deadline=batch.expires_at,
            reuse=list(batch.reused) or None,
            **self._run_arguments(project, batch),
        )
        record = BatchRecord(batch.id, project, run, batch.created_at, batch.expires_at)
        record_batch(self._connection, record)

    def retrieve(self, project: str, batch_id: str) -> dict[str, Any]:
        """Return the OpenAI object of a batch. Raises ApiError if there is no such batch."""
        return self._object(project, self._read(project, batch_id))

    def page(
        self, project: str, after: str | None, limit: int
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return the OpenAI objects of a page of batches, the latest first, and whether there are more.

        after, limit: see page_of.
        """
        batches, has_more = page_of(self._read_all(project), after, limit)
        return [self._object(project, batch) for batch in batches], has_more

    def cancel(self, project: str, batch_id: str) -> dict[str, Any]:
        """Cancel a batch, unless it has ended. Return its OpenAI object. Raises ApiError if there is no such batch."""
        batch = self._read(project, batch_id)
        api_object = self._object(project, batch)
        if api_object["status"] not in OPEN_STATUSES:
            return api_object

        batch = replace(batch, cancelling_at=int(self._clock()))
        self._write(project, batch)
        try:
            self._run(project, batch).cancel()
        except UnknownRun:
            # Redis has lost the run. The record's `cancelling_at` is enough: such a batch counts as cancelled.
            pass
        except RunResubmitted as error:
            raise ApiError(409, str(error)) from None
        return self._object(project, batch)

    def _find(self, project: str, batch_id: str) -> Batch | None:
        """Return a project's batch; None if there is no such batch."""
        record = read_json(self._folder, f"{_folder_name(project, batch_id)}/batch.json")
        return None if record is None else Batch(**record)

    def _read(self, project: str, batch_id: str) -> Batch:
        """Return a project's batch. Raises ApiError if there is no such batch. batch_id: from a client."""
        check_id(batch_id, "batch")
        batch = self._find(project, batch_id)
        if batch is None:
            raise missing("batch", batch_id)
        return batch

    def _write(self, project: str, batch: Batch) -> None:
        write_json(self._folder, f"{_folder_name(project, batch.id)}/batch.json", asdict(batch))

    def _read_all(self, project: str) -> list[Batch]:
        """Return a project's batches, the latest first."""
        ids = self._folder.names(f"{project}/batches")
        ids.reverse()
        with ThreadPoolExecutor(NUM_READERS) as readers:
            batches = list(readers.map(lambda batch_id: self._find(project, batch_id), ids))
        return [batch for batch in batches if batch is not None]

    def _finished_runs(self, project: str) -> list[str]:
        """Return the output paths of at most MAX_REUSED finished batches of a project, the latest first."""
        outputs: list[str] = []
        for batch in self._read_all(project):
            if len(outputs) == MAX_REUSED:
                break
            output = f"{_folder_name(project, batch.id)}/run"
            if self._folder.stat(f"{output}/{MANIFEST}") is not None:
                outputs.append(self._folder.path(output))
        return outputs

    def _run_arguments(self, project: str, batch: Batch) -> dict[str, Any]:
        """Return the arguments that determine the id of a batch's run."""
        return {
            "input": [batch.input_path],
            "output": self._folder.path(f"{_folder_name(project, batch.id)}/run"),
            "input_format": OPENAI_BATCH,
            "inline_pictures": True,  # a client may not name files on a worker's disk
            "batch_endpoint": batch.endpoint,
        }

    def _run(self, project: str, batch: Batch) -> Run:
        """Return the run of a batch, whether or not Redis knows it."""
        arguments = self._run_arguments(project, batch)
        run_id = RunSpec.from_arguments(**arguments).run
        return Run(run_id, self._connection, arguments["output"])

    def _state_in_folder(self, project: str, batch: Batch) -> BatchState | None:
        """Return the state of a batch that the output of its run shows; None if the run has not ended."""
        output = f"{_folder_name(project, batch.id)}/run"
        if self._folder.stat(f"{output}/{SUCCESS}") is None:
            return None
        manifest = read_json(self._folder, f"{output}/{MANIFEST}")
        if manifest is None or manifest["run"] != self._run(project, batch).id:
            return None
        status = "expired" if manifest["expired"] else "completed"
        return BatchState(
            status,
            total=manifest["rows"],
            done=manifest["rows"],
            failed=manifest["errors"],
            began_at=int(manifest["started_at"]),
            ended_at=int(manifest["ended_at"]),
        )

    def _state(self, project: str, batch: Batch) -> BatchState:
        """Return the state of a batch. It is expired if its window has ended and no worker is alive to end the run."""
        state = self._run_state(project, batch)
        is_late = state.status in OPEN_STATUSES and self._clock() >= batch.expires_at
        if is_late and not living_workers(self._connection, self._queue):
            return replace(state, status="expired")
        return state

    def _run_state(self, project: str, batch: Batch) -> BatchState:
        """Return the state of a batch, from its run. Submit the run if Redis does not know it and it has not ended."""
        run = self._run(project, batch)
        try:
            state = BatchState.from_snapshot(run.status())
        except UnknownRun:
            return self._state_of_unknown_run(project, batch)
        if state.status == "failed" and batch.cancelling_at is not None:
            # Redis lost the run, and with it the cancel. So planning went on, and failed.
            return replace(state, status="cancelled")
        return state

    def _state_of_unknown_run(self, project: str, batch: Batch) -> BatchState:
        """Return the state of a batch whose run Redis does not know. Submit the run if it has not ended."""
        final_state = self._state_in_folder(project, batch)
        if final_state is not None:
            return final_state
        if batch.cancelling_at is not None:
            return BatchState("cancelled")
        # Redis lost its data, or a server died before it submitted the run. The run keeps the parts that it has.
        try:
            self._submit(project, batch)
            return BatchState.from_snapshot(self._run(project, batch).status())
        except JobsError as error:
            return BatchState("failed", reason=str(error))

    def _answered_files(self, project: str, batch: Batch) -> set[str]:
        """Write the files of a cancelled batch, and return their names.

        If writing fails, log the error and return no names, because one batch must not spoil a list of batches.
        """
        try:
            return write_answered_lines(self._folder, _folder_name(project, batch.id))
        except (JobsError, OSError) as error:
            logger.warning("%s: its answered lines cannot be written: %s", batch.id, error)
            return set()

    def _object(self, project: str, batch: Batch) -> dict[str, Any]:
        """Return the OpenAI object of a batch."""
        state = self._state(project, batch)
        is_failed = state.status == "failed"
        is_expired = state.status == "expired"
        is_cancelled = state.status == "cancelled"
        # If no worker was alive when the window ended, the run has not ended yet, and its files are not written.
        has_ended = state.status in ("completed", "expired") and state.ended_at is not None
        num_completed = max(0, state.done - state.failed)

        has_output = has_ended and num_completed > 0
        has_errors = has_ended and state.failed > 0
        if is_cancelled:
            file_names = self._answered_files(project, batch)
            has_output = "output.jsonl" in file_names
            has_errors = "errors.jsonl" in file_names
        file_id = batch.id.replace("batch_", "file-", 1)

        errors = None
        if is_failed:
            reason = state.reason.replace(batch.input_path, batch.input_file_id)
            error = {"code": "batch_failed", "message": reason, "param": None, "line": None}
            errors = {"object": "list", "data": [error]}
        return {
            "id": batch.id,
            "object": "batch",
            "endpoint": batch.endpoint,
            "errors": errors,
            "input_file_id": batch.input_file_id,
            "completion_window": batch.completion_window,
            "status": state.status,
            "output_file_id": f"{file_id}-output" if has_output else None,
            "error_file_id": f"{file_id}-errors" if has_errors else None,
            "created_at": batch.created_at,
            "in_progress_at": state.began_at,
            "expires_at": batch.expires_at,
            "finalizing_at": state.ended_at if has_ended else None,
            "completed_at": state.ended_at if state.status == "completed" else None,
            "failed_at": (state.ended_at or batch.created_at) if is_failed else None,
            "expired_at": (state.ended_at or batch.expires_at) if is_expired else None,
            "cancelling_at": batch.cancelling_at,
            "cancelled_at": batch.cancelling_at if is_cancelled else None,
            "request_counts": {
                "total": state.total,
                "completed": num_completed,
                "failed": state.failed,
            },
            "usage": state.usage,
            "metadata": None if batch.metadata is None else dict(batch.metadata),
        }


def _folder_name(project: str, batch_id: str) -> str:
    """Return the name of a batch's folder within the server's folder."""
    return f"{project}/batches/{batch_id}"


def _checked_request(body: Any) -> _BatchRequest:
    """Return what the body of a request asks for. Raises ApiError for a wrong body."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object")
    endpoint = body.get("endpoint")
    if endpoint not in BATCH_ENDPOINTS:
        raise _wrong("endpoint", endpoint, " or ".join(BATCH_ENDPOINTS))
    file_id = body.get("input_file_id")
    if not isinstance(file_id, str):
        raise _wrong("input_file_id", file_id, "the id of an uploaded file")
    window_s = _window_s(body.get("completion_window"))
    return _BatchRequest(
        endpoint=endpoint,
        file_id=file_id,
        completion_window=body["completion_window"],
        window_s=window_s,
        metadata=_metadata(body.get("metadata")),
    )


def _refuse_compressed(lines: IO[bytes]) -> None:
    """Raise ApiError if the input file is compressed.

    Workers would unpack the file. But the server counts the file's bytes as text, to bound the tokens of a project.
    """
    beginning = lines.read(4)
    lines.seek(0)
    if beginning.startswith(_COMPRESSED):
        raise ApiError(
            400, "the file is compressed: upload its lines as they are", param="input_file_id"
        )


def _usage(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return the OpenAI object of a batch's token usage."""
    return {
        "input_tokens": snapshot.prompt_tokens,
        "input_tokens_details": {"cached_tokens": snapshot.cached_tokens},
        "output_tokens": snapshot.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": snapshot.prompt_tokens + snapshot.completion_tokens,
    }


def _window_s(value: object) -> int:
    """Return the seconds of a `completion_window`. Raises ApiError for a wrong value."""
    seconds = 0
    match = _WINDOW.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        unit_s = _DAY_S if match[2] == "d" else _HOUR_S
        seconds = int(match[1]) * unit_s
    if not _HOUR_S <= seconds <= 7 * _DAY_S:
        raise _wrong("completion_window", value, 'from "1h" to "7d"')
    return seconds


def _metadata(value: object) -> dict[str, str] | None:
    """Return a request's `metadata`; None if it has none. Raises ApiError for a wrong value."""
    if value is None:
        return None
    problem = ApiError(
        400,
        f"metadata is no object of at most {MAX_METADATA} texts of {MAX_METADATA_CHARS} characters",
        param="metadata",
    )
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise problem
    for text in [*value.keys(), *value.values()]:
        if not isinstance(text, str) or len(text) > MAX_METADATA_CHARS:
            raise problem
    return value


def _wrong(name: str, value: object, expected: str) -> ApiError:
    """Return the error that a field of the request has a wrong value."""
    return ApiError(400, f"{name} is {str(value)[:80]!r}, expected {expected}", param=name)
