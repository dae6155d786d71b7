"""A dry run: what a run will take, from a look at its prompts and the answers of a few of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from .estimate import Batch, Pick, Row, Together, Total, measured_speed, num_steps, total
from .trials import Trial, Tried

#: Requests that are tried. One of so many is in a first, smaller group, which tells what a step takes.
NUM_TRIED, FIRST_OF = 64, 4

#: By which part a time may be off whatever was measured: in a run's steps prompts and rows share the
#: processor's caches, and its rows' contexts are not those of the tried ones.
MODEL_ERROR = 0.1


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
    numbers = [range(0, len(picked), FIRST_OF), [i for i in range(len(picked)) if i % FIRST_OF]]
    groups = [_answers_of([picked[number] for number in group], survey, answer) for group in numbers]
    found = {
        number: each
        for group, one in zip(numbers, groups, strict=True)
        for number, each in zip(group, one.tried, strict=True)
    }
    tried = [found[number] for number in range(len(picked))]
    lengths = [_usage(each)[1] for each in tried]
    picks = [Pick(number, each["weight"]) for number, each in enumerate(picked)]
    generated = total(picks, lengths).times(scale)
    rows = [length * each["rows"] for length, each in zip(lengths, picked, strict=True)]
    batch = Batch(survey["max_num_seqs"], survey["num_blocks"])
    beginning = f"{token_hex(4)} "  # another one than any dry run's before, whose prompts are in the cache
    own = [group.prompts for group in groups if group.prompts is not None]
    speed = measured_speed(
        [each for half in range(2) if (each := _prompts_of(picked[half::2], answer, beginning)) is not None]
        or own,
        [group.together for group in groups if group.together.rows],
        batch,
    )
    computed = (survey["request_tokens"] - survey["cached_tokens"]) * scale
    num_rows = survey["requests"] * scale * survey["n"]
    played = [_row(length, each, survey) for length, each in zip(lengths, picked, strict=True)]
    steps = num_steps(picks, played, round(num_rows), batch)
    turns = [max(0.0, tokens - num_rows) for tokens in (generated.value, generated.low, generated.high)]
    seconds = [speed.seconds(computed, each, steps * _ratio(each, turns[0])) for each in turns]
    error = MODEL_ERROR + speed.error
    known = survey["prompt_tokens"] * scale
    return Estimate(
        Total(known, known, known),
        survey["cached_tokens"] * scale,
        total(picks, rows).times(scale),
        generated,
        Total(seconds[0], seconds[1] / (1 + error), seconds[2] * (1 + error)),
        len(tried),
        sum(each.value is None for each in tried),
    )


@dataclass(frozen=True)
class _Answers:
    """What a group of picked rows got. prompts: seconds and tokens of their prompts, its first, with which a
    worker that has just started is slower than it will be."""

    tried: list[Tried]
    together: Together
    prompts: tuple[float, float] | None


def _answers_of(
    group: Sequence[Mapping[str, Any]],
    survey: Mapping[str, Any],
    answer: Callable[[Sequence[Trial]], list[Tried]],
) -> _Answers:
    """Have rows answered three times: their prompts come into the cache, then out of it, then in full.

    How long first tokens take out of the cache is what the last time takes before it decodes.
    """
    first = [trial_of(each, None, max_tokens=1, min_tokens=0) for each in group]
    computed = _prompts(answer(first))
    cached = [each for each in answer(first) if each.value is not None]
    tried = answer([trial_of(each, None) for each in group])
    n = survey["n"]
    ran = [(one, each) for one, each in zip(group, tried, strict=True) if each.value is not None]
    began_at = min((each.began_at for _, each in ran), default=0.0)
    rows = [_row(_usage(each)[1], one, survey) for one, each in ran for _ in range(n)]
    ends_s = [each.ended_at - began_at for _, each in ran for _ in range(n)]
    return _Answers(tried, Together(rows, _span(cached), ends_s), computed)


def _prompts_of(
    group: Sequence[Mapping[str, Any]], answer: Callable[[Sequence[Trial]], list[Tried]], beginning: str
) -> tuple[float, float] | None:
    """Return seconds and tokens of prompts like these, none of which is in the cache; None where they are.

    beginning: stands before each: behind it no token of the prompt is in the prefix cache.
    """
    trials = [trial_of(each, None, max_tokens=1, min_tokens=0, n=1) for each in group]
    found = answer([_begun_with(beginning, each) for each in trials])
    prompts = _prompts(found)
    asked = sum(each.value["usage"]["prompt_tokens"] for each in found if each.value is not None)
    return prompts if prompts is not None and 2 * prompts[1] >= asked else None


def _begun_with(beginning: str, trial: Trial) -> Trial:
    """Return a job whose prompt is the same but for its beginning."""
    values = dict(trial.kwargs)
    if "messages" in values:
        first, *others = values["messages"]
        content = first.get("content")
        values["messages"] = (
            [{**first, "content": beginning + content}, *others]
            if isinstance(content, str)
            else values["messages"]
        )
    else:
        values["prompt"] = beginning + values["prompt"]
    return Trial(trial.function, values)


def _prompts(tried: Sequence[Tried]) -> tuple[float, float] | None:
    """Return how long rows took that got one token each, and how many tokens of prompts were computed."""
    ran = [each for each in tried if each.value is not None]
    computed = sum(_usage(each)[0] for each in ran)
    return (_span(ran), float(computed)) if computed else None


def _row(tokens: int, picked: Mapping[str, Any], survey: Mapping[str, Any]) -> Row:
    """Return what one completion of a picked row is in the batch. tokens: of all its completions.

    A sequence takes the blocks of its own tokens, what it shares with others aside, and one to grow into.
    """
    length = round(tokens / survey["n"])
    own = 1 - _ratio(survey["cached_tokens"], survey["request_tokens"])
    return Row(max(0, length - 1), 2 + int((picked["prompt_tokens"] * own + length) // survey["block_size"]))


def _usage(tried: Tried) -> tuple[int, int]:
    """Return tokens of a prompt that were computed, and of its answers."""
    usage = (tried.value or {}).get("usage", {})
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return usage.get("prompt_tokens", 0) - cached, usage.get("completion_tokens", 0)


def _span(tried: Sequence[Tried]) -> float:
    """Return the seconds from the first beginning to the last end."""
    return max(each.ended_at for each in tried) - min(each.began_at for each in tried) if tried else 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
