"""Which files a run's input names."""

from __future__ import annotations

import fnmatch
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from jobs.errors import InputNotFound, InvalidJob, MixedFormats, NestedFolders, SearchTooLong
from jobs.parquet.files.filesystem import Entry
from jobs.parquet.files.storage import Storage, glob_chars, reading
from jobs.runs.plans.formats import COMPRESSED, PARQUET, SUFFIXES, is_named, named_format
from jobs.runs.plans.partitions import FoundFile, Keys, folder_key
from jobs.runs.plans.paths import run_path
from jobs.runs.plans.spec import check_num_files

#: Names that one search may meet, in all folders together: some seconds on a local disk.
MAX_NAMES = 1_000_000


class Folder(NamedTuple):
    """A folder that a search goes through.

    named: its path as it was found. path: the real one. above: the folder in which it was found.
    """

    named: str
    path: str
    above: Folder | None = None

    def real_path(self, entry: Entry, storage: Storage) -> str:
        """Return the real path of what is in this folder. Raises PathOutsideRoots, or InvalidValue for a name
        that is not UTF-8."""
        path = os.path.join(self.path, entry.name)
        return storage.resolve(path) if entry.is_link else run_path(path)

    def child(self, entry: Entry, storage: Storage) -> Folder | None:
        """Return a folder in this one; None for a link that leads back. Raises PathOutsideRoots."""
        path = storage.resolve(os.path.join(self.path, entry.name)) if entry.is_link else None
        above: Folder | None = self
        while path is not None and above is not None:
            if above.path == path:
                return None
            above = above.above
        return Folder(os.path.join(self.named, entry.name), path or os.path.join(self.path, entry.name), self)


class Match(NamedTuple):
    """What a glob has matched. named: the path as it matched. path: the real one."""

    named: str
    path: str
    is_folder: bool


class FolderLister:
    """Lists the folders of one search, and heeds what interrupts the storage at each folder and name."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._num_names = 0

    def entries(self, folder: str) -> list[Entry]:
        """Return what a folder holds, by name. Raises SearchTooLong, or OSError where it cannot be read."""
        found = []
        with self.storage.scan(folder) as listing:
            for each in listing:
                self.storage.check_interrupted()
                self._num_names += 1
                if self._num_names > MAX_NAMES:
                    raise SearchTooLong(folder, MAX_NAMES)
                found.append(each)
        return sorted(found)

    def readable_entries(self, folder: str) -> list[Entry]:
        """Return what a folder holds, by name: nothing where it cannot be read. Raises SearchTooLong."""
        with suppress(OSError):
            return self.entries(folder)
        return []

    def matches(self, pattern: str, is_passed_by: Callable[[str], bool]) -> list[Match]:
        """Return what a glob names, by name. is_passed_by: tells names that are no part of the search.

        As in `glob`, but each folder is gone through once, however many `**` lead there, and a link back to a
        folder above it ends there. A folder that cannot be read holds nothing. Raises SearchTooLong, or
        PathOutsideRoots where the pattern leads outside, or a link that it goes through.
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
                if not hits or is_passed_by(entry.name):
                    continue
                if len(segments) - 1 in hits:
                    path = folder.real_path(entry, self.storage)
                    found.append(Match(os.path.join(folder.named, entry.name), path, entry.is_folder))
                below = _with_skipped({p if segments[p] == "**" else p + 1 for p in hits}, segments)
                child = folder.child(entry, self.storage) if below and entry.is_folder else None
                if child is not None:
                    waiting.append((child, below))
        return sorted(found)

    def _candidates(self, folder: Folder, segments: Sequence[str]) -> list[Entry]:
        """Return what of a folder may match: it is not listed where its names are known."""
        if any(map(glob_chars, segments)):
            return self.readable_entries(folder.path)
        self.storage.check_interrupted()
        looks = [self.storage.look(os.path.join(folder.path, segment)) for segment in segments]
        return [found for found in looks if found is not None]


def _matches(segment: str, name: str) -> bool:
    """Whether a part of a glob between two slashes matches a name; for `**`, whether it goes into it."""
    if not glob_chars(segment):
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
    """Return the files that a run reads, in order.

    input_format: of the files in folders. Without it, a folder gives its *.parquet, or where it has none the files of
    the one other format that it has; those of its folders named key=value too. A glob gives what it matches, files and,
    unless it holds **, folders. Both come sorted, without names that start with a dot or an underscore (unless a glob
    spells one out). Several inputs have the key=value of the folders below the one that holds them all: a shell expands
    a glob to such a list. Files below the output are never input. Raises InputNotFound, SearchTooLong,
    PathOutsideRoots, InvalidJob, SchemaMismatch for folders that give too many columns, MixedFormats, or NestedFolders
    for a folder that holds such files in folders of plain names.
    """
    lister = FolderLister(storage)
    found: list[FoundFile] = []
    folders = [_searched_folder(storage, item) for item in inputs]
    shared = _num_shared(folders)
    for item, folder in zip(inputs, folders, strict=True):
        storage.check_interrupted()
        keys = _keys(folder.split("/")[shared:])
        with reading(item):
            search = _Search(lister, output, input_format)
            files = [f for f in search.expand(item, keys) if not _is_below(output, f.path)]
        if not files:
            raise InputNotFound(item)
        found += files
        check_num_files(len(found))
    twice = [path for path, count in Counter(file.path for file in found).items() if count > 1]
    if twice:
        raise InvalidJob(f"the input names {twice[0]} twice: name each file once")
    return found


def _searched_folder(storage: Storage, item: str) -> str:
    """Return the folder that an input is, or that holds it; of a glob the one that it searches."""
    if _is_glob(storage, item):
        return "/".join(item.split("/")[: _first_glob_segment(item)]) or "/"
    with reading(item):
        return item if storage.is_folder(item) else os.path.dirname(item)


