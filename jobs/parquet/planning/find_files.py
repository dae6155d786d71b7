"""Finds the files that a run's input names, and the columns that folders named `key=value` give them."""

import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from glob import has_magic
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from jobs.errors import InputNotFound, InvalidJob, NestedFolders, SchemaMismatch, SearchTooLong
from jobs.parquet.files.filesystem import Entry
from jobs.parquet.files.storage import Storage, reading
from jobs.runs.plans.names import PARQUET, named_format, one_format, shows_format
from jobs.runs.plans.paths import run_path
from jobs.runs.plans.plan import AddedColumn
from jobs.runs.plans.spec import check_num_files

#: The most names that one search may meet, in all folders together. A local disk lists a million names within seconds.
MAX_NAMES = 1_000_000
#: How Hive, and programs that follow it, spell a null in a folder's name.
NULL = "__HIVE_DEFAULT_PARTITION__"
#: The key and the value of each folder named `key=value`, the outermost folder first. The value is None for a null.
Keys = tuple[tuple[str, str | None], ...]

#: An integer as int64 writes it. 02139 is text, because its leading zero would be lost.
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,19}")
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class FoundFile:
    """A file that a search has found.

    path: its real path. found_path: the path by which it was found, whose suffix gives the format. keys: the names and
    values that its folders' names give, see Keys.
    """

    path: str
    found_path: str
    keys: Keys = ()

    @property
    def key_names(self) -> list[str]:
        """Return the names of the columns that the file's folders give."""
        return [name for name, _ in self.keys]


def _is_int64(text: str) -> bool:
    """Whether a text is an integer of 64 bits, without leading zeros."""
    return _INTEGER.fullmatch(text) is not None and int(text) in _INT64


def folder_key(name: str) -> tuple[str, str | None] | None:
    """Return the key and the value of a folder named `key=value`; None for any other name."""
    key, equals, text = name.partition("=")
    if not key or not equals:
        return None
    value = None if text == NULL else unquote(text)
    return unquote(key), value


def partition_columns(
    files: Sequence[FoundFile], file_columns: Sequence[str]
) -> tuple[list[AddedColumn], list[list[Any]]]:
    """Return the columns that the folders' names give, and each file's values in them.

    A column is int64 if all its values are integers without leading zeros, else string. file_columns: the columns that
    the files themselves have. A folder's key with the name of such a column gives no column. Raises SchemaMismatch if
    the folders of two files have different keys.
    """
    names = files[0].key_names
    _check_key_names(files, names)
    columns: list[AddedColumn] = []
    values_by_file: list[list[Any]] = [[] for _ in files]
    for key_number, name in enumerate(names):
        if name in file_columns:
            continue
        texts = []  # one for each file; None for a null
        for file in files:
            _, text = file.keys[key_number]
            texts.append(text)
        present_texts = [text for text in texts if text is not None]
        is_integer = bool(present_texts) and all(map(_is_int64, present_texts))
        column_type: Literal["int64", "string"] = "int64" if is_integer else "string"
        columns.append(AddedColumn(name, column_type))
        for values_of_file, text in zip(values_by_file, texts, strict=True):
            if is_integer and text is not None:
                values_of_file.append(int(text))
            else:
                values_of_file.append(text)
    return columns, values_by_file


def _check_key_names(files: Sequence[FoundFile], names: Sequence[str]) -> None:
    """Raise SchemaMismatch if a file's folders have other keys than `names`, or have a key twice."""
    for file in files:
        if file.key_names != names:
            raise SchemaMismatch(
                file.path,
                f"its folders give the columns {file.key_names}, and the first file's folders give {names}",
            )
        if len(set(names)) < len(names):
            raise SchemaMismatch(file.path, f"its folders give a column twice: {names}")


