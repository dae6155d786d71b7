"""Labels: what may be one, and probabilities over them from their log-likelihoods.

Calibration after Zhao et al. 2021, "Calibrate Before Use", subtracts those behind a prompt without content, "N/A".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, isfinite
from typing import Any

from jobs.common.display import brief
from jobs.context.values import listed
from jobs.errors import InvalidJob, InvalidValue, unlike
from jobs.prompts.arguments import checked_text

MAX_LABELS = 1_000
COLUMNS = ("label", "probability", "probabilities", "margin")
CONTENT_FREE = "N/A"


@dataclass(frozen=True, slots=True)
class Classified:
    """label: the likeliest, of equal ones the first. margin: its probability less that of the next one."""

    label: str
    probabilities: Mapping[str, float]
    margin: float


def parse_labels(name: str, labels: object) -> list[str]:
    found = listed(name, labels, 'a list of texts such as ["yes", "no"]', 2, MAX_LABELS)
    for number, label in enumerate(found):
        if not checked_text(label, f"label {number}"):
            raise InvalidJob(f"label {number} is empty: no token stands for it")
        if (first := found.index(label)) != number:
            raise InvalidValue(
                f"labels {first} and {number} are both {{}}: name each once", brief(label)
            )
    return list(found)


def scoring_of(labels: Sequence[str], truncate_prompt_tokens: object = None) -> dict[str, Any]:
    """Return the values of a request that scores labels; see engine.ScoringParams."""
    return {
        "continuations": list(labels),
        "score_end": "auto",
        **truncation(truncate_prompt_tokens),
    }


def truncation(value: object) -> dict[str, int]:
    """Return the value of a request that says how many tokens of its prompt are read, if any. Raises InvalidJob."""
    if value is None:
        return {}
    if type(value) is not int or (value < 1 and value != -1):
        raise unlike("truncate_prompt_tokens", value, "a number of tokens, or -1 for what fits")
    return {"truncate_prompt_tokens": value}


def classify(
    labels: Sequence[str], logprobs: Sequence[float], prior: Sequence[float] | None = None
) -> Classified | None:
    """Return the softmax over labels' log-likelihoods, less those of `prior`, or None if one is not finite."""
    scores = list(logprobs)
    if prior is not None:
        scores = [score - before for score, before in zip(scores, prior, strict=True)]
    if not all(map(isfinite, scores)):
        return None
    highest = max(scores)
    weights = [exp(score - highest) for score in scores]
    total = fsum(weights)
    probabilities = [weight / total for weight in weights]
    best, second = sorted(probabilities, reverse=True)[:2]
    label = labels[probabilities.index(best)]
    return Classified(label, dict(zip(labels, probabilities, strict=True)), best - second)
