"""Checks: asks processes apart whether answers are valid, each within a limit of time.

A pattern that backtracks holds Python's lock while it does, and a user's function may do anything: in the
worker's own process either would hold up its engine.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from jobs.context.check_options import RepairOptions
from jobs.errors import InvalidJob
from sandbox import Child, ChildFailed, ChildOutOfMemory, ChildTooSlow, Limits, Pool

DEFAULT_LIMIT_S = 5.0
#: The same of importing a function, and of compiling a schema or a pattern.
BEGIN_LIMIT_S, COMPILE_LIMIT_S = 60.0, 2.0

_TASK = "jobs.context.check_child:check"


class Checks:
    """Checks answers in child processes, as many as threads ask at once. Thread-safe. limit_s: seconds of a check."""

    def __init__(self, allowed: Collection[str] = (), limit_s: float = DEFAULT_LIMIT_S) -> None:
        self._allowed, self._limit_s = frozenset(allowed), limit_s
        self._pool = Pool()

    def admit(self, options: RepairOptions) -> None:
        name = options.function
        if name is None or name in self._allowed:
            return
        near = get_close_matches(name, self._allowed, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else "its operator lists it in TOKENMILL_ALLOWED_FUNCTIONS"
        raise InvalidJob(f"function of check: {name} is not allowed on this worker: {hint}")

    def prepare(self, options: RepairOptions, **asked: Any) -> dict[str, Any]:
        """Raise InvalidJob for a check that can check nothing. It may take as long as an import."""
        self.admit(options)
        try:
            return {} if options.check is None else self._ask(options, **asked)
        except ChildFailed as error:
            raise _useless(error) from None

    def version(self, options: RepairOptions) -> str:
        """Return what a check's function is: another text once its source is another one. Raises InvalidJob."""
        return "" if options.function is None else str(self.prepare(options, version=True)["version"])

    def reason(self, options: RepairOptions, row: Any, text: str) -> str | None:
        """Return why an answer's text is not valid, or None. row: what a function gets. Raises InvalidJob."""
        self.admit(options)
        try:
            reply = self._ask(options, row=row, text=text)
        except ChildFailed as error:
            return f"the check {error}"
        reason: str | None = reply["reason"]
        return reason

    def _ask(self, options: RepairOptions, **answer: Any) -> dict[str, Any]:
        reply = self._pool.call(lambda child: self._reply(child, options, answer))
        if "problem" in reply:
            raise InvalidJob(reply["problem"])
        return reply

    def _reply(self, child: Child, options: RepairOptions, answer: Mapping[str, Any]) -> dict[str, Any]:
        question, reply = {"check": options.check_text}, dict[str, Any]()
        if options.check_text not in child.notes:
            limit_s = BEGIN_LIMIT_S if options.function else COMPILE_LIMIT_S
            try:
                reply, _ = child.ask(_TASK, question, Limits(limit_s))
            except (ChildTooSlow, ChildOutOfMemory) as error:
                raise _useless(error) from None
        if "problem" not in reply:
            child.notes.add(options.check_text)
            if answer:
                reply, _ = child.ask(_TASK, {**question, **answer}, Limits(self._limit_s))
        return reply

    def close(self) -> None:
        self._pool.close()


def _useless(error: ChildFailed) -> InvalidJob:
    return InvalidJob(f"the check {error} before it could check anything")
