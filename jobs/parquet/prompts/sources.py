"""Makes the source of rows for a run's arguments, and reads each row's own sampling values from columns."""

import json
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyarrow.types import is_boolean, is_decimal, is_floating, is_integer, is_null, is_struct

from jobs.common.display import to_json
from jobs.context import accept_any_sampling
from jobs.errors import ColumnConflict, InvalidJob, JobsError, WrongColumnType
from jobs.parquet.prompts import prompt_source
from jobs.parquet.prompts.jinja_source import JinjaSource
from jobs.parquet.prompts.picture_source import PictureSource
from jobs.parquet.prompts.prompt_source import (
    ColumnSource,
    PromptSource,
    Row,
    checked_text,
    rows_without_null_keys,
)
from jobs.parquet.tables.columns import (
    PROBLEM,
    RowProblem,
    as_number,
    has_comma_digits,
    has_digits,
    is_list,
    is_text,
    python_rows,
    with_own_json,
)
from jobs.prompts.arguments import NOT_TEXT, SPLIT_TOKENS
from jobs.prompts.messages import ChatOptions, split_chat_options
from jobs.prompts.pictures import ReadFile, is_url, loaded
from jobs.runs.plans.names import OPENAI_BATCH
from jobs.runs.plans.prompt_steps import PromptStep, Template
from jobs.runs.plans.spec import RunSpec

#: How many sets of sampling values are remembered with the result of their check. Many rows may have the same values.
CHECKS_REMEMBERED = 1024
#: How many rows are Python objects at a time. Python objects take many times the memory that Arrow needs.
SLICE_ROWS = 128

#: The only option of a chat that may come from a column.
TOOLS = "tools"

#: Arrow's tests for types that may hold numbers. A column of nulls only may stand for a column of numbers.
_NUMBER_TESTS = (is_integer, is_floating, is_decimal, is_boolean, is_null)


class RowSampling:
    """Reads rows' sampling values from columns. Null stands for the run's value.

    column_by_name: the columns of the rows' own values. The keys are the names of the sampling options. sampling: the
    run's values. check: raises InvalidJob for impossible values.
    """

    def __init__(
        self,
        column_by_name: Mapping[str, str],
        sampling: Mapping[str, Any],
        check: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.columns = tuple(column_by_name.values())
        self._column_by_name = dict(column_by_name)
        self._sampling = dict(sampling)
        self._check_sampling = check
        # A row gets these values where its own are null. Each row's JSON has them, so that rows with equal values have
        # equal JSON. The seed is left out, because each row gets a seed of its own.
        self._run_values = {name: value for name, value in sampling.items() if name != "seed"}
        remember = lru_cache(CHECKS_REMEMBERED)
        self._find_problem_once = remember(self._find_problem)

    def check(self, schema: pa.Schema) -> None:
        """Raise WrongColumnType if a column can never hold values of its sampling option."""
        for name, column in self._column_by_name.items():
            field = schema.field(column)
            if name == TOOLS:
                _check_tools(field)
            else:
                _check_values(field, name)

    def read(self, rows: pa.RecordBatch) -> Iterator[dict[str, Any] | RowProblem]:
        """Yield each row's values in the columns, or its RowProblem. Texts such as 0,7 become numbers first."""
        for column in self.columns:
            field = rows.field(column)
            if has_comma_digits(field):
                column_number = rows.schema.get_field_index(column)
                numbers = as_number(field, rows.column(column))
                rows = rows.set_column(column_number, column, numbers)
        return rows_without_null_keys(self.columns, rows)

    def as_json(self, values: Mapping[str, Any]) -> str:
        """Return a row's sampling values as JSON. Raises RowProblem. values: the values in the row's columns."""
        sampling = {}
        for name, column in self._column_by_name.items():
            value = values[column]
            if value is None:
                value = self._run_values.get(name)
            if name in NOT_TEXT:
                value = _number(value)  # a column of CSV may hold its numbers as texts
            if name == TOOLS and isinstance(value, str):
                value = _from_json(column, value)
            if value is not None:
                sampling[name] = _plain(value)
        sampling_json = json.dumps(sampling)
        problem = self._find_problem_once(sampling_json)
        if problem is not None:
            raise RowProblem(problem)
        return sampling_json

    def _check_options(self, values: Mapping[str, Any]) -> None:
        """Raise InvalidJob for impossible values."""
        sampling = values
        if TOOLS in values:  # tools are an option of the chat
            sampling, _ = split_chat_options(values)
        self._check_sampling(sampling)

    def _find_problem(self, sampling_json: str) -> str | None:
        """Return why a row's sampling values are impossible; None if they are possible."""
        values = json.loads(sampling_json)
        # Each value is checked alone first, so that the problem can name its column.
        for name, value in values.items():
            try:
                self._check_options({name: value})
            except InvalidJob as error:
                return f"column {self._column_by_name[name]!r}: {error}"
        try:
            self._check_options({**self._sampling, **values})
        except InvalidJob as error:
            return str(error)
        return None


def _check_tools(field: pa.Field) -> None:
    """Raise WrongColumnType if a column can never hold the tools of a chat."""
    has_structs = is_list(field.type) and is_struct(field.type.value_type)
    if not has_structs and not is_text(field.type):
        raise WrongColumnType(
            field.name, field.type, "lists of functions as structs, or their JSON"
        )


def _check_values(field: pa.Field, name: str) -> None:
    """Raise WrongColumnType if a column can never hold values of the sampling option `name`, or lists of these."""
    inner = field.type.value_type if is_list(field.type) else field.type
    has_number_type = any(is_of_type(inner) for is_of_type in _NUMBER_TESTS)
    is_number = has_number_type or has_digits(field)
    may_be_text = is_text(inner) and name not in NOT_TEXT
    if not is_number and not may_be_text:
        expected = f"numbers, or another type that holds values of {name}"
        if is_text(inner):
            expected += (
                " (for numbers with a decimal comma, submit with decimal=',' or --decimal ,)"
            )
        raise WrongColumnType(field.name, field.type, expected)


def _from_json(column: str, text: str) -> Any:
    """Parse a column's JSON. Raises RowProblem, which names the column."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowProblem(f"column {column!r} is not JSON: {error}") from None


def _number(value: Any) -> Any:
    """Return the number in a text. Return any other value unchanged.

    A column of a CSV file stays text if its numbers have forms such as 0.70 or 0,7.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value.replace(",", "."))
    except ValueError:
        return value


