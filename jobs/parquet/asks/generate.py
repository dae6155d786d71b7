"""Rows whose answers are generated: by one prompt, again where a check does not take the answer, or by several."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pyarrow as pa

from jobs.context.answers import Answer, failed_answer
from jobs.context.checks import NO_REPAIRS
from jobs.errors import InvalidJob
from jobs.items.item import Item
from jobs.parquet.asks.ask import OUTPUT_FIELDS, ROW_FIELDS, RowAsk, no_answer, request_of, row_seed
from jobs.parquet.asks.scores import LABEL_FIELDS, Labels
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import StepSource
from jobs.parquet.tables.columns import RowProblem
from jobs.prompts.generated import PromptAnswer, generated, hashed_seed
from jobs.prompts.messages import OF_VALUES, ChatOptions, split_chat_options
from jobs.prompts.response_options import LOGPROBS
from jobs.prompts.responses import text_token, with_ids
from jobs.runs.plans.prompt_steps import answer_columns
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion, Request

ATTEMPTS = (pa.field("attempts", pa.int64()), pa.field("check_error", pa.string()))

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

#: Of a shard's rows together, all held until its part is written: some 20 for each token that is named.
MAX_LOGPROB_BYTES = 1 << 30


def answer_field(name: str, spec: RunSpec) -> pa.Field:
    return pa.field(name, logprobs_type(spec.logprob_type) if name in LOGPROBS else pa.string())


class Generate(RowAsk):
    """Asks for `n` completions of each row, or is one prompt of a Chain.

    sampling, chat: of its prompt. control_tokens: texts that answers must not forge behind a text prompt, unless the
    prompt allows them.
    """

    is_tried = True

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
        self._chat, self._is_chat, self._n = chat, is_chat, spec.n
        self._logprob_type, self._logprob_bytes = spec.logprob_type, 0
        self._seed = seed
        self._repairs = spec.repairs
        self._control_tokens = control_tokens if chat.get(OF_VALUES, True) else ()
        self._way = spec.way
        self.has_checks = spec.repairs.check is not None or (
            spec.way is not None and spec.way.has_checks
        )

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        own = answer_columns(spec.chat[0], has_tools=spec.has_tools)[2:]
        fields = [*OUTPUT_FIELDS, *(answer_field(each, spec) for each in own)]
        if spec.n > 1:
            fields = [
                f.with_type(pa.list_(f.type)) if f.name in OF_EACH_COMPLETION else f for f in fields
            ]
        if spec.repairs.is_asked_for:
            fields += ATTEMPTS
        if spec.way is not None:
            fields += [
                pa.field(name, pa.type_for_alias(kind)) for name, kind in spec.way.columns.items()
            ]
        return fields

    def is_greedy(self, row: Row) -> bool:
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
        return failed_answer(reason, self._n)

    def request(self, row: Row, seed: int) -> Request:
        row_values = row.own_sampling
        values = {**self._values, **row_values}
        chat = self._chat
        if "tools" in row_values:
            values, chat = split_chat_options({**values, **chat, **row_values})
        if values.get("temperature") != 0:
            values = {"seed": seed, **values}
        return request_of(row, self._is_chat, values, chat)

    def answer(self, answer: PromptAnswer) -> Answer:
        """Return a row's answer: of several samples, what each has of its own is a tuple."""
        samples = answer.samples
        error = next((sample for sample in samples if sample.finish_reason == "error"), None)
        if error is not None:
            return replace(no_answer(error, self._n), attempts=1)

        texts = []
        reasons = []
        calls = []
        for sample in samples:
            text, reason, tool_calls = _texts_of(sample)
            texts.append(text)
            reasons.append(reason)
            calls.append(tool_calls)
        reasoning = [sample.reasoning for sample in samples]
        call_errors = [sample.tool_call_error for sample in samples]
        return Answer(
            completion=self._of_row(texts),
            finish_reason=self._of_row(reasons),
            prompt_tokens=answer.first.num_prompt_tokens,
            completion_tokens=self._of_row(answer.num_generated),
            cached_tokens=answer.first.num_cached_tokens,
            error=answer.first.error,
            reasoning=self._of_row(reasoning),
            tool_calls=self._of_row(calls),
            tool_call_error=self._of_row(call_errors),
            columns={**self._logprobs(samples), **_plain_columns(answer.extras)},
            attempts=answer.attempts,
            check_error=answer.check_error,
        )

    def _of_row(self, values: Sequence[Any]) -> Any:
        """Return the values of a row's samples: one, or a tuple of several."""
        return values[0] if self._n == 1 else tuple(values)

    def _logprobs(self, samples: Sequence[Completion]) -> dict[str, pa.Array]:
        of_texts = [each.logprobs for each in samples]
        kind = self._logprob_type
        found = {
            "logprobs": of_texts if self._n > 1 else of_texts[0],
            "prompt_logprobs": samples[0].prompt_logprobs,
        }
        columns = {
            # As an array that holds one value: of Python's it would take a tenfold.
            name: pa.array([_entries(each)], logprobs_type("float32", of_each)).cast(
                logprobs_type(kind, of_each)
            )
            for name, each in found.items()
            if self._values.get(name) is not None
            for of_each in [self._n > 1 and name in OF_EACH_COMPLETION]
        }
        self._logprob_bytes += sum(each.nbytes for each in columns.values())
        if self._logprob_bytes > MAX_LOGPROB_BYTES:
            raise InvalidJob(
                f"log probabilities of a shard take more than {MAX_LOGPROB_BYTES} bytes: submit with a smaller "
                "rows_per_shard, or ask for fewer"
            )
        return columns


def _plain_columns(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a way adds to an answer; lists and objects as JSON."""
    return {
        name: json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
        for name, value in extras.items()
    }


def _texts_of(sample: Completion) -> tuple[str, str, str | None]:
    if not sample.tool_calls:
        return sample.text, sample.finish_reason, None
    reason = "tool_calls" if sample.finish_reason == "stop" else sample.finish_reason
    seed = json.dumps([sample.text, sample.tool_calls])
    return sample.text, reason, json.dumps(with_ids(sample.tool_calls, seed), ensure_ascii=False)


@cache
def logprobs_type(number: str, of_each: bool = False) -> pa.DataType:
    """Return a list for each token: itself, then the likeliest. number: of floats. of_each: of a row's completions."""
    names = {"token_id": "int32", "token": "string", "logprob": number, "rank": "int32"}
    kind = pa.list_(
        pa.list_(pa.struct([(name, pa.type_for_alias(each)) for name, each in names.items()]))
    )
    return pa.list_(kind) if of_each else kind


def _entries(found: Any) -> Any:
    if isinstance(found, Mapping):
        return [
            (token_id, text_token(each), each.logprob, each.rank)
            for token_id, each in found.items()
        ]
    return None if found is None else [_entries(each) for each in found]


class Chain(RowAsk):
    """What a run asks of each row, one prompt after the other. seed: the run's. control_tokens: see row_source."""

    def __init__(self, spec: RunSpec, seed: int, control_tokens: Collection[str] = ()) -> None:
        self._steps = spec.steps
        self._seed = seed
        self._sources = [StepSource(step, spec.defaults, (), control_tokens) for step in spec.steps]
        self._prompts: list[Labels | Generate] = []
        for step in spec.steps:
            kind = (step.sampling, step.chat, step.is_chat)
            self._prompts.append(
                Labels(spec, *kind) if step.is_scored else Generate(spec, seed, *kind)
            )

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        """Return the columns of each prompt, then those of the row."""
        label_fields = {field.name: field for field in LABEL_FIELDS}
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
