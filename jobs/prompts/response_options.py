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
    """echo: with the prompt's text. prompt_only: and with none behind it. num_top: likeliest tokens beside
    each one's log probability, None where none is asked for."""

    echo: bool = False
    prompt_only: bool = False
    num_top: int | None = None


def completion_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], ResponseOptions]:
    """Part a completion's arguments: sampling values with what the response needs. Raises InvalidJob."""
    sampling = {name: value for name, value in values.items() if name != "echo"}
    echo, num_top = values.get("echo") or False, values.get("logprobs")
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
        sampling["max_tokens"] = 1  # which is left out of the response
    return sampling, ResponseOptions(True, prompt_only, num_top)


def chat_response_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], ResponseOptions]:
    """Return the same of a chat's. Its reasoning is given apart unless `separate_reasoning` is false."""
    sampling = {
        name: value for name, value in values.items() if name not in ("echo", "top_logprobs")
    }
    if values.get("echo"):
        raise InvalidJob("echo belongs to jobs.complete: a chat's response holds the answer alone")
    sampling.setdefault("separate_reasoning", True)
    wanted, num_top = sampling.pop("logprobs", None), values.get("top_logprobs") or 0
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
    """Return a run's values without those that ask for nothing. Raises InvalidJob for what its output cannot have."""
    nothing = [name for name in NAMES if values.get(name) is None or values[name] is False]
    kept = {name: value for name, value in values.items() if name not in nothing}
    for name in LOGPROBS:
        value = kept.get(name, 0)
        if type(value) is not int or not 0 <= value <= MAX_TOP_LOGPROBS:
            raise unlike(name, value, f"a number of tokens, 0 to {MAX_TOP_LOGPROBS}")
    if "echo" in kept:
        raise InvalidJob("echo is not built for a run: its output has no column for it")
    return kept


NAME = "response_format"


def with_structured_outputs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with `structured_outputs` in the place of `response_format`. Raises InvalidJob."""
    kept = {name: value for name, value in values.items() if name != NAME}
    asked, wanted = values.get(NAME), {"json_object": True}
    kind = asked.get("type") if isinstance(asked, dict) else None
    if asked is None or kind == "text":
        return kept
    if kind == "json_schema":
        described = asked.get("json_schema")
        if not isinstance(described, dict):
            raise unlike(
                "json_schema of response_format", described, '{"name": ..., "schema": ...}'
            )
        if (schema := described.get("schema")) is not None:
            wanted = {"json": schema}
    elif kind != "json_object":
        raise unlike(
            "response_format", asked, "an object whose type is text, json_object or json_schema"
        )
    if kept.get("structured_outputs") is not None:
        raise InvalidJob(
            "response_format and structured_outputs each say what the text must be: send one"
        )
    return {**kept, "structured_outputs": wanted}
