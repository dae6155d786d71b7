"""The files of each project, in a folder that servers share with workers.

    <project>/files/<id>          the bytes of an uploaded file
    <project>/files/<id>.json     its description, which is written last: without it the file does not exist
    <project>/batches/<id>/...    see batch_runs.py

Nothing is cached in memory, so several servers may use the folder at once.
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

#: The form of an id. After its prefix comes the time at which it was made, so that ids sort by age.
_ID = re.compile(r"(file|batch)[-_][0-9a-f]{28}(-output|-errors)?")
#: The seconds after which an unfinished upload is removed.
ABANDONED_S = 24 * 3600
#: The folder in a cancelled batch's folder with the files of its answered lines.
ANSWERED = "answered"
#: How many records are read at once. An object store takes milliseconds for each.
NUM_READERS = 16


def new_id(prefix: str, now: float) -> str:
    """Return an id that sorts behind all earlier ids. prefix: "file-" or "batch_". now: Unix seconds."""
    return f"{prefix}{int(now * 1000):012x}{secrets.token_hex(8)}"


@dataclass(frozen=True)
class StoredFile:
    """A file of a project. Times are Unix seconds.

    expires_at: None for a file that does not expire. content: the name of the bytes within the server's folder.
    """

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    content: str
    expires_at: int | None = None

    def to_object(self) -> dict[str, Any]:
        """Return the OpenAI object of the file."""
        fields = asdict(self)
        del fields["content"]
        return {**fields, "object": "file", "status": "processed"}


@dataclass(frozen=True)
class NewFile:
    """A file that is being uploaded. name: the name of its bytes within the server's folder."""

    id: str
    name: str
    draft: Draft


class FileStore:
    """Reads and writes files. Its methods block, and are called in threads. They raise OSError and StoreError.

    clock: Unix seconds.
    """

    def __init__(self, folder: Folder, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._clock = clock

    def begin(self, project: str) -> NewFile:
        """Begin an upload, and return the new file, whose draft takes the bytes."""
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
        """Publish an upload, and return its file.

        expires_s: the seconds until the file expires; None if it does not. as_id: the id of an earlier request for the
        same upload. If that request's file exists, it is returned. Otherwise the upload gets this id.
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
        """Return a project's uploaded files, the latest first. Remove expired files and abandoned uploads."""
        file_ids = []
        content_names = []
        for name in self.folder.names(f"{project}/files"):
            if name.endswith(".json"):
                file_ids.append(name.removesuffix(".json"))
            else:
                content_names.append(f"{project}/files/{name}")
        file_ids.reverse()

        with ThreadPoolExecutor(NUM_READERS) as readers:
            read_files = list(readers.map(lambda file_id: self._read(project, file_id), file_ids))
        files = [file for file in read_files if file is not None]

        known_contents = {file.content for file in files}
        for content_name in content_names:
            if content_name not in known_contents:
                self._remove_if_abandoned(content_name)
        return files

    def find(self, project: str, file_id: str) -> StoredFile:
        """Return a file that was uploaded, or that a batch wrote. Raises ApiError if the project has no such file."""
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
        """Remove a file. Raises ApiError if the project has no such file."""
        file = self.find(project, file_id)
        self.folder.remove(f"{project}/files/{file_id}.json")
        self.folder.remove(file.content)

    def _read(self, project: str, file_id: str) -> StoredFile | None:
        """Return an uploaded file; None if there is no such file. Remove a file that has expired."""
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

    def _remove_if_abandoned(self, name: str) -> None:
        """Remove the bytes of an upload that a server left unfinished long ago, when it died."""
        state = self.folder.stat(name)
        if state is not None and state.mtime_ns / 1e9 < self._clock() - ABANDONED_S:
            self.folder.remove(name)


def _output_names(project: str, file_id: str) -> list[str]:
    """Return the names at which an output file of a batch may be; [] for the id of an uploaded file."""
    batch_id = file_id.replace("file-", "batch_", 1)
    for suffix, name in (("-output", "output.jsonl"), ("-errors", "errors.jsonl")):
        if batch_id.endswith(suffix):
            folder = f"{project}/batches/{batch_id.removesuffix(suffix)}"
            return [f"{folder}/{ANSWERED}/{name}", f"{folder}/run/{name}"]
    return []


def check_id(text: str, kind: str) -> None:
    """Raise ApiError if a client's text has not the form of an id. It may be a path, for example.

    kind: "file" or "batch".
    """
    if _ID.fullmatch(text) is None or not text.startswith(kind):
        raise missing(kind, text)


def missing(kind: str, text: str) -> ApiError:
    """Return the error that a project has no file or batch with this id."""
    return ApiError(404, f"no {kind} has the id {text[:80]!r}", code="not_found")


class HasId(Protocol):
    """A file or a batch."""

    @property
    def id(self) -> str:
        """The id that clients use."""


Entry = TypeVar("Entry", bound=HasId)


def page_of(
    entries: Sequence[Entry], after: str | None, limit: int
) -> tuple[Sequence[Entry], bool]:
    """Return at most `limit` entries, and whether there are more behind them.

    after: the id of the entry before the first returned one; None to begin with the first entry of all. If no entry has
    this id, nothing is returned.
    """
    start = 0
    if after is not None:
        ids = [entry.id for entry in entries]
        start = len(ids)
        if after in ids:
            start = ids.index(after) + 1
    end = start + limit
    return entries[start:end], end < len(entries)


def list_object(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return the OpenAI object of a page. data: the objects of its entries."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
