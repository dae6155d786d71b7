"""The keys of a part's rows, beside the parts: what a later run looks its own rows up in.

A fixed layout, little-endian: eight bytes that name it, rows and models as 64-bit numbers, a digest of what follows,
the marks of the models that answered (jobs.parquet.asks.row_keys), and 16 bytes for each row.
"""

import os
import struct
from hashlib import blake2b

import numpy as np

from jobs.errors import InputNotFound, PartDamaged, PathSwapped
from jobs.parquet.asks.row_keys import SIZE, Keys, as_keys
from jobs.parquet.files.storage import Storage, reading, writing
from jobs.runs.plans.names import keys_name
from jobs.runs.plans.plan import Plan

_NAME = b"TMKEYS1\n"
_HEAD = struct.Struct("<8sQQ16s")

#: Models that may have answered one part's rows: each is looked for.
MAX_MODELS = 64


def write_keys(storage: Storage, plan: Plan, shard: int, keys: Keys, marks: Keys, execution_id: str) -> None:
    """Put a part's keys in place, unless they are there. Raises DiskFull or OutputNotWritable.

    keys: without a model, zeros for rows whose answer is none to take. marks: of each row's model.
    """
    keys, marks = np.where(keys.any(axis=1, keepdims=True), keys ^ marks, 0), np.unique(marks, axis=0)
    path = os.path.join(plan.spec.output, keys_name(shard))
    body = marks.tobytes() + keys.tobytes()
    head = _HEAD.pack(_NAME, len(keys), len(marks), blake2b(body, digest_size=16).digest())
    with writing(path):
        storage.make_folder(os.path.dirname(path))
    storage.put(path, execution_id, lambda sink: sink.write(head + body))


def read_keys(storage: Storage, plan: Plan, shard: int) -> tuple[Keys, Keys]:
    """Return a part's keys, and the marks of the models in them. Raises PartDamaged, also where there are none."""
    path, rows = os.path.join(plan.spec.output, keys_name(shard)), plan.shards[shard].rows
    try:
        with reading(path), storage.open_input(path) as source:
            found = bytes(source.read(_HEAD.size + (MAX_MODELS + rows) * SIZE + 1))
    except (InputNotFound, PathSwapped):
        raise PartDamaged(path, "there is no such file") from None
    if len(found) < _HEAD.size:
        raise PartDamaged(path, "it holds no keys")
    name, num_rows, num_marks, digest = _HEAD.unpack_from(found)
    body = found[_HEAD.size :]
    if name != _NAME or blake2b(body, digest_size=16).digest() != digest:
        raise PartDamaged(path, "it holds no keys, or others than were written")
    if num_rows != rows or num_marks > MAX_MODELS or len(body) != (num_rows + num_marks) * SIZE:
        raise PartDamaged(path, f"it has the keys of {num_rows} rows, expected {rows}")
    keys = as_keys(body)
    return keys[num_marks:], keys[:num_marks]
