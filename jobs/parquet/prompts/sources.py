"""Which source of rows a run's arguments name; lines of OpenAI's batch files have one of their own."""

import json
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from jobs.context import accept_any_sampling
from jobs.errors import ColumnConflict
from jobs.parquet.prompts import prompt_source
from jobs.parquet.prompts.jinja_source import JinjaSource
from jobs.parquet.prompts.picture_source import PictureSource
from jobs.parquet.prompts.prompt_source import Row, RowSource
from jobs.parquet.prompts.row_sampling import RowSampling
from jobs.parquet.tables.columns import RowProblem, is_text
from jobs.prompts.pictures import ReadFile, is_url, loaded
from jobs.runs.plans.formats import OPENAI_BATCH
from jobs.runs.plans.prompt_steps import PromptStep, Template
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Parts


def row_source(spec: RunSpec, check_sampling: Callable[[Mapping[str, Any]], None] = accept_any_sampling) -> RowSource:
    """Return the source that a run's arguments name, whose rows' sampling values are checked. Raises InvalidJob."""
    if spec.input_format == OPENAI_BATCH:
        return RowSource(LineSource())
    sampling = None
    if spec.sampling_columns:
        sampling = RowSampling(spec.sampling_columns, spec.chat[0], check_sampling)
    if spec.steps:
        first = _FirstStep(spec)
        return RowSource(first, sampling, first.later, prompt_source.written_as_texts)
    prompts, pictures = _prompts(spec), spec.image_column or ()
    if pictures:
        kind = {"has_template": spec.template is not None, "is_chat": spec.is_chat}
        prompts = PictureSource(prompts, pictures, **kind)
    if spec.repairs.function is None:
        return RowSource(prompts, sampling)
    texts = (column for column in prompts.columns if column not in pictures)
    given = dict.fromkeys((*texts, *spec.sampling_columns.values(), *(spec.check_columns or ())))
    return RowSource(prompts, sampling, tuple(given))


def _prompts(spec: RunSpec) -> prompt_source.PromptSource:
    if spec.template is not None and spec.template_format == "jinja":
        return JinjaSource(spec.template, spec.defaults, needs_column=not spec.image_column)
    if spec.template is not None:
        return prompt_source.TemplateSource(Template.parse(spec.template), spec.defaults)
    if spec.query_column is not None and spec.document_column is not None:
        return prompt_source.prompt_pair(spec.query_column, spec.document_column)
    if spec.messages_column is not None:
        return prompt_source.messages_column(spec.messages_column)
    assert spec.prompt_column is not None
    return prompt_source.prompt_column(spec.prompt_column)


def step_source(step: PromptStep, defaults: Mapping[str, str]) -> prompt_source.TemplateSource:
    own = {name: text for name, text in defaults.items() if name in step.template.columns}
    return prompt_source.TemplateSource(step.template, own)


class _FirstStep(prompt_source.TemplateSource):
    """The first of a row's prompts. later: the columns that the others name."""

    def __init__(self, spec: RunSpec) -> None:
        first, *others = spec.steps
        self._names = [step.name for step in spec.steps]
        named = dict.fromkeys(column for step in others for column in step.template.columns)
        self.later = tuple(column for column in named if column not in self._names)
        prompt_source.check_defaults(spec.defaults, (*first.template.columns, *self.later))
        super().__init__(first.template, step_source(first, spec.defaults).defaults)

    def check(self, schema: pa.Schema) -> None:
        for name in self._names:
            if name in schema.names:
                raise ColumnConflict(name, "give the prompt of this name another one, or rename the column")
        super().check(schema)

    def render(self, values: Mapping[str, Any]) -> str:
        try:
            return super().render(values)
        except RowProblem as problem:
            raise RowProblem(f"prompt {self._names[0]!r}: {problem}") from None


class LineSource(prompt_source.ColumnSource):
    """Each line is its own JSON, which may be longer than a prompt; a picture's path in it becomes a data: URL."""

    def __init__(self) -> None:
        super().__init__(["request"], _line, is_text, "JSON")

    def pictured(self, prompt: Parts, read: ReadFile) -> Row:
        paths: list[dict[str, Any]] = []

        def note(part: dict[str, Any]) -> dict[str, Any]:
            found = part.get("image_url")
            shown = part["image_url"] = {"url": found} if isinstance(found, str) else found
            if isinstance(shown, dict) and isinstance(url := shown.get("url"), str) and not is_url(url):
                paths.append(shown)
            return part

        text = prompt[0]["line"]
        try:
            line = json.loads(text, object_hook=lambda each: note(each) if each.get("type") == "image_url" else each)
        except (ValueError, RecursionError):
            return Row(text)  # what is wrong with it is told once it is asked
        for shown, file in zip(paths, loaded([each["url"] for each in paths], read), strict=True):
            shown["url"] = f"data:image/file;base64,{b64encode(file).decode()}"
        return Row(json.dumps(line) if paths else text)


def _line(text: Any) -> str | Parts:
    if text is None:
        raise RowProblem("there is no request")
    return [{"line": text}] if "image_url" in text else str(text)
