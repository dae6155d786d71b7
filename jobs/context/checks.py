"""Checks answers in child processes, within a time limit.

A pattern that backtracks holds Python's global lock, and a user's function may do anything. In the worker's own
process, both would hold up the engine.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from jobs.common.display import MAX_NAME_CHARS, brief
from jobs.context.values import some_text, truth, whole_number
from jobs.errors import InvalidJob, InvalidValue, check_limit, wrong_value_error
from sandbox import Child, ChildFailed, ChildOutOfMemory, ChildTooSlow, Limits, Pool

#: The kinds of checks that producers may ask for.
KINDS = ("function", "json", "regex")
#: A further kind, for our own use: it hashes the part of a text that is compared with other texts.
AGREE_ON = "agree_on"
#: A further kind, for our own use: it carries out the call of a tool.
TOOL = "tool"
DEFAULT_MAX_ATTEMPTS = 3
MOST_ATTEMPTS = 100
#: The most characters of a check's schema, pattern or function.
MAX_CHARS = 1 << 20
#: The most characters of a repair template. Each prompt that is tried again holds the template's text.
MAX_REPAIR_CHARS = 1 << 16
#: How many times the reason may stand in a repair template.
MAX_REASONS = 8
#: Stands for the reason in a repair template.
REASON = "{reason}"

CHAT_REPAIR = f"This answer is not valid: {REASON}\nAnswer again, with the corrected answer alone."
PROMPT_REPAIR = f"\n\nThis answer is not valid: {REASON}\nThe corrected answer alone:\n"


@dataclass(frozen=True)
class RepairOptions:
    """How answers are checked, and when a prompt is asked again.

    check: {"json": schema}, {"regex": pattern} or {"function": dotted name}; None for no check.
    max_attempts: the most times that a prompt is asked, including the first time.
    continue_on_length: whether an answer that ended with "length" is continued.
    repair_template: the text that asks for another answer; None for CHAT_REPAIR or PROMPT_REPAIR.
    """

    check: Mapping[str, Any] | None = None
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    continue_on_length: bool = False
    repair_template: str | None = None

    @cached_property
    def may_ask_again(self) -> bool:
        """Whether a prompt may be asked again."""
        return self.check is not None or self.continue_on_length

    @cached_property
    def check_text(self) -> str:
        """Return the check as JSON. Equal checks have equal texts."""
        return json.dumps(self.check, sort_keys=True)

    @property
    def function(self) -> str | None:
        """Return the dotted name of the check's function or tool; None if it has neither."""
        check = self.check or {}
        return check.get("function") or check.get(TOOL)

    def repair_text(self, reason: str, is_chat: bool) -> str:
        """Return the text that follows a wrong answer and asks for another one. reason: why the answer is wrong."""
        usual_template = CHAT_REPAIR if is_chat else PROMPT_REPAIR
        template = self.repair_template or usual_template
        return template.replace(REASON, reason)


NO_REPAIRS = RepairOptions()


def split_repair_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], RepairOptions]:
    """Split keyword arguments into those that are not about repairs, and RepairOptions. Raises InvalidJob."""
    remaining = {name: value for name, value in values.items() if name not in PARSERS}
    options = {}
    for name, parse in PARSERS.items():
        if values.get(name) is not None:
            options[name] = parse(name, values[name])
    return remaining, RepairOptions(**options)


def _check(name: str, value: Any) -> dict[str, Any]:
    """Return a valid check. A schema that was given as text is parsed. Raises InvalidJob."""
    is_check = isinstance(value, dict) and len(value) == 1 and next(iter(value)) in KINDS
    if not is_check:
        kinds = 'one of {"json": schema}, {"regex": pattern} and {"function": "module.name"}'
        raise wrong_value_error(name, value, kinds)
    [(kind, rule)] = value.items()
    if kind == "json":
        return {"json": _schema(rule)}
    text = some_text(f"{kind} of check", rule, MAX_CHARS)
    may_be_dotted_name = len(text) <= MAX_NAME_CHARS and "." in text.strip(".")
    if kind == "function" and not may_be_dotted_name:
        raise InvalidValue(
            "function of check is {}, which names no function in a module: write module.function",
            brief(text),
        )
    return {kind: text}


