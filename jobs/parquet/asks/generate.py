"""Rows whose answers are generated: by one prompt, again where a check does not take the answer, or by several."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Self

import pyarrow as pa

from jobs.context import JobContext
from jobs.context.answers import Answer, failed_answer
from jobs.context.checks import NO_REPAIRS
from jobs.errors import InvalidJob
from jobs.items.item import Item, Samples
from jobs.parquet.asks.ask import (
    OUTPUT_FIELDS,
    ROW_FIELDS,
    RowAsk,
    no_answer,
    output_fields,
    prompt_of,
    row_seed,
)
from jobs.parquet.asks.scores import Scores
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import RowSource, StepSource
from jobs.parquet.tables.columns import RowProblem
from jobs.prompts.generated import PromptAnswer, generated, hashed_seed
from jobs.prompts.messages import OF_VALUES, ChatOptions, split_chat_options
from jobs.prompts.response_options import LOGPROBS
from jobs.prompts.responses import finish_reason_of, text_token, with_ids
from jobs.prompts.scoring.kind import TRUNCATION
from jobs.prompts.scoring.labels import Labels
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.prompt_steps import PromptStep, answer_columns
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion, Request

ATTEMPTS = {"attempts": "int64", "check_error": "string"}

#: Columns that hold a list where a row has several completions.
OF_EACH_COMPLETION = frozenset(
    {
        "completion",
        "finish_reason",
        "completion_tokens",
        "reasoning",
        "tool_calls",
        "tool_call_error",
        "logprobs",
    }
)

#: Log probabilities of a shard's rows together, some 20 bytes for each token that is named. All are held until the part
#: is written.
MAX_LOGPROB_BYTES = 1 << 30


def answer_field(name: str, spec: RunSpec) -> pa.Field:
    """Return a column of a prompt's answer."""
    return pa.field(name, logprobs_type(spec.logprob_type) if name in LOGPROBS else pa.string())


