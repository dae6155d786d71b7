"""Rows with several prompts: each is filled in once those before it are answered."""

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from jobs.context.answers import Answer, failed_answer
from jobs.context.check_processes import Checks
from jobs.parquet.asks.ask import ROW_FIELDS, Ask, Asked, row_seed
from jobs.parquet.asks.generate import Generate, answer_field
from jobs.parquet.asks.scores import LABEL_FIELDS, Labels
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import step_source
from jobs.parquet.tables.columns import RowProblem
from jobs.prompts.attempts import hashed_seed
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion, Request


class Chain(Ask):
    """What a run asks of each row, one prompt after the other. seed: the run's."""

    def __init__(self, spec: RunSpec, seed: int, checks: Checks) -> None:
        self.steps, self.seed = spec.steps, seed
        self.sources = [step_source(step, spec.defaults) for step in spec.steps]
        own = [(step, (step.sampling, step.chat, step.is_chat)) for step in spec.steps]
        self.prompts = [Labels(spec, *of) if step.is_scored else Generate(spec, seed, checks, *of) for step, of in own]

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        labels = {field.name: field for field in LABEL_FIELDS}
        columns = [(column, name) for step in spec.steps for column, name in step.columns.items()]
        own = ((labels.get(name) or answer_field(name, spec)).with_name(column) for column, name in columns)
        return [*own, *ROW_FIELDS]

    def is_greedy(self, row: Row) -> bool:
        return all(prompt.is_greedy(row) for prompt in self.prompts)

    def begin(self, row: Row, number: int) -> Asked:
        return _Chained(self, row, row_seed(self.seed, number))

    def failed(self, reason: str) -> Answer:
        return self.answer((), reason)

    def answer(self, answers: Sequence[Answer], problem: str | None = None) -> Answer:
        columns: dict[str, Any] = {}
        error = problem
        for number, step in enumerate(self.steps):
            found = answers[number] if number < len(answers) else failed_answer("")
            if found.error:
                error = f"prompt {step.name!r}: {found.error}"
            columns |= {column: found.column(name) for column, name in step.columns.items()}
        return Answer(
            completion=None,
            finish_reason="error" if error is not None else answers[-1].finish_reason,
            prompt_tokens=sum(each.prompt_tokens for each in answers),
            completion_tokens=sum(each.all_completion_tokens for each in answers),
            cached_tokens=sum(each.cached_tokens for each in answers),
            error=error,
            columns=columns,
        )


class _Chained(Asked):
    def __init__(self, chain: Chain, row: Row, seed: int) -> None:
        self._chain, self._row, self._seed = chain, row, seed
        self._answers: list[Answer] = []
        self.requests = [self._request(row)]

    def then(self, place: int, completions: Sequence[Completion]) -> Answer | Sequence[Request]:
        self._answers.append(self._chain.prompts[len(self._answers)].answer(completions))
        if len(self._answers) == len(self._chain.steps) or self._answers[-1].error is not None:
            return self._chain.answer(self._answers)
        try:
            return [self._request(self._next())]
        except RowProblem as problem:
            return self._chain.answer(self._answers, str(problem))

    def _next(self) -> Row:
        number = len(self._answers)
        step, source = self._chain.steps[number], self._chain.sources[number]
        known = json.loads(self._row.values or "{}")
        known |= {step.name: answer.completion for step, answer in zip(self._chain.steps, self._answers, strict=False)}
        try:
            return self._row._replace(prompt=source.render({name: known[name] for name in source.columns}))
        except RowProblem as problem:
            raise RowProblem(f"prompt {step.name!r}: {problem}") from None

    def _request(self, row: Row) -> Request:
        number = len(self._answers)  # the first prompt has the row's seed
        seed = hashed_seed(f"{self._seed}:{number}") if number else self._seed
        return self._chain.prompts[number].request(row, seed)
