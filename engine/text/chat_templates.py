"""Finds the chat template that a model uses, and makes messages ready for it."""

import json
import re
from collections.abc import Container
from datetime import datetime
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, InvalidPrompt
from engine.text.template_probe import HELLO, TemplateProbe

if TYPE_CHECKING:
    from jinja2 import nodes

FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"
PROCESSORS_FILE = "chat_template.json"
DEFAULT = "default"
TOOL_USE = "tool_use"

#: Variables of a template that are not a request's to set.
RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
)

#: The role of instructions: OpenAI's newer name, and the name that most templates read.
DEVELOPER = "developer"
SYSTEM = "system"

#: Kinds of the parts of a message.
TEXT_ALONE = ("text",)
WITH_PICTURES = ("text", "image")

#: Marks of reasoning spans to look for in a model's text files, in this order.
REASONING_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)

Messages = list[dict[str, Any]]


def read_template(folder: Path, name: str | None) -> str | None:
    """Read a chat template of a model folder by its name; for None the default one, or the only one.

    Returns None if the folder has no template. Raises ConfigError, which lists the names, if no template has the name,
    or if there are several templates and none is the default.
    """
    try:
        templates = _read_templates(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"the chat templates in {folder} cannot be read: {error!r}") from error
    there_are = f"{folder} has {', '.join(map(repr, sorted(templates))) or 'no chat template'}"
    if name is not None:
        if name not in templates:
            raise ConfigError(f"chat_template={name!r} is no template of this model: {there_are}")
        return templates[name]
    if DEFAULT in templates:
        return templates[DEFAULT]
    if len(templates) < 2:
        return next(iter(templates.values()), None)
    raise ConfigError(
        f"chat_template must name one of several templates, none of them the default: {there_are}"
    )


def read_tool_template(folder: Path, name: str | None) -> str | None:
    """Read the template for chats with tools, as transformers does: TOOL_USE, unless another one is named.

    None if these chats take the template that `read_template` has read from the same files.
    """
    return _read_templates(folder).get(TOOL_USE) if name is None else None


def _read_templates(folder: Path) -> dict[str, str]:
    """Read all templates by name: from files of their own, else tokenizer_config.json, else PROCESSORS_FILE."""
    templates = {
        path.stem: path.read_text(encoding="utf-8") for path in (folder / FOLDER).glob("*.jinja")
    }
    if (folder / FILE).is_file():
        templates[DEFAULT] = (folder / FILE).read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", PROCESSORS_FILE):
        if not templates and (folder / name).is_file():
            content = (
                json.loads((folder / name).read_text(encoding="utf-8")).get("chat_template") or {}
            )
            if isinstance(content, str):
                templates = {DEFAULT: content}
            else:
                if not isinstance(content, dict):
                    content = {entry["name"]: entry["template"] for entry in content}
                templates = {str(key): str(template) for key, template in content.items()}
    return templates


@lru_cache(maxsize=16)
def read_variables(template: str) -> frozenset[str] | None:
    """Return the variables that a template reads and does not set; None if it cannot be parsed."""
    from jinja2 import meta

    tree = _parsed(template)
    return None if tree is None else frozenset(meta.find_undeclared_variables(tree))


def _parsed(template: str) -> "nodes.Template | None":
    """Parse a template; None if it cannot be parsed."""
    from jinja2 import Environment, TemplateError

    # transformers marks with this tag what an assistant wrote; jinja2 by itself does not know it
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)
    try:
        return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except (TemplateError, RecursionError):
        return None


CLOCK = "strftime_now"


def read_clock(template: str | None) -> tuple[str, ...] | None:
    """Return the formats in which a template writes the present time; () if it writes none.

    Returns None if nobody can say beforehand what the template writes: it computes a format, or writes something
    random.
    """
    from jinja2 import nodes

    tree = None if template is None else _parsed(template)
    if tree is None:
        return ()
    names = [name.name for name in tree.find_all(nodes.Name)]
    if "lipsum" in names or any(node.name == "random" for node in tree.find_all(nodes.Filter)):
        return None
    calls = [call for call in tree.find_all(nodes.Call) if _is_clock(call.node)]
    # Such as "strftime_now is defined".
    tests = [test for test in tree.find_all(nodes.Test) if _is_clock(test.node)]
    formats = [
        call.args[0].value
        for call in calls
        if len(call.args) == 1 and isinstance(call.args[0], nodes.Const)
    ]
    # A format is computed, or the function is used otherwise than by calls and tests, such as under another name.
    if len(formats) < len(calls) or names.count(CLOCK) > len(calls) + len(tests):
        return None
    return tuple(sorted(set(map(str, formats))))


def at_time(template: str, now: float) -> str:
    """Return a template that writes this Unix time as the present. It stays as it is if `read_clock` finds no formats.

    A macro takes the place of the function that gives the time, as transformers hands no functions to templates.
    """
    formats = read_clock(template)
    if not formats:
        return template
    moment = datetime.fromtimestamp(now)
    texts = json.dumps({pattern: moment.strftime(pattern) for pattern in formats})
    # The empty expression behind the macro keeps a line break with which the template begins.
    return f"{{% macro {CLOCK}(format) %}}{{{{ {texts}[format] }}}}{{% endmacro %}}{{{{ '' }}}}{template}"


def _is_clock(node: "nodes.Node") -> bool:
    return getattr(node, "name", None) == CLOCK


