"""Which files a run's input names."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jobs.errors import InputNotFound, InvalidJob, MixedFormats, NestedFolders
from jobs.parquet.files.filesystem import Entry
from jobs.parquet.files.storage import Storage, glob_chars, reading
from jobs.parquet.planning.folder_search import Folder, Walk
from jobs.runs.plans.formats import COMPRESSED, PARQUET, SUFFIXES, is_named, named_format
from jobs.runs.plans.partitions import FoundFile, Keys, folder_key, joined_keys
from jobs.runs.plans.spec import check_num_files


def find_files(
    storage: Storage, inputs: Sequence[str], output: str, input_format: str | None = None
) -> list[FoundFile]:
    """Return the files that a run reads, in order.

    input_format: of the files in folders. Without it, a folder gives its *.parquet, or where it has none the
    files of the one other format that it has; those of its folders named key=value too, at any depth. A glob
    gives what it matches, files and, unless it holds **, folders, with the key=value of the folders that it
    searches. Both come sorted, without names that start with a dot or an underscore (unless a glob spells one
    out). Several inputs have the key=value of the folders below the one that holds them all: a shell expands
    a glob to such a list. Files below the output are never input. Raises InputNotFound, SearchTooLong,
    PathOutsideRoots, InvalidJob, SchemaMismatch for folders that give too many columns, MixedFormats, or
    NestedFolders for one that holds such files deeper down in folders of plain names: whether they belong to
    it is for the caller to say.
    """
    walk = Walk(storage)
    found: list[FoundFile] = []
    folders = [_searched_folder(storage, item) for item in inputs]
    shared = _num_shared(folders)
    for item, folder in zip(inputs, folders, strict=True):
        storage.check_interrupted()
        keys = _keys(folder.split("/")[shared:])
        with reading(item):
            search = _Search(walk, output, input_format)
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

    walk: Walk
    output: str
    wanted: str | None

    def expand(self, item: str, keys: Keys) -> Iterable[FoundFile]:
        if _is_glob(self.walk.storage, item):
            return self._matches(item, keys)
        path = self.walk.storage.resolve(item)
        if self.walk.storage.is_folder(path):
            return self._folder_files(path, keys)
        return [FoundFile(path, keys, item)] if self.walk.storage.stat(path) is not None else []

    def _matches(self, pattern: str, above: Keys) -> Iterator[FoundFile]:
        searched = pattern.split("/")
        fixed = _first_glob_segment(pattern)
        names_hidden = any(_is_hidden(segment) for segment in searched[fixed:])
        for match in self.walk.matches(
            pattern, is_passed_by=lambda name: not names_hidden and _is_hidden(name)
        ):
            segments = match.named.split("/")[fixed:]
            if not match.is_folder:
                keys = joined_keys(above, _keys(segments[:-1]), match.path)
                yield FoundFile(match.path, keys, match.named)
            elif "**" not in searched and match.path != self.output:  # which finds a folder's files by itself
                yield from self._folder_files(match.path, joined_keys(above, _keys(segments), match.path))

    def _folder_files(self, path: str, keys: Keys) -> list[FoundFile]:
        """Return a folder's files of one format. Raises NestedFolders, MixedFormats."""
        plain_folders: list[str] = []
        seen = list(self._files(Folder(path, path), keys, plain_folders))
        wanted = self.wanted or _format_of([each.named for each in seen])
        files = [each.found(self.walk.storage) for each in seen if is_named(each.named, wanted)]
        plain = [folder for folder in plain_folders if folder != self.output]
        if (nested := _first_nested(self.walk, plain, self.output, wanted)) is not None:
            suffix = next(each for each in _suffixes(wanted) if nested.lower().endswith(each))
            raise NestedFolders(path, os.path.relpath(nested, path), suffix)
        return files

    def _files(self, top: Folder, keys: Keys, plain_folders: list[str]) -> Iterator[_Seen]:
        """Yield the files of a folder and of its key=value folders; note those that are not entered."""
        walk = self.walk
        waiting = [(top, keys, iter(walk.entries(top.path)))]
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
                child = folder.child(entry, walk.storage)
                if child is not None and child.path != self.output:
                    below = joined_keys(keys, (key,), child.path)
                    waiting.append((child, below, iter(walk.entries(child.path))))


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
    """Return the format of a folder's files: Parquet where it has some, as what lies beside them, a list of
    columns for example, is none of the rows; None where there are no files."""
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


def _first_nested(walk: Walk, folders: Sequence[str], output: str, wanted: str | None) -> str | None:
    """Return a file that lies below one of these folders, at any depth, but not below the output.

    wanted: its format, None for any. Enters no links, and passes by what is not readable.
    """
    waiting = list(reversed(folders))
    while waiting:
        folder = waiting.pop()
        for entry in reversed(walk.readable_entries(folder)):
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
