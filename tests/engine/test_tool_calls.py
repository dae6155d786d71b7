"""Calls of tools in answers, in the forms in which models write them."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.text.marked_text import with_marks
from engine.text.tokenizer import Tokenizer
from engine.text.tool_calls import ToolCallReader, find_form, read_tool_calls
from tests.engine.text_models import make_text_model


def tool(name: str, **types: Any) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


TOOLS = [
    tool("add", a="integer", b="number", note="string", rows="array", is_on="boolean"),
    tool("now"),
]
ADD = ("add", {"a": 1})
NOW = ("now", {})
BEGIN, CALL, SEP, END_CALL, END = (
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
JSON_ADD = '{"name": "add", "arguments": {"a": 1}}'
JSON_NOW = '{"name": "now"}'
V3_ADD = f'{CALL}function{SEP}add\n```json\n{{"a": 1}}\n```{END_CALL}'
XML_ADD = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"

FORMS = {
    "harmony": (
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
        "<|start|>assistant<|channel|>commentary to=functions.now<|message|><|call|>",
        '<|start|>assistant to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>'
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
    ),
    "hermes": (
        f"<tool_call>\n{JSON_ADD}\n</tool_call>\n<tool_call>\n{JSON_NOW}\n</tool_call>",
        f"<tool_call>{JSON_ADD}</tool_call><tool_call>{JSON_NOW}",
    ),
    "llama json": (
        '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
        f"<|python_tag|>{JSON_ADD}; {JSON_NOW}",
        f"[{JSON_ADD}, {JSON_NOW}]",
    ),
    "llama pythonic": ("[add(a=1), now()]", "<|python_start|>[add(a=1), now()]<|python_end|>"),
    "qwen xml": (
        f"<tool_call>\n{XML_ADD}\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        f"{XML_ADD}<function=now></function>",
    ),
    "mistral": (
        f"[TOOL_CALLS][{JSON_ADD}, {JSON_NOW}]",
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}',
        '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]now[CALL_ID]abcdefghj[ARGS]',
        '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]now{}',
    ),
    "deepseek": (
        f"{BEGIN}{V3_ADD}\n{CALL}function{SEP}now\n```json\n{{}}\n```{END_CALL}{END}",
        f'{BEGIN}{CALL}add{SEP}{{"a": 1}}{END_CALL}{CALL}now{SEP}{{}}{END_CALL}{END}',
        f'{BEGIN}{CALL}add{SEP}{{"a": 1}}{END_CALL}{CALL}now{SEP}',
    ),
    "glm": (
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    ),
    "listed": (
        f"functools[{JSON_ADD}, {JSON_NOW}]",
        f"<|tool_call|>[{JSON_ADD}, {JSON_NOW}]<|/tool_call|>",
        f"<tool_call>[{JSON_ADD}, {JSON_NOW}]",
    ),
}
CASES = [(form, text) for form, texts in FORMS.items() for text in texts]
#: These are all of an answer, or nothing.
BARE = {*FORMS["llama json"], *FORMS["llama pythonic"]} - {FORMS["llama json"][1]}


def read(
    text: str, tools: list[dict[str, Any]] = TOOLS
) -> tuple[list[tuple[str, Any]], str, str | None]:
    found = read_tool_calls(text, tools)
    return (
        [(call["name"], json.loads(call["arguments"])) for call in found.calls],
        found.content,
        found.problem,
    )


@pytest.mark.parametrize(("form", "text"), CASES)
def test_each_form_of_calls_is_read(form: str, text: str) -> None:
    assert read(text) == ([ADD, NOW], "", None)
    if text not in BARE:
        assert read(f"Let me see.\n\n{text}") == ([ADD, NOW], "Let me see.", None)


@pytest.mark.parametrize(("form", "text"), CASES)
def test_only_tools_that_were_given_are_called(form: str, text: str) -> None:
    calls, content, problem = read(text, [tool("other")])
    assert (calls, content) == ([], text)
    assert problem is not None
    assert "no such tool was given" in problem


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "",
        '{"name": "Bob", "age": 3}',
        '{"name": "add", "age": 3}',
        '{"answer": 4}',
        "[1, 2]",
        '[{"a": 1}]',
        '{"name": "add", "parameters": {}} and text',
        "[add] and (a=1)",
    ],
)
def test_a_text_or_json_that_calls_nothing_stays(text: str) -> None:
    assert read(text) == ([], text, None)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "argu',
        "<tool_call>" + "[" * 100_000,
        "[TOOL_CALLS][{",
        f"{BEGIN}{CALL}add{SEP}{{",
        "[add(1)]",
        "[add(a=b)]",
        "<|python_tag|>print(1)",
        "functools[oh",
        "<function=add>\n<parameter=note>\nhalf of a te",
        '<function=add>{"a": 1}</function>',
        "The tag <function=now> is a call.",
        "<tool_call>add\n<arg_key>note</arg_key>\n<arg_value>half of a te",
        "<tool_call>add\n<arg_key>note</arg_key>\n<arg_va",
        '[TOOL_CALLS]add[ARGS]{"note": "half of a te',
        "[add(**{'a': 1})]",
    ],
)
def test_what_looks_like_a_call_and_is_none_stays_and_is_said(text: str) -> None:
    calls, content, problem = read(text)
    assert (calls, content) == ([], text)
    assert problem


def test_a_call_that_fails_stays_beside_one_that_does_not() -> None:
    text = f'So: <tool_call>{JSON_ADD}</tool_call><tool_call>{{"name": "gone"}}</tool_call>'
    calls, content, problem = read(text)
    assert calls == [ADD]
    assert content == 'So: <tool_call>{"name": "gone"}</tool_call>'
    assert problem == "a call of 'gone' is no call: no such tool was given"


def test_values_that_are_bare_texts_have_the_types_of_the_tool() -> None:
    values = {"a": "3", "b": "1.5", "note": "3", "rows": "[1]", "is_on": "True", "more": "x y"}
    typed = {"a": 3, "b": 1.5, "note": "3", "rows": [1], "is_on": True, "more": "x y"}
    xml = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    assert read(f"<function=add>\n{xml}</function>")[0] == [("add", typed)]
    glm = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in values.items()
    )
    assert read(f"<tool_call>add\n{glm}</tool_call>")[0] == [("add", typed)]


def test_arguments_may_hold_what_ends_calls() -> None:
    arguments = {"note": '</tool_call> [TOOL_CALLS] {"a": "}"}'}
    for text in (
        f'<tool_call>{{"name": "add", "arguments": {json.dumps(arguments)}}}</tool_call>',
        f'<tool_call>{{"name": "add", "arguments": {json.dumps(json.dumps(arguments))}}}</tool_call>',
        f'{{"name": "add", "parameters": {json.dumps(arguments)}}}',
        f"[add(note={arguments['note']!r})]",
        f"[TOOL_CALLS]add[ARGS]{json.dumps(arguments)}",
        f'[TOOL_CALLS][{{"name": "add", "arguments": {json.dumps(arguments)}}}]',
        f"<function=add>\n<parameter=note>\n{arguments['note']}\n</parameter>\n</function>",
    ):
        assert read(text)[:2] == ([("add", arguments)], "")


def test_a_cut_call_takes_nothing_of_the_next() -> None:
    text = f"<tool_call>\n<function=now>\n<tool_call>\n{XML_ADD}\n</tool_call>"
    calls, content, problem = read(text)
    assert calls == [ADD]
    assert content == "<tool_call>\n<function=now>"
    assert problem


def test_each_list_of_calls_is_read() -> None:
    text = f"<|tool_call|>[{JSON_ADD}]<|/tool_call|>\n<|tool_call|>[{JSON_NOW}]<|/tool_call|>"
    assert read(text) == ([ADD, NOW], "", None)
    assert read(f"<tool_call>[{JSON_NOW}]</tool_call>") == ([NOW], "", None)


@pytest.mark.parametrize(
    "opening",
    ["<tool_call>\n", "<tool_call>add<arg_key>", "<tool_call>add<arg_key>a</arg_key><arg_value>", "<function=add>-",
     "<function=add><parameter=a>", "[TOOL_CALLS]add[ARGS]{", f"{CALL}add{SEP}", "<|tool_call|>["],
)  # fmt: skip
def test_an_answer_that_opens_a_call_again_and_again_is_read(opening: str) -> None:
    """In time that grows with its length alone: it is read on the engine's thread."""
    text = opening * 4000
    assert read(text)[1] == text


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    found = read_tool_calls('{"name": "add", "parameters": {"\\ud800": "\\ud83d\\ude00"}}', TOOLS)
    assert found.calls == [{"name": "add", "arguments": '{"\\ud800": "\\ud83d\\ude00"}'}]


