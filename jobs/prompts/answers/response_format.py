"""OpenAI's `response_format` as the sampling value that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.common.display import brief
from jobs.errors import InvalidJob, InvalidValue

NAME = "response_format"


def with_structured_outputs(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with `structured_outputs` in the place of `response_format`. Raises InvalidJob."""
    kept = {name: value for name, value in values.items() if name != NAME}
    wanted = _structured_outputs(values.get(NAME))
    if wanted is None:
        return kept
    if kept.get("structured_outputs") is not None:
        raise InvalidJob("response_format and structured_outputs each say what the text must be: send one")
    return {**kept, "structured_outputs": wanted}


def _structured_outputs(value: Any) -> dict[str, Any] | None:
    """Return the grammar that `response_format` asks for, or None for free text."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise InvalidValue(
            "response_format is {}, expected an object whose type is text, json_object or json_schema",
            brief(value),
        )
    described = value.get("json_schema")
    if not isinstance(described, dict):
        raise InvalidValue(
            'json_schema of response_format is {}, expected {{"name": ..., "schema": ...}}', brief(described)
        )
    schema = described.get("schema")
    return {"json_object": True} if schema is None else {"json": schema}
