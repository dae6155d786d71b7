"""The rows of CSV and JSONL files, one by one: each is a record, or a problem that costs it alone."""

import csv
import io
import json
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from jobs.common.display import brief, is_unicode
from jobs.errors import CorruptTable, OtherDelimiter, SchemaMismatch
from jobs.parquet.formats.encodings import CHUNK_BYTES, Decoded, EncodingGuess
from jobs.prompts.batch_lines import custom_id
from jobs.runs.plans.names import OPENAI_BATCH, TSV

#: Bytes of one line, or row of CSV: room for a prompt of the largest size, however its letters are written.
MAX_LINE_BYTES = 8 << 20

MAX_LINES = 1 << 16
_UTF8_MARK = b"\xef\xbb\xbf"
_TOO_LONG = f"has more than the limit of {MAX_LINE_BYTES} bytes: shorten it"
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


class TextFile:
    """The text of a file. encoding: as the run says; without one it is UTF-8, and `guess` sees each line."""

    def __init__(self, path: str, file_format: str, stream: Any, dialect: Mapping[str, str]) -> None:
        self.path, self.format, self._stream = path, file_format, stream
        self.delimiter, self.encoding = dialect.get("delimiter"), dialect.get("encoding")
        self.guess = EncodingGuess(path) if self.encoding is None else None
        self.encoding_name = "UTF-8" if self.encoding in (None, "utf-8") else self.encoding

    def lines(self) -> Iterator[Record]:
        """Yield lines, as bytes of UTF-8 without their end. Raises OtherEncoding."""
        stream = (
            self._stream
            if self.encoding in (None, "utf-8")
            else Decoded(self._stream, self.encoding, self.path, self.format)
        )
        file = io.BufferedReader(stream, CHUNK_BYTES)
        head = file.peek(CHUNK_BYTES)
        if self.guess is not None:
            self.guess.begin(head)
        if head.startswith(_UTF8_MARK):
            file.read(len(_UTF8_MARK))
        for line in _lines(file):
            if self.guess is not None and line.value is not None:
                self.guess.see(line.value)
            yield line

    def check_encoding(self) -> None:
        """Raise OtherEncoding if the lines read look like another encoding than UTF-8."""
        if self.guess is not None:
            self.guess.check()


def json_records(file: TextFile) -> Iterator[Record]:
    """Yield the records of a file of JSON lines; blank ones are none."""
    for line in file.lines():
        if line.problem or line.value.strip():
            found = line if line.problem else _json_record(line, file.encoding_name)
            if file.format == OPENAI_BATCH and found.value is not None:  # a row of two columns
                found = found._replace(value={"custom_id": custom_id(found.value), "request": found.value})
            yield found


def _lines(file: io.BufferedReader) -> Iterator[Record]:
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


def _json_record(line: Record, encoding: str) -> Record:
    try:
        value = json.loads(line.value.decode())
        if _MAY_BE_SURROGATE.search(line.value):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        where = f": {error.reason} at byte {error.start}" if encoding == "UTF-8" else ""
        problem = f"is not {encoding}{where}"
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


def _csv_rows(lines: Iterator[Record], delimiter: str, encoding: str) -> Iterator[Record]:
    """Yield rows, with lists of fields. The lines behind the first one of a row that does not end are read again."""
    again, taken, size, no_end = deque[Record](), list[Record](), 0, ""

    def texts() -> Iterator[str]:
        nonlocal size, no_end
        no_end = "begins a quote that is not closed"
        while (line := again.popleft() if again else next(lines, None)) is not None:
            taken.append(line)
            size += line.size
            if line.problem or size > MAX_LINE_BYTES + 1 or len(taken) > MAX_LINES:
                no_end = f"begins a row that {_TOO_LONG}, or close its quote"
                return
            yield f"{line.value.decode(errors='surrogateescape')}\n"

    reader = csv.reader(texts(), delimiter=delimiter, strict=True)
    while True:
        taken.clear()
        size, fields, problem = 0, list[str](), None
        try:
            fields = next(reader)
            problem = None if is_unicode("".join(fields)) else f"is not {encoding}"
        except (StopIteration, csv.Error) as error:
            if not taken:
                return
            problem = f"is not CSV: {str(error)[:200]}"
            if "new-line character" in problem:
                problem = "has a carriage return (\\r) outside quotes: end lines with \\n or \\r\\n, or quote the field"
            if isinstance(error, StopIteration) or "unexpected end of data" in problem:
                problem, size = taken[0].problem or no_end, taken[0].size
                again.extendleft(reversed(taken[1:]))
                reader = csv.reader(texts(), delimiter=delimiter, strict=True)
        if fields or problem:  # or it is a blank line
            yield Record(taken[0].line, size, fields, problem)


#: A first line of CSV that names the delimiter for Excel. It is no row.
_SEP_LINE = re.compile(rb'"?sep=(.)"?\r?', re.IGNORECASE)
#: Likely delimiters, if the header seems to have a single column that contains one.
_DELIMITERS = {";": "';'", "\t": "'\\t'", "|": "'|'", ",": "','"}


def csv_records(file: TextFile) -> tuple[list[str], Iterator[Record]]:
    """Return the column names in the first row, and the other rows by these names.

    Raises CorruptTable, SchemaMismatch, OtherEncoding or OtherDelimiter.
    """
    path, expected = file.path, "\t" if file.format == TSV else ","
    lines = file.lines()
    first = next(lines, None)
    told = _SEP_LINE.fullmatch(first.value) if first is not None and first.value is not None else None
    if told is None and first is not None:
        lines = chain([first], lines)
    delimiter = file.delimiter or (told[1].decode(errors="replace") if told else expected)
    rows = _csv_rows(lines, delimiter, file.encoding_name)
    head = next(rows, None)
    if head is None:
        raise CorruptTable(path, "CSV", "it is empty: its first line must name the columns")
    if head.problem:
        file.check_encoding()
        raise CorruptTable(path, "CSV", f"line {head.line} {head.problem}")
    if len(head.value) == 1 and file.delimiter is None and told is None:
        counts = Counter(character for character in head.value[0] if character in _DELIMITERS.keys() - {expected})
        for character, _ in counts.most_common(1):
            shown = _DELIMITERS[character]
            raise OtherDelimiter(path, brief(head.value[0]), shown, shown, repr(expected))
    if twice := [name for name, count in Counter(head.value).items() if count > 1]:
        raise SchemaMismatch(path, f"it has two columns named {brief(twice[0])}")
    return head.value, (_csv_record(head.value, row) for row in rows)


def _csv_record(names: Sequence[str], row: Record) -> Record:
    problem = row.problem
    if problem is None and len(row.value) != len(names):
        problem = f"has {len(row.value)} fields, and the header {len(names)}"
    return Record(row.line, row.size, None if problem else dict(zip(names, row.value, strict=True)), problem)