class Generate(RowAsk):
    """Asks for `n` completions of each row, or is one prompt of a Chain.

    sampling, chat: of its prompt. control_tokens: texts that answers must not forge behind a text prompt, unless the
    prompt allows them.
    """

    def __init__(
        self,
        spec: RunSpec,
        seed: int,
        sampling: Mapping[str, Any],
        chat: ChatOptions,
        is_chat: bool,
        control_tokens: Collection[str] = (),
    ) -> None:
        self._values = {name: value for name, value in sampling.items() if name != "seed"}
        self._seed = seed
        self._n = spec.n
        self._chat = chat
        self._is_chat = is_chat
        self._logprob_type = spec.logprob_type
        self._logprob_bytes = 0
        self._repairs = spec.repairs
        self._control_tokens = control_tokens if chat.get(OF_VALUES, True) else ()
        self._way = spec.way
        self.has_checks = spec.repairs.check is not None or (
            spec.way is not None and spec.way.has_checks
        )

    @classmethod
    def of_plan(cls, plan: Plan, context: JobContext, source: RowSource) -> Self:
        """Return what asks the rows of a run for completions."""
        spec = plan.spec
        return cls(spec, plan.seed, *spec.chat, spec.is_chat, context.model.control_tokens)

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        """Return the columns of a completion, and those of attempts or of the way to it."""
        names = answer_columns(spec.chat[0], has_tools=spec.has_tools)
        fields = list(OUTPUT_FIELDS)  # completion and finish_reason are among these
        fields += [answer_field(name, spec) for name in names[2:]]
        if spec.n > 1:
            for place, field in enumerate(fields):
                if field.name in OF_EACH_COMPLETION:
                    fields[place] = field.with_type(pa.list_(field.type))
        if spec.repairs.is_asked_for:
            fields += output_fields(ATTEMPTS)
        if spec.way is not None:
            fields += output_fields(spec.way.columns)
        return fields

    @staticmethod
    def is_tried(spec: RunSpec) -> bool:
        """Let preview and dry run ask some rows."""
        return True

    def is_greedy(self, row: Row) -> bool:
        """Return whether nothing is drawn for a row."""
        return row.own_sampling.get("temperature", self._values.get("temperature")) == 0

    def item(self, row: Row, number: int) -> Item[Answer]:
        """Ask a row for its completions."""
        request = self.request(row, row_seed(self._seed, number))
        values = json.loads(row.values) if row.values else None
        if self._way is not None:
            item = self._way.item(request)
        else:
            item = generated(request, self._repairs, values, self._control_tokens)
        del request, row
        return self.answer((yield from item))

    def prompt_item(self, row: Row, seed: int) -> Item[Answer]:
        """Ask a row's prompt once, as one of a chain."""
        item = generated(self.request(row, seed), NO_REPAIRS)
        del row
        return self.answer((yield from item))

    def failed(self, reason: str) -> Answer:
        """Return the answer of a row that cannot be asked."""
        return failed_answer(reason, self._n)

    def request(self, row: Row, seed: int) -> Request:
        """Return the request of a row's prompt. seed: for a row that names none."""
        row_sampling = row.own_sampling
        sampling = {**self._values, **row_sampling}
        chat = self._chat
        if "tools" in row_sampling:
            sampling, chat = split_chat_options({**sampling, **chat, **row_sampling})
        if sampling.get("temperature") != 0:
            sampling = {"seed": seed, **sampling}
        prompt = prompt_of(row, is_json=self._is_chat)
        if self._is_chat:
            return Request(None, prompt, sampling, chat)
        return Request(prompt, None, sampling)

    def answer(self, answer: PromptAnswer) -> Answer:
        """Return a row's answer. Where a row has several samples, each value that is a sample's own is a tuple."""
        failed_sample = answer.failed_sample
        if failed_sample is not None:
            return replace(no_answer(failed_sample, self._n), attempts=1)
        samples = answer.samples
        first = answer.first
        return Answer(
            completion=self._of_row([sample.text for sample in samples]),
            finish_reason=self._of_row([finish_reason_of(sample) for sample in samples]),
            prompt_tokens=first.num_prompt_tokens,
            completion_tokens=self._of_row(answer.num_generated),
            cached_tokens=first.num_cached_tokens,
            error=first.error,
            reasoning=self._of_row([sample.reasoning for sample in samples]),
            tool_calls=self._of_row([_calls_text(sample) for sample in samples]),
            tool_call_error=self._of_row([sample.tool_call_error for sample in samples]),
            columns={**self._logprobs(samples), **_plain_columns(answer.extras)},
            attempts=answer.attempts,
            check_error=answer.check_error,
        )

    def _of_row(self, values: Sequence[Any]) -> Any:
        """Return the values of a row's samples: one, or a tuple of several."""
        return values[0] if self._n == 1 else tuple(values)

    def _logprobs(self, samples: Samples) -> dict[str, pa.Array]:
        """Return the columns of log probabilities that are asked for."""
        columns = {}
        if self._values.get("logprobs") is not None:
            rows = self._of_row([sample.logprobs for sample in samples])
            columns["logprobs"] = _logprob_array(rows, self._logprob_type, is_list=self._n > 1)
        if self._values.get("prompt_logprobs") is not None:
            rows = samples[0].prompt_logprobs
            columns["prompt_logprobs"] = _logprob_array(rows, self._logprob_type)

        self._logprob_bytes += sum(array.nbytes for array in columns.values())
        if self._logprob_bytes > MAX_LOGPROB_BYTES:
            raise InvalidJob(
                f"log probabilities of a shard take more than {MAX_LOGPROB_BYTES} bytes: submit with a smaller "
                "rows_per_shard, or ask for fewer"
            )
        return columns


