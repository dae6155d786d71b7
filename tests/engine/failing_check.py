"""A check of answers that fails six texts of ten, by their hash."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

#: Of a hundred texts, so many fail.
FAILING = 60


def check(row: Mapping[str, Any], completion: str) -> str | None:
    """Fail six texts of ten, each row others."""
    digest = blake2b(f"{row['id']}:{completion}".encode(), digest_size=4).digest()
    return "no" if int.from_bytes(digest, "little") % 100 < FAILING else None