class Folder(NamedTuple):
    """A folder that a search goes through.

    found_path: the path by which it was found. path: its real path. above: the folder in which it was found.
    """

    found_path: str
    path: str
    above: "Folder | None" = None

    def child(self, entry: Entry, storage: Storage) -> "Folder | None":
        """Return a folder in this one; None for a link back to this folder or one above it. Raises PathOutsideRoots."""
        path = os.path.join(self.path, entry.name)
        if entry.is_link:
            path = storage.resolve(path)
            if self._is_at_or_below(path):
                return None
        return Folder(os.path.join(self.found_path, entry.name), path, self)

    def _is_at_or_below(self, path: str) -> bool:
        """Whether this folder, or one of the folders in which it was found, has this path."""
        folder: Folder | None = self
        while folder is not None:
            if folder.path == path:
                return True
            folder = folder.above
        return False


class FoundEntry(NamedTuple):
    """An entry of a folder that a search has gone through."""

    folder: Folder
    entry: Entry

    @property
    def found_path(self) -> str:
        """Return the path by which the entry was found."""
        return os.path.join(self.folder.found_path, self.entry.name)

    def real_path(self, storage: Storage) -> str:
        """Return the entry's real path. Raises PathOutsideRoots, or InvalidValue for a name that is not UTF-8."""
        path = os.path.join(self.folder.path, self.entry.name)
        return storage.resolve(path) if self.entry.is_link else run_path(path)


class _FolderFiles(NamedTuple):
    """What a search has found in one folder.

    files: files of the folder and of its key=value folders. nested: files of its other folders. A run does not read
    nested files.
    """

    files: list[FoundEntry]
    nested: list[FoundEntry]


