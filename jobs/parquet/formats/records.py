"""Reads the rows of CSV and JSONL files one by one. If a line cannot be read, only its row is lost."""

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

#: The most bytes of a line, or of a row of CSV: room for the longest prompt, even if every letter is escaped.
MAX_LINE_BYTES = 8 << 20

#: The most lines of a row of CSV.
MAX_LINES = 1 << 16
_UTF8_MARK = b"\xef\xbb\xbf"
_TOO_LONG = f"has more than the limit of {MAX_LINE_BYTES} bytes: shorten it"
#: JSON's escape for half of a surrogate pair. Such a half alone is no text.
_MAY_BE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

# The csv module has one limit for the process. No field reaches this one, because `_csv_rows` bounds the whole row.
csv.field_size_limit(2 * MAX_LINE_BYTES)


class Record(NamedTuple):
    """A row of a file.

    line: the number of its first line, from 1. size: in bytes. value: the row, by columns; None if there is a problem.
    problem: why the text is no row.
    """

    line: int
    size: int
    value: Any
    problem: str | None = None


class TextFile:
    """The text of a file.

    encoding: the run's encoding. Without one, the text is read as UTF-8, and `guess` looks at each line.
    """

    def __init__(
        self, path: str, file_format: str, stream: Any, dialect: Mapping[str, str]
    ) -> None:
        self.path = path
        self.format = file_format
        self._stream = stream
        self.delimiter = dialect.get("delimiter")
        self.encoding = dialect.get("encoding")
        self.guess = EncodingGuess(path) if self.encoding is None else None
        self.encoding_name = "UTF-8" if self.encoding in (None, "utf-8") else self.encoding

    def lines(self) -> Iterator[Record]:
        """Yield the lines, as bytes of UTF-8 without their end. Raises OtherEncoding."""
        stream = self._stream
        if self.encoding is not None and self.encoding != "utf-8":
            stream = Decoded(self._stream, self.encoding, self.path, self.format)
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
        """Raise OtherEncoding if the lines that were read look like another encoding than UTF-8."""
        if self.guess is not None:
            self.guess.check()


def json_records(file: TextFile) -> Iterator[Record]:
    """Yield the records of a file of JSON lines. Blank lines are left out. A line of a batch file has two columns."""
    for line in file.lines():
        if line.problem:
            yield line
            continue
        if not line.value.strip():
            continue
        record = _json_record(line, file.encoding_name)
        if file.format == OPENAI_BATCH and record.value is not None:
            columns = {"custom_id": custom_id(record.value), "request": record.value}
            record = record._replace(value=columns)
        yield record


