"""The rows of CSV and JSONL files, one by one: each is a record, or a problem that costs it alone."""

import csv
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jobs.common.display import brief
from jobs.errors import CorruptTable
from jobs.prompts.batch_lines import custom_id
from jobs.runs.plans.formats import HEADED, OPENAI_BATCH, TSV

#: Bytes of one line, or row of CSV: room for a prompt of the largest size, however its letters are written.
MAX_LINE_BYTES = 8 << 20

#: Lines of one row of CSV.
MAX_LINES = 1 << 16

CHUNK_BYTES = 1 << 20

_UTF8_MARK, _UTF16_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
_TOO_LONG = f"has more than the limit of {MAX_LINE_BYTES} bytes: shorten it"

#: How JSON writes half of a surrogate pair, which is no text.
_MAY_BE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

#: The csv module has one limit for a process. No field of ours is longer than its row, which is bounded.
csv.field_size_limit(2 * MAX_LINE_BYTES)


class Record(NamedTuple):
    """A row of a file. line: its first, counted from 1. size: bytes of its text.

    value: an object, or a list of fields, "" where one is empty; None where `problem` says why there is none.
    """

    line: int
    size: int
    value: Any
    problem: str | None = None


class _Line(NamedTuple):
    """A line without its end, counted from 1. text: None where it has more than MAX_LINE_BYTES."""

    number: int
    size: int
    text: bytes | None


def records(path: str, file_format: str, stream: Any) -> Iterator[Record]:
    """Yield the records of a file of text; blank lines are none. Raises CorruptTable for text in UTF-16."""
    lines = _lines(path, stream)
    if file_format in HEADED:
        return _csv_records(lines, "\t" if file_format == TSV else ",")
    found = (_json_record(line) for line in lines if line.text is None or line.text.strip())
    return map(_in_batch, found) if file_format == OPENAI_BATCH else found


def _lines(path: str, stream: Any) -> Iterator[_Line]:
    number, rest, dropped = 1, b"", 0
    while chunk := stream.read(CHUNK_BYTES):
        if number == 1 and not rest and not dropped:
            if chunk.startswith(_UTF16_MARKS):
                raise CorruptTable(path, "text", "it is UTF-16, expected UTF-8")
            chunk = chunk.removeprefix(_UTF8_MARK)
        first, *others = chunk.split(b"\n")
        for following in others:
            yield _line(number, rest + first, dropped)
            number, rest, dropped, first = number + 1, b"", 0, following
        rest += first
        if dropped or len(rest) > MAX_LINE_BYTES:
            rest, dropped = b"", dropped + len(rest)
    if rest or dropped:
        yield _line(number, rest, dropped)


def _line(number: int, text: bytes, dropped: int) -> _Line:
    """dropped: bytes before the text that were too many to hold."""
    size = len(text) + dropped
    return _Line(number, size + 1, text if size <= MAX_LINE_BYTES else None)


def _json_record(line: _Line) -> Record:
    if line.text is None:
        return Record(line.number, line.size, None, _TOO_LONG)
    try:
        value = json.loads(line.text.decode())
        if _MAY_BE_SURROGATE.search(line.text):
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
            return Record(line.number, line.size, value)
        problem = f"is JSON, but no object: {brief(value)}"
    return Record(line.number, line.size, None, problem)


def _in_batch(record: Record) -> Record:
    """Return a line of a batch file as a row of two columns."""
    if record.value is None:
        return record
    return record._replace(value={"custom_id": custom_id(record.value), "request": record.value})


class _TooLong(Exception):
    """Raised where a row of CSV goes on and on: a quote may not be closed."""


class _Feed:
    """The lines that the csv module takes for one row after the other."""

    def __init__(self, lines: Iterable[_Line]) -> None:
        self._lines, self._again = iter(lines), deque[_Line]()
        self.taken: list[_Line] = []

    def begin(self) -> None:
        """Begin a row with the next line."""
        self.taken, self.size, self.is_utf8, self.is_over = [], 0, True, False

    def end_behind_first(self) -> None:
        """End a row with its first line: the others are read again."""
        self._again.extendleft(reversed(self.taken[1:]))
        del self.taken[1:]
        self.size = self.taken[0].size

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._lines, None)
        if line is None:
            self.is_over = True
            raise StopIteration
        self.taken.append(line)
        self.size += line.size
        if line.text is None or self.size > MAX_LINE_BYTES + 1 or len(self.taken) > MAX_LINES:
            raise _TooLong
        try:
            return line.text.decode() + "\n"
        except UnicodeDecodeError:
            self.is_utf8 = False
            return line.text.decode(errors="replace") + "\n"


def _csv_records(lines: Iterable[_Line], delimiter: str) -> Iterator[Record]:
    feed = _Feed(lines)
    reader = csv.reader(feed, delimiter=delimiter, strict=True)
    while True:
        feed.begin()
        value: list[str] | None = None
        problem = None
        try:
            value = next(reader)
        except StopIteration:
            return
        except _TooLong:
            problem = _TOO_LONG if len(feed.taken) == 1 else f"begins a row that {_TOO_LONG}, or close its quote"
            feed.end_behind_first()
        except csv.Error as error:
            problem = f"is not CSV: {str(error)[:200]}"
            if feed.is_over:
                problem = "begins a quote that is not closed"
                feed.end_behind_first()
        if value and not feed.is_utf8:
            value, problem = None, "is not UTF-8"
        if value or problem:
            yield Record(feed.taken[0].number, feed.size, value, problem)
