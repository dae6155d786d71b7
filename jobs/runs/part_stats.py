"""What is known of one finished shard: in its part's footer, and in Redis while the run goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace

from ..common.stored import count

#: What a manifest sums up over the parts.
COUNTED = ("rows", "errors", "prompt_tokens", "completion_tokens", "cached_tokens", "generated_tokens")


@dataclass(frozen=True)
class PartStats:
    """Counts of one part.

    rows, errors: rows in the part, and those among them with an error.
    prompt_tokens, completion_tokens, cached_tokens: sums of the output's columns, equal prompts counted each
    time.
    generated_tokens: completion tokens that were computed, equal prompts counted once.
    started_at, ended_at: Unix time in seconds.
    model, fingerprint, dtype, attention_backend, version: of the model that answered, and of this code.
    worker: the name of the one that answered; "" for parts that were written before it was told.
    prompt_lengths, completion_lengths: in tokens, of rows without an error, as count_lengths returns them.
    """

    run: str
    shard: int
    rows: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    generated_tokens: int
    started_at: float
    ended_at: float
    model: str
    fingerprint: str
    dtype: str
    attention_backend: str
    version: str
    worker: str = ""
    prompt_lengths: dict[str, int] = field(default_factory=dict)
    completion_lengths: dict[str, int] = field(default_factory=dict)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    def to_record(self) -> str:
        """Return what Redis keeps of it: whoever looks at a run reads this of each of its parts."""
        return replace(self, prompt_lengths={}, completion_lengths={}).to_text()

    @classmethod
    def from_text(cls, text: str | bytes) -> PartStats:
        """Read what `to_text` wrote. Raises ValueError for anything else."""
        try:
            found = cls(**json.loads(text))
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if not isinstance(found.worker, str):
            raise ValueError("its worker is no name")
        if any(count(getattr(found, name)) is None for name in ("shard", *COUNTED)):
            raise ValueError("a count is no integer from 0 on")
        return found
