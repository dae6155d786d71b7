"""Which source of rows a run's arguments name, and the sampling values that each row brings in columns of its own."""

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
from jobs.parquet.prompts.prompt_source import ColumnSource, PromptSource, Row, checked_text, rows_without_null_keys
from jobs.parquet.tables.columns import PROBLEM, RowProblem, has_digits, is_list, is_text, python_rows, with_own_json
from jobs.prompts.arguments import NOT_TEXT
from jobs.prompts.messages import OF_VALUES, ChatOptions, split_chat_options
from jobs.prompts.pictures import ReadFile, is_url, loaded
from jobs.runs.plans.names import OPENAI_BATCH
from jobs.runs.plans.prompt_steps import PromptStep, Template
from jobs.runs.plans.spec import RunSpec

#: Sets of values whose check is remembered: rows of few kinds are common.
CHECKS_REMEMBERED = 1024
#: Rows that are Python's at a time: as Python's objects, values take many times what Arrow needs for them.
SLICE_ROWS = 128

#: The one option of a chat that may come from a column.
TOOLS = "tools"

_NUMBERS = (is_integer, is_floating, is_decimal, is_boolean, is_null)


class RowSampling:
    """Sampling values from columns `by_name`; null leaves the run's. check: raises InvalidJob for impossible ones."""

    def __init__(
        self, by_name: Mapping[str, str], sampling: Mapping[str, Any], check: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self.columns = tuple(by_name.values())
        self._by_name, self._sampling, self._check_sampling = dict(by_name), dict(sampling), check
        # What null stands for is written out, so that equal values are equal texts; a run's seed is no row's.
        self._shared = {name: value for name, value in sampling.items() if name != "seed"}
        self._problem = lru_cache(CHECKS_REMEMBERED)(self._find_problem)

    def check(self, schema: pa.Schema) -> None:
        for name, column in self._by_name.items():
            kind = schema.field(column).type
            if name == TOOLS:
                if not is_text(kind) and not (is_list(kind) and is_struct(kind.value_type)):
                    raise WrongColumnType(column, kind, "lists of functions as structs, or their JSON")
                continue
            inner = kind.value_type if is_list(kind) else kind
            is_number = any(is_one(inner) for is_one in _NUMBERS) or has_digits(schema.field(column))
            if not is_number and (name in NOT_TEXT or not is_text(inner)):
                raise WrongColumnType(column, kind, f"a value for {name}: a number, as a rule")

    def read(self, rows: pa.RecordBatch) -> Iterator[dict[str, Any] | RowProblem]:
        """Yield the values of each row's columns, or its RowProblem."""
        return rows_without_null_keys(self.columns, rows)

    def of(self, values: Mapping[str, Any]) -> str:
        found = {
            name: self._shared.get(name) if values[column] is None else values[column]
            for name, column in self._by_name.items()
        }
        found = {name: _number(value) if name in NOT_TEXT else value for name, value in found.items()}
        if isinstance(tools := found.get(TOOLS), str):
            found[TOOLS] = _from_json(self._by_name[TOOLS], tools)
        own = json.dumps({name: _plain(value) for name, value in found.items() if value is not None})
        if (problem := self._problem(own)) is not None:
            raise RowProblem(problem)
        return own

    def _check(self, values: Mapping[str, Any]) -> None:
        sampling = split_chat_options(values)[0] if TOOLS in values else values
        self._check_sampling(sampling)

    def _find_problem(self, own: str) -> str | None:
        values = json.loads(own)
        for name, value in values.items():
            try:
                self._check({name: value})
            except InvalidJob as error:
                return f"column {self._by_name[name]!r}: {error}"
        try:
            self._check({**self._sampling, **values})
        except InvalidJob as error:
            return str(error)
        return None


def _from_json(column: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowProblem(f"column {column!r} is not JSON: {error}") from None


def _number(value: Any) -> Any:
    """Return the number in a text of a CSV file whose type would write it otherwise: 0.70, or 0,7."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value.replace(",", "."))
    except ValueError:
        return value


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: pandas makes integers beside a null floating point numbers."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Decimal) and value.is_finite():
        return int(value) if value == value.to_integral_value() else float(value)
    return value


class RowSource:
    """Makes rows of prompts, with the sampling values and the values of columns `beside` them."""

    def __init__(
        self,
        prompts: PromptSource,
        sampling: RowSampling | None = None,
        beside: Sequence[str] = (),
        write: Callable[[Mapping[str, Any]], str] = to_json,
    ) -> None:
        self._prompts, self._sampling = prompts, sampling
        self._beside, self._write = tuple(beside), write
        own = () if sampling is None else sampling.columns
        self.columns = tuple(dict.fromkeys((*prompts.columns, *beside, *own)))

    def check(self, schema: pa.Schema) -> None:
        self._prompts.check(schema)
        prompt_source.check_texts(schema, self._beside)
        if self._sampling is not None:
            self._sampling.check(schema)

    def rows(self, batch: pa.RecordBatch, read: ReadFile = str.encode) -> Iterator[Row | RowProblem]:
        """Yield each row of a batch, or why it asks nothing. read: gives the file of a picture's path."""
        batch = with_own_json(batch)
        has_problems = PROBLEM in batch.schema.names
        for start in range(0, batch.num_rows, SLICE_ROWS):
            part = batch.slice(start, SLICE_ROWS)
            problems = part.column(PROBLEM).to_pylist() if has_problems else [None] * part.num_rows
            of_rows = zip(
                self._prompts.read(part), self._read_sampling(part), python_rows(self._beside, part), strict=True
            )
            for problem, values in zip(problems, of_rows, strict=True):
                yield self._row(*values, read) if problem is None else RowProblem(problem)

    def _read_sampling(self, rows: pa.RecordBatch) -> Iterator[dict[str, Any] | RowProblem]:
        return python_rows((), rows) if self._sampling is None else self._sampling.read(rows)

    def _row(
        self, given: Any, own: dict[str, Any] | RowProblem, values: dict[str, Any] | RowProblem, read: ReadFile
    ) -> Row | RowProblem:
        for each in (given, own, values):
            if isinstance(each, RowProblem):
                return each
        assert isinstance(own, dict)
        assert isinstance(values, dict)
        try:
            row = self._prompts.row(given, read)
            sampling = "" if self._sampling is None else self._sampling.of(own)
        except RowProblem as problem:
            return problem
        except JobsError as problem:  # a picture's
            if problem.fault == "server":
                raise
            return RowProblem(str(problem))
        beside = self._write({name: values[name] for name in self._beside}) if self._beside else ""
        return row._replace(sampling=sampling, values=beside)


def row_source(
    spec: RunSpec,
    check_sampling: Callable[[Mapping[str, Any]], None] = accept_any_sampling,
    control_tokens: Collection[str] = (),
) -> RowSource:
    """Return the source that a run's arguments name. It checks the rows' sampling values. Raises InvalidJob.

    control_tokens: the served model's. Rows' values cannot forge them, unless the run allows it.
    """
    if spec.input_format == OPENAI_BATCH:
        return RowSource(LineSource())
    sampling = None
    if spec.sampling_columns:
        sampling = RowSampling(spec.sampling_columns, spec.chat[0], check_sampling)
    if spec.steps:
        (first, *others), names = spec.steps, [step.name for step in spec.steps]
        named = dict.fromkeys(column for step in others for column in step.template.columns)
        later = [column for column in named if column not in names]
        prompt_source.check_defaults(spec.defaults, (*first.template.columns, *later))
        prompt = StepSource(first, spec.defaults, names, control_tokens)
        return RowSource(prompt, sampling, later, prompt_source.written_as_texts)
    prompts, pictures = _prompts(spec, _split(spec.chat[1], control_tokens)), spec.image_column or ()
    if pictures:
        kind = {"has_template": spec.template is not None, "is_chat": spec.is_chat}
        prompts = PictureSource(prompts, pictures, **kind)
    if spec.repairs.function is None:
        return RowSource(prompts, sampling)
    texts = (column for column in prompts.columns if column not in pictures)
    given = dict.fromkeys((*texts, *spec.sampling_columns.values(), *(spec.check_columns or ())))
    return RowSource(prompts, sampling, tuple(given))


def _split(chat: ChatOptions, control_tokens: Collection[str]) -> Collection[str]:
    """Return the control tokens that values may not forge."""
    return control_tokens if chat.get(OF_VALUES, True) else ()


def _prompts(spec: RunSpec, control_tokens: Collection[str]) -> prompt_source.PromptSource:
    if spec.template is not None and spec.template_format == "jinja":
        return JinjaSource(
            spec.template, spec.defaults, needs_column=not spec.image_column, control_tokens=control_tokens
        )
    if spec.template is not None:
        return prompt_source.TemplateSource(Template.parse(spec.template), spec.defaults, control_tokens)
    if spec.query_column is not None and spec.document_column is not None:
        return prompt_source.prompt_pair(spec.query_column, spec.document_column)
    if spec.messages_column is not None:
        return prompt_source.messages_column(spec.messages_column)
    assert spec.prompt_column is not None
    return ColumnSource([spec.prompt_column], checked_text, is_text, "text")


class StepSource(prompt_source.TemplateSource):
    """One of a row's prompts, which a problem of it names. defaults: of all of them. taken: names for no column."""

    def __init__(
        self,
        step: PromptStep,
        defaults: Mapping[str, str],
        taken: Sequence[str] = (),
        control_tokens: Collection[str] = (),
    ) -> None:
        own = {name: defaults[name] for name in step.template.columns if name in defaults}
        super().__init__(step.template, own, _split(step.chat, control_tokens))
        self._name, self._taken = step.name, taken

    def check(self, schema: pa.Schema) -> None:
        for name in self._taken:
            if name in schema.names:
                raise ColumnConflict(name, "give the prompt of this name another one, or rename the column")
        super().check(schema)

    def render(self, values: Mapping[str, Any]) -> str:
        try:
            return super().render(values)
        except RowProblem as problem:
            raise RowProblem(f"prompt {self._name!r}: {problem}") from None


class LineSource(PromptSource):
    """Each line is its own JSON, which may be longer than a prompt; a picture's path in it becomes a data: URL."""

    columns = ("request",)

    def render(self, values: Mapping[str, Any]) -> str:
        if values["request"] is None:
            raise RowProblem("there is no request")
        return str(values["request"])

    def row(self, values: Mapping[str, Any], read: ReadFile) -> Row:
        text, paths = self.render(values), list[dict[str, Any]]()
        if "image_url" not in text:
            return Row(text)

        def note(part: dict[str, Any]) -> dict[str, Any]:
            found = part.get("image_url")
            shown = part["image_url"] = {"url": found} if isinstance(found, str) else found
            if isinstance(shown, dict) and isinstance(url := shown.get("url"), str) and not is_url(url):
                paths.append(shown)
            return part

        try:
            line = json.loads(text, object_hook=lambda each: note(each) if each.get("type") == "image_url" else each)
        except (ValueError, RecursionError):
            return Row(text)  # what is wrong with it is told once it is asked
        for shown, file in zip(paths, loaded([each["url"] for each in paths], read), strict=True):
            shown["url"] = f"data:image/file;base64,{b64encode(file).decode()}"
        return Row(json.dumps(line) if paths else text)
