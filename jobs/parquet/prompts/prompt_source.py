"""How a row becomes a prompt: from a column, from a template, or from a column of messages."""

import abc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from jobs.common.display import brief, to_json
from jobs.errors import InvalidValue, WrongColumnType
from jobs.parquet.tables.columns import is_list, is_text
from jobs.parquet.tables.row_values import RowProblem, holds_bytes, python_rows
from jobs.prompts.arguments import MAX_PROMPT_BYTES, text_problem
from jobs.prompts.messages import UnusableMessages, normal_messages
from jobs.runs.plans.prompt_steps import Template

#: Rows that are Python's at a time: as Python's objects, values take many times what Arrow needs for them.
SLICE_ROWS = 128

#: What a template may hold.
TEXT_FORMS = "text, a number, a truth value, a time, or lists, structs and maps of these"


class PromptSource(abc.ABC):
    """Renders rows to texts. A text identifies its prompt: equal texts are equal prompts, and texts that
    start alike share a prefix, so that sorting them brings shared prefixes together."""

    #: The input columns that are read.
    columns: tuple[str, ...]
    #: Whether a rendered text is the JSON of a chat's messages and not a prompt.
    is_chat: bool

    @abc.abstractmethod
    def check(self, schema: pa.Schema) -> None:
        """Raise WrongColumnType when a column of the schema can never be rendered."""

    @abc.abstractmethod
    def rendered(self, rows: pa.RecordBatch) -> Iterator[str | RowProblem]:
        """Yield each row's text, or why it has none."""


