"""Turns the rows of a file into prompts, with the values that belong to the rows."""

import abc
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa

from jobs.common.display import brief, to_json
from jobs.errors import InvalidJob, InvalidValue, WrongColumnType
from jobs.parquet.tables.columns import RowProblem, holds, is_bytes, is_list, is_text, python_rows
from jobs.prompts.arguments import MAX_PROMPT_BYTES, text_problem
from jobs.prompts.messages import normal_messages
from jobs.prompts.pictures import ReadFile, filled, loaded, pictures_in
from jobs.prompts.template_texts import with_breaks
from jobs.runs.plans.prompt_steps import Template
from jobs.tasks import Parts

TEXT_FORMS = "text, a number, a truth value, a time, or lists, structs and maps of these (pictures by image_column)"


class Row(NamedTuple):
    """The prompt of a row, and the values that belong to it.

    Equal rows ask the same. When rows are sorted, prompts with a common prefix are neighbours.
    prompt: a text, or the JSON of a chat's messages. With pictures, the JSON of messages or parts that have hashes in
    place of the pictures. sampling: the row's own sampling values as JSON; "" for none. values: the values of the
    columns that the row's check or later prompts read, as JSON; "" for none. pictures: the bytes of each picture.
    """

    prompt: str
    sampling: str = ""
    values: str = ""
    pictures: tuple[bytes, ...] = ()

    @property
    def own_sampling(self) -> dict[str, Any]:
        """Return the row's own sampling values."""
        return dict(json.loads(self.sampling)) if self.sampling else {}

    @property
    def num_bytes(self) -> int:
        """Return about how much memory the row takes."""
        return (
            sys.getsizeof(self.prompt) + len(self.sampling) + len(self.values) + self.picture_bytes
        )

    @property
    def picture_bytes(self) -> int:
        """Return how many bytes the pictures have."""
        return sum(map(len, self.pictures))


class PromptSource(abc.ABC):
    """Renders rows to prompts: texts, or the JSON of a chat's messages. columns: the input's columns that are read."""

    columns: tuple[str, ...]

    def check(self, schema: pa.Schema) -> None:
        """Raise WrongColumnType if a column of the schema can never be rendered."""
        check_texts(schema, self.columns)

    def read(self, rows: pa.RecordBatch) -> Iterator[Any]:
        """Yield the values that each row's prompt is made of, or its RowProblem."""
        return python_rows(self.columns, rows)

    @abc.abstractmethod
    def render(self, values: Any) -> str | Parts:
        """Return the prompt of one row; if the row has pictures, its messages or parts. Raises RowProblem."""

    def row(self, values: Any, read: ReadFile) -> Row:
        """Return the row that is made of these values.

        read: returns the bytes of a picture's file. Raises RowProblem. If the row has pictures, also raises InvalidJob,
        or what `read` raises.
        """
        prompt = self.render(values)
        if isinstance(prompt, str):
            return Row(prompt)
        pictures = loaded(pictures_in(prompt), read)
        hashes = [blake2b(picture, digest_size=16).hexdigest() for picture in pictures]
        prompt_with_hashes = filled(prompt, hashes)
        return Row(json.dumps(prompt_with_hashes), pictures=tuple(pictures))


class ColumnSource(PromptSource):
    """Columns whose values are prompts.

    prompt_of: makes a prompt of a row's values, or raises RowProblem. fits: whether a column's type is allowed.
    expected: the allowed types, in words for errors.
    """

    def __init__(
        self,
        columns: Sequence[str],
        prompt_of: Callable[..., str | Parts],
        fits: Callable[[pa.DataType], bool],
        expected: str,
    ) -> None:
        self.columns = tuple(columns)
        self._prompt_of = prompt_of
        self._fits = fits
        self._expected = expected

    def check(self, schema: pa.Schema) -> None:
        """Raise WrongColumnType if a column has no type that fits."""
        for column in self.columns:
            kind = schema.field(column).type
            if not self._fits(kind):
                raise WrongColumnType(column, kind, self._expected)

    def render(self, values: Mapping[str, Any]) -> str | Parts:
        """Return the prompt of one row. Raises RowProblem."""
        values_of_columns = [values[column] for column in self.columns]
        return self._prompt_of(*values_of_columns)


def prompt_pair(*columns: str) -> ColumnSource:
    """Return the source of two columns of texts. A row's prompt is the JSON of both."""

    def pair(*texts: Any) -> str:
        """Return the JSON of a row's two texts. Raises RowProblem."""
        checked_texts = []
        for text, column in zip(texts, columns, strict=True):
            checked_texts.append(checked_text(text, f"column {column!r}"))
        return json.dumps(checked_texts)

    return ColumnSource(columns, pair, is_text, "text")


def messages_column(column: str, *, drops_keys: bool = False) -> ColumnSource:
    """Return the source of a column of chats: lists of structs with role and content, or the same as JSON text.

    drops_keys: whether to leave out unknown keys of messages.
    """

    def may_be_chat(kind: pa.DataType) -> bool:
        """Whether values of this type may be chats."""
        return is_text(kind) or (is_list(kind) and pa.types.is_struct(kind.value_type))

    return ChatSource(
        [column],
        partial(_chat, drops_keys=drops_keys),
        may_be_chat,
        "a list of structs with role and content, or their JSON",
    )


