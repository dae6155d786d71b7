"""Which chat template is used, and how messages, tools and variables reach it."""

import json
import shutil
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine import ConfigError, InvalidPrompt
from engine.text.chat_templates import read_clock
from engine.text.tokenizer import Tokenizer
from tests.engine.text_models import make_text_model

HI = [{"role": "user", "content": "hi"}]
TURNS = "{{ bos_token }}{% for m in messages %}[%s {{ m['content'] }}]{% endfor %}"
GEMMA_2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN_VL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|image_pad|>{% elif 'text' in part %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


def turns(name: str) -> str:
    return TURNS.replace("%s", name)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_text_model(tmp_path / "model", "llama3")


def write_templates(folder: Path, where: str, *names: str) -> None:
    """Templates that say their names, in files or in tokenizer_config.json."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if where == "files":
        (folder / "additional_chat_templates").mkdir()
        for name in names:
            file = (
                "chat_template.jinja"
                if name == "default"
                else f"additional_chat_templates/{name}.jinja"
            )
            (folder / file).write_text(turns(name))
    else:
        config["chat_template"] = [{"name": name, "template": turns(name)} for name in names]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def rendered(folder: Path, name: str | None = None, messages: list[dict[str, Any]] = HI) -> str:
    tokenizer = Tokenizer(folder, name)
    return str(tokenizer._tokenizer.decode(tokenizer.chat_token_ids(messages)))


@pytest.mark.parametrize("where", ["files", "tokenizer_config.json"])
def test_the_default_template_is_used_and_others_by_their_names(model: Path, where: str) -> None:
    write_templates(model, where, "rag", "default", "tool_use")
    theirs = AutoTokenizer.from_pretrained(model).apply_chat_template(HI, tokenize=False)
    assert (
        rendered(model) == rendered(model, "default") == theirs == "<|begin_of_text|>[default hi]"
    )
    assert rendered(model, "rag") == "<|begin_of_text|>[rag hi]"
    with pytest.raises(
        ConfigError, match=r"'default_' is no template.*has 'default', 'rag', 'tool_use'"
    ):
        Tokenizer(model, "default_")


def test_a_file_of_its_own_goes_before_the_others(model: Path) -> None:
    """And where there is nothing else, that of a processor of images, in which older folders have it."""
    (model / "chat_template.json").write_text(json.dumps({"chat_template": turns("processor")}))
    assert rendered(model) == "<|begin_of_text|>[processor hi]"
    write_templates(model, "tokenizer_config.json", "default")
    assert rendered(model) == "<|begin_of_text|>[default hi]"
    (model / "chat_template.jinja").write_text(turns("file"))
    assert rendered(model) == "<|begin_of_text|>[file hi]"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", b"\xff"),
        ("chat_template.json", b"[]"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "a"}]}'),
        ("tokenizer_config.json", b'{"chat_template": 7}'),
    ],
)
def test_templates_that_cannot_be_read_are_told_at_start(
    model: Path, file: str, content: bytes
) -> None:
    (model / file).write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"chat templates in .* cannot be read|tokenizer in .* cannot be loaded"
    ):
        Tokenizer(model)


@pytest.mark.parametrize(
    "file", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
)
def test_a_template_with_a_syntax_error_is_told_at_start(model: Path, file: str) -> None:
    (model / file).parent.mkdir(exist_ok=True)
    (model / "chat_template.jinja").write_text(turns("default"))
    (model / file).write_text("\n{% if %}")
    with pytest.raises(ConfigError, match="the chat template cannot be read, line 2"):
        Tokenizer(model)


@pytest.mark.parametrize(
    "content",
    [
        "{% macro again() %}{{ again() }}{% endmacro %}{% if messages %}{{ again() }}{% endif %}",
        "{{ 1 // 0 }}",
        "{{ messages[9]['role'] }}",
        "{{ [][3] + 1 }}",
    ],
)
def test_a_template_that_breaks_fails_the_request_by_name(model: Path, content: str) -> None:
    (model / "chat_template.jinja").write_text(content)
    with pytest.raises(InvalidPrompt, match="chat template refused these messages"):
        rendered(model)


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


def test_parts_of_text_reach_a_template_as_it_takes_them(model: Path) -> None:
    """One that reads parts gets them, one that reads texts gets one text, a line for each part."""
    (model / "chat_template.jinja").write_text(QWEN_VL)
    assert (
        rendered(model, messages=parts("a", "b"))
        == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    )
    (model / "chat_template.jinja").write_text(GEMMA_2)
    assert rendered(model, messages=parts("a")) == rendered(
        model, messages=[{"role": "user", "content": "a"}]
    )
    assert "a\nb<end_of_turn>" in rendered(model, messages=parts("a", "b"))


@pytest.mark.parametrize("template", [QWEN_VL, GEMMA_2])
@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video"])
def test_what_is_no_text_is_refused_by_its_name(model: Path, template: str, kind: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    messages = parts("a")
    messages[0]["content"].append({"type": kind, kind: "x"})
    with pytest.raises(InvalidPrompt, match=f"message 0 holds a part of the type '{kind}'"):
        rendered(model, messages=messages)


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


def with_options(model: Path, template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    (model / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(model)
    return str(tokenizer._tokenizer.decode(tokenizer.chat_token_ids(messages, **options)))


def called(arguments: Any, *, times: int = 1) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call] * times}


def test_tools_and_variables_are_the_templates(model: Path) -> None:
    found = with_options(
        model, HERMES, HI, tools=[TOOL], chat_template_kwargs={"enable_thinking": False}
    )
    theirs = AutoTokenizer.from_pretrained(model).apply_chat_template(
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
    assert (
        with_options(model, HERMES, HI, tools=[], chat_template_kwargs={})
        == "<|user|>hi<|assistant|>"
    )
    assert (
        with_options(model, HERMES, HI, tools=None, chat_template_kwargs=None)
        == "<|user|>hi<|assistant|>"
    )


def test_arguments_of_a_call_are_an_object_to_the_template(model: Path) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": "ä"}}</tool_call>'
    for arguments in ('{"a": "ä"}', {"a": "ä"}):
        found = with_options(model, HERMES, [*HI, called(arguments, times=2)])
        assert found == f"<|user|>hi<|assistant|>{text}{text}<|assistant|>"
    assert '"arguments": {}}' in with_options(model, HERMES, [*HI, called("")])
    assert '"parameters": {"a": 1}}' in with_options(model, LLAMA, [*HI, called('{"a": 1}')])


def test_messages_without_calls_do_not_show_the_key(model: Path) -> None:
    """Clients write it into every message; Llama's template takes its presence for a call."""
    for calls in (None, []):
        messages = [*HI, {"role": "assistant", "content": "yo", "tool_calls": calls}]
        assert with_options(model, LLAMA, messages) == "[user]hi[assistant]yo"


def test_the_reasoning_of_an_earlier_turn_has_the_name_that_templates_read(model: Path) -> None:
    for name in ("reasoning", "reasoning_content"):
        messages = [*HI, {"role": "assistant", "content": "yo", name: "why"}]
        assert "<think>why</think>yo" in with_options(model, HERMES, messages)


@pytest.mark.parametrize("arguments", ["{", "[1]", "7", 7, "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(model: Path, arguments: Any) -> None:
    with pytest.raises(
        InvalidPrompt, match="arguments of a tool call of message 1 must be an object"
    ):
        with_options(model, HERMES, [*HI, called(arguments)])


def test_what_a_template_does_not_read_is_refused_by_name(model: Path) -> None:
    with pytest.raises(InvalidPrompt, match="chat template takes no tools"):
        with_options(model, LLAMA, HI, tools=[TOOL])
    with pytest.raises(
        InvalidPrompt, match=r"reads no variable 'enable_thinkng'.*it reads enable_thinking"
    ):
        with_options(model, HERMES, HI, chat_template_kwargs={"enable_thinkng": True})


#: Templates that know some roles alone, each as some real model's does.
KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role == 'system' %}S:{{ m.content }}{% elif m.role == 'user' %}U:{{ m.content }}"
    "{% elif m.role == 'assistant' %}A:{{ m.content | trim }}{% endif %}{% endfor %}"
)
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}S:{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}"
)
RAISES = KNOWN_ROLES.replace(
    "{% endif %}{% endfor %}",
    "{% else %}{{ raise_exception('no ' + m.role) }}{% endif %}{% endfor %}",
)
ANY_ROLE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' and m.role != 'developer' %}"
    "{{ m.content }}{% endif %}{% endfor %}"
)
#: As Hermes' and Command R's for tools: it raises where there are none.
NEEDS_TOOLS = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + HERMES


