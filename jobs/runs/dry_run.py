"""A dry run: what a run will take, from counts of its prompts and the answers of a few of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from secrets import token_hex
from typing import Any

from .trials import Trial, Tried

#: Requests that are answered. One of so many is in a first, smaller group, which tells what a step takes.
NUM_TRIED, FIRST_OF = 64, 4

Answer = Callable[[Sequence[Trial]], list[Tried]]


@dataclass(frozen=True)
class Estimate:
    """What a run will take. Tokens over all rows, as its manifest will count them; `generated` over requests.

    seconds: on one worker like the one that answered, with nothing beside it.
    """

    prompt_tokens: float
    saved_tokens: float
    completion_tokens: float
    generated_tokens: float
    seconds: float
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


def estimate(survey: Mapping[str, Any], answer: Answer) -> Estimate:
    """Estimate a run. survey: what jobs.survey_parquet found. answer: runs jobs together."""
    picked, n = survey["picked"], survey["n"]
    scale = survey["rows"] / max(1, survey["rows_read"])
    prompt_token_s = _prompt_token_s(picked, answer)
    most = max(1, survey["max_num_seqs"] // n)
    answered: list[tuple[Mapping[str, Any], Tried]] = []
    ended: list[tuple[float, float, float]] = []
    for group in (picked[::FIRST_OF], [each for place, each in enumerate(picked) if place % FIRST_OF]):
        for start in range(0, len(group), most):
            asked = group[start : start + most]
            tried = answer([trial_of(each, None) for each in asked])
            answered += zip(asked, tried, strict=True)
            ended += _ended(tried, n, prompt_token_s)
    lengths = [_usage(tried)[1] for _, tried in answered]
    weighted = [each["weight"] * length * scale for (each, _), length in zip(answered, lengths, strict=True)]
    rows = [each["rows"] for each, _ in answered]
    num_asked = survey["requests"] * scale * n
    turns = max(0.0, fsum(weighted) - num_asked)
    step_s, row_s = _step_and_row_s(ended)
    steps = _num_steps(survey, turns, num_asked, max(lengths, default=0) / n)
    computed = (survey["request_tokens"] - survey["cached_tokens"]) * scale
    return Estimate(
        prompt_tokens=survey["prompt_tokens"] * scale,
        saved_tokens=survey["cached_tokens"] * scale,
        completion_tokens=fsum(each * count for each, count in zip(weighted, rows, strict=True)),
        generated_tokens=fsum(weighted),
        seconds=computed * prompt_token_s + turns * row_s + steps * step_s,
        num_tried=len(answered),
        num_failed=sum(tried.value is None for _, tried in answered),
    )


def _prompt_token_s(picked: Sequence[Mapping[str, Any]], answer: Answer) -> float:
    """Return what a token of a prompt takes: the faster of two tries, as a new worker is slow.

    Each try has a beginning of its own, behind which nothing is in the prefix cache.
    """
    found = []
    for _ in range(2):
        beginning = f"{token_hex(4)} "
        trials = [trial_of(_begun(each, beginning), None, max_tokens=1, min_tokens=0, n=1) for each in picked]
        ran = [each for each in answer(trials) if each.value is not None]
        if computed := sum(_usage(each)[0] for each in ran):
            took_s = max(each.ended_at for each in ran) - min(each.began_at for each in ran)
            found.append(took_s / computed)
    return min(found, default=0.0)


def _begun(picked: Mapping[str, Any], beginning: str) -> Mapping[str, Any]:
    """Return a row whose prompt is the same but for its beginning."""
    if not picked["is_chat"]:
        return {**picked, "prompt": beginning + picked["prompt"]}
    first, *others = picked["prompt"]
    content = first.get("content")
    parts = [{"type": "text", "text": beginning}, *content] if isinstance(content, list) else None
    return {**picked, "prompt": [{**first, "content": parts or f"{beginning}{content or ''}"}, *others]}


def _ended(tried: Sequence[Tried], n: int, prompt_token_s: float) -> list[tuple[float, float, float]]:
    """Return for each row of a group in which step it ended, how many turns all rows had had, and when."""
    ran = [each for each in tried if each.value is not None]
    prompts_s = sum(_usage(each)[0] for each in ran) * prompt_token_s
    began_at = min((each.began_at for each in ran), default=0.0) + prompts_s
    steps = [max(0.0, _usage(each)[1] / n - 1) for each in ran]
    return [
        (own, n * fsum(min(own, other) for other in steps), max(0.0, each.ended_at - began_at))
        for own, each in zip(steps, ran, strict=True)
    ]


def _step_and_row_s(ended: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return what a step and what each row in it takes, by least squares, neither less than nothing."""
    a, b, c, p, q = (
        fsum(each[one] * each[other] for each in ended)
        for one, other in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    )
    determinant = a * c - b * b
    found = [(p / a if a else 0.0, 0.0), (0.0, q / c if c else 0.0)]
    if determinant > 1e-9 * a * c:
        both = (p * c - q * b) / determinant, (q * a - p * b) / determinant
        found += [both] if min(both) >= 0 else []
    return min(
        found,
        key=lambda each: fsum(
            (taken - steps * each[0] - turns * each[1]) ** 2 for steps, turns, taken in ended
        ),
    )


def _num_steps(survey: Mapping[str, Any], turns: float, rows: float, longest: float) -> float:
    """Return in how many steps a run decodes. While its longest row ends, the batch is half full."""
    own = (survey["request_tokens"] - survey["cached_tokens"]) / max(1, survey["requests"])
    blocks = 2 + (own + turns / max(1.0, rows)) // survey["block_size"]
    slots = max(1.0, min(survey["max_num_seqs"], survey["num_blocks"] // blocks))
    return longest if rows <= slots else turns / slots + longest / 2


def _usage(tried: Tried) -> tuple[int, int]:
    """Return tokens of a prompt that were computed, and of its answers."""
    usage = (tried.value or {}).get("usage", {})
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return usage.get("prompt_tokens", 0) - cached, usage.get("completion_tokens", 0)
