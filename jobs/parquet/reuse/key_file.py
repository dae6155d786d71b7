"""The keys of a part's rows, beside the parts: what a later run looks its own rows up in.

A fixed layout, little-endian: a digest of run, shard and what follows, the number of the models that answered as 64
bits, their marks (jobs.parquet.asks.row_keys), and 16 bytes for each row.
"""

import os
from hashlib import blake2b

import numpy as np

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