def _plain(value: Any) -> Any:
    """Return a value as JSON writes it. Whole floats become integers: pandas makes floats of integers beside a null."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Decimal) and value.is_finite():
        is_whole = value == value.to_integral_value()
        return int(value) if is_whole else float(value)
    return value


class RowSource:
    """Makes rows of a table's batches.

    sampling: reads the rows' own sampling values. value_columns: the columns whose values are needed beside the prompt.
    write: turns a row's values of these columns into the text of Row.values.
    """

    def __init__(
        self,
        prompts: PromptSource,
        sampling: RowSampling | None = None,
        value_columns: Sequence[str] = (),
        write: Callable[[Mapping[str, Any]], str] = to_json,
    ) -> None:
        self._prompts = prompts
        self._sampling = sampling
        self._value_columns = tuple(value_columns)
        self._write = write
        sampling_columns = () if sampling is None else sampling.columns
        all_columns = (*prompts.columns, *value_columns, *sampling_columns)
        self.columns = tuple(dict.fromkeys(all_columns))

    def check(self, schema: pa.Schema) -> None:
        """Raise WrongColumnType or ColumnConflict if the columns of a schema can never be read."""
        self._prompts.check(schema)
        prompt_source.check_texts(schema, self._value_columns)
        if self._sampling is not None:
            self._sampling.check(schema)

    def rows(
        self, batch: pa.RecordBatch, read: ReadFile = str.encode
    ) -> Iterator[Row | RowProblem]:
        """Yield each row of a batch, or the reason why no prompt can be made of the row.

        read: returns the bytes of a picture's file. The default is never called: it is for sources without pictures.
        """
        batch = with_own_json(batch)
        # The column PROBLEM says why a line of a file is no row.
        has_problems = PROBLEM in batch.schema.names
        for start in range(0, batch.num_rows, SLICE_ROWS):
            part = batch.slice(start, SLICE_ROWS)
            problems: list[str | None] = [None] * part.num_rows
            if has_problems:
                problems = part.column(PROBLEM).to_pylist()
            values_of_rows = zip(
                problems,
                self._prompts.read(part),
                self._read_sampling(part),
                python_rows(self._value_columns, part),
                strict=True,
            )
            for problem, prompt_values, sampling_values, other_values in values_of_rows:
                if problem is not None:
                    yield RowProblem(problem)
                else:
                    yield self._row(prompt_values, sampling_values, other_values, read)

    def _read_sampling(self, rows: pa.RecordBatch) -> Iterator[dict[str, Any] | RowProblem]:
        """Yield each row's sampling values by column, or its RowProblem; {} if no column holds sampling values."""
        if self._sampling is None:
            return python_rows((), rows)
        return self._sampling.read(rows)

    def _row(
        self,
        prompt_values: Any,
        sampling_values: dict[str, Any] | RowProblem,
        other_values: dict[str, Any] | RowProblem,
        read: ReadFile,
    ) -> Row | RowProblem:
        """Return a row made of its values, or its problem. other_values: the values for Row.values."""
        for values in (prompt_values, sampling_values, other_values):
            if isinstance(values, RowProblem):
                return values
        assert isinstance(sampling_values, dict)
        assert isinstance(other_values, dict)
        try:
            row = self._prompts.row(prompt_values, read)
            sampling = "" if self._sampling is None else self._sampling.as_json(sampling_values)
        except RowProblem as problem:
            return problem
        except JobsError as problem:  # raised for a picture
            if problem.fault == "server":
                raise
            return RowProblem(str(problem))
        written_values = ""
        if self._value_columns:
            written_values = self._write(other_values)
        return row._replace(sampling=sampling, values=written_values)


