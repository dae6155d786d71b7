"""A model's chat templates: which one is used, and messages made ready for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, InvalidPrompt

FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"
PROCESSORS_FILE = "chat_template.json"
DEFAULT = "default"

Messages = list[dict[str, Any]]


def read_template(folder: Path, name: str | None) -> str | None:
    """The chat template of a model folder by its name; for None the default one, or the only one.

    None if the folder has no template. Raises ConfigError, which names those there are, if none has this
    name, or if no name is given and there are several, none of them the default.
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


def _read_templates(folder: Path) -> dict[str, str]:
    """All templates by their names: from files of their own, else tokenizer_config.json, else the file that
    processors of images once had. The first of these that has any has all."""
    found = {path.stem: path.read_text(encoding="utf-8") for path in (folder / FOLDER).glob("*.jinja")}
    if (folder / FILE).is_file():
        found[DEFAULT] = (folder / FILE).read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", PROCESSORS_FILE):
        if not found and (folder / name).is_file():
            content = json.loads((folder / name).read_text(encoding="utf-8")).get("chat_template") or {}
            if isinstance(content, str):
                found = {DEFAULT: content}
            else:
                pairs = content.items() if isinstance(content, dict) else map(_pair, content)
                found = {str(key): str(template) for key, template in pairs}
    return found


def _pair(entry: dict[str, str]) -> tuple[str, str]:
    return entry["name"], entry["template"]


def check_messages(messages: object) -> None:
    """Raise InvalidPrompt unless these are messages that a template can be given, with text alone."""
    if not isinstance(messages, list) or not messages:
        raise InvalidPrompt(f"messages must be a list of at least one message, got {type(messages).__name__}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidPrompt(f"message {i} must be an object with a role and a content")
        if isinstance(message.get("content"), list):
            for part in message["content"]:
                _check_part(part, i)


def _check_part(part: object, i: int) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidPrompt(f"a part of message {i} must be an object with a type, such as 'text'")
    if kind != "text":
        raise InvalidPrompt(
            f"message {i} holds a part of the type {kind!r}: this engine reads text alone, no images, audio "
            "or video"
        )
    if not isinstance(part.get("text"), str):
        raise InvalidPrompt(f"a part of message {i} of the type 'text' must hold its text")


def takes_parts(render: Callable[[Messages], str]) -> bool:
    """Whether a template reads a content that is a list of parts as it reads the same content as a text."""
    try:
        parts = render([{"role": "user", "content": [{"type": "text", "text": "text"}]}])
        return parts == render([{"role": "user", "content": "text"}])
    except Exception:  # noqa: BLE001 - whatever a template raises, it does not take them
        return False


def with_joined_parts(messages: Messages) -> Messages:
    """The messages, each content one text; parts of a content are joined by a line's end."""
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