def _plain_columns(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a way adds to an answer; lists and objects as JSON."""
    columns = {}
    for name, value in extras.items():
        is_json = isinstance(value, list | dict)
        columns[name] = json.dumps(value, ensure_ascii=False) if is_json else value
    return columns


def _calls_text(sample: Completion) -> str | None:
    """Return a sample's calls of tools as JSON. Equal answers have equal ids of calls."""
    if not sample.tool_calls:
        return None
    seed = json.dumps([sample.text, sample.tool_calls])
    return json.dumps(with_ids(sample.tool_calls, seed), ensure_ascii=False)


@cache
def logprobs_type(number: str, is_list: bool = False) -> pa.DataType:
    """Return the type of log probabilities: a list for each token, with the token itself before the likeliest.

    number: the type of each log probability. is_list: whether a row has several completions.
    """
    token = pa.struct(
        [
            ("token_id", pa.int32()),
            ("token", pa.string()),
            ("logprob", pa.type_for_alias(number)),
            ("rank", pa.int32()),
        ]
    )
    of_completion = pa.list_(pa.list_(token))
    return pa.list_(of_completion) if is_list else of_completion


def _logprob_array(rows: Any, number: str, is_list: bool = False) -> pa.Array:
    """Return an array that holds one value, as Python's own objects would take ten times as much."""
    exact = pa.array([_entries(rows)], logprobs_type("float32", is_list))
    return exact.cast(logprobs_type(number, is_list))


def _entries(rows: Any) -> Any:
    """Return log probabilities as Arrow takes them: each token's mapping as a list of tuples."""
    if rows is None:
        return None
    if isinstance(rows, Mapping):
        return [
            (token_id, text_token(entry), entry.logprob, entry.rank)
            for token_id, entry in rows.items()
        ]
    return [_entries(row) for row in rows]


class Chain(RowAsk):
    """What a run asks of each row, one prompt after the other. seed: the run's. control_tokens: see row_source."""

    def __init__(self, spec: RunSpec, seed: int, control_tokens: Collection[str] = ()) -> None:
        self._steps = spec.steps
        self._seed = seed
        self._sources = [StepSource(step, spec.defaults, (), control_tokens) for step in spec.steps]
        self._prompts = [_ask_of_step(step, spec, seed) for step in spec.steps]

    @classmethod
    def of_plan(cls, plan: Plan, context: JobContext, source: RowSource) -> Self:
        """Return what asks the rows of a run, one prompt after the other."""
        return cls(plan.spec, plan.seed, context.model.control_tokens)

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        """Return the columns of each prompt, then those of the row."""
        label_fields = {field.name: field for field in output_fields(Labels.columns)}
        fields = []
        for step in spec.steps:
            for column, name in step.columns.items():
                field = label_fields[name] if name in label_fields else answer_field(name, spec)
                fields.append(field.with_name(column))
        return [*fields, *ROW_FIELDS]

    def is_greedy(self, row: Row) -> bool:
        """Return whether no prompt draws."""
        return all(prompt.is_greedy(row) for prompt in self._prompts)

    def item(self, row: Row, number: int) -> Item[Answer]:
        """Ask one prompt after the other, each with the answers of the earlier ones, until one has an error."""
        seed = row_seed(self._seed, number)
        answers: list[Answer] = []
        try:
            for place, prompt in enumerate(self._prompts):
                if place:
                    row = self._filled(row, answers)
                    seed_of_prompt = hashed_seed(f"{seed}:{place}")
                else:
                    seed_of_prompt = seed
                answer = yield from prompt.prompt_item(row, seed_of_prompt)
                answers.append(answer)
                if answer.error is not None:
                    break
        except RowProblem as problem:
            return self._answer(answers, str(problem))
        return self._answer(answers)

    def _filled(self, row: Row, answers: Sequence[Answer]) -> Row:
        """Return a row with the next prompt. Raises RowProblem."""
        source = self._sources[len(answers)]
        values = json.loads(row.values or "{}")
        for step, answer in zip(self._steps, answers, strict=False):
            values[step.name] = answer.completion
        return row._replace(prompt=source.render({name: values[name] for name in source.columns}))

    def failed(self, reason: str) -> Answer:
        """Return the answer of a row whose first prompt cannot be asked."""
        return self._answer((), reason)

    def _answer(self, answers: Sequence[Answer], problem: str | None = None) -> Answer:
        """Return a row's answer from those of its prompts. problem: why the next one cannot be asked."""
        columns: dict[str, Any] = {}
        error = problem
        for number, step in enumerate(self._steps):
            answer = answers[number] if number < len(answers) else failed_answer("")
            if answer.error:
                error = f"prompt {step.name!r}: {answer.error}"
            columns |= {column: answer.column(name) for column, name in step.columns.items()}
        return Answer(
            completion=None,
            finish_reason="error" if error is not None else answers[-1].finish_reason,
            prompt_tokens=sum(answer.prompt_tokens for answer in answers),
            completion_tokens=sum(answer.all_completion_tokens for answer in answers),
            cached_tokens=sum(answer.cached_tokens for answer in answers),
            error=error,
            columns=columns,
        )


def _ask_of_step(step: PromptStep, spec: RunSpec, seed: int) -> Generate | Scores:
    """Return what asks one of a row's prompts."""
    if not step.is_scored:
        return Generate(spec, seed, step.sampling, step.chat, step.is_chat)
    scoring = Labels.of(spec.labels or (), step.sampling.get(TRUNCATION))
    return Scores(scoring, step.chat if step.is_chat else None)
