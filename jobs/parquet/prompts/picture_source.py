"""Puts the pictures of columns into prompts. Pictures may be in files."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from secrets import token_hex
from typing import Any

import pyarrow as pa

from jobs.common.display import brief
from jobs.context import JobContext
from jobs.errors import InputNotFound, InvalidJob, InvalidValue, PathSwapped, WrongColumnType
from jobs.parquet.files.storage import Storage, reading
from jobs.parquet.prompts.prompt_source import PromptSource
from jobs.parquet.tables.columns import RowProblem, is_bytes, is_list, is_text
from jobs.prompts.pictures import MAX_BYTES, Picture, picture_of
from jobs.tasks import Parts
from sandbox.exhausted import is_exhausted

#: A template may call the only column of pictures by this name.
ALIAS = "image"


class PictureSource(PromptSource):
    """Adds pictures to the prompts that another source makes: `prompts`.

    A picture stands where the template names its column. If the template does not name the column, the picture comes
    first. When the template is rendered, the value of each column of pictures is a placeholder, which is a random text.
    The pictures then replace the placeholders.
    """

    def __init__(
        self,
        prompts: PromptSource,
        picture_columns: Sequence[str],
        *,
        has_template: bool,
        is_chat: bool,
    ) -> None:
        self._prompts = prompts
        self._picture_columns = tuple(picture_columns)
        self._is_chat = is_chat
        #: For each name in the template that stands for a column of pictures: the name of that column.
        self._template_names: dict[str, str] = {}
        if has_template:
            for name in prompts.columns:
                if name in picture_columns:
                    self._template_names[name] = name
                elif name == ALIAS and len(picture_columns) == 1:
                    # "image" stands for the only column of pictures.
                    self._template_names[name] = picture_columns[0]
        #: For each column of pictures, the random text that stands in a rendered prompt where the pictures belong.
        self._placeholders = {column: token_hex(16) for column in picture_columns}
        alternatives = "|".join(self._placeholders.values())
        # The pattern has a group, so that splitting a text keeps the placeholders.
        self._any_placeholder = re.compile(f"({alternatives})")
        text_columns = [name for name in prompts.columns if name not in self._template_names]
        self.columns = tuple(dict.fromkeys((*text_columns, *picture_columns)))

    def check(self, schema: pa.Schema) -> None:
        """Raise WrongColumnType if a column cannot hold pictures, or if `prompts` cannot read its columns."""
        for name in self._picture_columns:
            kind = schema.field(name).type
            if not _may_be_picture(kind):
                raise WrongColumnType(
                    name, kind, "bytes, paths, structs of bytes and path, or lists of these"
                )
        fields = []
        for name in self._prompts.columns:
            if name in self._template_names:  # `prompts` gets a text in place of each picture
                fields.append(pa.field(name, pa.string()))
            else:
                fields.append(schema.field(name))
        self._prompts.check(pa.schema(fields))

    def read(self, rows: pa.RecordBatch) -> Iterator[Any]:
        """Yield a pair for each row: the values that `prompts` reads, and the row's pictures.

        The pictures are a dict. A key is the placeholder of a column of pictures, and the value is a list of pictures.
        If a value or a picture of the row cannot be read, a RowProblem is yielded in place of the pair.
        """
        pictures_by_column: dict[str, list[list[Picture] | RowProblem]] = {}
        for column in self._picture_columns:
            pictures_by_column[column] = list(map(_pictures_or_problem, rows.column(column)))
        values_of_rows = self._prompts.read(self._with_placeholders(rows, pictures_by_column))

        # Each element has one row's lists of pictures, in the order of the columns.
        pictures_of_rows = zip(*pictures_by_column.values(), strict=True)
        for values, pictures in zip(values_of_rows, pictures_of_rows, strict=True):
            problems = [value for value in (values, *pictures) if isinstance(value, RowProblem)]
            if problems:
                yield problems[0]
            else:
                yield values, dict(zip(self._placeholders.values(), pictures, strict=True))

    def _with_placeholders(
        self,
        rows: pa.RecordBatch,
        pictures_by_column: Mapping[str, Sequence[list[Picture] | RowProblem]],
    ) -> pa.RecordBatch:
        """Return the columns that `prompts` reads.

        A column of pictures has its placeholder, a random text, in each row that has pictures. The pictures replace the
        placeholder once the prompt is rendered.
        """
        text_columns = [name for name in self._prompts.columns if name not in self._template_names]
        prompt_rows = rows.select(text_columns)
        for name, column in self._template_names.items():
            placeholder = self._placeholders[column]
            placeholders = [
                placeholder if pictures else "" for pictures in pictures_by_column[column]
            ]
            field = pa.field(name, pa.string())
            prompt_rows = prompt_rows.append_column(field, pa.array(placeholders, pa.string()))
        return prompt_rows

    def render(self, values: tuple[Any, Mapping[str, list[Picture]]]) -> str | Parts:
        """Return the prompt of a row, with its pictures as parts. Raises RowProblem.

        values: what `read` yields for a row: the values for `prompts`, and lists of pictures by placeholder.
        """
        prompt_values, pictures = values
        prompt = self._prompts.render(prompt_values)
        if not any(pictures.values()):
            return prompt

        messages: Any = prompt
        if not self._is_chat:  # a text is handled as the message of a chat
            messages = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, str):
            messages = json.loads(prompt)
        for message in messages:
            content = message["content"]
            if isinstance(content, str) and self._any_placeholder.search(content):
                message["content"] = self._with_pictures(content, pictures)

        placeholders_in_template = {
            self._placeholders[column] for column in self._template_names.values()
        }
        parts_in_front: Parts = []
        for placeholder, pictures_of_column in pictures.items():
            if placeholder not in placeholders_in_template:
                parts_in_front += _parts(pictures_of_column)
        if parts_in_front:
            _put_first(messages, parts_in_front)
        rendered: str | Parts = messages if self._is_chat else messages[0]["content"]
        return rendered

    def _with_pictures(self, content: str, pictures: Mapping[str, list[Picture]]) -> Parts:
        """Return a text as parts, with pictures instead of their placeholders."""
        parts: Parts = []
        for piece in self._any_placeholder.split(content):
            if piece in pictures:  # the piece is a placeholder
                parts += _parts(pictures[piece])
            else:
                parts += _text(piece)
        return parts


def _may_be_picture(kind: pa.DataType) -> bool:
    """Whether values are bytes, paths, structs of both (as in Hugging Face's Image), or lists of any of these."""
    if is_list(kind):
        return _may_be_picture(kind.value_type)
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        picture_fields = [field for field in fields if field.name in ("bytes", "path")]
        if not picture_fields:
            return False
        return all(is_bytes(field.type) or is_text(field.type) for field in picture_fields)
    return is_bytes(kind) or is_text(kind)


def _pictures_or_problem(scalar: pa.Scalar) -> list[Picture] | RowProblem:
    """Return the pictures in a row's value, or the row's problem."""
    try:
        return _pictures_of(scalar.as_py())
    except (InvalidJob, ValueError, pa.ArrowException) as problem:
        if is_exhausted(problem):  # the machine lacks memory, and nothing is wrong with the row
            raise
        # Something is wrong with the row, such as a path that is not UTF-8.
        return RowProblem(str(problem)[:1000])


def _pictures_of(value: Any) -> list[Picture]:
    """Return the pictures in a value: bytes, a path, a struct of both, or a list of these. Raises InvalidJob."""
    if value is None:
        return []
    if isinstance(value, dict):
        content = value.get("bytes")
        if content is None:
            content = value.get("path")
        return _pictures_of(content)
    if isinstance(value, list):
        pictures = []
        for item in value:
            pictures += _pictures_of(item)
        return pictures
    if isinstance(value, str):
        return [picture_of(value, "a picture")]
    return [value]


def _parts(pictures: Sequence[Picture]) -> Parts:
    """Return the parts of a message that hold these pictures."""
    return [{"type": "image", "image": picture} for picture in pictures]


def _text(text: str) -> Parts:
    """Return the part of a message that holds a text; no part for an empty text."""
    return [{"type": "text", "text": text}] if text else []


def _put_first(messages: Parts, pictures: Parts) -> None:
    """Put pictures before the text of the user's last message. Raises RowProblem if there is no such message."""
    user_messages = [message for message in messages if message["role"] == "user"]
    if not user_messages:
        raise RowProblem("there is no message of the user that could hold the picture")
    message = user_messages[-1]
    content = message["content"]
    parts = content if isinstance(content, list) else _text(content)
    message["content"] = [*pictures, *parts]


def picture_reader(context: JobContext, folder: str | None = "") -> Callable[[str], bytes]:
    """Return a function that reads the file of a path or URI.

    folder: the folder where relative paths start. None if the rows come from several folders; then relative paths are
    refused.
    """
    storage = Storage.of(context)

    def read(path: str) -> bytes:
        """Return the bytes of a picture's file. Raises InvalidValue."""
        is_relative = not path.startswith("/") and "://" not in path
        if is_relative:
            if folder is None:
                raise InvalidValue(
                    "{} is relative, and rows of several folders were put together: give the whole path",
                    path,
                )
            path = os.path.join(folder, path)
        path = storage.resolve(path)
        try:
            with reading(path), storage.open_input(path) as file:
                size = file.size()
                if size > MAX_BYTES:
                    raise InvalidValue(
                        f"{{}} has {size} bytes, more than the limit of {MAX_BYTES}", brief(path)
                    )
                return bytes(file.read())
        except (InputNotFound, PathSwapped, PermissionError):
            raise InvalidValue(
                "there is no picture at {}, or it may not be read", brief(path)
            ) from None

    return read
