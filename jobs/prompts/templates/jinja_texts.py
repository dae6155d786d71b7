"""The texts of a Jinja template, which children compile and render."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jobs.context.children import CHILDREN
from jobs.errors import InvalidJob, InvalidValue
from sandbox import ChildFailed, Limits

#: Seconds that a template may take to be compiled, or for one row.
LIMIT_S = 2.0

_TASKS = "jobs.prompts.templates.jinja_environment"


class TemplateProblem(Exception):
    """Raised when a template or a row cannot be rendered: (why, what of the template stands for {})."""


class JinjaTexts:
    """A prompt's text, or the contents of a chat's messages. names: that they take from outside."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Raises InvalidJob for what is no template."""
        self.texts = list(texts)
        try:
            found = _asked("find_names", {"texts": self.texts})
        except TemplateProblem as problem:
            what, *of_template = problem.args
            raise (InvalidValue(what, *of_template) if of_template else InvalidJob(what)) from None
        self.names = frozenset(found["names"])

    def render(self, values: Mapping[str, Any]) -> list[str]:
        """Return each text with values of JSON filled in. Raises TemplateProblem."""
        texts: list[str] = _asked("render_values", {"texts": self.texts, "values": values})["texts"]
        return texts


def _asked(task: str, question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found, _ = CHILDREN.call(lambda child: child.ask(f"{_TASKS}:{task}", question, Limits(LIMIT_S)))
    except ChildFailed as error:
        raise TemplateProblem(f"the template {error}") from None
    if "problem" in found:
        raise TemplateProblem(*found["problem"])
    return found