def _num_shared(folders: Sequence[str]) -> int:
    """Return how many segments at their beginning all of the paths have."""
    paths = [folder.split("/") for folder in folders]
    for place, segments in enumerate(zip(*paths, strict=False)):
        if len(set(segments)) > 1:
            return place
    return min(map(len, paths))


@dataclass(frozen=True)
class _Search:
    """Finds the files of one input. wanted: the format of those in folders, None for what they have."""

    lister: FolderLister
    output: str
    wanted: str | None

    def expand(self, item: str, keys: Keys) -> Iterable[FoundFile]:
        if _is_glob(self.lister.storage, item):
            return self._matches(item, keys)
        path = self.lister.storage.resolve(item)
        if self.lister.storage.is_folder(path):
            return self._folder_files(path, keys)
        return [FoundFile(path, keys, item)] if self.lister.storage.stat(path) is not None else []

    def _matches(self, pattern: str, above: Keys) -> Iterator[FoundFile]:
        searched = pattern.split("/")
        fixed = _first_glob_segment(pattern)
        names_hidden = any(_is_hidden(segment) for segment in searched[fixed:])
        for match in self.lister.matches(pattern, is_passed_by=lambda name: not names_hidden and _is_hidden(name)):
            segments = match.named.split("/")[fixed:]
            if not match.is_folder:
                keys = (*above, *_keys(segments[:-1]))
                yield FoundFile(match.path, keys, match.named)
            elif "**" not in searched and match.path != self.output:  # which finds a folder's files by itself
                yield from self._folder_files(match.path, (*above, *_keys(segments)))

    def _folder_files(self, path: str, keys: Keys) -> list[FoundFile]:
        """Return a folder's files of one format. Raises NestedFolders, MixedFormats."""
        plain_folders: list[str] = []
        seen = list(self._files(Folder(path, path), keys, plain_folders))
        wanted = self.wanted or _format_of([each.named for each in seen])
        files = [each.found(self.lister.storage) for each in seen if is_named(each.named, wanted)]
        plain = [folder for folder in plain_folders if folder != self.output]
        if (nested := _first_nested(self.lister, plain, self.output, wanted)) is not None:
            suffix = next(each for each in _suffixes(wanted) if nested.lower().endswith(each))
            raise NestedFolders(path, os.path.relpath(nested, path), suffix)
        return files

    def _files(self, top: Folder, keys: Keys, plain_folders: list[str]) -> Iterator[_Seen]:
        """Yield the files of a folder and of its key=value folders; note those that are not entered."""
        lister = self.lister
        waiting = [(top, keys, iter(lister.entries(top.path)))]
        while waiting:
            folder, keys, entries = waiting[-1]
            entry = next(entries, None)
            if entry is None:
                waiting.pop()
            elif _is_hidden(entry.name):
                continue
            elif not entry.is_folder:
                if is_named(entry.name, self.wanted):
                    yield _Seen(folder, entry, keys)
            elif (key := folder_key(entry.name)) is None:
                plain_folders.append(os.path.join(folder.path, entry.name))
            else:
                child = folder.child(entry, lister.storage)
                if child is not None and child.path != self.output:
                    below = (*keys, key)
                    waiting.append((child, below, iter(lister.entries(child.path))))


class _Seen(NamedTuple):
    """A file in a folder, before it is known whether it is input: where a link leads is not asked yet."""

    folder: Folder
    entry: Entry
    keys: Keys

    @property
    def named(self) -> str:
        return os.path.join(self.folder.named, self.entry.name)

    def found(self, storage: Storage) -> FoundFile:
        """Raises PathOutsideRoots, or InvalidValue for a name that is not UTF-8."""
        return FoundFile(self.folder.real_path(self.entry, storage), self.keys, self.named)


def _format_of(names: Sequence[str]) -> str | None:
    """Return the format of a folder's files: Parquet where it has some, else its one; None for no file."""
    found: dict[str, str] = {}
    for name in names:
        found.setdefault(named_format(name) or PARQUET, name)
    if len(found) > 1 and PARQUET not in found:
        (one, first), (other, second), *_ = found.items()
        raise MixedFormats(second, other, first, one)
    return PARQUET if PARQUET in found else next(iter(found), None)


def _suffixes(wanted: str | None) -> Iterable[str]:
    """Return how the names of a format's files end, None for any, compressed ones last."""
    plain = [each for name, own in SUFFIXES.items() if wanted in (None, name) for each in own]
    return [*plain, *COMPRESSED]


def _is_glob(storage: Storage, item: str) -> bool:
    return bool(glob_chars(item)) and storage.look(item) is None


def _first_glob_segment(pattern: str) -> int:
    return next(place for place, segment in enumerate(pattern.split("/")) if glob_chars(segment))


def _keys(names: Sequence[str]) -> Keys:
    """Return the key=value among the names of folders."""
    return tuple(key for key in map(folder_key, names) if key is not None)


def _first_nested(lister: FolderLister, folders: Sequence[str], output: str, wanted: str | None) -> str | None:
    """Return a file of a wanted format, None for any, that lies below a folder, but not below the output."""
    waiting = list(reversed(folders))
    while waiting:
        folder = waiting.pop()
        for entry in reversed(lister.readable_entries(folder)):
            path = os.path.join(folder, entry.name)
            if _is_hidden(entry.name) or path == output:
                continue
            if entry.is_folder and not entry.is_link:
                waiting.append(path)
            elif not entry.is_folder and is_named(entry.name, wanted):
                return path
    return None


def _is_hidden(name: str) -> bool:
    return name[:1] in ("_", ".")


def _is_below(folder: str, path: str) -> bool:
    return path.startswith(folder + "/")
