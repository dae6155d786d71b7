"""How long prompts and answers are: counts by ranges that double every other step."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from jobs.common import stored

#: The most tokens of each range: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on.
BOUNDS = (0, 1, 2, 3, *(half << power for power in range(1, 30) for half in (2, 3)))


def count_lengths(lengths: Iterable[int]) -> dict[str, int]:
    """Return how many are in each range, by its most tokens."""
    found = Counter(BOUNDS[min(bisect_left(BOUNDS, length), len(BOUNDS) - 1)] for length in lengths)
    return {str(bound): found[bound] for bound in sorted(found)}


def read_lengths(value: Any) -> dict[int, int]:
    """Read what `count_lengths` returned, by range; what is none of it counts as nothing."""
    found: dict[int, int] = {}
    for bound, count in value.items() if isinstance(value, Mapping) else ():
        number = stored.count(bound)
        if number in BOUNDS and stored.count(count):
            found[number] = count
    return found
