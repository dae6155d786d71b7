"""A dry run: what a run will take, from a look at its prompts and the answers of a few of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .estimate import Pick, Speed, Total, measured_speed, total
from .trials import Trial, Tried

#: Requests that are tried, and how many of them by their prompts alone before, for the speed of prompts.
NUM_TRIED, NUM_PROMPTS = 64, 8


@dataclass(frozen=True)
class Estimate:
    """What a run will take. Tokens over all rows, as its manifest will count them; `generated` over requests.

    seconds: on one worker like the one that answered, with nothing beside it.
    """

    prompt_tokens: Total
    saved_tokens: float
    completion_tokens: Total
    generated_tokens: Total
    seconds: Total
    num_tried: int
    num_failed: int


def trial_of(picked: Mapping[str, Any], model: str | None, **changed: Any) -> Trial:
    """Return the job that answers a picked row as the run would."""
    values = {**picked["sampling"], **changed, **({} if model is None else {"model": model})}
    if picked["is_chat"]:
        return Trial("jobs.chat", {"messages": picked["prompt"], **values})
    return Trial("jobs.complete", {"prompt": picked["prompt"], **values})


def estimate(survey: Mapping[str, Any], answer: Callable[[Sequence[Trial]], list[Tried]]) -> Estimate:
    """Estimate a run. survey: what jobs.survey_parquet found. answer: runs jobs together."""
    picked, scale = survey["picked"], survey["rows"] / max(1, survey["rows_read"])
    alone = [trial_of(each, None, max_tokens=1, min_tokens=0, n=1) for each in _spread(picked, NUM_PROMPTS)]
    prompts = [tried for tried in answer(alone) if tried.value is not None]
    tried = answer([trial_of(each, None) for each in picked])
    usages = [_usage(each) for each in tried]
    lengths = [completion for _, completion in usages]
    picks = [Pick(number, each["weight"]) for number, each in enumerate(picked)]
    generated = total(picks, lengths).times(scale)
    rows = [length * each["rows"] for length, each in zip(lengths, picked, strict=True)]
    speed = _speed(prompts, tried, survey)
    computed = (survey["request_tokens"] - survey["cached_tokens"]) * scale
    batch = min(survey["max_num_seqs"], max(1, round(survey["requests"] * scale)) * survey["n"])
    seconds = [
        speed.seconds(computed, tokens, batch) for tokens in (generated.value, generated.low, generated.high)
    ]
    known = survey["prompt_tokens"] * scale
    return Estimate(
        Total(known, known, known),
        survey["cached_tokens"] * scale,
        total(picks, rows).times(scale),
        generated,
        Total(*seconds),
        len(tried),
        sum(each.value is None for each in tried),
    )


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    count = min(count, len(items))
    return [items[(2 * number + 1) * len(items) // (2 * count)] for number in range(count)]


def _usage(tried: Tried) -> tuple[int, int]:
    """Return tokens of a prompt that were computed, and of its answers."""
    usage = (tried.value or {}).get("usage", {})
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return usage.get("prompt_tokens", 0) - cached, usage.get("completion_tokens", 0)


def _speed(prompts: Sequence[Tried], tried: Sequence[Tried], survey: Mapping[str, Any]) -> Speed:
    computed = sum(_usage(each)[0] for each in prompts)
    prompt_token_s = _span(prompts) / computed if computed else 0.0
    ran = [each for each in tried if each.value is not None]
    if not ran:
        return Speed(prompt_token_s, 0.0, 0.0)
    began_at, n = min(each.began_at for each in ran), survey["n"]
    prefilled = sum(_usage(each)[0] for each in ran)
    ends_s = [each.ended_at - began_at for each in ran for _ in range(n)]
    lengths = [max(1, round(_usage(each)[1] / n)) for each in ran for _ in range(n)]
    if len(lengths) > survey["max_num_seqs"]:  # they took turns: the batch was as full as the run's
        decode_s = max(0.0, max(ends_s) - prompt_token_s * prefilled)
        return Speed(prompt_token_s, 0.0, decode_s / sum(lengths))
    return measured_speed(prompt_token_s, prefilled, ends_s, lengths)


def _span(tried: Sequence[Tried]) -> float:
    """Return the seconds from the first beginning to the last end."""
    return max(each.ended_at for each in tried) - min(each.began_at for each in tried) if tried else 0.0
