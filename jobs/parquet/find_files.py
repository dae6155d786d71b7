"""Which files a run's input names."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ..errors import InputNotFound, InvalidJob, NestedFolders
from ..runs.partitions import FoundFile, Keys, folder_key, joined_keys
from ..runs.spec import check_num_files
from .storage import Storage, glob_chars, reading
from .walk import Folder, Walk


def find_files(storage: Storage, inputs: Sequence[str], output: str) -> list[FoundFile]:
    """Return the files that a run reads, in order.

    A folder gives its *.parquet, and those of its folders named key=value, at any depth; a glob what it
    matches, files and, unless it holds **, folders, with the key=value of the folders that it searches. Both
    come sorted, without names that start with a dot or an underscore (unless a glob spells one out). Several
    inputs have the key=value of the folders below the one that holds them all: a shell expands a glob to such
    a list. Files below the output are never input. Raises InputNotFound, SearchTooLong, PathOutsideRoots,
    InvalidJob, SchemaMismatch for folders that give too many columns, or NestedFolders for one that holds
    Parquet files deeper down in folders of plain names: whether they belong to it is for the caller to say.
    """
    walk = Walk(storage)
    found: list[FoundFile] = []
    folders = [_searched_folder(storage, item) for item in inputs]
    common = os.path.commonpath(folders)
    for item, folder in zip(inputs, folders, strict=True):
        storage.check_interrupted()
        keys = _keys(os.path.relpath(folder, common).split("/"))
        with reading(item):
            files = [f for f in _expand(walk, item, keys, output) if not _is_below(output, f.path)]
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


def _expand(walk: Walk, item: str, keys: Keys, output: str) -> Iterable[FoundFile]:
    if _is_glob(item):
        return _matches(walk, item, keys, output)
    path = walk.storage.resolve(item)
    if walk.storage.is_folder(path):
        return _folder_files(walk, path, keys, output)
    return [FoundFile(path, keys)] if walk.storage.stat(path) is not None else []


def _matches(walk: Walk, pattern: str, above: Keys, output: str) -> Iterator[FoundFile]:
    searched = pattern.split("/")
    fixed = _first_glob_segment(pattern)
    names_hidden = any(_is_hidden(segment) for segment in searched[fixed:])
    for match in walk.matches(pattern, is_passed_by=lambda name: not names_hidden and _is_hidden(name)):
        segments = match.named.split("/")[fixed:]
        if not match.is_folder:
            yield FoundFile(match.path, joined_keys(above, _keys(segments[:-1]), match.path))
        elif "**" not in searched and match.path != output:  # which finds a folder's files by itself
            yield from _folder_files(
                walk, match.path, joined_keys(above, _keys(segments), match.path), output
            )


def _folder_files(walk: Walk, path: str, keys: Keys, output: str) -> list[FoundFile]:
    """Return a folder's files. Raises NestedFolders."""
    plain_folders: list[str] = []
    files = list(_files(walk, Folder(path, path), keys, output, plain_folders))
    plain = [folder for folder in plain_folders if folder != output]
    if (nested := _first_nested(walk, plain, output)) is not None:
        raise NestedFolders(path, os.path.relpath(nested, path))
    return files


def _files(walk: Walk, top: Folder, keys: Keys, output: str, plain_folders: list[str]) -> Iterator[FoundFile]:
    """Yield the files of a folder and of its key=value folders; note those that are not entered."""
    waiting = [(top, keys, iter(walk.entries(top.path)))]
    while waiting:
        folder, keys, entries = waiting[-1]
        entry = next(entries, None)
        if entry is None:
            waiting.pop()
        elif _is_hidden(entry.name):
            continue
        elif not entry.is_folder:
            if entry.name.endswith(".parquet"):
                yield FoundFile(folder.real_path(entry, walk.storage), keys)
        elif (key := folder_key(entry.name)) is None:
            plain_folders.append(os.path.join(folder.path, entry.name))
        else:
            child = folder.child(entry, walk.storage)
            if child is not None and child.path != output:
                below = joined_keys(keys, (key,), child.path)
                waiting.append((child, below, iter(walk.entries(child.path))))


def _is_glob(item: str) -> bool:
    return bool(glob_chars(item)) and not os.path.lexists(item)


def _first_glob_segment(pattern: str) -> int:
    return next(place for place, segment in enumerate(pattern.split("/")) if glob_chars(segment))


def _keys(names: Sequence[str]) -> Keys:
    """Return the key=value among the names of folders."""
    return tuple(key for key in map(folder_key, names) if key is not None)


def _first_nested(walk: Walk, folders: Sequence[str], output: str) -> str | None:
    """Return a Parquet file that lies below one of these folders, at any depth, but not below the output.

    Enters no links, and passes by what is not readable.
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
            elif not entry.is_folder and entry.name.endswith(".parquet"):
                return path
    return None


def _is_hidden(name: str) -> bool:
    return name[:1] in ("_", ".")


def _is_below(folder: str, path: str) -> bool:
    return path.startswith(folder + "/")
