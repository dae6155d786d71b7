"""Renders Jinja templates in a child process with limits, and in Jinja's sandbox, because strangers write templates."""

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jobs.common.display import to_json
from jobs.prompts.arguments import MAX_PROMPT_BYTES
from jobs.prompts.template_texts import TemplateProblem
from sandbox.child import Worker

#: The types whose values a template may write.
_WRITABLE = (
    str,
    int,
    float,
    Decimal,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    jinja2.Undefined,
    UUID,
)
#: Tags that read other templates.
_REFUSED_TAGS = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)
#: A filter and a global of Jinja that give another text in each rendering.
_RANDOM_FILTER = "random"
_RANDOM_GLOBAL = "lipsum"


def _value_text(value: Any) -> str:
    """Return the text of a value in a template. Raises TemplateProblem."""
    if value is None:
        raise TemplateProblem(
            "a value that the template writes is null: give it a default, such as {{ name or 'none' }}"
        )
    if isinstance(value, list | dict | tuple):
        return to_json(value)
    if not isinstance(value, _WRITABLE):
        raise TemplateProblem(f"a value of type {type(value).__name__} has no text")
    return str(value)


class _Generator(CodeGenerator):
    """Jinja's generator of Python code, with our own code for the operator `~`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Write code for `~` that gives each value the same text as `{{ value }}` does."""
        self.write("environment.joined('', (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox. Lists and dicts become JSON. Templates cannot use random numbers or other templates."""

    code_generator_class = _Generator

    def __init__(self) -> None:
        super().__init__(
            undefined=jinja2.StrictUndefined,
            # With `pass_context`, Jinja calls this only while it renders, and not for constants while it compiles.
            finalize=jinja2.pass_context(lambda context, value: _value_text(value)),
            # Constants are computed anew for each row. So a mistake in a constant fails the row, and not the run.
            optimized=False,
            keep_trailing_newline=True,
        )
        del self.filters[_RANDOM_FILTER]
        del self.globals[_RANDOM_GLOBAL]
        self.filters |= {"join": self._join, "string": _value_text, "tojson": to_json}

    def joined(self, separator: str, items: Iterable[Any]) -> str:
        """Join the texts of values. The code for `~` calls this method."""
        return separator.join(map(_value_text, items))

    def _join(self, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
        """Join values for Jinja's filter `join`. The parameters have Jinja's names, because templates may name them."""
        if attribute is not None:
            value = [self.getitem(item, attribute) for item in value]
        return self.joined(d, value)

    def compiled(self, text: str) -> tuple[jinja2.Template, frozenset[str]]:
        """Return a compiled template, and the names of the variables whose values it needs. Raises TemplateProblem."""
        try:
            tree = self.parse(text)
            refused_tag = next(tree.find_all(_REFUSED_TAGS), None)
            if refused_tag is not None:
                kind = type(refused_tag).__name__.lower()
                raise TemplateProblem(
                    f"the template, line {refused_tag.lineno}: {kind} reads other templates, and there are none"
                )
            tracker = meta.TrackingCodeGenerator(self)
            # An optimizer would compute constants here, so a mistake in a constant would fail the run; see `optimized`.
            tracker.optimizer = None
            tracker.visit(tree)
            return self.from_string(tree), frozenset(tracker.undeclared_identifiers)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateProblem(
                f"the template, line {error.lineno}: {{}}", str(error.message)[:200]
            ) from None
        except (SyntaxError, RecursionError, MemoryError, ValueError):
            raise TemplateProblem(
                "the template is nested too deeply, or holds what Python cannot compile"
            ) from None


_environment = _Environment()


@lru_cache(maxsize=16)
def _compiled(text: str) -> tuple[jinja2.Template, frozenset[str]]:
    """Compile a template as `_Environment.compiled` does. The last templates are cached."""
    return _environment.compiled(text)


def render(texts: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Render templates with the same values. Raises TemplateProblem."""
    rendered = []
    try:
        for text in texts:
            template, _ = _compiled(text)
            rendered.append(template.render(values))
    except TemplateProblem:
        raise
    except MemoryError:
        raise TemplateProblem(
            "it takes more memory than the process that renders it may have"
        ) from None
    except Exception as error:  # noqa: BLE001  # a template is a program, and its errors belong to the row
        raise TemplateProblem(f"{type(error).__name__}: {str(error)[:200]}") from None
    num_chars = sum(map(len, rendered))
    if num_chars > MAX_PROMPT_BYTES:  # a character takes at least a byte
        raise TemplateProblem(
            f"the prompt has {num_chars} characters, more than the limit of {MAX_PROMPT_BYTES} bytes: shorten it"
        )
    return rendered


def fill_in(worker: Worker) -> Iterator[dict[str, Any]]:
    """Reply with the rendered texts of a template, or with its problem.

    If the worker's question has no values, reply with the names of the template's variables instead.
    """
    texts = worker.question["texts"]
    reply: dict[str, Any]
    try:
        if "values" in worker.question:
            reply = {"texts": render(texts, worker.question["values"])}
        else:
            names: set[str] = set()
            for text in texts:
                _, names_of_text = _compiled(text)
                names |= names_of_text
            reply = {"names": sorted(names)}
    except TemplateProblem as problem:
        reply = {"problem": problem.args}
    yield reply
