"""Likelihoods: the log-likelihood of each continuation of a prompt. Jobs can ask for them, and runs cannot."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from jobs.context.values import checked_list
from jobs.errors import wrong_value_error
from jobs.prompts.arguments import MAX_CHOICES, one_prompt, parse_model
from jobs.prompts.prompt_task import PromptTask
from jobs.prompts.responses import Answers, usage
from jobs.prompts.scoring.kind import truncation
from jobs.tasks import Request


def loglikelihood_task(
    prompt: object,
    continuations: object,
    *,
    truncate_prompt_tokens: object = None,
    model: object = None,
) -> PromptTask:
    """Return the task of `jobs.loglikelihood`. Raises InvalidJob."""
    model_name = parse_model(model)
    texts_or_ids = _continuations(continuations)
    request = Request(
        prompt=one_prompt(prompt, "prompt"),
        messages=None,
        sampling={"continuations": texts_or_ids, **truncation(truncate_prompt_tokens)},
        kind="score",
    )
    respond = partial(_response, continuations=texts_or_ids)
    return PromptTask([request], respond, model_name)


def _continuations(continuations: object) -> list[str | list[int]]:
    """Return continuations as texts or token ids. Raises InvalidJob."""
    texts_or_ids: list[str | list[int]] = []
    values = checked_list("continuations", continuations, "a list of texts", 1, MAX_CHOICES)
    for number, value in enumerate(values):
        name = f"continuation {number}"
        if not value or not isinstance(value, str | list):
            raise wrong_value_error(name, value, "a text or a list of token ids, and not empty")
        texts_or_ids.append(one_prompt(value, name))
    return texts_or_ids


def _response(
    answers: Answers, job_id: str, continuations: Sequence[str | list[int]]
) -> dict[str, Any]:
    """Return a choice for each continuation. A continuation of token ids has no text."""
    likelihoods = answers[0].first.loglikelihoods
    assert likelihoods is not None, "a failed request has been reported before"
    choices = []
    pairs = zip(continuations, likelihoods, strict=True)
    for index, (continuation, likelihood) in enumerate(pairs):
        choice = {
            "index": index,
            "text": continuation if isinstance(continuation, str) else None,
            "logprob": likelihood.logprob,
            "num_tokens": likelihood.num_tokens,
            "is_greedy": likelihood.is_greedy,
        }
        choices.append(choice)
    return {"object": "loglikelihood", "choices": choices, "usage": usage(answers)}
