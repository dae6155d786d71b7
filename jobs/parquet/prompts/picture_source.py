"""Prompts with pictures of columns, which may lie in files."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
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

#: What a template may call the only column of pictures.
ALIAS = "image"


class PictureSource(PromptSource):
    """The prompts of another source with pictures: where a template names their columns, else before the text."""

    def __init__(self, prompts: PromptSource, columns: Sequence[str], *, has_template: bool, is_chat: bool) -> None:
        self._prompts, self._pictures, self._is_chat = prompts, tuple(columns), is_chat
        names = {**({ALIAS: columns[0]} if len(columns) == 1 else {}), **{name: name for name in columns}}
        #: The columns of pictures by their names in the template, which gets marks that no text of a row has.
        self._named = {name: names[name] for name in prompts.columns if has_template and name in names}
        self._marks = {column: token_hex(16) for column in columns}
        self._pattern = re.compile(f"({'|'.join(self._marks.values())})")
        self.columns = tuple(dict.fromkeys((*(n for n in prompts.columns if n not in self._named), *columns)))

    def check(self, schema: pa.Schema) -> None:
        for name in self._pictures:
            if not _may_be_picture(kind := schema.field(name).type):
                raise WrongColumnType(name, kind, "bytes, paths, structs of bytes and path, or lists of these")
        named = {name: pa.field(name, pa.string()) for name in self._named}
        self._prompts.check(pa.schema([named.get(name) or schema.field(name) for name in self._prompts.columns]))

    def read(self, rows: pa.RecordBatch) -> Iterator[Any]:
        """Yield what the other source reads of a row, and its pictures by their marks."""
        found = {name: list(map(_pictures, rows.column(name))) for name in self._pictures}
        marked = rows.select([name for name in self._prompts.columns if name not in self._named])
        for name, column in self._named.items():
            marks = [self._marks[column] if each else "" for each in found[column]]
            marked = marked.append_column(pa.field(name, pa.string()), pa.array(marks, pa.string()))
        for given, pictures in zip(self._prompts.read(marked), zip(*found.values(), strict=True), strict=True):
            problem = next((each for each in (given, *pictures) if isinstance(each, RowProblem)), None)
            yield problem or (given, dict(zip(self._marks.values(), pictures, strict=True)))

    def render(self, values: tuple[Any, Mapping[str, list[Picture]]]) -> str | Parts:
        given, pictures = values
        made = self._prompts.render(given)
        if not any(pictures.values()):
            return made
        placed = {self._marks[column] for column in self._named.values()}
        first = [part for mark, each in pictures.items() if mark not in placed for part in _parts(each)]
        messages: Any = [{"role": "user", "content": made}]
        if self._is_chat:
            messages = json.loads(made) if isinstance(made, str) else made
        for message in messages:
            if isinstance(message["content"], str) and self._pattern.search(message["content"]):
                pieces = self._pattern.split(message["content"])
                parts = (_parts(pictures[each]) if each in pictures else _text(each) for each in pieces)
                message["content"] = list(chain(*parts))
        if first:
            _put_first(messages, first)
        found: str | Parts = messages if self._is_chat else messages[0]["content"]
        return found


def _may_be_picture(kind: pa.DataType) -> bool:
    """Whether values are bytes, paths, or structs of these, as Hugging Face's Image is, or lists."""
    if is_list(kind):
        return _may_be_picture(kind.value_type)
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        kinds = [each.type for each in fields if each.name in ("bytes", "path")]
        return bool(kinds) and all(is_bytes(each) or is_text(each) or pa.types.is_null(each) for each in kinds)
    return is_bytes(kind) or is_text(kind)


def _pictures(scalar: pa.Scalar) -> list[Picture] | RowProblem:
    try:
        return _pictures_of(scalar.as_py())
    except (InvalidJob, ValueError, pa.ArrowException) as problem:  # such as a path that is not UTF-8
        if is_exhausted(problem):
            raise
        return RowProblem(str(problem)[:1000])


def _pictures_of(value: Any) -> list[Picture]:
    if isinstance(value, dict):
        return _pictures_of(value.get("path") if value.get("bytes") is None else value["bytes"])
    if isinstance(value, list):
        return [picture for each in value for picture in _pictures_of(each)]
    if isinstance(value, str):
        return [picture_of(value, "a picture")]
    return [] if value is None else [value]


def _parts(pictures: Sequence[Picture]) -> Parts:
    return [{"type": "image", "image": each} for each in pictures]


def _text(text: str) -> Parts:
    return [{"type": "text", "text": text}] if text else []


def _put_first(messages: Parts, pictures: Parts) -> None:
    message = next((each for each in reversed(messages) if each["role"] == "user"), None)
    if message is None:
        raise RowProblem("there is no message of the user's that could hold the picture")
    content = message["content"]
    message["content"] = [*pictures, *(content if isinstance(content, list) else _text(content))]


def picture_reader(context: JobContext, folder: str | None = "") -> Callable[[str], bytes]:
    """Return what reads the file of a path or URI. folder: of relative paths; None where rows have several."""
    storage = Storage.of(context)

    def read(path: str) -> bytes:
        is_relative = not path.startswith("/") and "://" not in path
        if is_relative and folder is None:
            raise InvalidValue("{} is relative, and rows of several folders were put together: name it whole", path)
        path = storage.resolve(os.path.join(folder or "", path) if is_relative else path)
        try:
            with reading(path), storage.open_input(path) as file:
                if (size := file.size()) > MAX_BYTES:
                    raise InvalidValue(f"{{}} has {size} bytes, more than the limit of {MAX_BYTES}", brief(path))
                return bytes(file.read())
        except (InputNotFound, PathSwapped, PermissionError):
            raise InvalidValue("there is no picture at {}, or it may not be read", brief(path)) from None

    return read
