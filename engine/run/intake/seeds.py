"""Seeds for requests that name none."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from hashlib import blake2b


class Seeds:
    """Draws them one after the other, or, where results shall depend on a request alone, from its prompt."""

    def __init__(self, seed: int, *, from_prompts: bool) -> None:
        self._seed, self._from_prompts = seed, from_prompts
        self._drawn = random.Random(seed)

    def draw(self, token_ids: Sequence[int]) -> int:
        """A seed of 64 bits. token_ids: of the prompt."""
        if not self._from_prompts:
            return self._drawn.getrandbits(64)
        digest = blake2b(f"{self._seed}:".encode(), digest_size=8)
        digest.update(array("q", token_ids).tobytes())
        return int.from_bytes(digest.digest(), "little")
