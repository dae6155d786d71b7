"""Rows with several prompts: what each asks once those before it are answered, and what comes of a row."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import pyarrow as pa

from jobs.common.display import to_json
from jobs.context.answers import Answer
from jobs.errors import ColumnConflict, WrongColumnType
from jobs.parquet.prompts.prompt_source import TEXT_FORMS, RowSource, TemplateSource, check_defaults
from jobs.parquet.tables.row_values import RowProblem, holds_bytes
from jobs.runs.plans.prompt_steps import FINISH_REASON, REASONING, TOOL_CALLS, PromptStep
from jobs.tasks import Request

#: Between a row's first prompt and the JSON of what its later ones read, which holds no line break.
_BREAK = "\n"


class ChainSource(RowSource):
    """A row's first prompt with the columns behind it that its later prompts name, as texts.

    So equal texts are still equal rows, and rows whose first prompts start alike come together.
    """

    def __init__(self, steps: Sequence[PromptStep], defaults: Mapping[str, str]) -> None:
        """Raises InvalidJob for a default of a column that no template names."""
        self._names = [step.name for step in steps]
        first, *later = [
            [column for column in step.template.columns if column not in self._names] for step in steps
        ]
        self._first = _source(steps[0], defaults)
        self._later = tuple(dict.fromkeys(column for columns in later for column in columns))
        self.columns = tuple(dict.fromkeys((*first, *self._later)))
        self.is_chat = steps[0].is_chat
        check_defaults(defaults, self.columns)

    def check(self, schema: pa.Schema) -> None:
        for name in self._names:
            if name in schema.names:
                raise ColumnConflict(name, "give the prompt of this name another one, or rename the column")
        for column in self.columns:
            if holds_bytes(kind := schema.field(column).type):
                raise WrongColumnType(column, kind, TEXT_FORMS)

    def render(self, values: Mapping[str, Any]) -> str:
        try:
            first = self._first.render(values)
        except RowProblem as problem:
            raise RowProblem(f"prompt {self._names[0]!r}: {problem}") from None
        later = {name: _text(values[name]) for name in self._later}
        return f"{first}{_BREAK}{json.dumps(later, ensure_ascii=False)}"


class Chain:
    """What a run asks of each row, one prompt after the other."""

    def __init__(self, steps: Sequence[PromptStep], defaults: Mapping[str, str]) -> None:
        self._steps = steps
        self._sources = [_source(step, defaults) for step in steps]

    def is_greedy(self, own: Mapping[str, Any]) -> bool:
        """Whether no prompt draws a token. own: sampling values that the row brings."""
        return all({**step.sampling, **own}.get("temperature") == 0 for step in self._steps)

    def has_tools(self, number: int) -> bool:
        """Whether calls of tools are looked for in the answers to a prompt."""
        return self._steps[number].chat.has_tools

    def is_over(self, answers: Sequence[Answer]) -> bool:
        """Whether a row with these answers asks nothing more."""
        return len(answers) == len(self._steps) or (bool(answers) and answers[-1].error is not None)

    def request(self, text: str, own: Mapping[str, Any], answers: Sequence[Answer], seed: int) -> Request:
        """Return a row's next request. Raises RowProblem.

        text: as ChainSource rendered it. own: as of is_greedy. answers: to those before. seed: the row's.
        """
        step, prompt = self._steps[len(answers)], self._prompt(text, answers)
        # A run's own seed is where the rows' seeds come from.
        sampling = {name: value for name, value in step.sampling.items() if name != "seed"}
        sampling.update(own)
        if sampling.get("temperature") != 0:
            sampling = {"seed": _step_seed(seed, len(answers)), **sampling}
        if step.is_chat:
            return Request(None, json.loads(prompt), sampling, step.chat.template)
        return Request(prompt=prompt, messages=None, sampling=sampling)

    def _prompt(self, text: str, answers: Sequence[Answer]) -> str:
        first, _, later = text.rpartition(_BREAK)
        if not answers:
            return first
        given = zip(self._steps, answers, strict=False)
        known = {**json.loads(later), **{step.name: answer.completion for step, answer in given}}
        step, source = self._steps[len(answers)], self._sources[len(answers)]
        try:
            return source.render({name: known[name] for name in source.columns})
        except RowProblem as problem:
            raise RowProblem(f"prompt {step.name!r}: {problem}") from None

    def answer(self, answers: Sequence[Answer], problem: str | None = None) -> Answer:
        """Return what a row has in the end, with the answers there are. problem: why there are no more."""
        columns: dict[str, Any] = {}
        error = problem
        for number, step in enumerate(self._steps):
            found = answers[number] if number < len(answers) else None
            if found is not None and found.error is not None:
                error = f"prompt {step.name!r}: {found.error}"
            values = {
                "": None if found is None else found.completion,
                FINISH_REASON: "error" if found is None else found.finish_reason,
                REASONING: None if found is None else found.reasoning,
                TOOL_CALLS: None if found is None else found.tool_calls,
            }
            columns.update((step.name + ending, value) for ending, value in values.items())
        return Answer(
            completion=None,
            finish_reason="error" if error is not None else answers[-1].finish_reason,
            prompt_tokens=sum(each.prompt_tokens for each in answers),
            completion_tokens=sum(each.all_completion_tokens for each in answers),
            cached_tokens=sum(each.cached_tokens for each in answers),
            error=error,
            columns=columns,
        )


def _source(step: PromptStep, defaults: Mapping[str, str]) -> TemplateSource:
    own = {name: text for name, text in defaults.items() if name in step.template.columns}
    return TemplateSource(step.template, own)


def _text(value: Any) -> str | None:
    """Return what stands in a prompt for a column's value, as TemplateSource writes it."""
    if value is None:
        return None
    return to_json(value) if isinstance(value, list | dict) else f"{value}"


def _step_seed(seed: int, number: int) -> int:
    """Return the seed of a row's prompt: its first one has the row's."""
    if number == 0:
        return seed
    digest = blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
