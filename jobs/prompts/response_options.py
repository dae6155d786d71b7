"""What a job asks of its response, beside the sampling values of its requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.errors import InvalidJob, unlike

MAX_TOP_LOGPROBS = 20
LOGPROBS = ("logprobs", "prompt_logprobs")
NAMES = ("echo", "top_logprobs", *LOGPROBS)


@dataclass(frozen=True)
class ResponseOptions:
    """What a response shows.

    echo: the prompt's text too. prompt_only: nothing behind it. num_top: how many likeliest tokens stand beside each
    token's log probability; None shows no log probabilities.
    """

    echo: bool = False
    prompt_only: bool = False
    num_top: int | None = None


def completion_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], ResponseOptions]:
    """Return a completion's sampling values, and what its response shows. Raises InvalidJob."""
    sampling = {name: value for name, value in values.items() if name != "echo"}
    echo = values.get("echo") or False
    num_top = values.get("logprobs")
    if not isinstance(echo, bool):
        raise unlike("echo", echo, "true or false")
    if num_top is None or num_top is False:
        sampling.pop("logprobs", None)
        num_top = None
    elif type(num_top) is not int:
        raise unlike("logprobs", num_top, "a number of tokens")
    if not echo:
        return sampling, ResponseOptions(num_top=num_top)
    sampling["echo"] = True
    if num_top is not None:
        sampling["prompt_logprobs"] = num_top
    prompt_only = type(values.get("max_tokens")) is int and values["max_tokens"] == 0
    if prompt_only:
        sampling["max_tokens"] = 1  # the engine generates one at least; the response leaves it out
    return sampling, ResponseOptions(True, prompt_only, num_top)


def chat_response_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], ResponseOptions]:
    """Return a chat's sampling values, and what its response shows. Raises InvalidJob.

    Reasoning stands apart from the answer, unless `separate_reasoning` is false.
    """
    sampling = {
        name: value for name, value in values.items() if name not in ("echo", "top_logprobs")
    }
    if values.get("echo"):
        raise InvalidJob("echo belongs to jobs.complete: a chat's response holds the answer alone")
    sampling.setdefault("separate_reasoning", True)
    wanted = sampling.pop("logprobs", None)
    num_top = values.get("top_logprobs") or 0
    if wanted is not None and not isinstance(wanted, bool):
        raise unlike("logprobs", wanted, "true or false: a number is top_logprobs")
    if num_top and not wanted:
        raise InvalidJob("top_logprobs needs logprobs=true")
    if not wanted:
        return sampling, ResponseOptions()
    if type(num_top) is not int or not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise unlike("top_logprobs", num_top, f"an integer from 0 to {MAX_TOP_LOGPROBS}")
    return {**sampling, "logprobs": num_top}, ResponseOptions(num_top=num_top)


def run_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's values without those that are off. Raises InvalidJob for one that the output has no column for."""
    asking: dict[str, Any] = {}
    for name, value in values.items():
        asks_nothing = name in NAMES and (value is None or value is False)
        if not asks_nothing:
            asking[name] = value
    for name in LOGPROBS:
        value = asking.get(name, 0)
        if type(value) is not int or not 0 <= value <= MAX_TOP_LOGPROBS:
            raise unlike(name, value, f"a number of tokens, 0 to {MAX_TOP_LOGPROBS}")
    if "echo" in asking:
        raise InvalidJob("echo is not built for a run: its output has no column for it")
    return asking


def with_structured_outputs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with `structured_outputs` in place of `response_format`. Raises InvalidJob."""
    other_values = {name: value for name, value in values.items() if name != "response_format"}
    response_format = values.get("response_format")
    form: dict[str, Any] = {"json_object": True}
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if response_format is None or kind == "text":
        return other_values
    if kind == "json_schema":
        described = response_format.get("json_schema")
        if not isinstance(described, dict):
            raise unlike(
                "json_schema of response_format", described, '{"name": ..., "schema": ...}'
            )
        schema = described.get("schema")
        if schema is not None:
            form = {"json": schema}
    elif kind != "json_object":
        raise unlike(
            "response_format",
            response_format,
            "an object whose type is text, json_object or json_schema",
        )
    if other_values.get("structured_outputs") is not None:
        raise InvalidJob(
            "response_format and structured_outputs each say what the text must be: send one"
        )
    return {**other_values, "structured_outputs": form}