@pytest.mark.parametrize(
    ("sign", "form"),
    [
        ("<tool_call></tool_call>", "hermes"),
        ("<tool_call>\n<function=example", "qwen xml"),
        ("[TOOL_CALLS]", "mistral"),
        (BEGIN, "deepseek"),
        ("<tool_call>{{ name }}<arg_key>", "glm"),
        ("[func_name1(params_name1=params_value1)]", "llama pythonic"),
        ('{"name": x, "parameters": y}', "llama json"),
        ("functools[", "listed"),
        ("<|channel|>commentary to=x <|constrain|>json<|message|>", "harmony"),
        ("", None),
    ],
)
def test_a_models_form_is_found_by_its_template_or_its_tokens(sign: str, form: str | None) -> None:
    for template, tokens in (
        (f"a {sign} b", []),
        (None, [sign[:12] if sign == "[TOOL_CALLS]" else sign]),
    ):
        found = find_form(template, tokens)
        if template is not None or sign in ("[TOOL_CALLS]", BEGIN, ""):
            assert (None if found is None else found.name) == form


@pytest.mark.parametrize("family", ["llama", "qwen", "tekken"])
def test_marks_that_a_text_leaves_out_are_read_of_its_tokens(tmp_path: Path, family: str) -> None:
    make_text_model(tmp_path, family)
    made = Tokenizer(tmp_path)._tokenizer
    made.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    made.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    reader = ToolCallReader(tokenizer)
    token_ids = tokenizer.encode_alone('So:[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}')
    text = tokenizer.decode(token_ids)
    assert "[TOOL_CALLS]" not in text
    marked = partial(
        with_marks, tokenizer, token_ids=token_ids, marks=reader.hidden_marks, follows_text=False
    )
    found = reader.read(marked(text), TOOLS)
    assert [call["name"] for call in found.calls] == ["add", "now"]
    assert found.content == "So:"
    cut = marked(text[:4])
    assert cut.replace("[TOOL_CALLS]", "") == text[:4]


