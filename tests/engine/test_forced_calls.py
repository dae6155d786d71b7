"""An answer that must be a call of a tool is one, in each model's own form of calls."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine import InvalidSampling, SamplingParams
from engine.structured.forced_calls import ForcedCalls
from engine.structured.grammars import Grammars
from engine.text.marked_text import with_marks
from engine.text.tokenizer import Tokenizer
from engine.text.tool_calls import DEEPSEEK, FORMS, ToolCallReader
from tests.engine.test_forced_text import walk
from tests.engine.text_models import make_text_model

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "unit": {"enum": ["C", "</tool_call> [TOOL_CALLS] ```"]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 31}},
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": CITY, "description": "start: x ::= y"},
}
NOW = {"type": "function", "function": {"name": "time-of.day"}}
TOOLS = [WEATHER, NOW]
SCHEMAS: dict[str, Any] = {"get_weather": CITY, "time-of.day": {"const": {}}}

#: By a name: the form, what its models' templates hold, and tokens that they have.
MODELS: dict[str, tuple[str, str, list[str]]] = {
    "hermes": ("hermes", "<tool_call></tool_call>", ["<tool_call>", "</tool_call>"]),
    "hermes without tokens": ("hermes", "<tool_call></tool_call>", []),
    "llama json": ("llama json", '{"name": x, "parameters": y}', ["<|python_tag|>"]),
    "mistral list": ("mistral", "[TOOL_CALLS]", ["[TOOL_CALLS]"]),
    "mistral arguments": ("mistral", "[TOOL_CALLS]", ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]),
    "deepseek v3": ("deepseek", f"{DEEPSEEK[0]}```json", list(DEEPSEEK)),
    "deepseek v3.1": ("deepseek", DEEPSEEK[0], list(DEEPSEEK)),
    "phi 4": ("listed", "functools[", []),
    "phi 4 mini": ("listed", "<|tool_call|><|/tool_call|>", ["<|tool_call|>", "<|/tool_call|>"]),
    "granite": ("listed", "<|tool_call|>", ["<|tool_call|>"]),
    "harmony": (
        "harmony",
        "<|channel|>commentary to=x <|constrain|>json<|message|>",
        ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"],
    ),
}
ENDS = "<|call|>"  # which ends gpt-oss's answers


def make_tokenizer(
    folder: Path, family: str, template: str, tokens: list[str], *, is_special: bool
) -> Tokenizer:
    make_text_model(folder, family)
    made = Tokenizer(folder)._tokenizer
    if is_special:
        made.add_special_tokens({"additional_special_tokens": tokens})
    else:
        made.add_tokens(tokens)
    made.chat_template = "{% if false %}{% raw %}" + template + "{% endraw %}{% endif %}"
    made.save_pretrained(folder)
    return Tokenizer(folder)


def answers(tokenizer: Tokenizer, **values: Any) -> list[list[int]]:
    """Return completions whose tokens are drawn from all that a choice allows, or forced where they can be."""
    end = next(iter(tokenizer.end_token_ids(len(tokenizer.backend.get_vocab()))))
    ends = frozenset(
        {end, *(token.token_id for text, token in tokenizer.added_tokens.items() if text == ENDS)}
    )
    forms = Grammars(
        tokenizer.backend,
        tokenizer.backend.get_vocab_size(),
        ends,
        ForcedCalls(tokenizer, ends).form,
    )
    try:
        matchers = forms.matchers(SamplingParams(n=16, tools=TOOLS, **values), ends)
        return [
            walk(matcher, random.Random(number), jumps=number % 2 == 0)
            for number, matcher in enumerate(matchers)
            if matcher is not None
        ]
    finally:
        forms.close()


@pytest.mark.parametrize(("family", "is_special"), [("qwen", False), ("llama", True)])
@pytest.mark.parametrize("model", MODELS)
def test_a_forced_answer_is_a_call_of_an_offered_tool(
    tmp_path: Path, model: str, family: str, is_special: bool
) -> None:
    form, template, tokens = MODELS[model]
    tokenizer = make_tokenizer(tmp_path, family, template, tokens, is_special=is_special)
    reader = ToolCallReader(tokenizer)
    first = {"harmony": "<|channel|>", "llama json": None}.get(form, tokens[0] if tokens else None)
    names = set()
    for token_ids in answers(tokenizer, tool_choice="required"):
        text = tokenizer.decode(token_ids)
        found = reader.read(
            with_marks(tokenizer, text, token_ids, reader.hidden_marks, follows_text=False), TOOLS
        )
        assert (len(found.calls), found.content, found.problem) == (1, "", None)
        (call,) = found.calls
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
        names.add(call["name"])
        # marks are tokens where the model has them, as in what it was trained on
        assert first is None or token_ids[0] == tokenizer.added_tokens[first].token_id
    assert names == SCHEMAS.keys()


def test_one_function_can_be_chosen(tmp_path: Path) -> None:
    _, template, tokens = MODELS["hermes"]
    tokenizer = make_tokenizer(tmp_path, "qwen", template, tokens, is_special=False)
    choice = {"type": "function", "function": {"name": "time-of.day"}}
    for token_ids in answers(tokenizer, tool_choice=choice):
        text = "".join(tokenizer.decode(token_ids).split())
        assert text == '<tool_call>{"name":"time-of.day","arguments":{}}</tool_call>'


@pytest.mark.parametrize(
    "form", [form for form in FORMS if form.write is None], ids=lambda form: form.name
)
def test_a_form_whose_arguments_are_no_json_is_refused_by_name(tmp_path: Path, form: Any) -> None:
    tokenizer = make_tokenizer(tmp_path, "qwen", form.signs[0], [], is_special=False)
    with pytest.raises(
        InvalidSampling, match=rf"form of tool calls \({form.name}\) cannot be forced"
    ):
        answers(tokenizer, tool_choice="required")


def test_a_model_without_a_form_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "qwen", "none", [], is_special=False)
    with pytest.raises(InvalidSampling, match="form of tool calls is not known"):
        answers(tokenizer, tool_choice="required")


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


ANSWER = {
    "type": "object",
    "properties": {"degrees": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["degrees"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("model", MODELS)
def test_an_answer_beside_tools_is_one_call_or_has_the_form(tmp_path: Path, model: str) -> None:
    _, template, tokens = MODELS[model]
    tokenizer = make_tokenizer(tmp_path, "qwen", template, tokens, is_special=False)
    reader = ToolCallReader(tokenizer)
    num_calls = 0
    completions = answers(tokenizer, structured_outputs={"json": ANSWER})
    for token_ids in completions:
        text = tokenizer.decode(token_ids)
        found = reader.read(
            with_marks(tokenizer, text, token_ids, reader.hidden_marks, follows_text=False), TOOLS
        )
        if found.calls:
            (call,) = found.calls
            jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
            num_calls += 1
        else:
            jsonschema.validate(json.loads(text), ANSWER)
    assert 0 < num_calls < len(completions)


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"choice": ["yes", "n/o"]}, {"yes", "n/o"}),
        ({"json": True}, None),
        ({"json_object": True}, None),
    ],
)
def test_other_forms_stand_beside_tools_too(
    tmp_path: Path, form: dict[str, Any], texts: set[str] | None
) -> None:
    _, template, tokens = MODELS["hermes"]
    tokenizer = make_tokenizer(tmp_path, "qwen", template, tokens, is_special=False)
    free = set()
    for token_ids in answers(tokenizer, structured_outputs=form):
        text = tokenizer.decode(token_ids)
        if "<tool_call>" not in text:
            free.add(text)
    assert free
    if texts is not None:
        assert free <= texts


def test_a_forced_call_goes_before_the_form_of_an_answer(tmp_path: Path) -> None:
    _, template, tokens = MODELS["hermes"]
    tokenizer = make_tokenizer(tmp_path, "qwen", template, tokens, is_special=False)
    form = {"json": ANSWER}
    for token_ids in answers(tokenizer, structured_outputs=form, tool_choice="required"):
        assert tokenizer.decode(token_ids).startswith("<tool_call>")


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "a+"}, "beside tools must be json, json_object or choice, got regex"),
        ({"grammar": 'start: "a"'}, "beside tools must be json, json_object or choice"),
        ({"json": False}, "beside tools needs a schema that some text satisfies"),
        ({"json": {"const": 2**53 + 1}}, "beside tools needs a schema that can be enforced"),
        ({"json": {"type": "string", "pattern": "("}}, "beside tools needs a form and tools"),
    ],
)
def test_a_form_that_cannot_stand_beside_tools_is_named(
    tmp_path: Path, form: dict[str, Any], says: str
) -> None:
    _, template, tokens = MODELS["hermes"]
    tokenizer = make_tokenizer(tmp_path, "qwen", template, tokens, is_special=False)
    with pytest.raises(InvalidSampling, match=says):
        answers(tokenizer, structured_outputs=form)


def test_tools_of_a_form_that_cannot_be_forced_stand_beside_no_other(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "qwen", "<function=", [], is_special=False)
    with pytest.raises(InvalidSampling, match=r"beside tools cannot be served: .*\(qwen xml\)"):
        answers(tokenizer, structured_outputs={"json_object": True})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tools": ()}, "tool_choice needs tools"),
        (
            function() | {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "must name one of the tools",
        ),
        (function(name="a b"), "whose names hold letters"),
        (
            function(parameters={"type": "string"}),
            "a schema of an object for the parameters of tool 'f'",
        ),
        (
            function(parameters={"properties": {"a": {"const": 2**53 + 1}}}),
            "can be enforced for .* tool 'f'",
        ),
        (
            function(parameters={"properties": {"a": {"pattern": "("}}}),
            "tool_choice needs tools that can be enforced",
        ),
    ],
)
def test_a_call_that_cannot_be_forced_is_refused_by_name(
    tmp_path: Path, values: dict[str, Any], says: str
) -> None:
    _, template, tokens = MODELS["hermes"]
    tokenizer = make_tokenizer(tmp_path, "qwen", template, tokens, is_special=False)
    end = frozenset({0})
    forms = Grammars(
        tokenizer.backend, tokenizer.backend.get_vocab_size(), end, ForcedCalls(tokenizer, end).form
    )
    with pytest.raises(InvalidSampling, match=says):
        forms.matchers(SamplingParams(**{"tool_choice": "required", **values}), end)
    forms.close()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tool_choice": "auto"}, "tool_choice must be 'required' or"),
        ({"tool_choice": {"type": "function"}}, "tool_choice must be 'required' or"),
        ({"tool_choice": "required", "thinking_token_budget": 3}, "no thinking_token_budget"),
    ],
)
def test_an_impossible_choice_is_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSampling, match=says):
        SamplingParams(**values)
