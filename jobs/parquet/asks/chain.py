"""Asks rows with several prompts, one prompt after the other. A later prompt may hold the answers to earlier ones."""

import json
from collections.abc import Collection, Sequence
from typing import Any, Self

import pyarrow as pa

from jobs.context import JobContext
from jobs.context.answers import Answer, failed_answer
from jobs.items.item import Item
from jobs.parquet.asks.ask import ROW_FIELDS, RowAsk, label_fields, row_seed
from jobs.parquet.asks.generate import Generate, answer_field
from jobs.parquet.asks.scores import Scores
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import RowSource, StepSource
from jobs.parquet.tables.columns import RowProblem
from jobs.prompts.generated import hashed_seed
from jobs.prompts.scoring.kind import TRUNCATION
from jobs.prompts.scoring.labels import Labels
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.prompt_steps import PromptStep
from jobs.runs.plans.spec import RunSpec


class Chain(RowAsk):
    """Asks the prompts of each row, one after the other.

    seed: the run's seed. control_tokens: the texts of the model's control tokens. In a value that fills a prompt, such
    a text is read as plain text, unless the prompt allows control tokens.
    """

    def __init__(self, spec: RunSpec, seed: int, control_tokens: Collection[str] = ()) -> None:
        self._steps = spec.steps
        self._seed = seed
        # For each of a row's prompts, a source that makes the prompt, and an object that asks it.
        self._sources = []
        self._asks = []
        for step in spec.steps:
            source = StepSource(step, spec.defaults, control_tokens=control_tokens)
            self._sources.append(source)
            self._asks.append(_ask_of_step(step, spec, seed))

    @classmethod
    def of_plan(cls, plan: Plan, context: JobContext, source: RowSource) -> Self:
        """Return the object that asks the prompts of each row of a run."""
        return cls(plan.spec, plan.seed, context.model.control_tokens)

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        """Return the columns of each prompt, then the columns about the row as a whole."""
        fields_of_labels = {field.name: field for field in label_fields(spec)}
        fields = []
        for step in spec.steps:
            for column, answer_name in step.columns.items():
                field = fields_of_labels.get(answer_name)
                if field is None:
                    field = answer_field(answer_name, spec)
                fields.append(field.with_name(column))
        return [*fields, *ROW_FIELDS]

    def is_deterministic(self, row: Row) -> bool:
        """Return whether nothing is drawn at random for any prompt."""
        return all(ask.is_deterministic(row) for ask in self._asks)

    def item(self, row: Row, number: int) -> Item[Answer]:
        """Ask one prompt after the other until an answer has an error. Prompts may hold the earlier answers."""
        seed = row_seed(self._seed, number)
        answers: list[Answer] = []
        try:
            for prompt_number, ask in enumerate(self._asks):
                prompt_seed = seed
                if prompt_number > 0:  # the row has its first prompt already
                    row = self._filled(row, answers)
                    prompt_seed = hashed_seed(f"{seed}:{prompt_number}")
                answer = yield from ask.prompt_item(row, prompt_seed)
                answers.append(answer)
                if answer.error is not None:
                    break
        except RowProblem as problem:
            return self._answer(answers, str(problem))
        return self._answer(answers)

    def _filled(self, row: Row, answers: Sequence[Answer]) -> Row:
        """Return the row with its next prompt, into which the earlier answers are filled. Raises RowProblem."""
        values = json.loads(row.values or "{}")
        for step, answer in zip(self._steps, answers, strict=False):  # later steps have no answer
            values[step.name] = answer.completion
        next_source = self._sources[len(answers)]
        prompt_values = {name: values[name] for name in next_source.columns}
        return row._replace(prompt=next_source.render(prompt_values))

    def failed(self, reason: str) -> Answer:
        """Return the answer of a row whose first prompt cannot be asked."""
        return self._answer((), reason)

    def _answer(self, answers: Sequence[Answer], problem: str | None = None) -> Answer:
        """Return a row's answer, made of the answers to its prompts. problem: why the next prompt cannot be asked."""
        columns: dict[str, Any] = {}
        error = problem
        # Stands for a prompt that was not asked. Its values are None, and its error "" is not reported.
        answer_if_unasked = failed_answer("")
        for number, step in enumerate(self._steps):
            was_asked = number < len(answers)
            answer = answers[number] if was_asked else answer_if_unasked
            if answer.error:
                error = f"prompt {step.name!r}: {answer.error}"
            for column, answer_name in step.columns.items():
                columns[column] = answer.column(answer_name)
        finish_reason = "error" if error is not None else answers[-1].finish_reason
        return Answer(
            completion=None,
            finish_reason=finish_reason,
            prompt_tokens=sum(answer.prompt_tokens for answer in answers),
            completion_tokens=sum(answer.all_completion_tokens for answer in answers),
            cached_tokens=sum(answer.cached_tokens for answer in answers),
            error=error,
            columns=columns,
        )


def _ask_of_step(step: PromptStep, spec: RunSpec, seed: int) -> Generate | Scores:
    """Return the object that asks one of a row's prompts."""
    if not step.is_scored:
        return Generate(spec, seed, step.sampling, step.chat, step.is_chat)
    scoring = Labels.of(spec.labels or (), step.sampling.get(TRUNCATION))
    chat_options = step.chat if step.is_chat else None
    return Scores(scoring, chat_options)
