"""Reads the rows of CSV and JSONL files one by one. If a line cannot be read, only its row is lost."""

import csv
import io
import json
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
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

# The csv module has one limit for the process. No field reaches this limit, because `_RowLines` bounds the whole row.
csv.field_size_limit(2 * MAX_LINE_BYTES)


class Record(NamedTuple):
    """A row of a file, or a line of its text.

    line_number: the number of the line, or of the row's first line, from 1. size: in bytes. value: a row's values by
    column, or a line's bytes; None if there is a problem. problem: why the text cannot be read.
    """

    line_number: int
    size: int
    value: Any
    problem: str | None = None


class TextFile:
    """The text of a file.

    encoding: the encoding that the run names; None if it names none. In this case the text is read as UTF-8, and
    `guess` looks for signs of another encoding. encoding_name: the encoding as messages show it.
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
        """Yield the lines. Their values are bytes of UTF-8, without the line's end. Raises OtherEncoding."""
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
    """Yield the records of a file of JSON lines. Blank lines are left out.

    A record of a batch file has the columns custom_id and request.
    """
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
        has_end = line.endswith(b"\n")  # the limit does not count the line's end
        if len(line) <= MAX_LINE_BYTES or has_end:
            yield Record(number, len(line), line.removesuffix(b"\n"))
            continue
        size = len(line)
        piece = line
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(CHUNK_BYTES)
            size += len(piece)
        yield Record(number, size, value=None, problem=_TOO_LONG)


def _json_record(line: Record, encoding: str) -> Record:
    """Return the row in a line of JSON. The line is UTF-8. encoding: the name of the file's encoding, for messages."""
    try:
        value = json.loads(line.value.decode())
        if _MAY_BE_SURROGATE.search(line.value):
            # Half of a surrogate pair raises UnicodeEncodeError here.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        # A file in another encoding was turned into UTF-8, so the position in the line is not the position in the file.
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


class _RowLines:
    """Gives the csv module the lines of a file, and remembers the lines of the current row.

    lines: the lines of the current row. size: how many bytes these lines have. no_end_problem: the error to report if
    the lines come to an end before the row does.
    """

    def __init__(self, file_lines: Iterator[Record]) -> None:
        self._file_lines = file_lines
        self._lines_again: deque[Record] = deque()  # read before the next lines of the file
        self.lines: list[Record] = []
        self.size = 0
        self.no_end_problem = ""  # see the class

    def texts(self) -> Iterator[str]:
        """Yield lines for the csv module. Ends at a line that cannot be part of a row, or at the file's end."""
        self.no_end_problem = "begins a quote that is not closed"
        while True:
            if self._lines_again:
                line = self._lines_again.popleft()
            else:
                next_line = next(self._file_lines, None)
                if next_line is None:
                    return
                line = next_line
            self.lines.append(line)
            self.size += line.size
            is_row_too_long = self.size > MAX_LINE_BYTES + 1 or len(self.lines) > MAX_LINES
            if line.problem or is_row_too_long:  # a line's only problem is that it is too long
                self.no_end_problem = f"begins a row that {_TOO_LONG}, or close its quote"
                return
            yield f"{line.value.decode(errors='surrogateescape')}\n"

    def begin_row(self) -> None:
        """Forget the lines of the row before."""
        self.lines = []
        self.size = 0

    def keep_first(self) -> None:
        """Cut the row down to its first line. Its other lines are read again, as rows of their own."""
        first_line, *later_lines = self.lines
        self._lines_again.extendleft(reversed(later_lines))
        self.lines = [first_line]
        self.size = first_line.size


def _csv_rows(file_lines: Iterator[Record], delimiter: str, encoding: str) -> Iterator[Record]:
    """Yield rows whose values are lists of fields.

    If a row does not end, because a quote is not closed, only its first line is lost. The row's other lines are read
    again. A row that is no CSV has a problem and no fields. A row that is not valid Unicode has a problem and fields.
    """
    current_row = _RowLines(file_lines)  # serves all rows, one after the other
    reader = csv.reader(current_row.texts(), delimiter=delimiter, strict=True)
    while True:
        current_row.begin_row()
        fields: list[str] = []
        problem = None
        try:
            fields = next(reader)
            if not is_unicode("".join(fields)):
                problem = f"is not {encoding}"
        except (StopIteration, csv.Error) as error:
            if not current_row.lines:
                return  # the file's end
            has_no_end = isinstance(error, StopIteration) or "unexpected end of data" in str(error)
            if has_no_end:
                current_row.keep_first()
                problem = current_row.lines[0].problem or current_row.no_end_problem
                # The texts have ended, and this reader with them.
                reader = csv.reader(current_row.texts(), delimiter=delimiter, strict=True)
            else:
                problem = _csv_problem(error)
        is_blank_line = not fields and not problem
        if not is_blank_line:
            yield Record(current_row.lines[0].line_number, current_row.size, fields, problem)


