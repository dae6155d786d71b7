"""The rows of CSV and JSONL files, one by one: each is a record, or a problem that costs it alone."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jobs.common.display import brief
from jobs.errors import CorruptTable
from jobs.parquet.formats.lines import MAX_LINE_BYTES, Line
from jobs.prompts.batch_lines import custom_id
from jobs.runs.plans.formats import JSONL, OPENAI_BATCH, TSV
from jobs.runs.plans.plan import Block

#: How JSON writes half of a surrogate pair, which is no text.
_MAY_BE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

#: The csv module has one limit for a process. No field of ours is longer than its line, which is bounded.
csv.field_size_limit(2 * MAX_LINE_BYTES)


class Record(NamedTuple):
    """A row of a file. line: its first, counted from 1. behind: where the next one begins.

    value: an object, or a list of fields, "" where one is empty; None where `problem` says why there is none.
    """

    line: int
    behind: Block
    value: Any
    problem: str | None = None


def records(path: str, file_format: str, lines: Iterable[Line]) -> Iterator[Record]:
    """Yield the records of lines; blank lines are none. Raises CorruptTable where it is not known where one
    ends."""
    if file_format == JSONL:
        return _json_records(lines)
    if file_format == OPENAI_BATCH:
        return map(_in_batch, _json_records(lines))
    return _csv_records(path, lines, "\t" if file_format == TSV else ",")


def _json_records(lines: Iterable[Line]) -> Iterator[Record]:
    for line in lines:
        if line.text is None:
            yield Record(line.number, line.behind, None, f"line {line.number} {_TOO_LONG}")
        elif line.text and not line.text.isspace():
            yield _json_record(line, line.text)


def _in_batch(record: Record) -> Record:
    """Return a line of a batch file as a row of two columns."""
    if record.value is None:
        return record
    return record._replace(value={"custom_id": custom_id(record.value), "request": record.value})


def _json_record(line: Line, text: bytes) -> Record:
    try:
        value = json.loads(text.decode())
        if _MAY_BE_SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8: {error.reason} at byte {error.start}"
    except UnicodeEncodeError:
        problem = "is not valid Unicode: it holds half of a surrogate pair"
    except RecursionError:
        problem = "is nested too deeply"
    except ValueError as error:
        problem = f"is not JSON: {str(error)[:200]}"
    else:
        if isinstance(value, dict):
            return Record(line.number, line.behind, value)
        problem = f"is JSON, but no object: {brief(value)}"
    return Record(line.number, line.behind, None, f"line {line.number} {problem}")


_TOO_LONG = f"has more than the limit of {MAX_LINE_BYTES} bytes: shorten it"


class _Feed:
    """The lines that the csv module takes for one record after the other."""

    def __init__(self, path: str, lines: Iterable[Line]) -> None:
        self._path, self._lines = path, iter(lines)
        self.is_over = False
        self.behind = Block(0, 1)
        self.begin()

    def begin(self) -> None:
        """The next line begins a record."""
        self.first, self.is_utf8, self._bytes = 0, True, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines, None)
        if line is None:
            self.is_over = True
            raise StopIteration
        self.first, self.behind = self.first or line.number, line.behind
        self._bytes += MAX_LINE_BYTES if line.text is None else len(line.text) + 1
        if line.text is None or self._bytes > MAX_LINE_BYTES + 1:
            raise CorruptTable(
                self._path,
                "CSV",
                f"the row that begins in line {self.first} has more than {MAX_LINE_BYTES} bytes: "
                "a quote may not be closed",
            )
        try:
            return line.text.decode() + "\n"
        except UnicodeDecodeError:
            self.is_utf8 = False
            return line.text.decode(errors="replace") + "\n"


def _csv_records(path: str, lines: Iterable[Line], delimiter: str) -> Iterator[Record]:
    feed = _Feed(path, lines)
    reader = csv.reader(feed, delimiter=delimiter, strict=True)
    while True:
        feed.begin()
        value, problem = None, None
        try:
            value = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if feed.is_over:
                reason = f"a quote in the row that begins in line {feed.first} is not closed"
                raise CorruptTable(path, "CSV", reason) from None
            problem = f"line {feed.first} is not CSV: {str(error)[:200]}"
        if value and not feed.is_utf8:
            value, problem = None, f"line {feed.first} is not UTF-8"
        if value or problem:
            yield Record(feed.first, feed.behind, value, problem)
