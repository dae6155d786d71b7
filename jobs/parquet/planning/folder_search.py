"""The names in folders as a search for input files meets them: each folder once, their number bounded."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from jobs.errors import SearchTooLong
from jobs.parquet.files.filesystem import Entry
from jobs.parquet.files.storage import Storage, glob_chars
from jobs.runs.plans.paths import run_path

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


class Walk:
    """One search, which heeds what interrupts the storage at each folder and name."""

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
        texts = pattern.split("/")
        first = next(place for place, text in enumerate(texts) if glob_chars(text))
        segments = [_Segment(text) for text in texts[first:]]
        top = "/".join(texts[:first]) or "/"
        found = []
        waiting = [(Folder(top, self.storage.resolve(top)), _with_skipped({0}, segments))]
        while waiting:
            folder, places = waiting.pop()
            for entry in self._candidates(folder, [segments[place] for place in places]):
                hits = {place for place in places if segments[place].matches(entry.name)}
                if not hits or is_passed_by(entry.name):
                    continue
                if len(segments) - 1 in hits:
                    path = folder.real_path(entry, self.storage)
                    found.append(Match(os.path.join(folder.named, entry.name), path, entry.is_folder))
                below = _with_skipped({p if segments[p].is_any_depth else p + 1 for p in hits}, segments)
                child = folder.child(entry, self.storage) if below and entry.is_folder else None
                if child is not None:
                    waiting.append((child, below))
        return sorted(found)

    def _candidates(self, folder: Folder, segments: Sequence[_Segment]) -> list[Entry]:
        """Return what of a folder may match: it is not listed where its names are known."""
        if any(segment.is_glob for segment in segments):
            return self.readable_entries(folder.path)
        self.storage.check_interrupted()
        looks = [self.storage.look(os.path.join(folder.path, segment.text)) for segment in segments]
        return [found for found in looks if found is not None]


class _Segment:
    """A part of a glob between two slashes."""

    def __init__(self, text: str) -> None:
        self.text, self.is_any_depth, self.is_glob = text, text == "**", bool(glob_chars(text))
        self._is_match = re.compile(fnmatch.translate(text)).match

    def matches(self, name: str) -> bool:
        """Whether it matches a name; for `**`, whether it goes into it."""
        if not self.is_glob:
            return name == self.text
        if name.startswith(".") and not self.text.startswith("."):
            return False
        return self.is_any_depth or self._is_match(name) is not None


def _with_skipped(places: set[int], segments: Sequence[_Segment]) -> frozenset[int]:
    """Return the segments that may match next, also behind `**`, which stands for no folder too."""
    reached: set[int] = set()
    for place in places:
        while place < len(segments):
            reached.add(place)
            if not segments[place].is_any_depth:
                break
            place += 1
    return frozenset(reached)
