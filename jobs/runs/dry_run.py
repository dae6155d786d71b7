"""A dry run: what a run will take, from a look at its prompts and the answers of a few of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .estimate import Pick, Speed, Together, Total, measured_speed, num_steps, total
from .trials import Trial, Tried

#: Requests that are tried. One of so many is in a first, smaller group, which tells what a step takes.
NUM_TRIED, FIRST_OF = 64, 4


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


def classification_of(picked: Mapping[str, Any], survey: Mapping[str, Any], model: str | None) -> Trial:
    """Return the job that gives a picked row its label as the run would."""
    asked = {"messages" if picked["is_chat"] else "prompt": picked["prompt"], **picked["sampling"]}
    named = {"labels": survey["labels"], "calibrate": survey["calibrate"]}
    return Trial("jobs.classify", {**asked, **named, **({} if model is None else {"model": model})})


def trial_of(picked: Mapping[str, Any], model: str | None, **changed: Any) -> Trial:
    """Return the job that answers a picked row as the run would."""
    values = {**picked["sampling"], **changed, **({} if model is None else {"model": model})}
    if picked["is_chat"]:
        return Trial("jobs.chat", {"messages": picked["prompt"], **values})
    return Trial("jobs.complete", {"prompt": picked["prompt"], **values})


def estimate(survey: Mapping[str, Any], answer: Callable[[Sequence[Trial]], list[Tried]]) -> Estimate:
    """Estimate a run. survey: what jobs.survey_parquet found. answer: runs jobs together."""
    picked, scale = survey["picked"], survey["rows"] / max(1, survey["rows_read"])
    prompts = answer([trial_of(each, None, max_tokens=1, min_tokens=0, n=1) for each in picked])
    groups = [range(0, len(picked), FIRST_OF), [i for i in range(len(picked)) if i % FIRST_OF]]
    found: dict[int, Tried] = {}
    for numbers in groups:
        answers = answer([trial_of(picked[number], None) for number in numbers])
        found.update(zip(numbers, answers, strict=True))
    tried = [found[number] for number in range(len(picked))]
    usages = [_usage(each) for each in tried]
    lengths = [completion for _, completion in usages]
    picks = [Pick(number, each["weight"]) for number, each in enumerate(picked)]
    generated = total(picks, lengths).times(scale)
    rows = [length * each["rows"] for length, each in zip(lengths, picked, strict=True)]
    speed = _speed(prompts, [[found[number] for number in numbers] for numbers in groups], survey)
    computed = (survey["request_tokens"] - survey["cached_tokens"]) * scale
    n = survey["n"]
    steps = num_steps(
        picks,
        [round(each / n) for each in lengths],
        round(survey["requests"] * scale) * n,
        survey["max_num_seqs"],
    )
    seconds = [
        speed.seconds(computed, tokens, steps * tokens / max(1.0, generated.value))
        for tokens in (generated.value, generated.low, generated.high)
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


def _usage(tried: Tried) -> tuple[int, int]:
    """Return tokens of a prompt that were computed, and of its answers."""
    usage = (tried.value or {}).get("usage", {})
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return usage.get("prompt_tokens", 0) - cached, usage.get("completion_tokens", 0)


def _speed(prompts: Sequence[Tried], groups: Sequence[Sequence[Tried]], survey: Mapping[str, Any]) -> Speed:
    """prompts: the rows answered with one token, together, by which alone their prompts take time."""
    ran = [each for each in prompts if each.value is not None]
    computed = sum(_usage(each)[0] for each in ran)
    prompt_token_s = _span(ran) / computed if computed else 0.0
    together = [
        _together([each for each in group if each.value is not None], survey["n"]) for group in groups
    ]
    together = [group for group in together if group.lengths]
    if all(len(group.lengths) <= survey["max_num_seqs"] for group in together):
        return measured_speed(prompt_token_s, together)
    # They took turns: the batch was as full as the run's.
    decode_s = sum(max(group.ends_s) - prompt_token_s * group.prompt_tokens for group in together)
    return Speed(prompt_token_s, 0.0, max(0.0, decode_s) / sum(sum(group.lengths) for group in together))


def _together(ran: Sequence[Tried], n: int) -> Together:
    began_at = min((each.began_at for each in ran), default=0.0)
    return Together(
        sum(_usage(each)[0] for each in ran),
        [each.ended_at - began_at for each in ran for _ in range(n)],
        [max(1, round(_usage(each)[1] / n)) for each in ran for _ in range(n)],
    )


def _span(tried: Sequence[Tried]) -> float:
    """Return the seconds from the first beginning to the last end."""
    return max(each.ended_at for each in tried) - min(each.began_at for each in tried) if tried else 0.0