def check_variables(values: object, variables: frozenset[str] | None) -> dict[str, Any]:
    """Return chat_template_kwargs, {} for None. Raises InvalidPrompt for variables that the template does not take.

    variables: those that the template reads, None if not known.
    """
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise InvalidPrompt(
            f"chat_template_kwargs must be an object of names, got {type(values).__name__}"
        )
    for name in values:
        if name in RESERVED:
            raise InvalidPrompt(
                f"chat_template_kwargs may not hold {name!r}, which the engine sets"
            )
        if variables is not None and name not in variables:
            known = ", ".join(sorted(variables - RESERVED)) or "none"
            raise InvalidPrompt(
                f"the chat template reads no variable {name[:64]!r} of chat_template_kwargs; it reads {known}"
            )
    return values


def check_tools(tools: object) -> list[dict[str, Any]] | None:
    """Return `tools`; None for an empty list. Raises InvalidPrompt unless they are functions in OpenAI's shape."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise InvalidPrompt(f"tools must be a list of functions, got {type(tools).__name__}")
    for i, tool in enumerate(tools):
        function = (
            tool.get("function")
            if isinstance(tool, dict) and tool.get("type") == "function"
            else None
        )
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidPrompt(
                f"tool {i} must be {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}"
            )
    return tools


def for_template(
    messages: object,
    *,
    takes_parts: bool | None,
    kinds: Container[str] = TEXT_ALONE,
    takes_developer: bool = True,
) -> Messages:
    """Return OpenAI's messages as templates expect them, which differ in parts, tool calls and reasoning.

    takes_parts: True if the template reads parts as well as texts, False if only texts (parts are joined by line
    breaks), None if only parts. kinds: the kinds of parts allowed. takes_developer: False turns the role `developer`
    into `system`. Raises InvalidPrompt unless these are messages of such parts.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidPrompt(
            f"messages must be a list of at least one message, got {type(messages).__name__}"
        )
    ready = [
        _for_template(message, i, takes_parts=takes_parts, kinds=kinds)
        for i, message in enumerate(messages)
    ]
    for message in ready:
        if message["role"] == DEVELOPER and not takes_developer:
            message["role"] = SYSTEM
    return ready


#: Roles that every template may be asked to read.
ROLES = ("system", "developer", "user", "assistant", "tool")


def check_roles(messages: Messages, template: str) -> None:
    """Raise InvalidPrompt for a role that is none of ROLES and that the template does not name.

    Most templates write any role as it is, and the model has never seen such a turn.
    """
    for i, message in enumerate(messages):
        role = message["role"]
        if role in ROLES or f"'{role}'" in template or f'"{role}"' in template:
            continue
        raise InvalidPrompt(
            f"message {i} has the role {role[:64]!r}, which this model's chat template does not name: expected "
            f"{', '.join(ROLES)}"
        )


def _check_part(part: object, i: int, kinds: Container[str]) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidPrompt(f"a part of message {i} must be an object with a type, such as 'text'")
    if kind not in kinds:
        raise InvalidPrompt(
            f"message {i} holds a part of the type {kind!r}: this engine reads text alone, no images, audio or video"
        )
    if kind == "text" and not isinstance(part.get("text"), str):
        raise InvalidPrompt(f"a part of message {i} of the type 'text' must hold its text")


def _for_template(
    entry: object, i: int, *, takes_parts: bool | None, kinds: Container[str]
) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        raise InvalidPrompt(f"message {i} must be an object with a role and a content")
    message: dict[str, Any] = {key: value for key, value in entry.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            _check_part(part, i, kinds)
        if takes_parts is False:
            message["content"] = "\n".join(part["text"] for part in content)
        else:  # a template does not get the pictures themselves
            message["content"] = [
                part if part["type"] == "text" else {"type": part["type"]} for part in content
            ]
    elif takes_parts is None and isinstance(content, str):
        message["content"] = [{"type": "text", "text": content}]
    if "reasoning" in message:
        message.setdefault("reasoning_content", message["reasoning"])
    calls = message.get("tool_calls")
    if calls is None:
        return message
    del message["tool_calls"]
    if not isinstance(calls, list):
        raise InvalidPrompt(f"tool_calls of message {i} must be a list, got {type(calls).__name__}")
    if calls:
        message["tool_calls"] = [_call_for_template(call, i) for call in calls]
        message.setdefault("content", "")
    return message


def _call_for_template(call: Any, i: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidPrompt(
            f"a tool call of message {i} must be {{'type': 'function', 'function': {{'name': ..., 'arguments': ...}}}}"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise InvalidPrompt(
            f"the arguments of a tool call of message {i} must be an object, or its JSON"
        )
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def with_short_ids(messages: Messages) -> Messages:
    """Return the messages with tool call ids of nine letters and digits. Equal ids stay equal."""
    shortened = []
    for message in messages:
        message = {**message}
        if isinstance(message.get("tool_call_id"), str):
            message["tool_call_id"] = _short_id(message["tool_call_id"])
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                if isinstance(call.get("id"), str):
                    call = {**call, "id": _short_id(call["id"])}
                calls.append(call)
            message["tool_calls"] = calls
        shortened.append(message)
    return shortened


def _short_id(call_id: str) -> str:
    if re.fullmatch("[A-Za-z0-9]{9}", call_id):
        return call_id
    return blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()[:9]


def takes_parts(probe: TemplateProbe) -> bool | None:
    """Whether a template writes the same for a list of parts as for a text; None if it writes parts alone."""
    in_parts = probe.texts([{"role": "user", "content": [{"type": "text", "text": "text"}]}])
    alone = probe.texts([HELLO])
    if not any("text" in text for text in alone):
        return None if any("text" in text for text in in_parts) else False
    return in_parts == alone
