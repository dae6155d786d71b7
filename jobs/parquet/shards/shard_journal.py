"""The journal of an open shard: its answers, and how far its other rows are, for whoever takes it up next.

A file of answers for each interval of an execution, with those of that interval; and one file, put over the one before,
that tells how far the rows are that were under way then. Nobody but their execution writes them. They lie in a folder
that planning makes and the run's end removes: who thaws afterwards finds none.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa

from jobs.context.answers import Answer
from jobs.context.journal_bytes import MAX_BYTES, JournalUnfit, packed, unpacked
from jobs.context.under_way import UnderWay, answer_from_json, answer_to_json
from jobs.errors import PathSwapped, RunError
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.shards.shard_requests import Answered, ShardRequests

#: Kinds of records.
_ANSWER, _UNDER_WAY = b"A", b"U"

#: Of all files of a shard that are read.
MAX_FILES = 100_000

#: Rows that are written into one file at most, so that it stays within its bounds.
_FILE_ROWS = 2_000

_log = logging.getLogger("rq.worker")


@dataclass
class Journalled:
    """What a journal holds: the answers of rows, the tokens generated for them, and how far others are."""

    answers: dict[int, Answer] = field(default_factory=dict)
    num_tokens: int = 0
    under_way: dict[int, UnderWay] = field(default_factory=dict)


class ShardJournal:
    """The journal of one shard, as one execution reads and goes on with it.

    whose: what else must be the same. check: raises for answers that no part of this run can hold.
    """

    def __init__(
        self, folder: RunFolder, shard: int, fingerprint: str, check: Callable[[Sequence[Answer]], None]
    ) -> None:
        self._storage, self._folder, self._check = folder.storage, folder.journal, check
        self._rows, self._prefix = folder.plan.shards[shard].rows, f"{shard:05d}."
        self._whose = f"{folder.plan.run} {shard} {folder.plan.seed} {fingerprint}"
        self._stem, self._num_files, self._num_written = f"{self._prefix}{folder.execution_id}", 0, 0
        self._names: set[str] = set()

    def read(self) -> Journalled:
        """Return what earlier executions have left; passes over what is damaged, or of another plan or model."""
        found = Journalled()
        try:
            names = [name for name in self._storage.names(self._folder) if self._is_ours(name)]
        except FileNotFoundError:
            return found
        except (OSError, PathSwapped) as error:
            _log.warning("the journals in %s are passed over: %s", self._folder, error)
            return found
        self._names.update(names)
        for name in names[:MAX_FILES]:
            path = os.path.join(self._folder, name)
            try:
                self._add(found, self._storage.read_small(path, MAX_BYTES) or b"")
            except JournalUnfit as error:
                _log.warning("the journal %s is passed over: %s", path, error)
        for row in found.answers:
            found.under_way.pop(row, None)
        return found

    def _is_ours(self, name: str) -> bool:
        return name.startswith(self._prefix) and name.endswith(".journal")

    def _add(self, found: Journalled, contents: bytes) -> None:
        """Add what a file tells, or nothing of it. Raises JournalUnfit."""
        answered: list[Answered] = []
        under_way: dict[int, UnderWay] = {}
        try:
            for kind, value in unpacked(contents, self._whose):
                if kind == _ANSWER:
                    rows, num_tokens, answer = value
                    answered.append(Answered(self._checked(rows), int(num_tokens), answer_from_json(answer)))
                elif kind == _UNDER_WAY:
                    row, was = value
                    under_way[self._checked([row])[0]] = UnderWay.from_json(was)
            self._check([each.answer for each in answered])
        except JournalUnfit:
            raise
        except Exception as error:  # noqa: BLE001 - what is in it may be anything
            raise JournalUnfit(f"a record is none of this run: {type(error).__name__}") from None
        for rows, num_tokens, answer in answered:
            if rows[0] not in found.answers:
                found.num_tokens += num_tokens
            found.answers.update(dict.fromkeys(rows, answer))
        for row, was in under_way.items():
            known = found.under_way.get(row)
            if known is None or was.length > known.length:
                found.under_way[row] = was

    def _checked(self, rows: Sequence[int]) -> Sequence[int]:
        if not rows or not all(type(row) is int and 0 <= row < self._rows for row in rows):
            raise JournalUnfit("a record is of no row of its shard")
        return rows

    def keep(
        self, requests: ShardRequests, so_far: Mapping[int, Mapping[int, Sequence[int]]]
    ) -> Callable[[], None] | None:
        """Return what writes down, in any thread, what is new; see OpenTask."""
        answered, under_way = requests.answered[self._num_written :], requests.under_way(so_far)
        answered = [each for each in answered if not any(isinstance(v, pa.Array) for v in each.answer.columns.values())]
        if not answered and not under_way:
            return None

        def write() -> None:
            with suppress(FileNotFoundError):  # the run has ended
                self._write(answered, under_way)

        return write

    def _write(self, answered: Sequence[Answered], under_way: Mapping[int, UnderWay]) -> None:
        """Write answers first: a row whose answer is there is not under way, whatever else is told of it."""
        for start in range(0, len(answered), _FILE_ROWS):
            some = answered[start : start + _FILE_ROWS]
            records = (f"[{list(rows)},{tokens},{answer_to_json(answer)}]" for rows, tokens, answer in some)
            self._put(str(self._num_files), _ANSWER, records)
            self._num_files += 1
            self._num_written += len(some)
        if under_way:
            self._put("now", _UNDER_WAY, (f"[{row},{was.to_json()}]" for row, was in under_way.items()))

    def _put(self, name: str, kind: bytes, texts: Iterable[str]) -> None:
        name = f"{self._stem}.{name}.journal"
        contents = packed(self._whose, ((kind, text) for text in texts))
        self._storage.put(os.path.join(self._folder, name), contents)
        self._names.add(name)

    def remove(self) -> None:
        """Remove what was read and written, once the part is there; the run's end removes what is left."""
        with suppress(OSError, RunError):
            for name in self._names:
                self._storage.remove(os.path.join(self._folder, name))
