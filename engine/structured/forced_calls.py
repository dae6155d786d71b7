"""ForcedCalls: writes the grammar by which an answer is a call of a tool, in the model's own form of calls.

A request may have structured outputs and tools, and force no call. Then the grammar allows a call, and also an answer
in the form of the structured outputs.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from engine.errors import InvalidSampling
from engine.sampling.parameter_values import brief
from engine.sampling.sampling_params import SamplingParams
from engine.sampling.structured_params import NAME, StructuredOutputsParams
from engine.structured.endless_schemas import NotEnforceable
from engine.structured.json_schemas import enforceable
from engine.text.tokenizer import Tokenizer
from engine.text.tool_calls import ToolForm, find_form

#: The names of functions that can be written in every form, without spelling one of its marks.
_FUNCTION = re.compile(r"[\w.-]+")

#: What a request has if it does not force a call, as errors name it.
BESIDE = f"response_format or {NAME} beside tools"

#: What a function without parameters takes.
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


class ForcedCalls:
    """Says which texts are calls of tools in one model's form."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> None:
        """eos_token_ids: ids that end a text. A mark that is one of them ends the call by itself."""
        self._template = tokenizer.tool_template or ""
        self._added_tokens = tokenizer.added_tokens
        self._eos_token_ids = eos_token_ids
        self._form = find_form(tokenizer.tool_template, tokenizer.added_tokens)

    def form(self, params: SamplingParams) -> StructuredOutputsParams:
        """Return the form of a text that is a call. Raises InvalidSampling.

        If no tool_choice forces a call, a text in the form of the request's structured outputs is allowed too.
        """
        form = self._form
        option = name_of(params)
        if form is None or form.write is None:
            reason = "is not known" if form is None else f"({form.name}) cannot be forced"
            raise InvalidSampling(
                f"{option} cannot be served: this model's form of tool calls {reason}"
            )
        functions = _chosen(params)
        names = [f"call_{number}" for number in range(len(functions))]
        rules = [
            f"{name}: {self._rule(form, function, option)}"
            for name, function in zip(names, functions, strict=True)
        ]
        if params.tool_choice is None:
            assert isinstance(params.structured_outputs, StructuredOutputsParams)
            names.append("answer")
            rules.append(f"answer: {_answer(params.structured_outputs, option)}")
        start = " | ".join(names)
        # A call and an answer in JSON may both begin with a brace. llguidance follows the longest text with which a
        # rule begins, and does not go back: if that is the call's, an answer needs a blank behind its brace.
        return StructuredOutputsParams(
            grammar="\n".join([f"start: {start}", *rules]),
            allow_whitespace=params.tool_choice is None,
        )

    def _rule(self, form: ToolForm, function: Mapping[str, Any], option: str) -> str:
        """Return the rule of a function's calls. option: the part of the request that needs it, for errors."""
        assert form.write is not None
        if not _FUNCTION.fullmatch(function["name"]):
            wanted = (
                f"{option} needs tools whose names hold letters, digits, '_', '-' and '.' alone"
            )
            raise InvalidSampling(wanted, brief(function["name"]))
        before, behind = form.write(function["name"], self._shows)
        arguments = json.dumps(_arguments(function, option), ensure_ascii=False)
        return " ".join(
            [*self._terms(before, form), f"%json {arguments}", *self._terms(behind, form)]
        )

    def _shows(self, text: str) -> bool:
        return text in self._template or text in self._added_tokens

    def _terms(self, text: str, form: ToolForm) -> Iterator[str]:
        """Yield a text as terms of a grammar, with the form's marks as tokens, up to a mark that ends the answer."""
        marks = "|".join(re.escape(mark) for mark in form.marks)
        for part in re.split(f"({marks})", text):
            token = self._added_tokens.get(part) if part in form.marks else None
            if token is not None and token.token_id in self._eos_token_ids:
                return
            if token is not None:
                yield f"<[{token.token_id}]>"
            elif part:
                yield json.dumps(part, ensure_ascii=False)


def name_of(params: SamplingParams) -> str:
    """Return how errors name the part of a request that needs a grammar of calls."""
    return BESIDE if params.tool_choice is None else "tool_choice"


def _answer(spec: StructuredOutputsParams, option: str) -> str:
    """Return the rule, in Lark's notation, of an answer that is no call. Raises InvalidSampling."""
    if spec.json is not None or spec.json_object:
        schema = json.loads(str(spec.json)) if spec.json is not None else {"type": "object"}
        if schema is True:
            schema = {}
        if schema is False:
            raise InvalidSampling(f"{option} needs a schema that some text satisfies", "false")
        try:
            enforceable(schema)
        except NotEnforceable as error:
            wanted = f"{option} needs a schema that can be enforced"
            raise InvalidSampling(wanted, f"one {error}") from None
        return f"%json {json.dumps(schema, ensure_ascii=False)}"
    if spec.choice is not None:
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in spec.choice)
    raise InvalidSampling(f"{option} must be json, json_object or choice", spec.kind)


def _chosen(params: SamplingParams) -> list[Mapping[str, Any]]:
    """Return the functions of which one may be called."""
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


def _arguments(function: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object. option: as `name_of` returns it, for errors."""
    parameters = function.get("parameters")
    whose = f"the parameters of tool {brief(function['name'])}"
    schema = _NOTHING if parameters is None else parameters
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InvalidSampling(
            f"{option} needs a schema of an object for {whose}", brief(parameters)
        )
    try:
        return dict(enforceable({"type": "object", **schema}))
    except NotEnforceable as error:
        raise InvalidSampling(
            f"{option} needs a schema that can be enforced for {whose}", f"one {error}"
        ) from None