def _lines(file: io.BufferedReader) -> Iterator[Record]:
    """Yield a file's lines. A line that is too long is read to its end, and has a problem in place of a value."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) <= MAX_LINE_BYTES or line.endswith(b"\n"):  # the line's end does not count
            yield Record(number, len(line), line.removesuffix(b"\n"))
            continue
        size = len(line)
        piece = line
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(CHUNK_BYTES)
            size += len(piece)
        yield Record(number, size, value=None, problem=_TOO_LONG)


def _json_record(line: Record, encoding: str) -> Record:
    """Return the row in a line of JSON. encoding: the file's, for messages."""
    try:
        value = json.loads(line.value.decode())
        if _MAY_BE_SURROGATE.search(line.value):
            json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError for a half
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
    """Yield rows whose values are lists of fields.

    If a row does not end, because a quote is not closed, only its first line is lost. The lines after the first one are
    read again. A row with a problem has an empty list. If the problem is its Unicode, the row has all its fields.
    """
    lines_again: deque[Record] = deque()  # lines to be read before others
    row_lines: list[Record] = []  # the lines of the current row
    size = 0  # the bytes of the current row
    no_end_problem = ""  # what to say of the current row if it does not end

    def texts() -> Iterator[str]:
        """Yield lines for the csv module. Ends at a line that cannot be part of a row, or at the file's end."""
        nonlocal size, no_end_problem
        no_end_problem = "begins a quote that is not closed"
        while True:
            line = lines_again.popleft() if lines_again else next(lines, None)
            if line is None:
                return
            row_lines.append(line)
            size += line.size
            if line.problem or size > MAX_LINE_BYTES + 1 or len(row_lines) > MAX_LINES:
                no_end_problem = f"begins a row that {_TOO_LONG}, or close its quote"
                return
            yield f"{line.value.decode(errors='surrogateescape')}\n"

    reader = csv.reader(texts(), delimiter=delimiter, strict=True)
    while True:
        row_lines.clear()
        size = 0
        fields: list[str] = []
        problem = None
        try:
            fields = next(reader)
            problem = None if is_unicode("".join(fields)) else f"is not {encoding}"
        except (StopIteration, csv.Error) as error:
            if not row_lines:
                return  # the file's end
            problem = f"is not CSV: {str(error)[:200]}"
            if "new-line character" in problem:
                problem = "has a carriage return (\\r) outside quotes: end lines with \\n or \\r\\n, or quote the field"
            if isinstance(error, StopIteration) or "unexpected end of data" in problem:
                # `texts` has ended within the row, and this reader with it. A new one begins at the row's second line.
                first_line, *later_lines = row_lines
                problem = first_line.problem or no_end_problem
                size = first_line.size
                lines_again.extendleft(reversed(later_lines))
                reader = csv.reader(texts(), delimiter=delimiter, strict=True)
        if fields or problem:  # other lines are blank
            yield Record(row_lines[0].line, size, fields, problem)


#: A first line of CSV that names the delimiter for Excel. This line is no row.
_SEP_LINE = re.compile(rb'"?sep=(?P<delimiter>.)"?\r?', re.IGNORECASE)
#: Likely delimiters, if the header seems to have a single column that contains one.
_DELIMITERS = {";": "';'", "\t": "'\\t'", "|": "'|'", ",": "','"}


def csv_records(file: TextFile) -> tuple[list[str], Iterator[Record]]:
    """Return the names of the columns, from the first row, and the other rows by these names.

    Raises CorruptTable, SchemaMismatch, OtherEncoding or OtherDelimiter.
    """
    path = file.path
    usual_delimiter = "\t" if file.format == TSV else ","
    lines = file.lines()
    first_line = next(lines, None)
    sep_line = None
    if first_line is not None and first_line.value is not None:
        sep_line = _SEP_LINE.fullmatch(first_line.value)
    if sep_line is None and first_line is not None:
        lines = chain([first_line], lines)  # it is the header

    delimiter = usual_delimiter
    if file.delimiter:
        delimiter = file.delimiter
    elif sep_line:
        delimiter = sep_line["delimiter"].decode(errors="replace")
    rows = _csv_rows(lines, delimiter, file.encoding_name)

    head = next(rows, None)
    if head is None:
        raise CorruptTable(path, "CSV", "it is empty: its first line must name the columns")
    if head.problem:
        file.check_encoding()
        raise CorruptTable(path, "CSV", f"line {head.line} {head.problem}")
    names: list[str] = head.value
    if len(names) == 1 and file.delimiter is None and sep_line is None:
        [name] = names
        other_delimiters = _DELIMITERS.keys() - {usual_delimiter}
        counts = Counter(character for character in name if character in other_delimiters)
        if counts:
            [(commonest, _)] = counts.most_common(1)
            shown = _DELIMITERS[commonest]
            raise OtherDelimiter(path, brief(name), shown, shown, repr(usual_delimiter))

    for name, count in Counter(names).items():
        if count > 1:
            raise SchemaMismatch(path, f"it has two columns named {brief(name)}")
    return names, (_csv_record(names, row) for row in rows)


def _csv_record(names: Sequence[str], row: Record) -> Record:
    """Return a row whose value has the fields by the columns' names."""
    problem = row.problem
    if problem is None and len(row.value) != len(names):
        problem = f"has {len(row.value)} fields, and the header {len(names)}"
    value = None if problem else dict(zip(names, row.value, strict=True))
    return Record(row.line, row.size, value, problem)