def chat(*turns: str) -> list[dict[str, Any]]:
    return [
        {"role": role, "content": content}
        for role, _, content in (turn.partition(":") for turn in turns)
    ]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (KNOWN_ROLES, "S:be briefU:hi"),
        (FIRST_SYSTEM, "S:be brief[user]hi"),
        (RAISES, "S:be briefU:hi"),
        (ANY_ROLE, "[developer]be brief[user]hi"),
    ],
)
def test_a_developers_message_is_a_systems_where_the_template_reads_no_other(
    model: Path, template: str, text: str
) -> None:
    assert with_options(model, template, chat("developer:be brief", "user:hi")) == text


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (NO_SYSTEM, chat("developer:be brief", "user:hi"), "message 0, of the role 'developer'"),
        (NO_SYSTEM, chat("system:be brief", "user:hi"), "message 0, of the role 'system'"),
        (KNOWN_ROLES, chat("user:hi", "critic:no"), "message 1 has the role 'critic', which"),
        (ANY_ROLE, chat("user:hi", "User:no"), "message 1 has the role 'User', which"),
        (
            FIRST_SYSTEM,
            chat("user:hi", "system:be brief", "user:ho"),
            "message 1, of the role 'system'",
        ),
        (
            FIRST_SYSTEM,
            chat("system:a", "developer:b", "user:hi"),
            "message 1, of the role 'system'",
        ),
        (KNOWN_ROLES, chat("user:hi", "tool:3"), "message 1, of the role 'tool'"),
        (RAISES, chat("user:hi", "tool:3"), "refused these messages: no tool"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused_by_its_role(
    model: Path, template: str, messages: list[dict[str, Any]], says: str
) -> None:
    with pytest.raises(InvalidPrompt, match=says):
        with_options(model, template, messages)


def test_a_role_that_the_template_names_is_read(model: Path) -> None:
    template = "{% if messages[0].role == 'critic' %}!{% endif %}" + ANY_ROLE
    assert with_options(model, template, chat("critic:no")) == "![critic]no"


def test_tool_calls_that_the_template_leaves_out_are_refused(model: Path) -> None:
    only_name = HERMES.replace('"arguments": {{ f.arguments | tojson }}', "")
    for template in (KNOWN_ROLES, ANY_ROLE, only_name):
        with pytest.raises(InvalidPrompt, match="leaves out the tool calls of message 1"):
            with_options(model, template, [*HI, called('{"a": 1}')])
    assert '"name": "add", }' in with_options(model, only_name, [*HI, called("{}")]), (
        "there are no arguments to show"
    )


def test_a_template_that_raises_without_tools_takes_them(model: Path) -> None:
    assert '"name": "add"' in with_options(model, NEEDS_TOOLS, HI, tools=[TOOL])
    assert '"name": "add"' in with_options(model, NEEDS_TOOLS, parts("hi"), tools=[TOOL])
    with pytest.raises(InvalidPrompt, match="refused these messages: no tools"):
        with_options(model, NEEDS_TOOLS, HI)


def test_chats_with_tools_take_the_template_for_them(model: Path) -> None:
    """As in transformers: the one named "tool_use", unless the engine is to use another."""
    named = {"default": ANY_ROLE, "tool_use": NEEDS_TOOLS}
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": name, "template": template} for name, template in named.items()
    ]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(model).chat_text(HI) == "[user]hi"
    assert "<tools>" in Tokenizer(model).chat_text(HI, tools=[TOOL])
    assert "</think>" in Tokenizer(model).chat_text(
        HI, tools=[TOOL], chat_template_kwargs={"enable_thinking": False}
    )
    with pytest.raises(InvalidPrompt, match="takes no tools"):
        Tokenizer(model, "default").chat_text(HI, tools=[TOOL])


