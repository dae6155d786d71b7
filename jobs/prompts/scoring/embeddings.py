"""Embeddings: a list of numbers for each text."""

from array import array
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

from jobs.common.display import MAX_NAME_CHARS, MAX_SHOWN_CHARS, brief
from jobs.context.served_model import ServedModel
from jobs.context.values import check_shard, one_of, some_text, truth, whole_number
from jobs.errors import InvalidJob, InvalidValue
from jobs.prompts.arguments import parse_model, parse_prompts, without_neutral
from jobs.prompts.prompt_task import PromptTask
from jobs.prompts.responses import Answers, usage
from jobs.prompts.scoring.kind import TRUNCATION, Scored, Scoring, truncation, unscored
from jobs.tasks import Completion

ENCODINGS = ("float", "base64")
#: The most numbers of all embeddings of a shard. Each number has 4 bytes, and all are in memory until the part is
#: written.
MAX_NUMBERS = 1 << 26

_OPTIONS: Mapping[str, Callable[[str, Any], Any]] = {
    "dimensions": whole_number,
    "normalize": truth,
    "prompt_name": partial(some_text, most=MAX_NAME_CHARS),
}
#: The arguments of jobs.embed.
ARGUMENTS = ("input", "encoding_format", "model", TRUNCATION, *_OPTIONS)


class Embeddings(Scoring):
    """Asks for the embedding of a text."""

    kind = "embed"
    columns: ClassVar = {"embedding": "embedding"}

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Return the scoring for these options of a job or a run. Raises InvalidJob."""
        values: dict[str, Any] = {}
        for name, parse in _OPTIONS.items():
            if options.get(name) is not None:
                values[name] = parse(name, options[name])
        return cls({**values, **truncation(options.get(TRUNCATION))})

    @classmethod
    def of_run(cls, options: Mapping[str, Any], model: ServedModel) -> Self:
        """Return the scoring of a run."""
        return cls.of({**options, TRUNCATION: options["sampling"].get(TRUNCATION)})

    @classmethod
    def check_served(cls, options: Mapping[str, Any], model: ServedModel) -> None:
        """Raise InvalidJob if the model cannot give these embeddings, or if a shard would hold too many numbers."""
        if not model.embedding_size:
            raise InvalidJob(
                f"the worker serves {model.name!r}, which gives no embeddings: it has no modules.json that says "
                "how, and TOKENMILL_POOLING is not set"
            )
        dimensions = options["dimensions"]
        if dimensions is not None and dimensions > model.embedding_size:
            raise InvalidJob(
                f"dimensions is {dimensions}, and embeddings of {model.name!r} have {model.embedding_size} numbers"
            )
        prompt_name = options["prompt_name"]
        if prompt_name is not None and prompt_name not in model.embedding_prompts:
            raise InvalidValue(
                "prompt_name is {}, and the model {} has prompts of these names: {}",
                brief(prompt_name),
                brief(model.name),
                ", ".join(model.embedding_prompts)[:MAX_SHOWN_CHARS] or "none",
            )
        num_numbers = model.embedding_size if dimensions is None else dimensions
        check_shard(num_numbers, "numbers of an embedding", options["rows_per_shard"], MAX_NUMBERS)

    def scored(self, completion: Completion) -> Scored:
        """Return the embedding as an array of float32."""
        if completion.embedding is None:
            return unscored(completion)
        return Scored({"embedding": array("f", completion.embedding)})


def embed_task(
    input: object, *, encoding_format: object = None, model: object = None, **options: Any
) -> PromptTask:
    """Return the task of `jobs.embed`. Raises InvalidJob."""
    model_name = parse_model(model)
    remaining = {
        name: value for name, value in options.items() if name not in (*_OPTIONS, TRUNCATION)
    }
    unknown = list(without_neutral(remaining))  # arguments that change nothing are accepted
    if unknown:
        raise InvalidValue("{} is no argument of jobs.embed", brief(unknown[0]))
    encoding = ENCODINGS[0]
    if encoding_format is not None:
        encoding = one_of("encoding_format", encoding_format, ENCODINGS)
    scoring = Embeddings.of(options)
    requests = scoring.requests(parse_prompts(input))
    respond = partial(_response, scoring=scoring, is_base64=encoding == "base64")
    return PromptTask(requests, respond, model_name)


def _response(
    answers: Answers, job_id: str, scoring: Embeddings, *, is_base64: bool
) -> dict[str, Any]:
    """Return OpenAI's list of embeddings. A text that failed has its `error` in the list, and no numbers."""
    entries = []
    for index, answer in enumerate(answers):
        scored = scoring.scored(answer.first)
        numbers = scored.values.get("embedding", ())
        encoded = _encoded(numbers, is_base64)
        entry = {"object": "embedding", "index": index, "embedding": encoded}
        if scored.error is not None:
            entry["error"] = scored.error
        entries.append(entry)
    num_tokens = usage(answers)["prompt_tokens"]
    return {
        "object": "list",
        "data": entries,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _encoded(numbers: Sequence[float], is_base64: bool) -> str | list[float]:
    """Return an embedding in the form for a response: base64 of float32 values, or a list of numbers."""
    if is_base64:
        return b64encode(array("f", numbers)).decode()
    # Nine digits are enough for a float32. All digits of Python's float would take twice the space.
    return [float(f"{number:.9g}") for number in numbers]