def _csv_problem(error: Exception) -> str:
    """Return what is wrong with a row that the csv module refuses."""
    if "new-line character" in str(error):
        return "has a carriage return (\\r) outside quotes: end lines with \\n or \\r\\n, or quote the field"
    return f"is not CSV: {str(error)[:200]}"


#: A CSV file's first line may name the delimiter for Excel. This line is no row.
_SEP_LINE = re.compile(rb'"?sep=(?P<delimiter>.)"?\r?', re.IGNORECASE)
#: Likely delimiters of a file whose header seems to name a single column, with the form that messages show.
_DELIMITERS = {";": "';'", "\t": "'\\t'", "|": "'|'", ",": "','"}
#: The most rows of such a file that are read to guess its encoding.
_GUESS_ROWS = 1000


def csv_records(file: TextFile) -> tuple[list[str], Iterator[Record]]:
    """Return the column names, and the records of the rows after the header. A record's value is a dict of the fields.

    Raises CorruptTable, SchemaMismatch, OtherEncoding or OtherDelimiter.
    """
    path = file.path
    usual_delimiter = "\t" if file.format == TSV else ","
    lines = file.lines()
    first_line = next(lines, None)
    # A first line such as sep=; is for Excel, and names the delimiter.
    sep_line = None
    if first_line is not None and first_line.value is not None:
        sep_line = _SEP_LINE.fullmatch(first_line.value)
    if sep_line is None and first_line is not None:
        lines = chain([first_line], lines)  # the first line is the header

    delimiter = usual_delimiter
    if file.delimiter:
        delimiter = file.delimiter
    elif sep_line:
        delimiter = sep_line["delimiter"].decode(errors="replace")
    rows = _csv_rows(lines, delimiter, file.encoding_name)

    header = next(rows, None)
    if header is None:
        raise CorruptTable(path, "CSV", "it is empty: its first line must name the columns")
    # A header that is not UTF-8 has fields too. So the error for another delimiter also names the encoding.
    names: list[str] = header.value or []
    is_usual_delimiter = file.delimiter is None and sep_line is None
    if len(names) == 1 and is_usual_delimiter:
        _check_only_column(file, names[0], usual_delimiter, rows)
    if header.problem:
        file.check_encoding()
        raise CorruptTable(path, "CSV", f"line {header.line_number} {header.problem}")
    for name, count in Counter(names).items():
        if count > 1:
            raise SchemaMismatch(path, f"it has two columns named {brief(name)}")
    return names, (_csv_record(names, row) for row in rows)


def _check_only_column(file: TextFile, name: str, delimiter: str, rows: Iterator[Record]) -> None:
    """Raise OtherDelimiter if the name of a file's only column contains another likely delimiter.

    rows: the rows after the header. Some are read, so that the error also says if they look like another encoding.
    """
    other_delimiters = _DELIMITERS.keys() - {delimiter}
    counts = Counter(character for character in name if character in other_delimiters)
    if counts:
        [(commonest, _)] = counts.most_common(1)
        likely_delimiter = _DELIMITERS[commonest]
        deque(islice(rows, _GUESS_ROWS), maxlen=0)  # `file.guess` sees their lines
        encoding = ""
        if file.guess is not None and file.guess.seems_cp1252:
            encoding = " and encoding (--encoding cp1252)"
        raise OtherDelimiter(file.path, brief(name), likely_delimiter, encoding, repr(delimiter))


def _csv_record(names: Sequence[str], row: Record) -> Record:
    """Return the record of a row, with its fields in a dict.

    A row with more or fewer fields than the header has a problem in place of the dict.
    """
    problem = row.problem
    if problem is None and len(row.value) != len(names):
        problem = f"has {len(row.value)} fields, and the header {len(names)}"
    value = None if problem else dict(zip(names, row.value, strict=True))
    return Record(row.line_number, row.size, value, problem)
