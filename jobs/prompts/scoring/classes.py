"""Classes: a model's sequence-classification head gives each text a class."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self

from jobs.context.served_model import ServedModel
from jobs.context.values import check_shard
from jobs.errors import InvalidJob
from jobs.prompts.arguments import parse_model, parse_prompts
from jobs.prompts.prompt_task import PromptTask
from jobs.prompts.responses import Answers, usage
from jobs.prompts.scoring.kind import (
    MAX_PROBABILITIES,
    TRUNCATION,
    Scored,
    Scoring,
    truncation,
    unscored,
)
from jobs.tasks import Completion


class Classes(Scoring):
    """Asks for the class of a text. A head with one output gives only a score."""

    kind = "classify"
    columns: ClassVar = {"label": "string", "score": "float64", "probabilities": "probabilities"}

    @classmethod
    def of_run(cls, options: Mapping[str, Any], model: ServedModel) -> Self:
        """Return the scoring of a run."""
        return cls(truncation(options["sampling"].get(TRUNCATION)))

    @classmethod
    def check_served(cls, options: Mapping[str, Any], model: ServedModel) -> None:
        """Raise InvalidJob if the model has no head, or if a shard would hold too many probabilities."""
        if not model.classes:
            raise InvalidJob(
                f"the worker serves {model.name!r}, which has no sequence-classification head"
            )
        check_shard(len(model.classes), "labels", options["rows_per_shard"], MAX_PROBABILITIES)

    def scored(self, completion: Completion) -> Scored:
        """Return the likeliest class, its probability, and the probabilities of all classes."""
        scores = completion.class_scores
        if scores is None:
            return unscored(completion)
        if len(scores) == 1:  # a head with one output gives only a score
            [score] = scores.values()
            return Scored({"score": score})
        label = max(scores, key=scores.__getitem__)
        probabilities = tuple(scores.items())
        return Scored({"label": label, "score": scores[label], "probabilities": probabilities})


def classify_text_task(
    input: object, *, truncate_prompt_tokens: object = None, model: object = None
) -> PromptTask:
    """Return the task of `jobs.classify_text`. Raises InvalidJob."""
    model_name = parse_model(model)
    scoring = Classes(truncation(truncate_prompt_tokens))
    requests = scoring.requests(parse_prompts(input))
    return PromptTask(requests, partial(_response, scoring=scoring), model_name)


def _response(answers: Answers, job_id: str, scoring: Classes) -> dict[str, Any]:
    """Return a list of classifications. A text that failed has its `error` in the list."""
    entries = []
    for index, answer in enumerate(answers):
        scored = scoring.scored(answer.first)
        entry = {"object": "classification", "index": index, **scored.values}
        if "probabilities" in entry:
            entry["probabilities"] = dict(entry["probabilities"])
        if scored.error is not None:
            entry["error"] = scored.error
        entries.append(entry)
    return {"object": "list", "data": entries, "usage": usage(answers)}
