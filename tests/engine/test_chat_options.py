"""Tools, variables of a template and messages with tool calls, as templates get them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine import InvalidPrompt
from engine.text.tokenizer import Tokenizer
from tests.engine.text_models import make_text_model

HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "sum", "parameters": {"type": "object"}},
}
#: As Qwen's and Hermes' templates write tools and calls.
HERMES = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif -%}
{%- for m in messages %}<|{{ m.role }}|>{% generation %}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{ m.content }}{% for call in m.tool_calls or [] -%}
{%- set f = call.function -%}
<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>
{%- endfor %}{% endgeneration %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
#: As Llama 3's does: it indexes `tool_calls` wherever the key is, and joins content to text.
LLAMA = """{%- for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 -%}
{{ raise_exception('single tool-calls at once') }}{% endif -%}
{%- set f = m.tool_calls[0].function -%}
[{{ m.role }}]{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}
{%- else %}[{{ m.role }}]{{ m.content + '' }}{% endif %}{% endfor %}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_text_model(tmp_path / "model", "llama3")


def rendered(folder: Path, template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(folder)
    return str(tokenizer._tokenizer.decode(tokenizer.chat_token_ids(messages, **options)))


def called(arguments: Any, *, times: int = 1) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call] * times}


def test_tools_and_variables_are_the_templates(folder: Path) -> None:
    found = rendered(folder, HERMES, HI, tools=[TOOL], chat_template_kwargs={"enable_thinking": False})
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        HI,
        tools=[TOOL],
        chat_template=HERMES,
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=False,
    )
    assert found == theirs
    assert '<tools>{"type": "function"' in found
    assert found.endswith("<|user|>hi<|assistant|><think></think>")
    assert rendered(folder, HERMES, HI, tools=[], chat_template_kwargs={}) == "<|user|>hi<|assistant|>"
    assert rendered(folder, HERMES, HI, tools=None, chat_template_kwargs=None) == "<|user|>hi<|assistant|>"


def test_arguments_of_a_call_are_an_object_to_the_template(folder: Path) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": "ä"}}</tool_call>'
    for arguments in ('{"a": "ä"}', {"a": "ä"}):
        found = rendered(folder, HERMES, [*HI, called(arguments, times=2)])
        assert found == f"<|user|>hi<|assistant|>{text}{text}<|assistant|>"
    assert '"arguments": {}}' in rendered(folder, HERMES, [*HI, called("")])
    assert '"parameters": {"a": 1}}' in rendered(folder, LLAMA, [*HI, called('{"a": 1}')])


def test_messages_without_calls_do_not_show_the_key(folder: Path) -> None:
    """Clients write it into every message; Llama's template takes its presence for a call."""
    for calls in (None, []):
        messages = [*HI, {"role": "assistant", "content": "yo", "tool_calls": calls}]
        assert rendered(folder, LLAMA, messages) == "[user]hi[assistant]yo"


def test_the_reasoning_of_an_earlier_turn_has_the_name_that_templates_read(folder: Path) -> None:
    for name in ("reasoning", "reasoning_content"):
        messages = [*HI, {"role": "assistant", "content": "yo", name: "why"}]
        assert "<think>why</think>yo" in rendered(folder, HERMES, messages)


@pytest.mark.parametrize("arguments", ["{", "[1]", "7", 7, "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(folder: Path, arguments: Any) -> None:
    with pytest.raises(InvalidPrompt, match="arguments of a tool call of message 1 must be an object"):
        rendered(folder, HERMES, [*HI, called(arguments)])


def test_what_a_template_does_not_read_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(InvalidPrompt, match="chat template takes no tools"):
        rendered(folder, LLAMA, HI, tools=[TOOL])
    with pytest.raises(InvalidPrompt, match=r"reads no variable 'enable_thinkng'.*it reads enable_thinking"):
        rendered(folder, HERMES, HI, chat_template_kwargs={"enable_thinkng": True})


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_what_the_engine_sets_is_no_variable(folder: Path, name: str) -> None:
    with pytest.raises(InvalidPrompt, match=f"may not hold '{name}'"):
        rendered(folder, HERMES, HI, chat_template_kwargs={name: []})


@pytest.mark.parametrize(
    "options",
    [{"tools": {}}, {"tools": [{}]}, {"tools": [{"type": "function"}]}, {"chat_template_kwargs": []}],
)
def test_options_of_a_wrong_shape_are_refused(folder: Path, options: Any) -> None:
    with pytest.raises(InvalidPrompt, match="must be"):
        rendered(folder, HERMES, HI, **options)
