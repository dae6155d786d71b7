"""The labels of a run, and what they go together with. Needs no pyarrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jobs.common.display import brief
from jobs.errors import InvalidJob, InvalidValue
from jobs.prompts.chat_options import NAMES as CHAT_NAMES
from jobs.prompts.labels import parse_labels

#: Of a shard's rows together, all held until its part is written: 88 bytes each.
MAX_PROBABILITIES = 4_000_000

#: Sampling values that say how a prompt is read, and nothing of an answer.
OF_PROMPTS = ("truncate_prompt_tokens", *CHAT_NAMES)


def labels(value: Any) -> list[str] | None:
    """Return a run's labels. Raises InvalidJob."""
    return None if value is None else parse_labels(value)


def calibrate(value: Any, asks_labels: bool) -> bool:
    """Return whether what labels have without content is subtracted. Raises InvalidJob."""
    if value is None or value is False:
        return False
    if value is not True:
        raise InvalidValue("calibrate is {}, expected true or false", brief(value))
    if not asks_labels:
        raise InvalidJob("calibrate is for labels, and there are none: name labels too")
    return True


def check_labels(
    asked: Sequence[str] | None, sampling: Mapping[str, Any], options: Mapping[str, Any], rows_per_shard: int
) -> None:
    """Raise InvalidJob for what a run cannot have that generates nothing. asked: its labels, if any."""
    if asked is None:
        return
    if len(asked) * rows_per_shard > MAX_PROBABILITIES:
        raise InvalidJob(
            f"{len(asked)} labels make more than {MAX_PROBABILITIES} probabilities of a shard of "
            f"{rows_per_shard} rows: give at most {MAX_PROBABILITIES // len(asked)} rows_per_shard"
        )
    for name in sampling:
        if name not in OF_PROMPTS:
            raise InvalidValue(
                "sampling has {}, and with labels nothing is generated: leave it out", brief(name)
            )
    for name in ("sampling_columns", "prompts"):
        if options.get(name):
            raise InvalidJob(f"{name} and labels do not go together: with labels nothing is generated")
