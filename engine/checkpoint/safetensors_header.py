"""The header of a safetensors file: which tensors it holds, and where they lie. Reads none of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from engine.errors import MissingWeights

#: No checkpoint's header is as large; a file that claims one is none.
MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class TensorEntry:
    """dtype: as safetensors names it. start, end: bytes from the file's beginning, the end not included."""

    name: str
    dtype: str
    shape: list[int]
    start: int
    end: int

    @property
    def numel(self) -> int:
        """Its numbers."""
        return prod(self.shape)


def read_header(file: BinaryIO) -> list[TensorEntry]:
    """Return the tensors of an open file, in the header's order.

    Raises ValueError, KeyError, TypeError or AttributeError for what is no header.
    """
    size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {size} bytes")
    entries = []
    for name, entry in json.loads(file.read(size)).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            entries.append(
                TensorEntry(name, entry["dtype"], entry["shape"], 8 + size + start, 8 + size + end)
            )
    return entries


def check_file(path: Path) -> list[TensorEntry]:
    """Return the tensors of a file that is as long as its header says. Raises MissingWeights."""
    try:
        with path.open("rb") as file:
            entries = read_header(file)
        size, wanted = path.stat().st_size, max((each.end for each in entries), default=0)
        if size < wanted:
            raise ValueError(f"it has {size} bytes, and its header names {wanted}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MissingWeights(f"{path} is no complete safetensors file ({error}); fetch it again") from error
    return entries