def row_source(
    spec: RunSpec,
    check_sampling: Callable[[Mapping[str, Any]], None] = accept_any_sampling,
    control_tokens: Collection[str] = (),
) -> RowSource:
    """Return the source of a run's rows, which also checks the rows' sampling values. Raises InvalidJob.

    control_tokens: the texts of the served model's control tokens. Unless the run says otherwise, such a text in a
    row's value is split, so that the model reads it as plain text.
    """
    if spec.input_format == OPENAI_BATCH:
        return RowSource(LineSource(inline_pictures=spec.inline_pictures))
    sampling = None
    if spec.sampling_columns:
        sampling = RowSampling(spec.sampling_columns, spec.chat.sampling, check_sampling)
    if spec.steps:
        return _step_source(spec, sampling, control_tokens)

    chat_options = spec.chat.options
    prompts = _prompts(spec, _tokens_to_split(chat_options, control_tokens))
    picture_columns = spec.image_column or ()
    if picture_columns:
        has_template = spec.template is not None
        prompts = PictureSource(
            prompts, picture_columns, has_template=has_template, is_chat=spec.is_chat
        )
    if spec.repairs.function is None:
        return RowSource(prompts, sampling)
    # The check function gets the values of these columns.
    text_columns = [column for column in prompts.columns if column not in picture_columns]
    check_columns = (*text_columns, *spec.sampling_columns.values(), *(spec.check_columns or ()))
    distinct_columns = tuple(dict.fromkeys(check_columns))
    return RowSource(prompts, sampling, distinct_columns)


def _step_source(
    spec: RunSpec, sampling: RowSampling | None, control_tokens: Collection[str]
) -> RowSource:
    """Return the source of rows with several prompts. Row.values has the values that later prompts read."""
    first_step, *later_steps = spec.steps
    step_names = [step.name for step in spec.steps]
    # A later template names columns, and earlier prompts whose answers it takes.
    later_names: dict[str, None] = {}  # a set that keeps its order
    for step in later_steps:
        later_names.update(dict.fromkeys(step.template.columns))
    value_columns = [name for name in later_names if name not in step_names]
    prompt_source.check_defaults(spec.defaults, (*first_step.template.columns, *value_columns))
    prompts = StepSource(first_step, spec.defaults, step_names, control_tokens)
    return RowSource(prompts, sampling, value_columns, prompt_source.written_as_texts)


def _tokens_to_split(chat: ChatOptions, control_tokens: Collection[str]) -> Collection[str]:
    """Return the control tokens whose texts are split where a value contains them, so that they stay plain text."""
    splits_tokens = chat.get(SPLIT_TOKENS, True)
    return control_tokens if splits_tokens else ()


