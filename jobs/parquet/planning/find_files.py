"""Which files a run's input names, and the columns that folders named `key=value` give them."""

import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from glob import has_magic
from itertools import takewhile
from typing import Any, NamedTuple
from urllib.parse import unquote

from jobs.errors import InputNotFound, InvalidJob, NestedFolders, SchemaMismatch, SearchTooLong
from jobs.parquet.files.filesystem import Entry
from jobs.parquet.files.storage import Storage, reading
from jobs.runs.plans.names import PARQUET, is_named, named_format, one_format
from jobs.runs.plans.paths import run_path
from jobs.runs.plans.plan import AddedColumn
from jobs.runs.plans.spec import check_num_files

#: Names that one search may meet, in all folders together: some seconds on a local disk.
MAX_NAMES = 1_000_000
#: How Hive, and whoever writes as it does, spells a null in a folder's name.
NULL = "__HIVE_DEFAULT_PARTITION__"
#: Name and text of each `key=value`, from the outside in; None for a null.
Keys = tuple[tuple[str, str | None], ...]

#: An integer as int64 writes it. 02139 is text, as its leading zero would be lost.
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,19}")
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class FoundFile:
    """A file's real path, the path by which it was found, whose suffix tells its format, and what its folders say."""

    path: str
    named: str
    keys: Keys = ()

    @property
    def key_names(self) -> list[str]:
        return [name for name, _ in self.keys]


def folder_key(name: str) -> tuple[str, str | None] | None:
    key, equals, value = name.partition("=")
    if not key or not equals:
        return None
    return unquote(key), None if value == NULL else unquote(value)


def partition_columns(files: Sequence[FoundFile], in_files: Sequence[str]) -> tuple[list[AddedColumn], list[list[Any]]]:
    """Return the columns that the folders' names give, and each file's values in them.

    A column is int64 if all its values are integers without leading zeros, else string. in_files: the columns of the
    files, which win. Raises SchemaMismatch when the files' folders do not have the same keys.
    """
    names = files[0].key_names
    for file in files:
        if file.key_names != names:
            raise SchemaMismatch(file.path, f"its folders give the columns {file.key_names}, the first file's {names}")
        if len(set(names)) < len(names):
            raise SchemaMismatch(file.path, f"its folders give a column twice: {names}")
    columns: list[AddedColumn] = []
    rows: list[list[Any]] = [[] for _ in files]
    for place, name in enumerate(names):
        if name in in_files:
            continue
        texts = [file.keys[place][1] for file in files]
        there = [text for text in texts if text is not None]
        is_integer = any(there) and all(_INTEGER.fullmatch(text) and int(text) in _INT64 for text in there)
        columns.append(AddedColumn(name, "int64" if is_integer else "string"))
        for row, text in zip(rows, texts, strict=True):
            row.append(int(text) if is_integer and text is not None else text)
    return columns, rows


class Folder(NamedTuple):
    """A folder that a search goes through: its path as found, the real one, and the folder in which it was found."""

    named: str
    path: str
    above: "Folder | None" = None

    def child(self, entry: Entry, storage: Storage) -> "Folder | None":
        """Return a folder in this one; None for a link that leads back. Raises PathOutsideRoots."""
        path = storage.resolve(os.path.join(self.path, entry.name)) if entry.is_link else None
        above: Folder | None = self
        while path is not None and above is not None:
            if above.path == path:
                return None
            above = above.above
        return Folder(os.path.join(self.named, entry.name), path or os.path.join(self.path, entry.name), self)


class Found(NamedTuple):
    folder: Folder
    entry: Entry

    @property
    def named(self) -> str:
        return os.path.join(self.folder.named, self.entry.name)

    def real_path(self, storage: Storage) -> str:
        """Raises PathOutsideRoots, or InvalidValue for a name that is not UTF-8."""
        path = os.path.join(self.folder.path, self.entry.name)
        return storage.resolve(path) if self.entry.is_link else run_path(path)