class RowSource(PromptSource):
    """Renders row by row, in this process."""

    @abc.abstractmethod
    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text for one row. Raises RowProblem."""

    def rendered(self, rows: pa.RecordBatch) -> Iterator[str | RowProblem]:
        for values in python_rows(self.columns, rows):
            yield values if isinstance(values, RowProblem) else _outcome(self.render, values)


class PromptColumn(RowSource):
    """A column of texts."""

    is_chat = False

    def __init__(self, column: str) -> None:
        self.columns = (column,)

    def check(self, schema: pa.Schema) -> None:
        (column,) = self.columns
        if not is_text(schema.field(column).type):
            raise WrongColumnType(column, schema.field(column).type, "text")

    def render(self, values: Mapping[str, Any]) -> str:
        (text,) = values.values()
        return checked_text(text, "prompt")


class MessagesColumn(RowSource):
    """A column of chats: lists of structs with role and content, or the same as JSON text."""

    is_chat = True

    def __init__(self, column: str) -> None:
        self.columns = (column,)

    def check(self, schema: pa.Schema) -> None:
        (column,) = self.columns
        kind = schema.field(column).type
        if not (is_text(kind) or (is_list(kind) and pa.types.is_struct(kind.value_type))):
            raise WrongColumnType(column, kind, "a list of structs with role and content, or their JSON")

    def render(self, values: Mapping[str, Any]) -> str:
        (messages,) = values.values()
        if messages is None:
            raise RowProblem("messages are null")
        if isinstance(messages, str):
            try:
                messages = json.loads(messages)
            except (ValueError, RecursionError) as error:
                raise RowProblem(f"messages are not JSON: {error}") from None
        return checked_chat(messages)


class TemplateSource(RowSource):
    """A template over any columns that have a text form; lists, structs and maps stand there as JSON.

    defaults: for columns the text that stands for null; without one the row has no prompt.
    """

    def __init__(self, template: Template, defaults: Mapping[str, str] = MappingProxyType({})) -> None:
        """Raises InvalidJob for a default of a column that the template does not name."""
        self.columns = template.columns
        self.is_chat = template.roles is not None
        self._template, self._defaults = template, defaults
        check_defaults(defaults, self.columns)

    def check(self, schema: pa.Schema) -> None:
        for column in self.columns:
            kind = schema.field(column).type
            if holds_bytes(kind):
                raise WrongColumnType(column, kind, TEXT_FORMS)

    def render(self, values: Mapping[str, Any]) -> str:
        values = {column: self._text(column, values[column]) for column in self.columns}
        if (chars := self._template.filled_chars(values)) > MAX_PROMPT_BYTES:
            raise RowProblem(
                f"prompt has {chars} characters, more than the limit of {MAX_PROMPT_BYTES} bytes: shorten it"
            )
        filled = self._template.fill(values)
        return checked_text(filled, "prompt") if isinstance(filled, str) else checked_chat(filled)

    def _text(self, column: str, value: Any) -> Any:
        if value is None:
            value = self._defaults.get(column)
            if value is None:
                raise RowProblem(f"column {column!r} is null")
        return to_json(value) if isinstance(value, list | dict) else value


def check_defaults(defaults: Mapping[str, str], columns: Sequence[str]) -> None:
    """Raise InvalidJob for a default of a column that a template does not name."""
    for column in defaults:
        if column not in columns:
            raise InvalidValue(
                "{} has a default, and is no column that the template names: leave it out", brief(column)
            )


def render_rows(
    source: PromptSource, batch: pa.RecordBatch, problems: Sequence[str | None] = ()
) -> Iterator[str | RowProblem]:
    """Render each row of a batch to its text, or to the reason why it has none.

    problems: of each row why its line is none, None where it is one; empty where no row has such.
    """
    if problems:
        texts = render_rows(source, batch)
        for problem, text in zip(problems, texts, strict=True):
            yield text if problem is None else RowProblem(problem)
        return
    for start in range(0, batch.num_rows, SLICE_ROWS):
        yield from source.rendered(batch.slice(start, SLICE_ROWS))


def render_behind(
    source: PromptSource,
    columns: Sequence[str],
    rows: pa.RecordBatch,
    behind: Callable[[Mapping[str, Any]], str],
) -> Iterator[str | RowProblem]:
    """Yield what a source renders with a line behind it, which is made of values of the row.

    behind: raises RowProblem for values of which none can be made.
    """
    for text, values in zip(source.rendered(rows), python_rows(columns, rows), strict=True):
        problem = next((each for each in (text, values) if isinstance(each, RowProblem)), None)
        yield problem or _outcome(lambda found, text=text: f"{text}\n{behind(found)}", values)  # type: ignore[misc]


def _outcome(render: Callable[[Any], str], values: Any) -> str | RowProblem:
    try:
        return render(values)
    except RowProblem as problem:
        return problem


def checked_text(text: Any, what: str) -> str:
    if text is None or text == "":
        raise RowProblem(f"{what} is {'null' if text is None else 'empty'}")
    if problem := text_problem(text, what):
        raise RowProblem(problem)
    assert isinstance(text, str)
    return text


def checked_chat(messages: Any) -> str:
    """The JSON of a chat. One order of keys, so that equal chats are equal texts."""
    try:
        return json.dumps(normal_messages(messages))
    except UnusableMessages as problem:
        raise RowProblem(str(problem)) from None


class CheckedSource(PromptSource):
    """Another source's prompts with the rows' values behind them, so that a text still identifies what is
    asked. `row_sampling.split` takes them apart.

    columns: what the function gets beside the columns that the prompt is made of.
    """

    def __init__(self, source: PromptSource, columns: Sequence[str]) -> None:
        self.columns = tuple(dict.fromkeys((*source.columns, *columns)))
        self.is_chat = source.is_chat
        self._source = source

    def check(self, schema: pa.Schema) -> None:
        self._source.check(schema)
        for column in self.columns:
            if holds_bytes(schema.field(column).type):
                raise WrongColumnType(column, schema.field(column).type, TEXT_FORMS)

    def rendered(self, rows: pa.RecordBatch) -> Iterator[str | RowProblem]:
        return render_behind(self._source, self.columns, rows, to_json)