class Search:
    """One search for input files.

    output: the run's output folder, which is left out. wanted_format: the format of the files to take from folders. If
    it is None, a folder's Parquet files are taken. If the folder has no Parquet files, its files must have one format.
    """

    def __init__(
        self, storage: Storage, output: str = "", wanted_format: str | None = None
    ) -> None:
        self.storage = storage
        self._output = output
        self._wanted_format = wanted_format
        self._num_names = 0

    def expand(self, input_path: str) -> tuple[str, list[FoundFile]]:
        """Return the folder that is searched, and its files. input_path: a file, a folder or a glob of the input."""
        # If a file has a name that looks like a pattern, the file itself is meant.
        if has_magic(input_path) and self.storage.entry(input_path) is None:
            folder, _ = _split_pattern(input_path)
            return folder, list(self._matched_files(input_path))
        path = self.storage.resolve(input_path)
        if self.storage.is_folder(path):
            return input_path, self._folder_files(input_path, path)
        files = []
        if self.storage.stat(path) is not None:
            files.append(FoundFile(path, input_path))
        return os.path.dirname(input_path), files

    def _matched_files(self, pattern: str) -> Iterator[FoundFile]:
        """Yield the files that a pattern matches, and the files of the folders that it matches."""
        _, segments = _split_pattern(pattern)
        with_hidden = any(map(_is_hidden, segments))
        # If a pattern with `**` matches a folder, it also matches the files in the folder. So a matched folder itself
        # gives no files here.
        matches_files_below = "**" in segments
        for match in self.matches(pattern, with_hidden):
            path = match.real_path(self.storage)
            if not match.entry.is_folder:
                yield FoundFile(path, match.found_path)
            elif not matches_files_below and path != self._output:
                yield from self._folder_files(match.found_path, path)

    def _folder_files(self, found_path: str, path: str) -> list[FoundFile]:
        """Return a folder's files of one format, key=value folders included. Raises MixedFormats, NestedFolders."""
        files, nested = self._walk(Folder(found_path, path))
        # The paths are compared name by name, so the files of each folder stay together.
        files.sort(key=lambda file: file.found_path.split("/"))
        wanted_format = self._wanted_format
        if wanted_format is None:
            wanted_format = _format_of([file.found_path for file in files])
        nested_paths = [
            file.found_path for file in nested if shows_format(file.found_path, wanted_format)
        ]
        if nested_paths:
            first = min(nested_paths)
            suffix = os.path.splitext(first)[1]
            raise NestedFolders(path, os.path.relpath(first, found_path), suffix)

        wanted_files = [file for file in files if shows_format(file.found_path, wanted_format)]
        return [FoundFile(file.real_path(self.storage), file.found_path) for file in wanted_files]

    def _walk(self, top: Folder) -> _FolderFiles:
        """Return the files of a folder and of all folders below it."""
        folder_files = _FolderFiles([], [])
        waiting = [(top, False)]  # pairs: a folder, and whether it is nested
        while waiting:
            folder, is_nested = waiting.pop()
            for entry in self.entries(folder.path, ignores_errors=is_nested):
                if _is_hidden(entry.name):
                    continue
                if not entry.is_folder:
                    if shows_format(entry.name, self._wanted_format):
                        files = folder_files.nested if is_nested else folder_files.files
                        files.append(FoundEntry(folder, entry))
                    continue

                # Files in key=value folders count as files of the top folder. Files in other folders are nested.
                is_key_folder = not is_nested and folder_key(entry.name) is not None
                # Nested files only lead to the error NestedFolders, so no link to a nested folder is followed.
                if entry.is_link and not is_key_folder:
                    continue
                child = folder.child(entry, self.storage)
                is_child_nested = not is_key_folder
                if child is not None and child.path != self._output:
                    waiting.append((child, is_child_nested))
        return folder_files

    def entries(self, folder: str, *, ignores_errors: bool = False) -> list[Entry]:
        """Return what a folder holds. Raises SearchTooLong, or OSError.

        ignores_errors: whether a folder that cannot be read counts as empty. Then no OSError is raised.
        """
        entries = []
        errors_are_ignored = suppress(OSError) if ignores_errors else nullcontext()
        with errors_are_ignored, self.storage.scan(folder) as listing:
            for entry in listing:
                self.storage.check_interrupted()
                self._num_names += 1
                if self._num_names > MAX_NAMES:
                    raise SearchTooLong(MAX_NAMES, folder)
                entries.append(entry)
        return entries

    def matches(self, pattern: str, with_hidden: bool) -> list[FoundEntry]:
        """Return the files and folders that a glob matches, sorted by name.

        This works like `glob`, but each folder is listed once, even if links lead back to it. A folder that cannot be
        read counts as empty. with_hidden: whether to match hidden names, because the pattern spells out a hidden name.
        Raises SearchTooLong. Raises PathOutsideRoots if the pattern, or a link on the way, leads outside the roots.
        """
        top, segments = _split_pattern(pattern)
        last_index = len(segments) - 1
        matches = []
        # Folders that are still to be read, each with the indices of the segments that the folder's entries may match.
        waiting = [(Folder(top, self.storage.resolve(top)), _with_skipped({0}, segments))]
        while waiting:
            folder, indices = waiting.pop()
            segments_here = [segments[index] for index in indices]
            for entry in self._candidates(folder, segments_here):
                matched_indices = {
                    index for index in indices if _segment_matches(segments[index], entry.name)
                }
                is_skipped = _is_hidden(entry.name) and not with_hidden
                if not matched_indices or is_skipped:
                    continue
                if last_index in matched_indices:
                    matches.append(FoundEntry(folder, entry))
                if not entry.is_folder:
                    continue

                indices_below = _indices_below(matched_indices, segments)
                if not indices_below:
                    continue
                child = folder.child(entry, self.storage)
                if child is not None:
                    waiting.append((child, indices_below))
        return sorted(matches, key=lambda match: match.found_path)

    def _candidates(self, folder: Folder, segments: Sequence[str]) -> list[Entry]:
        """Return the entries of a folder that may match. The folder is listed only if a segment is a pattern."""
        if any(map(has_magic, segments)):
            return self.entries(folder.path, ignores_errors=True)
        self.storage.check_interrupted()
        entries = []
        for segment in segments:
            entry = self.storage.entry(os.path.join(folder.path, segment))
            if entry is not None:
                entries.append(entry)
        return entries


