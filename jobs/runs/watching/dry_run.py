"""A dry run: what a run will take, from counts of its prompts and the answers of a few of its rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from secrets import token_hex
from typing import Any

from jobs.runs.watching.trials import Trial, Tried

#: Requests that are answered.
NUM_TRIED = 64

#: How a worker's speed is measured: tokens of each row, and rows at most.
TIMED_TOKENS, MAX_BATCH = 24, 256

Answer = Callable[[Sequence[Trial]], list[Tried]]


@dataclass(frozen=True)
class Estimate:
    """What a run will take: tokens over all rows, `generated` ones over requests, seconds alone on one such worker."""

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
        top = values.pop("logprobs", None)
        values |= {} if top is None else {"logprobs": True, "top_logprobs": top}
        return Trial("jobs.chat", {"messages": picked["prompt"], **values})
    return Trial("jobs.complete", {"prompt": picked["prompt"], **values})


def estimate(survey: Mapping[str, Any], answer: Answer) -> Estimate:
    """Estimate a run. survey: what jobs.survey_parquet found. answer: runs jobs together."""
    picked, n = survey["picked"], survey["n"]
    scale = survey["rows"] / max(1, survey["rows_read"])
    tried = answer([trial_of(each, None) for each in picked])
    lengths = [_usage(each)[1] for each in tried]
    asked = [each["weight"] * length * scale for each, length in zip(picked, lengths, strict=True)]
    num_rows = survey["requests"] * scale * n
    slots = _slots(survey, fsum(asked) / max(1.0, num_rows))
    computed = (survey["request_tokens"] - survey["cached_tokens"]) * scale
    prompt_token_s, token_s = _speed(picked, int(min(slots, MAX_BATCH, max(1.0, num_rows))), answer)
    return Estimate(
        prompt_tokens=survey["prompt_tokens"] * scale,
        saved_tokens=survey["cached_tokens"] * scale,
        completion_tokens=fsum(each * one["rows"] for each, one in zip(asked, picked, strict=True)),
        generated_tokens=fsum(asked),
        seconds=computed * prompt_token_s + max(0.0, fsum(asked) - num_rows) * token_s,
        num_tried=len(tried),
        num_failed=sum(each.value is None for each in tried),
    )


def _speed(picked: Sequence[Mapping[str, Any]], batch: int, answer: Answer) -> tuple[float, float]:
    """Measure in two tries the seconds that a token of a prompt, and one of an answer in a full batch, take."""
    if not picked:
        return 0.0, 0.0
    prompts_s = []
    for _ in range(2):
        beginning = f"{token_hex(4)} "
        begun = [_begun(each, beginning) for each in picked]
        ran, took_s = _timed(begun, 1, answer)
        prompts_s.append(took_s / max(1, sum(_usage(each)[0] for each in ran)))
    rows = [begun[place % len(begun)] for place in range(batch)]
    first_s = min(_timed(rows, 1, answer)[1] for _ in range(2))
    ran, took_s = min((_timed(rows, TIMED_TOKENS, answer) for _ in range(2)), key=lambda each: each[1])
    tokens = sum(_usage(each)[1] - 1 for each in ran)
    return min(prompts_s), max(0.0, took_s - first_s) / max(1, tokens)


def _timed(rows: Sequence[Mapping[str, Any]], tokens: int, answer: Answer) -> tuple[list[Tried], float]:
    """Have rows answered with so many tokens; return what was, and the seconds from first to last."""
    exact = {"n": 1, "min_tokens": tokens, "max_tokens": tokens, "ignore_eos": True}
    ran = [each for each in answer([trial_of(row, None, **exact) for row in rows]) if each.value is not None]
    return ran, max(each.ended_at for each in ran) - min(each.began_at for each in ran) if ran else 0.0


def _begun(picked: Mapping[str, Any], beginning: str) -> Mapping[str, Any]:
    """Return a row whose prompt is the same but for its beginning."""
    if not picked["is_chat"]:
        return {**picked, "prompt": beginning + picked["prompt"]}
    first, *others = picked["prompt"]
    content = first.get("content")
    parts = [{"type": "text", "text": beginning}, *content] if isinstance(content, list) else None
    return {**picked, "prompt": [{**first, "content": parts or f"{beginning}{content or ''}"}, *others]}


def _slots(survey: Mapping[str, Any], length: float) -> int:
    """Return how many rows the run's batch holds. length: of an answer in tokens."""
    own = (survey["request_tokens"] - survey["cached_tokens"]) / max(1, survey["requests"])
    blocks = 2 + (own + length) // survey["block_size"]
    return max(1, int(min(survey["max_num_seqs"], survey["num_blocks"] // blocks)))


def _usage(tried: Tried) -> tuple[int, int]:
    """Return tokens of a prompt that were computed, and of its answers."""
    usage = (tried.value or {}).get("usage", {})
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return usage.get("prompt_tokens", 0) - cached, usage.get("completion_tokens", 0)
