"""What is known of one finished shard: in its part's footer, and in Redis while the run goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace

#: What is summed up over the parts while a run goes on.
COUNTED = (
    *("rows", "errors", "prompt_tokens", "completion_tokens", "cached_tokens", "generated_tokens"),
    *("failed_checks", "cut", "rows_reused", "rows_escalated"),
)

TOLD = (*COUNTED, "rows_resumed", "tokens_resumed")


@dataclass(frozen=True)
class PartStats:
    """Counts of one part.

    prompt_tokens, completion_tokens, cached_tokens: sums of the output's columns. generated_tokens: that its execution
    has computed, equal prompts counted once. rows_resumed, tokens_resumed: of earlier executions. started_at, ended_at:
    Unix seconds. failed_checks, cut: rows without an error whose answer fails its check, or ended at its limit of
    tokens. prompt_lengths, completion_lengths: in tokens, as count_lengths returns them.
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
    failed_checks: int = 0
    cut: int = 0
    rows_resumed: int = 0
    tokens_resumed: int = 0
    rows_reused: int = 0
    rows_escalated: int = 0

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended_at - self.started_at)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    def to_record(self) -> str:
        """Return what Redis keeps of it: whoever looks at a run reads this of each of its parts."""
        return replace(self, prompt_lengths={}, completion_lengths={}).to_text()

    @classmethod
    def from_text(cls, text: str | bytes) -> PartStats:
        """Read what `to_text` or `to_record` wrote, here or in another version. Raises ValueError for anything else."""
        known = {each.name for each in fields(cls)}
        try:
            return cls(**{name: value for name, value in json.loads(text).items() if name in known})
        except TypeError as error:
            raise ValueError(str(error)) from None


def outcome_text(errors: int, failed_checks: int, cut: int, rows: str = "") -> str:
    """Say how many rows have no good answer, and why. rows: what stands behind the first number."""
    told = [f"{errors} {rows}with an error"]
    told += [f"{failed_checks} failed their check"] if failed_checks else []
    return ", ".join([*told, *([f"{cut} cut at their limit of tokens"] if cut else [])])
