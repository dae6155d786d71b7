"""Which files a run's input names."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from ..errors import InputNotFound, InvalidJob, NestedFolders
from .partitions import FoundFile, folder_key
from .spec import check_num_files
from .storage import Storage, glob_chars, reading

Keys = tuple[tuple[str, str | None], ...]


def find_files(storage: Storage, inputs: Sequence[str], output: str) -> list[FoundFile]:
    """Return the files that a run reads, in order.

    A folder gives its *.parquet, and those of its folders named key=value, at any depth; a glob what it
    matches, files and, unless it holds **, folders, with the key=value of the folders that it searches. Both
    come sorted, without names that start with a dot or an underscore (unless a glob spells one out). Several
    inputs have the key=value of the folders below the one that holds them all: a shell expands a glob to such
    a list. Files below the output are never input. Raises InputNotFound, PathOutsideRoots, InvalidJob, or
    NestedFolders for a folder that holds Parquet files deeper down in folders of plain names: whether they
    belong to it is for the caller to say.
    """
    found: list[FoundFile] = []
    folders = [_searched_folder(storage, item) for item in inputs]
    common = os.path.commonpath(folders)
    for item, folder in zip(inputs, folders, strict=True):
        keys = _keys(os.path.relpath(folder, common).split("/"))
        with reading(item):
            files = [f for f in _expand(storage, item, keys, output) if not _is_below(output, f.path)]
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
    if _is_glob(item):
        return "/".join(item.split("/")[: _first_glob_segment(item)]) or "/"
    with reading(item):
        return item if storage.is_folder(item) else os.path.dirname(item)


def _expand(storage: Storage, item: str, keys: Keys, output: str) -> list[FoundFile]:
    if _is_glob(item):
        return list(_matches(storage, item, keys, output))
    path = storage.resolve(item)
    if storage.is_folder(path):
        return _folder_files(storage, path, keys, output)
    return [FoundFile(path, keys)] if storage.stat(path) is not None else []


def _matches(storage: Storage, pattern: str, above: Keys, output: str) -> Iterator[FoundFile]:
    searched = pattern.split("/")
    fixed = _first_glob_segment(pattern)
    names_hidden = any(_is_hidden(segment) for segment in searched[fixed:])
    for named, path in storage.expand(pattern):
        segments = named.split("/")[fixed:]
        if not names_hidden and any(map(_is_hidden, segments)):
            continue
        if not storage.is_folder(path):
            yield FoundFile(path, (*above, *_keys(segments[:-1])))
        elif "**" not in searched and path != output:  # which finds a folder's files by itself
            yield from _folder_files(storage, path, (*above, *_keys(segments)), output)


def _folder_files(storage: Storage, path: str, keys: Keys, output: str) -> list[FoundFile]:
    """Return a folder's files. Raises NestedFolders."""
    walk = _Walk(storage, output)
    files = list(walk.files(path, keys))
    plain = [folder for folder in walk.plain_folders if folder != output]
    if (nested := _first_nested(plain, output)) is not None:
        raise NestedFolders(path, os.path.relpath(nested, path))
    return files


def _is_glob(item: str) -> bool:
    return bool(glob_chars(item)) and not os.path.lexists(item)


def _first_glob_segment(pattern: str) -> int:
    return next(place for place, segment in enumerate(pattern.split("/")) if glob_chars(segment))


def _keys(names: Sequence[str]) -> Keys:
    """Return the key=value among the names of folders."""
    return tuple(key for key in map(folder_key, names) if key is not None)


class _Walk:
    """One search of a folder. plain_folders: those that it met and did not enter."""

    def __init__(self, storage: Storage, output: str) -> None:
        self._storage, self._output = storage, output
        self.plain_folders: list[str] = []

    def files(self, folder: str, keys: Keys, above: tuple[str, ...] = ()) -> Iterator[FoundFile]:
        """Yield the files of a folder and of its key=value folders. above: the folders around it."""
        for name in self._storage.names(folder):
            key, path = folder_key(name), os.path.join(folder, name)
            if _is_hidden(name):
                continue
            if not self._storage.is_folder(path):
                if name.endswith(".parquet"):
                    yield FoundFile(self._storage.resolve(path), keys)
            elif key is None:
                self.plain_folders.append(path)
            elif (real := self._storage.resolve(path)) not in (folder, *above, self._output):
                # A link that leads back ends here.
                yield from self.files(real, (*keys, key), (*above, folder))


def _first_nested(folders: Sequence[str], output: str) -> str | None:
    """Return a Parquet file that lies below one of these folders, at any depth, but not below the output."""
    for folder in folders:
        for parent, children, names in os.walk(folder):  # enters no links, and passes by what is not readable
            children[:] = [
                name for name in children if not _is_hidden(name) and os.path.join(parent, name) != output
            ]
            for name in names:
                if name.endswith(".parquet") and not _is_hidden(name):
                    return os.path.join(parent, name)
    return None


def _is_hidden(name: str) -> bool:
    return name[:1] in ("_", ".")


def _is_below(folder: str, path: str) -> bool:
    return path.startswith(folder + "/")
