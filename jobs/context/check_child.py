"""Checks answers, and calls tools, in a child process.

This module imports only what a check needs, because each child imports it anew.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial, wraps
from hashlib import blake2b
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from jobs.context.own_sources import hash_of, own_files
from sandbox.child import Worker, unlimited_memory
from sandbox.recent import Recent

#: The most characters of a reason. The reason becomes part of a prompt and of a column.
MAX_REASON_CHARS = 2_000

Check = Callable[[Any, str], object]
"""Takes a row and the text of its answer. Returns None, or the reason why the text is not valid.

The functions of two kinds return something else: for `agree_on` a hash or None, for `tool` JSON. See their makers.
"""


class Unusable(Exception):
    """Raised with the reason why a check can never work."""


def check(worker: Worker) -> Iterator[dict[str, Any]]:
    """Reply to a question about a check. What the check's function prints goes to the log."""
    yield _reply(worker.question)


def _reply(question: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a question.

    Each question names a check, which is compiled. A question may also have a text to check, or ask for the version of
    the check's function. The reply is stale if the function's files have changed since this process imported them.
    """
    try:
        check = _compiled(question["check"])
    except Unusable as error:
        return {"problem": _cut(str(error))}
    except Exception as error:  # noqa: BLE001  # a schema may be anything, and its library raises what it likes
        return {"problem": _cut(f"check cannot be read ({type(error).__name__}: {error})")}

    kind, _ = _kind_and_rule(question["check"])
    has_files = kind in ("function", "tool")
    if has_files and _version(check) != hash_of(_files(check)):
        return {"is_stale": True}
    if "version" in question:
        return {"version": _version(check)}
    if "text" not in question:
        return {}
    if kind in ("agree_on", "tool"):
        # The functions made for these kinds are our own. They raise nothing, and return a hash or JSON, which must not
        # be cut like a reason.
        return {"outcome": check(question["row"], question["text"])}
    return {"outcome": _reason(check, question["row"], question["text"])}


def _kind_and_rule(text: str) -> tuple[str, Any]:
    """Return a check's kind, and its schema, pattern or function. text: the check as JSON."""
    [(kind, rule)] = json.loads(text).items()
    return kind, rule


@lru_cache(maxsize=64)
def _files(check: Check) -> list[Path]:
    """Return the files that define a function or a callable object's class, and the files that they import.

    The files are found once, when the function is imported.
    """
    function: Any = inspect.unwrap(check)
    definition: Any = function if inspect.isroutine(function) else type(function)
    with suppress(OSError, TypeError):
        path = inspect.getsourcefile(definition)
        if path is not None:
            return own_files(definition.__module__, Path(path).resolve())
    return []


@lru_cache(maxsize=64)
def _version(check: Check) -> str:
    """Return the hash that a function's files had when this process imported the function."""
    return hash_of(_files(check))


def _reason(check: Check, row: Any, text: str) -> str | None:
    """Check a text. Return why it is not valid; None if it is valid."""
    try:
        reason = check(row, text)
    except BaseException as error:  # noqa: BLE001  # a function raises what it likes
        reason = f"the check raised {type(error).__name__}: {error}"
    if reason is None:
        return None
    if not isinstance(reason, str):
        reason = (
            f"the check returned {type(reason).__name__}, expected None or the reason as a text"
        )
    return _cut(reason) or "the check gave no reason"


def _cut(text: str) -> str:
    """Return a reason as valid Unicode, cut after MAX_REASON_CHARS."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]}..."


#: The checks that were compiled last, by their JSON.
_known: Recent[Check] = Recent()


def _compiled(text: str) -> Check:
    """Return a compiled check. text: the check as JSON. The last compiled checks are cached."""
    check = _known.get(text)
    if check is None:
        kind, rule = _kind_and_rule(text)
        make_check = _MAKE[kind]
        check = make_check(rule)
        has_dropped_check = _known.put(text, check)
        if has_dropped_check:
            re.purge()  # the cache of `re` would keep hundreds of patterns that nobody uses any more
    return check


def _pattern(pattern: str) -> Check:
    """Make a check that accepts a text if the whole text matches a pattern. Raises Unusable."""
    try:
        expression = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise Unusable(f"regex of check is no pattern of Python's re: {error}") from None

    def check(row: Any, text: str) -> str | None:
        """Return None if a text matches; otherwise, say that it does not."""
        if expression.fullmatch(text):
            return None
        return f"it does not match the pattern {pattern}"

    return check


def _function(dotted: str) -> Check:
    """Import a function by its dotted name. Raises Unusable."""
    module, _, name = dotted.rpartition(".")
    try:
        with unlimited_memory():
            # The colon marks the module's end, because the module may have a submodule with the function's name.
            function = resolve_name(f"{module}:{name}")
    except BaseException as error:  # a module may raise anything
        raise Unusable(
            f"function of check: {dotted} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    if not callable(function):
        raise Unusable(
            f"function of check: {dotted} is a {type(function).__name__}, expected a function"
        )
    check: Check = function
    # This call fills the cache of `_version` with a hash of the files as they were imported.
    _version(check)
    return check


def _schema(schema: dict[str, Any]) -> Check:
    """Make a check that accepts a text if it is JSON and follows a schema. Raises Unusable."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    validator_class = validator_for(schema, default=Draft202012Validator)
    try:
        validator_class.check_schema(schema)
    except SchemaError as error:
        raise Unusable(
            f"json of check is no JSON schema: {error.json_path}: {error.message}"
        ) from None
    # This registry fetches no schema from outside.
    validator = validator_class(schema, registry=REGISTRY)

    def check(row: Any, text: str) -> str | None:
        """Return None if a text follows the schema; otherwise, say how it violates the schema."""
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            return f"it is not JSON: {error}"
        violation = best_match(validator.iter_errors(value))
        if violation is None:
            return None
        return f"{violation.json_path}: {violation.message}"

    return check


def _agreement(agree_on: str) -> Check:
    """Make a function that hashes one part of a text. The function returns None for a text without that part.

    agree_on: names the part: "json" for the whole text as JSON, a JSON pointer, or a pattern. Raises Unusable.
    """
    part_of: Callable[[str], str | None]
    if agree_on == "json":
        part_of = partial(_json_part, pointer="")  # the whole text
    elif agree_on.startswith("/"):
        part_of = partial(_json_part, pointer=agree_on)
    else:
        try:
            part_of = partial(_matched, re.compile(agree_on))
        except (re.error, OverflowError, RecursionError) as error:
            raise Unusable(f"agree_on is no pattern of Python's re: {error}") from None

    def hash_of_part(row: Any, text: str) -> str | None:
        """Return a hash of the part of a text that `agree_on` names; None for a text without that part."""
        part = part_of(text)
        if part is None:
            return None
        return blake2b(part.encode(errors="replace"), digest_size=16).hexdigest()

    return hash_of_part


def _matched(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the text that a pattern's first group matches, or the whole match if the pattern has no group.

    Returns None for no match.
    """
    match = pattern.search(text)
    if match is None:
        return None
    return match[1] if pattern.groups > 0 else match[0]


def _json_part(text: str, pointer: str) -> str | None:
    """Return the value at a JSON pointer (RFC 6901) as canonical JSON; None if there is no such value."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_number)
        _, *steps = pointer.split("/")  # a pointer is empty, or begins with a slash
        for step in steps:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list):
                value = value[_array_index(name)]
            elif isinstance(value, dict):
                value = value[name]
            else:
                return None
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return json.dumps(value, sort_keys=True)


def _number(text: str) -> float | int:
    """Parse a number of JSON. A whole number becomes an int, so that 1 and 1.0 are written alike."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _array_index(name: str) -> int:
    """Return an index of an array. Raises ValueError for a name that JSON pointers do not allow, such as -1 and 01."""
    index = int(name)
    if name != str(index) or index < 0:
        raise ValueError(f"{name} is no index of an array")
    return index


#: The most characters of a tool's result. The result stays in the chat.
MAX_RESULT_CHARS = 1 << 20


def _tool(dotted: str) -> Check:
    """Make a function that carries out a tool call, and returns its result or error as JSON."""
    function: Any = _function(dotted)

    @wraps(function)
    def call(row: Any, text: str) -> str:
        """Call the tool, and return its result or its error as JSON. text: the call's arguments as JSON."""
        try:
            arguments = json.loads(text or "{}")  # a call without arguments may have no text
        except (ValueError, RecursionError) as error:
            return json.dumps({"error": f"its arguments are not JSON: {error}"})
        if not isinstance(arguments, dict):
            return json.dumps({"error": "its arguments are no JSON object"})
        try:
            value = function(**arguments)
            result = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except BaseException as error:  # noqa: BLE001  # a function raises what it likes
            return json.dumps({"error": _cut(f"it raised {type(error).__name__}: {error}")})
        if len(result) > MAX_RESULT_CHARS:
            return json.dumps({"error": f"its result has more than {MAX_RESULT_CHARS} characters"})
        return json.dumps({"result": result})

    return call


def _refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and Infinity. Python's parser reads them, but JSON does not have them."""
    raise ValueError(f"{name} is no value of JSON")


_MAKE: dict[str, Callable[[Any], Check]] = {
    "agree_on": _agreement,
    "function": _function,
    "json": _schema,
    "regex": _pattern,
    "tool": _tool,
}