def _segment_matches(segment: str, name: str) -> bool:
    """Whether a segment of a glob matches a name; for `**`, whether the search goes into a folder of this name."""
    if not has_magic(segment):
        return name == segment
    if name.startswith(".") and not segment.startswith("."):
        return False
    return segment == "**" or fnmatch.fnmatchcase(name, segment)


def _indices_below(matched_indices: set[int], segments: Sequence[str]) -> frozenset[int]:
    """Return the indices of the segments that a folder's entries may match.

    matched_indices: the indices of the segments that the folder itself matches.
    """
    next_indices = set()
    for index in matched_indices:
        # `**` stands for any number of folders, so entries of the folder may match it again.
        may_match_again = segments[index] == "**"
        next_index = index if may_match_again else index + 1
        next_indices.add(next_index)
    return _with_skipped(next_indices, segments)


def _with_skipped(indices: set[int], segments: Sequence[str]) -> frozenset[int]:
    """Return these indices of segments, and for each `**` also the next index, because `**` may stand for no folder."""
    reached: set[int] = set()
    for index in indices:
        while index < len(segments):
            reached.add(index)
            if segments[index] != "**":
                break
            index += 1
    return frozenset(reached)


def find_files(
    storage: Storage, inputs: Sequence[str], output: str, input_format: str | None = None
) -> list[FoundFile]:
    """Return the files that a run reads, in order. Files below the output are never input.

    A folder gives its *.parquet files, and the *.parquet files in its folders named key=value. If a folder has no such
    files, all its files must have one format, and the folder gives these files. input_format: if set, a folder gives
    the files of this format only.
    A glob gives the files that it matches. A glob without ** also gives the files of the folders that it matches.
    The files of each input are sorted. Hidden names are left out unless a glob spells a hidden name out.
    If there are several inputs, keys are taken from the folders below the innermost folder that holds all inputs.
    Raises InputError or InvalidJob.
    """
    search = Search(storage, output, input_format)
    searched_folders: list[list[str]] = []
    found_files: list[FoundFile] = []
    for input_path in inputs:
        storage.check_interrupted()
        with reading(input_path):
            folder, files = search.expand(input_path)
        files = [file for file in files if not file.path.startswith(f"{output}/")]
        if not files:
            raise InputNotFound(input_path)
        found_files += files
        searched_folders.append(folder.rstrip("/").split("/"))
        check_num_files(len(found_files))

    for path, count in Counter(file.path for file in found_files).items():
        if count > 1:
            raise InvalidJob(f"the input names {path} twice: name each file once")

    num_shared = 0  # leading segments that all searched folders have
    for segments in zip(*searched_folders, strict=False):
        if len(set(segments)) > 1:
            break
        num_shared += 1
    with_keys = []
    for file in found_files:
        folders = file.found_path.split("/")[num_shared:-1]
        with_keys.append(replace(file, keys=_keys(folders)))
    return with_keys


def _format_of(names: Sequence[str]) -> str | None:
    """Return the format of a folder's files: Parquet if it has any, else its only format. None if it has no files."""
    if any(named_format(name) == PARQUET for name in names):
        return PARQUET
    return one_format(names) if names else None


def _split_pattern(pattern: str) -> tuple[str, list[str]]:
    """Return the folder in which a glob's search begins, and the glob's segments below that folder."""
    segments = pattern.split("/")
    num_plain = 0
    while not has_magic(segments[num_plain]):
        num_plain += 1
    folder = "/".join(segments[:num_plain]) or "/"
    return folder, segments[num_plain:]


def _keys(folder_names: Sequence[str]) -> Keys:
    """Return a pair of key and value for each folder that is named `key=value`."""
    pairs = [folder_key(name) for name in folder_names]
    return tuple(pair for pair in pairs if pair is not None)


def _is_hidden(name: str) -> bool:
    """Whether a name, or a pattern of names, begins with a dot or an underscore."""
    return name[:1] in ("_", ".")
