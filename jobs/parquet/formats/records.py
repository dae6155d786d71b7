"""The rows of CSV and JSONL files, one by one: each is a record, or a problem that costs it alone."""

import csv
import io
import json
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jobs.common.display import brief, is_unicode
from jobs.errors import CorruptTable, SchemaMismatch
from jobs.prompts.batch_lines import custom_id
from jobs.runs.plans.names import OPENAI_BATCH, TSV

#: Bytes of one line, or row of CSV: room for a prompt of the largest size, however its letters are written.
MAX_LINE_BYTES = 8 << 20

MAX_LINES = 1 << 16
CHUNK_BYTES = 1 << 20
_UTF8_MARK = b"\xef\xbb\xbf"
_TOO_LONG = f"has more than the limit of {MAX_LINE_BYTES} bytes: shorten it"
_NOT_UTF8 = "is not UTF-8"
#: How JSON writes half of a surrogate pair, which is no text.
_MAY_BE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

#: The csv module has one limit for a process. No field of ours is longer than its row, which is bounded.
csv.field_size_limit(2 * MAX_LINE_BYTES)


class Record(NamedTuple):
    """A row of a file. line: its first, from 1. size: in bytes. value: by columns, None where `problem` says why."""

    line: int
    size: int
    value: Any
    problem: str | None = None


def records(file_format: str, stream: Any) -> Iterator[Record]:
    """Yield the records of a file of JSON lines; blank ones are none."""
    for line in _lines(stream):
        if line.problem or line.value.strip():
            found = line if line.problem else _json_record(line)
            if file_format == OPENAI_BATCH and found.value is not None:  # a row of two columns
                found = found._replace(value={"custom_id": custom_id(found.value), "request": found.value})
            yield found


def _lines(stream: Any) -> Iterator[Record]:
    """Yield lines, as bytes without their end."""
    file = io.BufferedReader(stream, CHUNK_BYTES)
    if file.peek(CHUNK_BYTES).startswith(_UTF8_MARK):
        file.read(len(_UTF8_MARK))
    number = 0
    while text := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(text) <= MAX_LINE_BYTES or text.endswith(b"\n"):
            yield Record(number, len(text), text.removesuffix(b"\n"))
            continue
        size = len(text)
        while text and not text.endswith(b"\n"):
            text = file.readline(CHUNK_BYTES)
            size += len(text)
        yield Record(number, size, None, _TOO_LONG)


def _json_record(line: Record) -> Record:
    try:
        value = json.loads(line.value.decode())
        if _MAY_BE_SURROGATE.search(line.value):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8: {error.reason} at byte {error.start}"
    except UnicodeEncodeError:
        problem = "is not valid Unicode: it holds half of a surrogate pair"
    except RecursionError:
        problem = "is nested too deeply"
    except MemoryError:
        problem = "holds too many values"
    except ValueError as error:
        problem = f"is not JSON: {str(error)[:200]}"
    else:
        if isinstance(value, dict):
            return line._replace(value=value)
        problem = f"is JSON, but no object: {brief(value)}"
    return line._replace(value=None, problem=problem)


def _csv_rows(lines: Iterator[Record], delimiter: str) -> Iterator[tuple[int, int, list[str] | str]]:
    """Yield number, size and fields of each row, or why it is none. Lines of one that does not end are read again."""
    again = deque[Record]()
    while (line := again.popleft() if again else next(lines, None)) is not None:
        size, found = line.size, line.problem or _of_line(line.value, delimiter)
        if found is None:
            size, found = _of_lines(line, again, lines, delimiter)
        if found:
            yield line.line, size, found


def _of_line(text: bytes, delimiter: str) -> list[str] | str | None:
    """Return the fields of a row that is one line, else as `_fields`: twice as fast where nothing is quoted."""
    plain = text.removesuffix(b"\r")
    if not plain or b'"' in plain or b"\r" in plain:
        return _fields([text], delimiter)
    try:
        return plain.decode().split(delimiter)
    except UnicodeDecodeError:
        return _NOT_UTF8


def _of_lines(
    first: Record, again: deque[Record], lines: Iterator[Record], delimiter: str
) -> tuple[int, list[str] | str | None]:
    """Return size and fields of a row whose first line leaves a quote open, or why it is none."""
    taken, size, problem = [first], first.size, "begins a quote that is not closed"

    def texts() -> Iterator[bytes]:
        nonlocal size, problem
        yield first.value
        while (line := again.popleft() if again else next(lines, None)) is not None:
            taken.append(line)
            size += line.size
            if line.problem or size > MAX_LINE_BYTES + 1 or len(taken) > MAX_LINES:
                problem = f"begins a row that {_TOO_LONG}, or close its quote"
                return
            yield line.value

    found = _fields(texts(), delimiter)
    if found is None:
        again.extendleft(reversed(taken[1:]))
        return first.size, problem
    return size, found


def _fields(texts: Iterable[bytes], delimiter: str) -> list[str] | str | None:
    lines = (f"{text.decode(errors='surrogateescape')}\n" for text in texts)
    try:
        found = next(csv.reader(lines, delimiter=delimiter, strict=True))
    except csv.Error as error:
        return None if "unexpected end of data" in str(error) else f"is not CSV: {str(error)[:200]}"
    return found if is_unicode("".join(found)) else _NOT_UTF8


def csv_records(path: str, file_format: str, stream: Any) -> tuple[list[str], Iterator[Record]]:
    """Return the columns that the first row names, and the others by these. Raises CorruptTable, SchemaMismatch."""
    found = _csv_rows(_lines(stream), "\t" if file_format == TSV else ",")
    number, _, names = next(found, (1, 0, None))
    if names is None:
        raise CorruptTable(path, "CSV", "it is empty: its first line must name the columns")
    if isinstance(names, str):
        raise CorruptTable(path, "CSV", f"line {number} {names}")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise SchemaMismatch(path, f"it has two columns named {brief(twice[0])}")
    return names, (_csv_record(names, *row) for row in found)


def _csv_record(names: Sequence[str], number: int, size: int, found: list[str] | str) -> Record:
    if isinstance(found, str):
        return Record(number, size, None, found)
    if len(found) != len(names):
        return Record(number, size, None, f"has {len(found)} fields, and the header {len(names)}")
    return Record(number, size, dict(zip(names, found, strict=True)))
