"""The task of `jobs.embed`: texts in the job, OpenAI's list of embeddings in its result."""

from array import array
from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jobs.common.display import MAX_NAME_CHARS, brief
from jobs.context.served_model import parse_model
from jobs.context.values import one_of, some_text, truth, whole_number
from jobs.errors import InvalidJob, InvalidValue
from jobs.prompts.arguments import parse_prompts, without_neutral
from jobs.prompts.labels import truncation
from jobs.prompts.prompt_task import PromptTask, text_requests
from jobs.prompts.responses import Answers, usage
from jobs.tasks import Completion

ENCODINGS = ("float", "base64")

_POOLING: Mapping[str, Callable[[str, Any], Any]] = {
    "dimensions": whole_number,
    "normalize": truth,
    "prompt_name": partial(some_text, most=MAX_NAME_CHARS),
}


def embed_task(
    input: object = None, *, encoding_format: object = None, model: object = None, **others: Any
) -> PromptTask:
    asked_for = parse_model(model)
    given = {name: others.pop(name, None) for name in (*_POOLING, "truncate_prompt_tokens")}
    for name in without_neutral(others):
        raise InvalidValue("{} is no argument of jobs.embed", brief(name))
    encoding = ENCODINGS[0] if encoding_format is None else one_of("encoding_format", encoding_format, ENCODINGS)
    if input is None:
        raise InvalidJob("input is missing: a text, token ids, or a list of either")
    requests = text_requests(parse_prompts(input), pooling_values(**given), kind="embed")
    return PromptTask(requests, partial(_embeddings, is_base64=encoding == "base64"), asked_for)


def pooling_values(*, truncate_prompt_tokens: object = None, **given: Any) -> dict[str, Any]:
    """Return the values of a request for an embedding; see engine.PoolingParams. Raises InvalidJob."""
    values = {name: _POOLING[name](name, value) for name, value in given.items() if value is not None}
    return {**values, **truncation(truncate_prompt_tokens)}


def _embeddings(answers: Answers, job_id: str, *, is_base64: bool) -> dict[str, Any]:
    num_tokens = usage(answers)["prompt_tokens"]
    return {
        "object": "list",
        "data": [_entry(index, samples[0], is_base64=is_base64) for index, samples in enumerate(answers)],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _entry(index: int, sample: Completion, *, is_base64: bool) -> dict[str, Any]:
    numbers = sample.embedding or ()
    # nine digits are all that a float32 has, and half of what is written otherwise
    shown_numbers = b64encode(array("f", numbers)).decode() if is_base64 else [float(f"{x:.9g}") for x in numbers]
    entry = {"object": "embedding", "index": index, "embedding": shown_numbers}
    return entry if sample.error is None else {**entry, "error": sample.error}