def _prompts(spec: RunSpec, control_tokens: Collection[str]) -> prompt_source.PromptSource:
    """Return the source of a run's prompts, without pictures."""
    if spec.template is not None and spec.template_format == "jinja":
        return JinjaSource(
            spec.template,
            spec.defaults,
            needs_column=not spec.image_column,
            control_tokens=control_tokens,
        )
    if spec.template is not None:
        return prompt_source.TemplateSource(
            Template.parse(spec.template), spec.defaults, control_tokens
        )
    if spec.query_column is not None and spec.document_column is not None:
        return prompt_source.prompt_pair(spec.query_column, spec.document_column)
    if spec.messages_column is not None:
        return prompt_source.messages_column(spec.messages_column, drops_keys=spec.drop_unsupported)
    assert spec.prompt_column is not None
    return ColumnSource([spec.prompt_column], checked_text, is_text, "text")


class StepSource(prompt_source.TemplateSource):
    """Makes one of a row's several prompts. If a row has a problem, the problem names the prompt.

    defaults: the defaults of all prompts of a row. reserved_names: the names of all prompts, which no column of the
    input may have.
    """

    def __init__(
        self,
        step: PromptStep,
        defaults: Mapping[str, str],
        reserved_names: Sequence[str] = (),
        control_tokens: Collection[str] = (),
    ) -> None:
        step_defaults = {name: defaults[name] for name in step.template.columns if name in defaults}
        super().__init__(step.template, step_defaults, _tokens_to_split(step.chat, control_tokens))
        self._name = step.name
        self._reserved_names = reserved_names

    def check(self, schema: pa.Schema) -> None:
        """Raise ColumnConflict or WrongColumnType if the prompt cannot be made from the columns of a schema."""
        for name in self._reserved_names:
            if name in schema.names:
                raise ColumnConflict(name, "give the prompt another name, or rename the column")
        super().check(schema)

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the prompt of one row. Raises RowProblem."""
        try:
            return super().render(values)
        except RowProblem as problem:
            raise RowProblem(f"prompt {self._name!r}: {problem}") from None


class LineSource(PromptSource):
    """Lines of a batch file. Each line is JSON. The limit of a prompt's length does not hold for a line.

    A line may name a picture by its path. The path is then replaced by a data: URL. inline_pictures: True if every
    picture must be a data: URL already. Then a line that names a path is refused.
    """

    columns = ("request",)

    def __init__(self, *, inline_pictures: bool = False) -> None:
        self._inline_pictures = inline_pictures

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the request that a line holds, as JSON. Raises RowProblem if there is none."""
        if values["request"] is None:
            raise RowProblem("there is no request")
        return str(values["request"])

    def row(self, values: Mapping[str, Any], read: ReadFile) -> Row:
        """Return a line with its pictures. Raises RowProblem or InvalidJob, or what `read` raises."""
        text = self.render(values)
        # JSON may write any name with escapes, so a line with escapes is searched too.
        if "image_url" not in text and "\\u" not in text:
            return Row(text)

        # The line's image_url objects that name a file: their `url` is a path.
        images_with_path: list[dict[str, Any]] = []

        def note_path(part: dict[str, Any]) -> dict[str, Any]:
            """Note the picture of a part if its URL is a path. Called with each object of the line. Returns the object.

            If the part's image_url is a text, it is replaced by an object whose `url` is this text.
            """
            if part.get("type") != "image_url":
                return part
            image: Any = part.get("image_url")
            if isinstance(image, str):
                image = {"url": image}
            part["image_url"] = image
            url = image.get("url") if isinstance(image, dict) else None
            if isinstance(url, str) and not is_url(url):
                images_with_path.append(image)
            return part

        try:
            line = json.loads(text, object_hook=note_path)
        except (ValueError, RecursionError):
            return Row(text)  # the row's error will say what is wrong with the line
        if not images_with_path:
            return Row(text)
        if self._inline_pictures:
            raise RowProblem(
                "a picture is no data: URL, and files are not read here: send data:image/...;base64,..."
            )
        files = loaded([image["url"] for image in images_with_path], read)
        for image, file in zip(images_with_path, files, strict=True):
            image["url"] = f"data:image/file;base64,{b64encode(file).decode()}"
        return Row(json.dumps(line))
