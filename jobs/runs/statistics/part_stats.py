"""What is known of one finished shard: in its part's footer, and in Redis while the run goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace

from jobs.common.stored import count

#: What a manifest sums up over the parts.
COUNTED = (
    *("rows", "errors", "prompt_tokens", "completion_tokens", "cached_tokens", "generated_tokens"),
    *("failed_checks", "cut"),
)


@dataclass(frozen=True)
class PartStats:
    """Counts of one part.

    rows, errors: rows in the part, and those among them with an error.
    prompt_tokens, completion_tokens, cached_tokens: sums of the output's columns, equal prompts counted each
    time.
    generated_tokens: completion tokens that were computed, equal prompts counted once.
    started_at, ended_at: Unix time in seconds, of all work on it, with the pause before a retry of its rows.
    model, fingerprint, dtype, attention_backend, version: of the model that answered, and of this code.
    failed_checks, cut: rows without an error whose answer their check does not take, or ended at its limit of
    tokens; 0 of parts that were written before they were counted.
    worker: the name of the one that answered; "" for parts that were written before it was told.
    prompt_lengths, completion_lengths: in tokens, of rows without an error, as count_lengths returns them.
    spans: of a part whose rows were retried, start, end and generated tokens of all times that it was worked
    on.
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
    spans: list[list[float]] = field(default_factory=list)
    failed_checks: int = 0
    cut: int = 0

    @property
    def worked(self) -> list[list[float]]:
        """Return start, end and generated tokens of each time that it was worked on."""
        return self.spans or [[self.started_at, self.ended_at, self.generated_tokens]]

    def retried(self, since: float, until: float, generated_tokens: int) -> PartStats:
        """Return what it is with the time and tokens of a retry."""
        return replace(
            self,
            ended_at=until,
            generated_tokens=self.generated_tokens + generated_tokens,
            spans=[*self.worked, [since, until, generated_tokens]],
        )

    def to_text(self) -> str:
        """Return the fields that all versions know: some refuse a text with others."""
        return json.dumps({name: value for name, value in asdict(self).items() if name not in _LATER})

    def later_text(self) -> str:
        """Return the fields that came later, for a place of their own."""
        return json.dumps({name: getattr(self, name) for name in _LATER})

    def to_record(self) -> str:
        """Return what Redis keeps of it: whoever looks at a run reads this of each of its parts."""
        return json.dumps(asdict(replace(self, prompt_lengths={}, completion_lengths={})))

    @classmethod
    def from_text(cls, text: str | bytes, later: str | bytes = b"{}") -> PartStats:
        """Read what `to_text` or `to_record`, and `later_text`, wrote. Raises ValueError for anything else.

        Fields of a newer version are passed over: both may work on a run while workers are replaced.
        """
        try:
            told = {**json.loads(text), **json.loads(later)}
            found = cls(**{name: value for name, value in told.items() if name in _NAMES})
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if not isinstance(found.worker, str):
            raise ValueError("its worker is no name")
        if not _are_spans(found.spans):
            raise ValueError("its spans are no times and tokens")
        if any(count(getattr(found, name)) is None for name in ("shard", *COUNTED)):
            raise ValueError("a count is no integer from 0 on")
        return found


def _are_spans(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, list) and len(each) == 3 and all(type(number) in (int, float) for number in each)
        for each in value
    )


_NAMES = {each.name for each in fields(PartStats)}

#: Fields that versions before them refuse in a part's statistics.
_LATER = ("worker", "prompt_lengths", "completion_lengths", "spans", "failed_checks", "cut")


def outcome_text(errors: int, failed_checks: int, cut: int, rows: str = "") -> str:
    """Say how many rows have no good answer, and why. rows: what stands behind the first number."""
    told = [f"{errors} {rows}with an error"]
    told += [f"{failed_checks} failed their check"] if failed_checks else []
    return ", ".join([*told, *([f"{cut} cut at their limit of tokens"] if cut else [])])
