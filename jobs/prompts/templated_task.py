"""Prompts that are templates over the answers of the jobs that a job depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jobs.common.display import brief
from jobs.context import JobContext
from jobs.errors import InvalidJob, InvalidValue
from jobs.prompts.templates.jinja_texts import JinjaTexts, TemplateProblem
from jobs.prompts.templates.template_texts import template_texts
from jobs.tasks import OpenTask, Task

if TYPE_CHECKING:
    from jobs.prompts.dependency_answers import Dependencies

#: What a template may name.
NAMES = frozenset({"answers", "results"})

#: What a template of each argument is.
KINDS: Mapping[str, tuple[type, str]] = {
    "prompt_template": (str, "a text"),
    "messages_template": (list, "a list of {'role': ..., 'content': ...}"),
}

#: Answers that are null and are named where one of them is written.
MAX_NULLS = 3


class TemplatedTask(Task):
    """The task that is made of a template once the answers are read.

    Blocking, as it reads them from Redis and as a template may take seconds.
    """

    blocking = True

    def __init__(self, argument: str, template: Any, make: Callable[[Any], Task]) -> None:
        """argument: prompt_template or messages_template. make: the task of the prompt, or the messages.

        Raises InvalidJob for what cannot be such a template.
        """
        kind, what = KINDS[argument]
        if not isinstance(template, kind):
            raise InvalidJob(f"{argument} is {type(template).__name__}, expected {what}")
        self._argument, self._make = argument, make
        self._texts, self._roles = template_texts(template)

    def open(self, context: JobContext) -> OpenTask:
        """Raises AnswerMissing, InvalidJob for a template that cannot be filled in, and as the task does."""
        from jobs.prompts.dependency_answers import read_dependencies  # rq: only where a template is filled

        template = JinjaTexts(self._texts)
        if foreign := sorted(template.names - NAMES):
            raise InvalidValue(
                f"{self._argument} names {{}}: there are `answers`, one for each job that this one depends "
                "on, and `results`, all that each returned",
                brief(foreign[0]),
            )
        texts = self._filled(template, read_dependencies(context))
        if self._roles is None:
            return self._make(texts[0]).open(context)
        pairs = zip(self._roles, texts, strict=True)
        return self._make([{"role": role, "content": text} for role, text in pairs]).open(context)

    def _filled(self, template: JinjaTexts, found: Dependencies) -> list[str]:
        try:
            return template.render({"answers": found.answers, "results": found.results})
        except TemplateProblem as problem:
            nulls = "".join(f"; {each}" for each in found.nulls[:MAX_NULLS])
            raise InvalidValue(f"{self._argument}: {{}}{{}}", str(problem), nulls) from None


def refuse_template(values: dict[str, Any]) -> None:
    """Raise InvalidJob where something asks for a template that is no job and depends on none."""
    for name in KINDS:
        if values.get(name) is not None:
            raise InvalidJob(f"{name} stands for answers of jobs that a job depends on, and this is no job")
