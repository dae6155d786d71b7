"""Tails: blocks by what they hold behind a prefix, to find the one that begins most like other tokens.

A hit of the prefix cache is a whole block. What a sequence shares with others beyond it is a part of one,
which is copied: the first tokens of a full block, or of the last one of a prompt.
"""

from __future__ import annotations

from bisect import bisect_left, insort

TOKEN_BYTES = 4


class Tails:
    """Blocks by the content before them, and in the order of their tokens' bytes.

    Of tokens in order those next to a place share the most with what would stand there.
    """

    def __init__(self) -> None:
        self._behind: dict[int, list[tuple[bytes, int]]] = {}

    def add(self, parent: int, tokens: bytes, block_id: int) -> None:
        """A block holds these tokens behind that content, and maybe more."""
        insort(self._behind.setdefault(parent, []), (tokens, block_id))

    def remove(self, parent: int, tokens: bytes, block_id: int) -> None:
        """What `add` was told is no longer so."""
        entries = self._behind[parent]
        del entries[bisect_left(entries, (tokens, block_id))]
        if not entries:
            del self._behind[parent]

    def find(self, parent: int, tokens: bytes) -> tuple[int, int]:
        """The block that shares the most first tokens with these, and how many; (-1, 0) if none does."""
        entries = self._behind.get(parent, [])
        place = bisect_left(entries, (tokens,))
        near = entries[max(0, place - 1) : place + 1]
        found = [(num_shared(other, tokens), block_id) for other, block_id in near]
        num_tokens, block_id = max(found, default=(0, -1))
        return (block_id, num_tokens) if num_tokens else (-1, 0)

    def entries(self) -> list[tuple[int, bytes, int]]:
        """All that was added and not removed, to be checked."""
        return [(parent, *entry) for parent, entries in self._behind.items() for entry in entries]


def num_shared(some: bytes, others: bytes) -> int:
    """First tokens that both have."""
    shortest = min(len(some), len(others))
    for start in range(0, shortest, TOKEN_BYTES):
        if some[start : start + TOKEN_BYTES] != others[start : start + TOKEN_BYTES]:
            return start // TOKEN_BYTES
    return shortest // TOKEN_BYTES
