"""Labels: gives each of several texts the probability that it follows a prompt or a chat.

Calibration subtracts the log-likelihoods that the labels have after a prompt without content. Source: Zhao et al. 2021,
"Calibrate Before Use".
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, fsum, isfinite
from typing import Any, ClassVar, Self

from jobs.common.display import brief
from jobs.context.served_model import ServedModel
from jobs.context.values import checked_list
from jobs.errors import InvalidJob, InvalidValue, RequestFailed, wrong_value_error
from jobs.prompts.arguments import (
    SPLIT_TOKENS,
    checked_text,
    one_prompt,
    parse_model,
    splits_control_tokens,
)
from jobs.prompts.generated import NO_REASON
from jobs.prompts.messages import CHAT_OPTIONS, forces_call, normal_messages, split_chat_options
from jobs.prompts.pictures import pictured_task, pictures_in
from jobs.prompts.prompt_jobs import asked_task
from jobs.prompts.prompt_task import PromptTask
from jobs.prompts.responses import Answers, usage
from jobs.prompts.scoring.kind import TRUNCATION, Scored, Scoring, truncation, unscored
from jobs.tasks import Completion, Parts, Task

MAX_LABELS = 1_000
#: Takes the place of a prompt's or a chat's content, if `calibrate` names no prompt without content.
CONTENT_FREE = "N/A"

NOT_FINITE = "a label has no finite log-likelihood: its probability is not known"


def parse_labels(name: str, labels: object) -> list[str]:
    """Return a list of labels. Raises InvalidJob for too few or too many labels, and for an empty or repeated label."""
    texts = checked_list(name, labels, 'a list of texts such as ["yes", "no"]', 2, MAX_LABELS)
    for number, label in enumerate(texts):
        if not checked_text(label, f"label {number}"):
            raise InvalidJob(f"label {number} is empty: no token stands for it")
        first_number = texts.index(label)
        if first_number != number:
            raise InvalidValue(
                f"labels {first_number} and {number} are both {{}}: name each once", brief(label)
            )
    return list(texts)


@dataclass(frozen=True)
class Labels(Scoring):
    """Asks for the log-likelihood of each label.

    prior: for calibration, the labels' log-likelihoods after a prompt without content. If that prompt failed, a text
    that says why. None if there is no calibration.
    """

    labels: Sequence[str]
    prior: Sequence[float] | str | None = None

    kind = "score"
    columns: ClassVar = {
        "label": "string",
        "probability": "float64",
        "probabilities": "probabilities",
        "margin": "float64",
    }
    is_tried = True
    is_compared = True

    @classmethod
    def of(cls, labels: Sequence[str], truncate_prompt_tokens: object = None) -> Self:
        """Return the scoring for these labels. Raises InvalidJob."""
        values = {
            "continuations": list(labels),
            "score_end": "auto",  # for labels; see ScoringParams
            **truncation(truncate_prompt_tokens),
        }
        return cls(values, labels)

    @classmethod
    def of_run(cls, options: Mapping[str, Any], model: ServedModel) -> Self:
        """Return the scoring of a run."""
        return cls.of(options["labels"], options["sampling"].get(TRUNCATION))

    def calibrated(self, completion: Completion) -> Self:
        """Return a scoring that subtracts the labels' log-likelihoods after a prompt without content."""
        if completion.loglikelihoods is None:
            return replace(self, prior=f"the prompt without content failed: {completion.error}")
        return replace(self, prior=_logprobs(completion))

    def scored(self, completion: Completion) -> Scored:
        """Return the likeliest label, and the probabilities of all labels: the softmax of their log-likelihoods.

        Among equally likely labels, the first one is returned. The margin is the likeliest label's probability minus
        the probability of the second likeliest label.
        """
        if completion.loglikelihoods is None:
            return unscored(completion)
        if isinstance(self.prior, str):
            return Scored(error=self.prior)
        scores = _logprobs(completion)
        if self.prior is not None:
            scores = [score - prior for score, prior in zip(scores, self.prior, strict=True)]
        if not all(map(isfinite, scores)):
            return Scored(error=NOT_FINITE)

        probabilities = _softmax(scores)
        best, second, *_ = sorted(probabilities, reverse=True)
        best_index = probabilities.index(best)
        values = {
            "label": self.labels[best_index],
            "probability": best,
            "probabilities": tuple(zip(self.labels, probabilities, strict=True)),
            "margin": best - second,
        }
        return Scored(values)