@pytest.mark.parametrize(
    ("form", "text", "note"),
    [
        (
            "qwen xml",
            "<function=add>\n<parameter=note>\n{}\n</parameter>\n</function>",
            "a </parameter> b <b>",
        ),
        (
            "qwen xml",
            "<function=add><parameter=note>{}</parameter></function>",
            "see <function=now></function>",
        ),
        (
            "glm",
            "<tool_call>add<arg_key>note</arg_key><arg_value>{}</arg_value></tool_call>",
            "</arg_value> x",
        ),
        (
            "glm",
            "<tool_call>add<arg_key>note</arg_key><arg_value>{}</arg_value></tool_call>",
            "<tool_call>now</tool_call>",
        ),
        (
            "hermes",
            '<tool_call>{{"name": "add", "arguments": {{"note": "{}"}}}}</tool_call>',
            "<tool_call>x</tool_call>",
        ),
    ],
)
def test_a_value_that_spells_tags_is_no_call(form: str, text: str, note: str) -> None:
    calls, content, problem = read(text.format(note))
    assert (calls, content, problem) == ([("add", {"note": note})], "", None), form


def test_an_end_tag_may_be_missing_before_the_next_call() -> None:
    assert read(f"<tool_call>{JSON_ADD}\n<tool_call>{JSON_NOW}</tool_call>") == (
        [ADD, NOW],
        "",
        None,
    )


def test_a_call_behind_one_that_was_cut_is_read() -> None:
    calls, _, problem = read(f"<function=add>\n<parameter=a>\n7\n{XML_ADD}")
    assert calls == [ADD]
    assert problem is not None


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>",
        "<function=add>\n",
        "<function=add><parameter=a>1</parameter>",
        "<tool_call>add\n",
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>",
        "[TOOL_CALLS]add",
        "[TOOL_CALLS]add[ARGS]",
        f"{BEGIN}{CALL}add{SEP}",
        f"{BEGIN}{CALL}function{SEP}add\n```json\n",
    ],
)
def test_a_call_that_was_cut_is_no_call(text: str) -> None:
    """Its arguments may be missing: an answer that ended at its length is told apart from one that the model ended."""
    assert read_tool_calls(text, TOOLS).calls
    cut = read_tool_calls(text, TOOLS, is_cut=True)
    assert (cut.calls, cut.content) == ([], text)
    assert cut.problem == "the answer was cut in a call of 'add'"


@pytest.mark.parametrize(("form", "text"), CASES)
def test_the_whole_calls_of_an_answer_that_was_cut_are_read(form: str, text: str) -> None:
    calls = read_tool_calls(text, TOOLS, is_cut=True).calls
    assert [call["name"] for call in calls][:1] == ["add"], form
