"""Makes prompts from Jinja templates over a row's columns. Child processes render them."""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from jobs.context.shared_files import CHILDREN
from jobs.errors import InvalidJob
from jobs.parquet.prompts.prompt_source import (
    PromptSource,
    check_defaults,
    checked_chat,
    checked_text,
)
from jobs.parquet.tables.columns import RowProblem, python_rows
from jobs.parquet.tables.row_groups import packed
from jobs.prompts.jinja_environment import render
from jobs.prompts.template_texts import (
    LIMIT_S,
    JinjaTexts,
    TemplateProblem,
    template_texts,
    with_breaks,
)
from sandbox import ChildFailed, Limits
from sandbox.child import Worker

_TASK = "jobs.parquet.prompts.jinja_source:render_rows"


class JinjaSource(PromptSource):
    """A Jinja template over columns, for a text or a chat.

    defaults: for each column, the text that stands for null. For a column without a default, the template gets `none`.
    needs_column: whether a template that names no column is refused. control_tokens: see TemplateSource.
    """

    def __init__(
        self,
        template: Any,
        defaults: Mapping[str, str] = MappingProxyType({}),
        *,
        needs_column: bool = True,
        control_tokens: Collection[str] = (),
    ) -> None:
        texts, self._roles = template_texts(template)
        self._template = JinjaTexts(texts)
        self._defaults = dict(defaults)
        # A template with roles makes a chat, and the engine keeps control tokens out of chats.
        self._control_tokens = list(control_tokens) if self._roles is None else []
        self.columns = tuple(sorted(self._template.names))
        if needs_column and not self.columns:
            raise InvalidJob(
                "the template names no column, so that every row would ask the same: "
                "write {{ column }} where a row's value goes"
            )
        check_defaults(defaults, self.columns)

    def read(self, rows: pa.RecordBatch) -> Iterator[list[str] | RowProblem]:
        """Yield each row's texts, or its problem.

        If a child fails, the remaining rows are rendered one at a time. If a child then fails on a row, the row gets a
        problem.
        """
        num_done = 0
        rows_at_once: int | None = None  # None for all remaining rows
        while num_done < rows.num_rows:
            try:
                for outcome in self._rendered(rows.slice(num_done, rows_at_once)):
                    num_done += 1
                    if isinstance(outcome, str):  # the text says what is wrong with the row
                        yield RowProblem(outcome)
                    else:
                        yield outcome
            except ChildFailed as error:
                if rows_at_once == 1:
                    num_done += 1
                    yield RowProblem(f"the template {error}")
                rows_at_once = 1

    def _rendered(self, rows: pa.RecordBatch) -> Iterator[list[str] | str]:
        """Render rows in a child process; yield each row's texts, or its problem as a text."""
        question = {
            "texts": self._template.texts,
            "columns": self.columns,
            "defaults": self._defaults,
            "control_tokens": self._control_tokens,
        }
        read_rows = rows.select(self.columns)
        body = bytes(packed(read_rows))
        with CHILDREN.lent() as child:
            for message, _ in child.replies(_TASK, question, Limits(LIMIT_S), body):
                yield from message["rows"]

    def render(self, values: list[str]) -> str:
        """Make a row's prompt of its rendered texts: a text, or a chat as JSON. Raises RowProblem."""
        if self._roles is None:
            return checked_text(values[0])
        pairs = zip(self._roles, values, strict=True)
        return checked_chat([{"role": role, "content": text} for role, text in pairs])


#: A child sends its rendered rows once they have this many characters.
_TOGETHER_CHARS = 1 << 20


def render_rows(worker: Worker) -> Iterator[dict[str, Any]]:
    """Render a batch, in a child. The replies have each row's texts, or its problem as a text.

    The body of the question is the batch in Arrow's stream format.
    """
    question = worker.question
    (batch,) = pa.ipc.open_stream(pa.py_buffer(worker.body))
    outcomes: list[list[str] | str] = []
    chars = 0
    for values in python_rows(question["columns"], batch):
        outcome = _outcome(question, values)
        outcomes.append(outcome)
        # The sum is the number of characters, whether `outcome` is a list of texts or one text.
        chars += sum(map(len, outcome))
        if chars > _TOGETHER_CHARS:
            yield {"rows": outcomes}
            outcomes = []
            chars = 0
    yield {"rows": outcomes}


def _outcome(question: dict[str, Any], values: dict[str, Any] | RowProblem) -> list[str] | str:
    """Return a row's rendered texts, or its problem as a text."""
    if isinstance(values, RowProblem):
        return str(values)
    with_defaults = {}
    for name, value in values.items():
        if value is None:
            value = question["defaults"].get(name)
        with_defaults[name] = value
    try:
        # A control token's text in a value is split, so that the model reads it as plain text.
        template_values = with_breaks(with_defaults, question["control_tokens"])
        return render(question["texts"], template_values)
    except TemplateProblem as problem:
        return f"the template: {problem}"
