"""The task of `jobs.embed`: texts in the job, OpenAI's list of embeddings in its result."""

import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Any

from jobs.common.display import brief
from jobs.context.served_model import parse_model
from jobs.errors import InvalidJob, InvalidValue, unlike
from jobs.prompts.arguments import Unusable, parse_prompts
from jobs.prompts.client_values import without_neutral
from jobs.prompts.labels import parse_truncation
from jobs.prompts.prompt_task import PromptTask
from jobs.prompts.responses import Answers, usage
from jobs.tasks import Completion, Request

ENCODINGS = ("float", "base64")


def embed_task(
    input: object = None,
    *,
    dimensions: object = None,
    encoding_format: object = "float",
    normalize: object = None,
    prompt_name: object = None,
    truncate_prompt_tokens: object = None,
    model: object = None,
    **others: Any,
) -> PromptTask:
    """Return the task of jobs.embed. Raises InvalidJob when an argument is wrong."""
    asked_for = parse_model(model)
    for name in without_neutral(others):
        raise InvalidValue("{} is no argument of jobs.embed", brief(name))
    if encoding_format is None:
        encoding_format = "float"
    if encoding_format not in ENCODINGS:
        raise unlike("encoding_format", encoding_format, "'float' or 'base64'")
    if input is None:
        raise InvalidJob("input is missing: a text, token ids, or a list of either")
    values = pooling_values(dimensions, normalize, prompt_name, truncate_prompt_tokens)
    requests = [
        each if isinstance(each, Unusable) else Request(each, None, values, kind="embed")
        for each in parse_prompts(input)
    ]
    respond = partial(_embeddings, is_base64=encoding_format == "base64")
    return PromptTask(requests, {}, respond, asked_for)


def pooling_values(
    dimensions: object = None,
    normalize: object = None,
    prompt_name: object = None,
    truncate_prompt_tokens: object = None,
) -> dict[str, Any]:
    """Return the values of a request for an embedding; see engine.PoolingParams. Raises InvalidJob."""
    values: dict[str, Any] = {}
    if dimensions is not None:
        if type(dimensions) is not int or dimensions < 1:
            raise unlike(
                "dimensions", dimensions, "a positive integer: on the command line of RQ write dimensions:=256"
            )
        values["dimensions"] = dimensions
    if normalize is not None:
        if not isinstance(normalize, bool):
            raise unlike("normalize", normalize, "true or false")
        values["normalize"] = normalize
    if prompt_name is not None:
        if not isinstance(prompt_name, str):
            raise unlike("prompt_name", prompt_name, "a text such as 'query'")
        values["prompt_name"] = prompt_name
    if truncate_prompt_tokens is not None:
        values["truncate_prompt_tokens"] = parse_truncation(truncate_prompt_tokens)
    return values


def packed(embedding: Sequence[float]) -> bytes:
    """Return an embedding's numbers as little-endian float32, which they are."""
    numbers = array("f", embedding)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _embeddings(answers: Answers, job_id: str, *, is_base64: bool) -> dict[str, Any]:
    num_tokens = usage(answers)["prompt_tokens"]
    return {
        "object": "list",
        "data": [_entry(index, samples[0], is_base64=is_base64) for index, samples in enumerate(answers)],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _entry(index: int, sample: Completion, *, is_base64: bool) -> dict[str, Any]:
    """One text's; of one that failed it is empty, with its error beside it."""
    numbers = sample.embedding or ()
    # nine digits are all that a float32 has, and half of what is written otherwise
    shown_numbers = b64encode(packed(numbers)).decode() if is_base64 else [float(f"{x:.9g}") for x in numbers]
    entry = {"object": "embedding", "index": index, "embedding": shown_numbers}
    return entry if sample.error is None else {**entry, "error": sample.error}