class Search:
    """One search. output: of the run. wanted: the format of files in folders, None for what they have."""

    def __init__(self, storage: Storage, output: str = "", wanted: str | None = None) -> None:
        self.storage, self._output, self._wanted = storage, output, wanted
        self._num_names = 0

    def expand(self, item: str) -> tuple[str, list[FoundFile]]:
        """Return the folder that is searched for an item, and its files."""
        if has_magic(item) and self.storage.look(item) is None:
            return "/".join(item.split("/")[: _first_glob_segment(item)]) or "/", list(self._matched_files(item))
        path = self.storage.resolve(item)
        if self.storage.is_folder(path):
            return item, self._folder_files(item, path)
        return os.path.dirname(item), [FoundFile(path, item)] if self.storage.stat(path) is not None else []

    def _matched_files(self, pattern: str) -> Iterator[FoundFile]:
        searched = pattern.split("/")[_first_glob_segment(pattern) :]
        for match in self.matches(pattern, any(map(_is_hidden, searched))):
            path = match.real_path(self.storage)
            if not match.entry.is_folder:
                yield FoundFile(path, match.named)
            elif "**" not in searched and path != self._output:  # which finds a folder's files by itself
                yield from self._folder_files(match.named, path)

    def _folder_files(self, named: str, path: str) -> list[FoundFile]:
        """Return a folder's files of one format, key=value folders included. Raises MixedFormats, NestedFolders."""
        seen, nested = list[Found](), list[Found]()
        waiting = [(Folder(named, path), seen)]
        while waiting:
            folder, files = waiting.pop()
            for entry in self.entries(folder.path, or_none=files is nested):
                if _is_hidden(entry.name):
                    continue
                if not entry.is_folder:
                    if is_named(entry.name, self._wanted):
                        files.append(Found(folder, entry))
                    continue
                has_key = files is seen and folder_key(entry.name) is not None
                child = folder.child(entry, self.storage) if has_key or not entry.is_link else None
                if child is not None and child.path != self._output:
                    waiting.append((child, seen if has_key else nested))
        seen.sort(key=lambda each: each.named.split("/"))  # a folder's files before those of the folders behind it
        wanted = self._wanted or _format_of([each.named for each in seen])
        if first := min((each.named for each in nested if is_named(each.named, wanted)), default=None):
            raise NestedFolders(path, os.path.relpath(first, named), os.path.splitext(first)[1])
        wanted_files = (each for each in seen if is_named(each.named, wanted))
        return [FoundFile(each.real_path(self.storage), each.named) for each in wanted_files]

    def entries(self, folder: str, *, or_none: bool = False) -> list[Entry]:
        """Return what a folder holds. or_none: nothing where it cannot be read. Raises SearchTooLong, or OSError."""
        found = []
        with suppress(OSError) if or_none else nullcontext(), self.storage.scan(folder) as listing:
            for each in listing:
                self.storage.check_interrupted()
                self._num_names += 1
                if self._num_names > MAX_NAMES:
                    raise SearchTooLong(MAX_NAMES, folder)
                found.append(each)
        return found

    def matches(self, pattern: str, names_hidden: bool) -> list[Found]:
        """Return what a glob names, by name; hidden names only where it spells one out.

        As in `glob`, but each folder is gone through once, also by links. A folder that cannot be read holds nothing.
        Raises SearchTooLong, or PathOutsideRoots where the pattern leads outside, or a link that it goes through.
        """
        first = _first_glob_segment(pattern)
        segments = pattern.split("/")[first:]
        top = "/".join(pattern.split("/")[:first]) or "/"
        found = []
        waiting = [(Folder(top, self.storage.resolve(top)), _with_skipped({0}, segments))]
        while waiting:
            folder, places = waiting.pop()
            for entry in self._candidates(folder, [segments[place] for place in places]):
                hits = {place for place in places if _matches(segments[place], entry.name)}
                if not hits or (_is_hidden(entry.name) and not names_hidden):
                    continue
                if len(segments) - 1 in hits:
                    found.append(Found(folder, entry))
                below = _with_skipped({p if segments[p] == "**" else p + 1 for p in hits}, segments)
                child = folder.child(entry, self.storage) if below and entry.is_folder else None
                if child is not None:
                    waiting.append((child, below))
        return sorted(found, key=lambda each: each.named)

    def _candidates(self, folder: Folder, segments: Sequence[str]) -> list[Entry]:
        """Return what of a folder may match: it is not listed where its names are known."""
        if any(map(has_magic, segments)):
            return self.entries(folder.path, or_none=True)
        self.storage.check_interrupted()
        looks = [self.storage.look(os.path.join(folder.path, segment)) for segment in segments]
        return [found for found in looks if found is not None]


def _matches(segment: str, name: str) -> bool:
    """Whether a part of a glob between two slashes matches a name; for `**`, whether it goes into it."""
    if not has_magic(segment):
        return name == segment
    if name.startswith(".") and not segment.startswith("."):
        return False
    return segment == "**" or fnmatch.fnmatchcase(name, segment)


def _with_skipped(places: set[int], segments: Sequence[str]) -> frozenset[int]:
    """Return the segments that may match next, also behind `**`, which stands for no folder too."""
    reached: set[int] = set()
    for place in places:
        while place < len(segments):
            reached.add(place)
            if segments[place] != "**":
                break
            place += 1
    return frozenset(reached)


def find_files(
    storage: Storage, inputs: Sequence[str], output: str, input_format: str | None = None
) -> list[FoundFile]:
    """Return the files that a run reads, in order. Files below the output are never input.

    input_format: of the files in folders. Without it, a folder gives its *.parquet, or the files of the one other
    format that it has, and those of its folders named key=value. A glob gives what it matches, files and, unless it
    holds **, folders. Both come sorted, without hidden names (unless a glob spells one out). Several inputs have the
    key=value of the folders below the one that holds them all. Raises InputError, InvalidJob, or SchemaMismatch for too
    many columns.
    """
    search, searched, found = Search(storage, output, input_format), list[list[str]](), list[FoundFile]()
    for item in inputs:
        storage.check_interrupted()
        with reading(item):
            folder, files = search.expand(item)
        files = [file for file in files if not file.path.startswith(f"{output}/")]
        if not files:
            raise InputNotFound(item)
        found += files
        searched.append(folder.rstrip("/").split("/"))
        check_num_files(len(found))
    twice = [path for path, count in Counter(file.path for file in found).items() if count > 1]
    if twice:
        raise InvalidJob(f"the input names {twice[0]} twice: name each file once")
    shared = len(list(takewhile(lambda names: len(set(names)) == 1, zip(*searched, strict=False))))
    return [replace(file, keys=_keys(file.named.split("/")[shared:-1])) for file in found]


def _format_of(names: Sequence[str]) -> str | None:
    """Return the format of a folder's files: Parquet where it has some, else its one; None for no file."""
    if any(named_format(name) == PARQUET for name in names):
        return PARQUET
    return one_format(names, None) if names else None


def _first_glob_segment(pattern: str) -> int:
    return next(place for place, segment in enumerate(pattern.split("/")) if has_magic(segment))


def _keys(names: Sequence[str]) -> Keys:
    return tuple(key for key in map(folder_key, names) if key is not None)


def _is_hidden(name: str) -> bool:
    return name[:1] in ("_", ".")