class ChatSource(ColumnSource):
    """A column of chats. Arrow gives the structs of all rows the same keys, so keys with a null value are left out."""

    def read(self, rows: pa.RecordBatch) -> Iterator[Any]:
        """Yield each row's messages, or its RowProblem."""
        return rows_without_null_keys(self.columns, rows)


def rows_without_null_keys(
    columns: Sequence[str], rows: pa.RecordBatch
) -> Iterator[dict[str, Any] | RowProblem]:
    """Yield the values of each row as python_rows does, without the null fields of structs."""
    kinds = {column: rows.schema.field(column).type for column in columns}
    for values in python_rows(columns, rows):
        if isinstance(values, RowProblem):
            yield values
        else:
            yield {name: without_null_keys(value, kinds[name]) for name, value in values.items()}


def without_null_keys(value: Any, kind: pa.DataType) -> Any:
    """Return a value without the null fields of its structs, at all depths. kind: the value's type."""
    if pa.types.is_struct(kind) and isinstance(value, dict):
        cleaned = {}
        for key, inner in value.items():
            if inner is not None:
                cleaned[key] = without_null_keys(inner, kind.field(key).type)
        return cleaned
    if pa.types.is_map(kind) and isinstance(value, dict):
        return {key: without_null_keys(inner, kind.item_type) for key, inner in value.items()}
    if is_list(kind) and isinstance(value, list):
        return [without_null_keys(item, kind.value_type) for item in value]
    return value


def _chat(messages: Any, *, drops_keys: bool) -> str | Parts:
    """Return a chat as JSON, or as messages if it has pictures. Raises RowProblem."""
    if messages is None:
        raise RowProblem("messages are null")
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError) as error:
            raise RowProblem(f"messages are not JSON: {error}") from None
    normal = _normal(messages, drops_keys=drops_keys)
    if pictures_in(normal):
        return normal
    return json.dumps(normal)


class TemplateSource(PromptSource):
    """A template over columns. Lists, structs and maps are written as JSON.

    defaults: for each column, the text that stands for null. control_tokens: the texts of control tokens. Such a text
    in a value is split, so that the model reads it as plain text. In a chat, the engine does this instead.
    """

    def __init__(
        self,
        template: Template,
        defaults: Mapping[str, str] = MappingProxyType({}),
        control_tokens: Collection[str] = (),
    ) -> None:
        self.columns = template.columns
        self._template = template
        self._defaults = defaults
        # A template with roles makes a chat, in which the engine splits control tokens.
        self._control_tokens = control_tokens if template.roles is None else ()
        check_defaults(defaults, self.columns)

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the prompt of one row: a text, or a chat as JSON. Raises RowProblem."""
        texts = {column: self._text(column, values[column]) for column in self.columns}
        chars = self._template.filled_chars(texts)
        if chars > MAX_PROMPT_BYTES:
            raise RowProblem(
                f"prompt has {chars} characters, more than the limit of {MAX_PROMPT_BYTES} bytes: shorten it"
            )
        filled = self._template.fill(texts)
        return checked_text(filled) if isinstance(filled, str) else checked_chat(filled)

    def _text(self, column: str, value: Any) -> Any:
        """Return a value as the template shows it. Raises RowProblem for null in a column without a default."""
        if value is None:
            value = self._defaults.get(column)
            if value is None:
                raise RowProblem(f"column {column!r} is null")
        if isinstance(value, list | dict):
            value = to_json(value)
        return with_breaks(value, self._control_tokens)


def written_as_texts(values: Mapping[str, Any]) -> str:
    """Return the texts that a template would show for values, as a JSON object by the values' names."""
    texts: dict[str, str | None] = {}
    for name, value in values.items():
        if value is None:
            texts[name] = None
        elif isinstance(value, list | dict):
            texts[name] = to_json(value)
        else:
            texts[name] = f"{value}"
    return json.dumps(texts, ensure_ascii=False)


def check_defaults(defaults: Mapping[str, str], columns: Sequence[str]) -> None:
    """Raise InvalidValue if a default is for a column that the template does not name."""
    for column in defaults:
        if column not in columns:
            raise InvalidValue(
                "{} has a default, and is no column that the template names: leave it out",
                brief(column),
            )


def check_texts(schema: pa.Schema, columns: Sequence[str]) -> None:
    """Raise WrongColumnType for a column that holds bytes."""
    for column in columns:
        kind = schema.field(column).type
        if holds(kind, is_bytes):
            raise WrongColumnType(column, kind, TEXT_FORMS)


def checked_text(text: Any, name: str = "prompt") -> str:
    """Return a text that can be a prompt. Raises RowProblem. name: the text's name in the problem."""
    if text is None:
        raise RowProblem(f"{name} is null")
    if text == "":
        raise RowProblem(f"{name} is empty")
    problem = text_problem(text, name)
    if problem:
        raise RowProblem(problem)
    assert isinstance(text, str)
    return text


def checked_chat(messages: Any) -> str:
    """Return the JSON of a chat. Raises RowProblem.

    The keys of each message have a fixed order, so that equal chats are equal texts.
    """
    return json.dumps(_normal(messages))


def _normal(messages: Any, *, drops_keys: bool = False) -> Parts:
    """Return messages in their normal form. Raises RowProblem. drops_keys: see messages_column."""
    try:
        return normal_messages(messages, drops_keys=drops_keys)
    except InvalidJob as problem:
        raise RowProblem(str(problem)) from None