def _softmax(scores: Sequence[float]) -> list[float]:
    """Return probabilities that are proportional to the exponentials of scores."""
    highest = max(scores)
    weights = [exp(score - highest) for score in scores]
    total = fsum(weights)
    return [weight / total for weight in weights]


def _logprobs(completion: Completion) -> list[float]:
    """Return the log-likelihood of each label."""
    return [likelihood.logprob for likelihood in completion.loglikelihoods or ()]


def classify_task(
    prompt: object = None,
    labels: object = None,
    *,
    messages: object = None,
    prompt_template: object = None,
    messages_template: object = None,
    calibrate: object = None,
    truncate_prompt_tokens: object = None,
    model: object = None,
    **options: Any,
) -> Task:
    """Return the task of `jobs.classify`. Raises InvalidJob.

    calibrate: the prompt or messages without content. If it is true, CONTENT_FREE takes the place of the content.
    """
    model_name = parse_model(model)
    scoring = Labels.of(parse_labels("labels", labels), truncate_prompt_tokens)
    if forces_call(options):
        raise InvalidValue(
            "tool_choice is {}, and jobs.classify generates nothing", brief(options["tool_choice"])
        )
    _, chat_options = split_chat_options(options)
    is_calibrated = calibrate is not False and calibrate is not None
    respond = partial(_response, scoring=scoring)

    def chat_task(messages: Parts) -> PromptTask:
        """Return the task for a chat whose pictures are loaded."""
        requests = [scoring.request(messages, chat_options)]
        if is_calibrated:
            without_content = _messages_without_content(messages, calibrate)
            if pictures_in(messages) or pictures_in(without_content):
                raise InvalidJob(
                    "calibrate and pictures do not go together: calibrate asks a prompt without content, and a picture "
                    "is content"
                )
            requests.append(scoring.request(without_content, chat_options))
        return PromptTask(requests, respond, model_name)

    def task(kind: str, value: object) -> Task:
        """Return the task for a prompt or a chat. kind: "prompt" or "messages"."""
        if kind == "messages":
            _check_names(options, known=CHAT_OPTIONS)
            return pictured_task(normal_messages(value), chat_task)
        _check_names(options, known=(SPLIT_TOKENS,))
        requests = [scoring.request(one_prompt(value, "prompt"))]
        if is_calibrated:
            without_content = one_prompt(_prompt_without_content(calibrate), "prompt")
            requests.append(scoring.request(without_content))
        return PromptTask(requests, respond, model_name)

    return asked_task(
        task,
        tokens_are_text=splits_control_tokens(options),
        prompt=prompt,
        messages=messages,
        prompt_template=prompt_template,
        messages_template=messages_template,
    )


def _check_names(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise InvalidValue for an option of jobs.classify that is not known."""
    for name in options:
        if name not in known:
            raise InvalidValue("{} is no argument of jobs.classify", brief(name))


def _prompt_without_content(calibrate: object) -> str:
    """Return the prompt without content that calibrates the labels. Raises InvalidValue."""
    if calibrate is True:
        return CONTENT_FREE
    if not isinstance(calibrate, str):
        raise wrong_value_error("calibrate", calibrate, "true, false, or a prompt without content")
    return calibrate


def _messages_without_content(messages: Parts, calibrate: object) -> Parts:
    """Return the chat without content that calibrates the labels. Raises InvalidJob.

    If `calibrate` is true, this is the chat itself with CONTENT_FREE as the content of its last message.
    """
    if calibrate is True:
        *earlier_messages, last_message = messages
        return [*earlier_messages, {**last_message, "content": CONTENT_FREE}]
    if not isinstance(calibrate, list):
        raise wrong_value_error("calibrate", calibrate, "true, false, or messages without content")
    return normal_messages(calibrate)


def _response(answers: Answers, job_id: str, scoring: Labels) -> dict[str, Any]:
    """Return the classification of the first prompt. Raises RequestFailed if a prompt failed.

    With calibration, there is a second prompt, which is the prompt without content.
    """
    for number, answer in enumerate(answers):
        if answer.first.loglikelihoods is None:
            raise RequestFailed(number, answer.first.error or NO_REASON)
    if len(answers) > 1:
        scoring = scoring.calibrated(answers[1].first)
    scored = scoring.scored(answers[0].first)
    if scored.error is not None:
        raise RequestFailed(0, scored.error)
    return {
        "object": "classification",
        "label": scored.values["label"],
        "probabilities": dict(scored.values["probabilities"]),
        "usage": usage(answers),
    }
