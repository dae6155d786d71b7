"""ForcedCalls: writes the grammar by which an answer is a call of a tool, in the model's own form of calls."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from engine.errors import InvalidSampling
from engine.sampling.parameter_values import brief
from engine.sampling.sampling_params import SamplingParams
from engine.sampling.structured_params import StructuredOutputsParams
from engine.structured.endless_schemas import NotEnforceable
from engine.structured.json_schemas import enforceable
from engine.text.tokenizer import Tokenizer
from engine.text.tool_calls import ToolForm, find_form

#: The names of functions that can be written in every form, without spelling one of its marks.
_NAME = re.compile(r"[\w.-]+")

#: What a function without parameters takes.
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


class ForcedCalls:
    """Says which texts are calls of tools in one model's form."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> None:
        """eos_token_ids: ids that end a text. A mark that is one of them ends the call by itself."""
        self._template, self._added_tokens = tokenizer.tool_template or "", tokenizer.added_tokens
        self._eos_token_ids = eos_token_ids
        self._form = find_form(tokenizer.tool_template, tokenizer.added_tokens)

    def form(self, params: SamplingParams) -> StructuredOutputsParams:
        """Return the form of a call that the request's tool_choice forces. Raises InvalidSampling."""
        form = self._form
        if form is None or form.write is None:
            name = "is not known" if form is None else f"({form.name}) cannot be forced"
            raise InvalidSampling(
                f"tool_choice cannot be served: this model's form of tool calls {name}"
            )
        functions = _chosen(params)
        rules = [
            f"call_{number}: {self._rule(form, function)}"
            for number, function in enumerate(functions)
        ]
        start = " | ".join(f"call_{number}" for number in range(len(functions)))
        return StructuredOutputsParams(grammar="\n".join([f"start: {start}", *rules]))

    def _rule(self, form: ToolForm, function: Mapping[str, Any]) -> str:
        """Return the rule of a function's calls."""
        assert form.write is not None
        if not _NAME.fullmatch(function["name"]):
            wanted = (
                "tool_choice needs tools whose names hold letters, digits, '_', '-' and '.' alone"
            )
            raise InvalidSampling(wanted, brief(function["name"]))
        before, behind = form.write(function["name"], self._shows)
        arguments = json.dumps(_arguments(function), ensure_ascii=False)
        return " ".join(
            [*self._terms(before, form), f"%json {arguments}", *self._terms(behind, form)]
        )

    def _shows(self, text: str) -> bool:
        return text in self._template or text in self._added_tokens

    def _terms(self, text: str, form: ToolForm) -> Iterator[str]:
        """Yield the terms of a text, in which the form's marks are tokens, up to a mark that ends it all."""
        marks = "|".join(re.escape(mark) for mark in form.marks)
        for part in re.split(f"({marks})", text):
            token = self._added_tokens.get(part) if part in form.marks else None
            if token is not None and token.token_id in self._eos_token_ids:
                return
            if token is not None:
                yield f"<[{token.token_id}]>"
            elif part:
                yield json.dumps(part, ensure_ascii=False)


def _chosen(params: SamplingParams) -> list[Mapping[str, Any]]:
    """Return the functions of which one must be called."""
    functions: dict[str, Mapping[str, Any]] = {
        tool["function"]["name"]: tool["function"] for tool in params.tools
    }
    if not functions:
        raise InvalidSampling("tool_choice needs tools that it could call", "none")
    if not isinstance(params.tool_choice, Mapping):
        return list(functions.values())
    name = params.tool_choice["function"]["name"]
    if name not in functions:
        raise InvalidSampling("tool_choice must name one of the tools", brief(name))
    return [functions[name]]


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object."""
    parameters = function.get("parameters")
    whose = f"the parameters of tool {brief(function['name'])}"
    schema = _NOTHING if parameters is None else parameters
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InvalidSampling(
            f"tool_choice needs a schema of an object for {whose}", brief(parameters)
        )
    try:
        return dict(enforceable({"type": "object", **schema}))
    except NotEnforceable as error:
        raise InvalidSampling(
            f"tool_choice needs a schema that can be enforced for {whose}", f"one {error}"
        ) from None