def _schema(value: Any) -> dict[str, Any]:
    """Return a JSON schema, which may be given as text. Raises InvalidJob."""
    try:
        if isinstance(value, str):
            value = json.loads(value)
        size = len(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidJob(f"json of check is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise wrong_value_error("json of check", value, "a JSON schema: an object")
    check_limit(size, MAX_CHARS, "json of check has {} characters")
    return value


def _repair_template(name: str, value: Any) -> str:
    """Return a repair template. Raises InvalidJob."""
    text = some_text(name, value, MAX_REPAIR_CHARS)
    num_reasons = text.count(REASON)
    if num_reasons > MAX_REASONS:
        raise InvalidJob(
            f"{name} has {REASON} {num_reasons} times, more than the limit of {MAX_REASONS}: once is enough"
        )
    return text


#: A function for each option, by its name. It checks a value, and returns it in one form.
PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    "check": _check,
    "continue_on_length": truth,
    "max_attempts": partial(whole_number, most=MOST_ATTEMPTS),
    "repair_template": _repair_template,
}


#: The names of all options.
REPAIR_OPTIONS = PARSERS.keys()

#: The most seconds of a check.
DEFAULT_LIMIT_S = 5.0
#: The most seconds for importing a function.
IMPORT_LIMIT_S = 60.0
#: The most seconds for compiling a schema or a pattern.
COMPILE_LIMIT_S = 2.0

_TASK = "jobs.context.check_child:check"


class Checks:
    """Checks answers in child processes. Each thread that checks has a child of its own. Thread-safe.

    allowed: the dotted names of functions that this worker may call. limit_s: how many seconds a check may take.
    """

    def __init__(self, allowed: Collection[str] = (), limit_s: float = DEFAULT_LIMIT_S) -> None:
        self._allowed = frozenset(allowed)
        self._limit_s = limit_s
        self._pool = Pool()

    def admit(self, options: RepairOptions) -> None:
        """Raise InvalidJob if the check calls a function that this worker does not allow."""
        name = options.function
        if name is not None and name not in self._allowed:
            is_tool = options.check is not None and TOOL in options.check
            role = "tool" if is_tool else "function of check"
            raise InvalidJob(
                f"{role}: {name} is not allowed on this worker: add it to TOKENMILL_ALLOWED_FUNCTIONS"
            )

    def prepare(self, options: RepairOptions, **question: Any) -> dict[str, Any]:
        """Have a child process compile a check, and return its reply. Raises InvalidJob if the check can never work.

        This may take long, because the child imports the check's function.
        question: further fields of the question to the child, such as the one that asks for the function's version.
        """
        self.admit(options)
        try:
            return {} if options.check is None else self._ask(options, **question)
        except ChildFailed as error:
            raise _useless_check_error(error) from None

    def version(self, options: RepairOptions) -> str:
        """Return a text that changes when the files of a check's function change. Raises InvalidJob."""
        if options.function is None:
            return ""
        reply = self.prepare(options, version=True)
        return str(reply["version"])

    def outcome(self, options: RepairOptions, row: Any, text: str) -> str | None:
        """Return what a check finds: why an answer's text is not valid, or None if it is valid. Raises InvalidJob.

        A check of kind AGREE_ON returns a hash of the compared part of the text, or None if the text has no such part.
        A check of kind TOOL returns JSON with the result or the error of the call.
        row: the row that a check function gets.
        """
        self.admit(options)
        try:
            reply = self._ask(options, row=row, text=text)
        except ChildFailed as error:
            check = options.check or {}
            if AGREE_ON in check:
                return None
            # The error's text begins with a verb, such as "went on for more than 5 s".
            if TOOL in check:
                return json.dumps({"error": f"it {error}"})
            return f"the check {error}"
        outcome: str | None = reply["outcome"]
        return outcome

    def _ask(self, options: RepairOptions, **question: Any) -> dict[str, Any]:
        """Have a child process compile a check and answer a question with it. Raises InvalidJob or ChildFailed."""
        reply = self._pool.call(lambda child: self._reply(child, options, question))
        # A reply is stale if the child imported the function before the function's files changed. `_reply` has then
        # closed the child, so the next call gets another one.
        while "is_stale" in reply:
            reply = self._pool.call(lambda child: self._reply(child, options, question))
        if "problem" in reply:
            raise InvalidJob(reply["problem"])
        return reply

    def _reply(
        self, child: Child, options: RepairOptions, question: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a child's reply to a question about a check. Closes the child if its reply is stale (see `_ask`).

        A child that has not compiled the check yet must first compile it, within a separate time limit.
        """
        compile_question = {"check": options.check_text}
        reply: dict[str, Any] = {}
        has_compiled = child.notes.get(options.check_text)
        if not has_compiled:
            limit_s = IMPORT_LIMIT_S if options.function else COMPILE_LIMIT_S
            try:
                reply, _ = child.ask(_TASK, compile_question, Limits(limit_s))
            except (ChildTooSlow, ChildOutOfMemory) as error:
                raise _useless_check_error(error) from None
        if "problem" not in reply:
            # The child keeps its last checks in the same order as these notes. So both forget the same checks.
            child.notes.put(options.check_text, True)
            if question:
                full_question = {**compile_question, **question}
                reply, _ = child.ask(_TASK, full_question, Limits(self._limit_s))
        if "is_stale" in reply:
            child.close()
        return reply

    def close(self) -> None:
        """End the child processes."""
        self._pool.close()


def _useless_check_error(error: ChildFailed) -> InvalidJob:
    """Return the error for a check that failed before it could check an answer."""
    return InvalidJob(f"the check {error} before it could check anything")
