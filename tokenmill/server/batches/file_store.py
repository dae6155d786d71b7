"""The files of each project, in a folder that the workers see too.

    <project>/files/<id>          what was uploaded
    <project>/files/<id>.json     its description, written last: without it the file does not exist
    <project>/batches/<id>/...    see batch_runs.py

Several servers may share the folder. Nothing is kept in memory.
"""

import re
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from tokenmill.server.batches.folders import Draft, Folder, read_json, write_json
from tokenmill.server.errors import ApiError

#: An id of a file or batch. It begins with the time when it was made, so that ids sort by age.
_ID = re.compile(r"(file|batch)[-_][0-9a-f]{28}(-output|-errors)?")
#: How long an unfinished upload is left alone.
ABANDONED_S = 24 * 3600
#: The folder of a cancelled batch that holds the files of its answered lines.
ANSWERED = "answered"
#: How many records are read at once. A store takes milliseconds for each.
NUM_READERS = 16


def new_id(prefix: str, now: float) -> str:
    """Return an id that sorts behind all earlier ones."""
    return f"{prefix}{int(now * 1000):012x}{secrets.token_hex(8)}"


@dataclass(frozen=True)
class StoredFile:
    """A file of a project. Times are Unix seconds.

    expires_at: None for a file that stays. content: the name within the server's folder that its bytes have.
    """

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    content: str
    expires_at: int | None = None

    def to_object(self) -> dict[str, Any]:
        """Return OpenAI's object of the file."""
        fields = asdict(self)
        del fields["content"]
        return {**fields, "object": "file", "status": "processed"}


@dataclass(frozen=True)
class NewFile:
    """A file that is on its way. name: what its bytes are called within the server's folder."""

    id: str
    name: str
    draft: Draft


class FileStore:
    """Reads and writes files. Its methods block, and are called in threads. They raise OSError and StoreError."""

    def __init__(self, folder: Folder, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._clock = clock

    def begin(self, project: str) -> NewFile:
        """Begin an upload."""
        file_id = new_id("file-", self._clock())
        name = f"{project}/files/{file_id}"
        return NewFile(file_id, name, self.folder.create(name))

    def finish(
        self,
        project: str,
        upload: NewFile,
        filename: str,
        purpose: str,
        expires_s: int | None,
        *,
        as_id: str | None = None,
    ) -> StoredFile:
        """Put an upload in its place. From then on it exists.

        as_id: the id of the same upload as an earlier request has sent it. That file is returned, if it is there.
        """
        file_id = as_id or upload.id
        known = self._read(project, file_id)
        if known is not None:
            return known

        upload.draft.finish()
        state = self.folder.stat(upload.name)
        if state is None:
            raise FileNotFoundError(self.folder.path(upload.name))
        now = int(self._clock())
        file = StoredFile(
            id=file_id,
            filename=filename,
            purpose=purpose,
            bytes=state.size,
            created_at=now,
            content=upload.name,
            expires_at=None if expires_s is None else now + expires_s,
        )
        write_json(self.folder, f"{project}/files/{file_id}.json", asdict(file))
        return file

    def uploads(self, project: str) -> list[StoredFile]:
        """Return a project's uploads, the latest first, and remove those that have expired."""
        names = self.folder.names(f"{project}/files")
        described = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        described.reverse()
        with ThreadPoolExecutor(NUM_READERS) as readers:
            found = list(readers.map(lambda file_id: self._read(project, file_id), described))
        files = [file for file in found if file is not None]

        contents = {file.content for file in files}
        for name in names:
            path = f"{project}/files/{name}"
            if not name.endswith(".json") and path not in contents:
                self._remove_abandoned(path)
        return files

    def find(self, project: str, file_id: str) -> StoredFile:
        """Return a project's file. Raises ApiError if there is none."""
        check_id(file_id, "file")
        file = self._read(project, file_id)
        if file is not None:
            return file
        for name in _output_names(project, file_id):
            state = self.folder.stat(name)
            if state is not None:
                return StoredFile(
                    id=file_id,
                    filename=f"{file_id}.jsonl",
                    purpose="batch_output",
                    bytes=state.size,
                    created_at=int(state.mtime_ns / 1e9),
                    content=name,
                )
        raise missing("file", file_id)

    def delete(self, project: str, file_id: str) -> None:
        """Remove a file. Raises ApiError if there is none."""
        file = self.find(project, file_id)
        self.folder.remove(f"{project}/files/{file_id}.json")
        self.folder.remove(file.content)

    def _read(self, project: str, file_id: str) -> StoredFile | None:
        name = f"{project}/files/{file_id}.json"
        record = read_json(self.folder, name)
        if record is None:
            return None
        file = StoredFile(**record)
        if file.expires_at is not None and file.expires_at <= self._clock():
            self.folder.remove(name)
            self.folder.remove(file.content)
            return None
        return file

    def _remove_abandoned(self, name: str) -> None:
        """Remove a file that a server left unfinished when it died long ago."""
        state = self.folder.stat(name)
        if state is not None and state.mtime_ns / 1e9 < self._clock() - ABANDONED_S:
            self.folder.remove(name)


def _output_names(project: str, file_id: str) -> list[str]:
    """Return the names that a batch's output or errors may have; none for the id of an upload."""
    batch_id = file_id.replace("file-", "batch_", 1)
    for kind, name in (("-output", "output.jsonl"), ("-errors", "errors.jsonl")):
        if batch_id.endswith(kind):
            folder = f"{project}/batches/{batch_id.removesuffix(kind)}"
            return [f"{folder}/{ANSWERED}/{name}", f"{folder}/run/{name}"]
    return []


def check_id(name: str, kind: str) -> None:
    """Raise ApiError for a text that is no id of this kind, such as a path."""
    if _ID.fullmatch(name) is None or not name.startswith(kind):
        raise missing(kind, name)


def missing(kind: str, name: str) -> ApiError:
    """Return the error that a project has no such file or batch."""
    return ApiError(404, f"no {kind} has the id {name[:80]!r}", code="not_found")


class HasId(Protocol):
    """A file or a batch."""

    @property
    def id(self) -> str:
        """The id by which clients name it."""


Entry = TypeVar("Entry", bound=HasId)


def page_of(
    entries: Sequence[Entry], after: str | None, limit: int
) -> tuple[Sequence[Entry], bool]:
    """Return at most `limit` entries behind the one with the id `after`, and whether there are more."""
    start = 0
    if after is not None:
        ids = [entry.id for entry in entries]
        start = ids.index(after) + 1 if after in ids else len(ids)
    end = start + limit
    return entries[start:end], end < len(entries)


def list_object(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return OpenAI's object of a page."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
