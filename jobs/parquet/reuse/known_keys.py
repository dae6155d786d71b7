"""The keys of a part's rows, beside the parts, and an index of many: which old rows have the answers of new ones.

A key file has a fixed layout, little-endian: a digest of run, shard and what follows, the number of the models that
answered as 64 bits, their marks (jobs.parquet.asks.row_keys), and 16 bytes for each row.
"""

import os
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from jobs.errors import InputNotFound, PartDamaged, PathSwapped
from jobs.parquet.asks.row_keys import SIZE, Keys, as_keys
from jobs.parquet.files.storage import Storage, reading
from jobs.runs.plans.names import keys_name
from jobs.runs.plans.plan import Plan

#: Models that may have answered a part's rows; of so many in all parts each is looked for.
MAX_MODELS = 64


def write_keys(storage: Storage, plan: Plan, shard: int, keys: Keys, marks: Keys, execution_id: str) -> None:
    """Put a part's keys in place, unless there. keys: zeros for no answer. marks: of each row's model."""
    keys, marks = np.where(keys.any(axis=1, keepdims=True), keys ^ marks, 0), np.unique(marks, axis=0)
    path = os.path.join(plan.spec.output, keys_name(shard))
    body = len(marks).to_bytes(8, "little") + marks.tobytes() + keys.tobytes()
    storage.make_folder(os.path.dirname(path))
    storage.put(path, execution_id, lambda sink: sink.write(_digest(plan.run, shard, body) + body))


def read_keys(storage: Storage, plan: Plan, shard: int, run: str) -> tuple[Keys, Keys]:
    """Return a part's keys, and the marks of the models in them. run: that wrote them. Raises PartDamaged."""
    path, rows = os.path.join(plan.spec.output, keys_name(shard)), plan.shards[shard].rows
    try:
        with reading(path), storage.open_input(path) as source:
            found = bytes(source.read(24 + (MAX_MODELS + rows) * SIZE))
    except (InputNotFound, PathSwapped):
        raise PartDamaged(path, "there is no such file") from None
    digest, body = found[:16], found[16:]
    if digest != _digest(run, shard, body) or len(body) % SIZE != 8:
        raise PartDamaged(path, "it holds no keys, or others than were written for it")
    num_marks, keys = int.from_bytes(body[:8], "little"), as_keys(body[8:])
    if len(keys) != num_marks + rows:
        raise PartDamaged(path, f"it has the keys of {len(keys) - num_marks} rows, expected {rows}")
    return keys[num_marks:], keys[:num_marks]


def _digest(run: str, shard: int, body: bytes) -> bytes:
    return blake2b(body, digest_size=16, key=f"{run} {shard}".encode(), person=b"tokenmill keys").digest()


#: Of so many equal keys each is found in its turn; of more, the first of them.
MAX_EQUAL = 1000

Places = npt.NDArray[np.int64]


class KnownKeys:
    """Finds keys among at most `size` that were added. At most 32 bytes for each of these, while `sort` runs."""

    def __init__(self, size: int) -> None:
        self._first, self._second = np.empty(size, np.uint64), np.empty(size, np.uint64)
        self._order: Places = np.empty(0, np.int64)
        self._taken: dict[int, int] = {}
        self.size = 0

    def add(self, keys: Keys) -> None:
        """Take more keys; those of no row, zeros, are never found."""
        end = self.size + len(keys)
        self._first[self.size : end], self._second[self.size : end] = keys[:, 0], keys[:, 1]
        self.size = end

    def sort(self) -> None:
        self._first, self._second = self._first[: self.size], self._second[: self.size]
        self._order = np.argsort(self._first, kind="stable")
        self._first = self._first[self._order]

    def forget(self, places: Places) -> None:
        self._second[places] = 0

    def find(self, keys: Keys) -> Places:
        """Return the place of each key among those added, -1 where it is not.

        Equal ones are given out in the order they were added: rows that ask the same keep answers of their own.
        """
        first = np.ascontiguousarray(keys[:, 0])
        lows, highs = (np.searchsorted(self._first, first, side) for side in ("left", "right"))
        found = np.full(len(keys), -1, np.int64)
        single = (highs - lows == 1) & keys.any(axis=1)
        places = self._order[lows[single]]
        found[single] = np.where(self._second[places] == keys[single, 1], places, -1)
        for row in np.flatnonzero((highs - lows > 1) & keys.any(axis=1)):
            equal = self._order[lows[row] : min(highs[row], lows[row] + MAX_EQUAL)]
            equal = equal[self._second[equal] == keys[row, 1]]
            if len(equal):
                begin = int(equal[0])
                number = self._taken.get(begin, 0)
                self._taken[begin] = number + 1
                found[row] = equal[number % len(equal)]
        return found