def test_ids_of_calls_are_shortened_where_the_template_demands_it(model: Path) -> None:
    """As Mistral's does: with ids that this engine, or OpenAI, gave no chat with calls could go on."""
    strict = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}"
        "{{ raise_exception('length 9!') }}{% endif %}{{ call.function | tojson }}{{ call.id }}{% endfor %}"
        "{{ m.content }}{% if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %} {% endfor %}"
    )
    answer = {"role": "tool", "content": "3", "tool_call_id": "call_1"}
    shown = with_options(model, strict, [*HI, called("{}"), answer]).split()
    assert shown[-1] == "3" + shown[-2][-9:]
    kept = [*HI, called("{}"), answer]
    kept[1]["tool_calls"][0]["id"] = kept[2]["tool_call_id"] = "abcdefgh1"
    assert with_options(model, strict, kept).count("abcdefgh1") == 2
    assert "call_1" in with_options(
        model, strict.replace("!= 9", "== 0"), [*HI, called("{}"), answer]
    )


def test_names_and_ids_that_no_template_reads_are_told_once(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "chat_template.jinja").write_text(LLAMA)
    tokenizer = Tokenizer(model)
    answer = {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": "add"}
    for _ in range(2):
        tokenizer.chat_text([*HI, called("{}") | {"content": "so"}, answer])
    told = [
        record.getMessage() for record in caplog.records if "does not read" in record.getMessage()
    ]
    assert len(told) == 3
    assert all(
        any(subject in line for line in told) for subject in ("`name`", "ids", "text beside")
    )
    caplog.clear()
    (model / "chat_template.jinja").write_text(
        LLAMA.replace("m.content + ''", "[m.content, m.name, m.tool_call_id]")
    )
    Tokenizer(model).chat_text([*HI, {**answer}])
    assert not caplog.records


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_what_the_engine_sets_is_no_variable(model: Path, name: str) -> None:
    with pytest.raises(InvalidPrompt, match=f"may not hold '{name}'"):
        with_options(model, HERMES, HI, chat_template_kwargs={name: []})


@pytest.mark.parametrize(
    "options",
    [
        {"tools": {}},
        {"tools": [{}]},
        {"tools": [{"type": "function"}]},
        {"chat_template_kwargs": []},
    ],
)
def test_options_of_a_wrong_shape_are_refused(model: Path, options: Any) -> None:
    with pytest.raises(InvalidPrompt, match="must be"):
        with_options(model, HERMES, HI, **options)


@pytest.mark.parametrize(
    ("template", "formats"),
    [
        ("{{ messages }}", ()),
        ("{{ strftime_now('%d %b %Y') }}", ("%d %b %Y",)),
        (
            "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{{ strftime_now('%d') }}{% endif %}",
            ("%Y", "%d"),
        ),
        ("{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}", ("%Y",)),
        ("{% set f = '%Y' %}{{ strftime_now(f) }}", None),
        ("{% set now = strftime_now %}{{ now('%Y') }}", None),
        ("{{ messages | random }}", None),
        ("{{ lipsum() }}", None),
        ("{{ no template", ()),
        (None, ()),
    ],
)
def test_the_formats_in_which_a_template_writes_the_time(
    template: str | None, formats: tuple[str, ...] | None
) -> None:
    assert read_clock(template) == formats


def test_a_template_gets_the_time_that_a_request_names(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folders["gqa1_untied"], tmp_path / "copy"))
    (copy / "chat_template.jinja").write_text(
        "\n{% macro day() %}{{ strftime_now('%d') }}{% endmacro %}\n"
        " {% if strftime_now is defined %}{{ day() }}{% endif %}{{ strftime_now('%Y') | int }}{{ messages[0].content }}"
    )
    tokenizer = Tokenizer(copy)
    messages = [{"role": "user", "content": "a"}]
    now = time.time()
    assert tokenizer.chat_text(messages, now=now) == tokenizer.chat_text(messages)
    assert tokenizer.chat_text(messages, now=datetime(1971, 2, 5).timestamp()) == "\n051971a", (
        "blocks leave no spaces"
    )
