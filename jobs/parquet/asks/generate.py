"""Asks rows with one prompt each, and generates the answers. If a check refuses an answer, asks the prompt again."""

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
    RowAsk,
    answer_of_failed_request,
    output_fields,
    prompt_of,
    row_seed,
)
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import RowSource
from jobs.prompts.arguments import SPLIT_TOKENS
from jobs.prompts.generated import PromptAnswer, generated
from jobs.prompts.messages import ChatOptions, split_chat_options
from jobs.prompts.responses import LOGPROBS, finish_reason_of, text_token, with_ids
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.prompt_steps import answer_columns
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion, Request

ATTEMPTS = {"attempts": "int64", "check_error": "string"}

#: Columns with a value for each completion. If a row has several completions, they hold lists.
PER_COMPLETION = frozenset(
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

#: The most bytes of log probabilities that a shard's rows may have together. They are all in memory until the part is
#: written. Each token and each alternative to it takes about 20 bytes.
MAX_LOGPROB_BYTES = 1 << 30


def answer_field(name: str, spec: RunSpec) -> pa.Field:
    """Return a column of a prompt's answer."""
    column_type = logprobs_type(spec.logprob_type) if name in LOGPROBS else pa.string()
    return pa.field(name, column_type)


class Generate(RowAsk):
    """Asks for `n` completions of each row, or asks one prompt of a Chain.

    sampling: the prompt's sampling values. control_tokens: the texts of the model's control tokens. A text prompt that
    is asked again may repeat the refused answer. Control tokens in that answer are read as plain text, unless the
    prompt allows them.
    """

    def __init__(
        self,
        spec: RunSpec,
        seed: int,
        sampling: Mapping[str, Any],
        chat_options: ChatOptions,
        is_chat: bool,
        control_tokens: Collection[str] = (),
    ) -> None:
        # The run's seed is left out, because each row gets a seed of its own.
        self._sampling = {name: value for name, value in sampling.items() if name != "seed"}
        self._seed = seed
        self._n = spec.n
        self._chat_options = chat_options
        self._has_row_tools = spec.has_row_tools
        self._is_chat = is_chat
        self._logprob_type = spec.logprob_type
        self._logprob_bytes = 0
        self._repairs = spec.repairs
        # If control tokens in a prompt are not split into plain text, control tokens in an answer are not split either.
        splits_tokens = chat_options.get(SPLIT_TOKENS, True)
        self._control_tokens = control_tokens if splits_tokens else ()
        #: How several requests lead to a row's answer, such as by tool calls; None if one request is enough.
        self._way = spec.way
        way_has_checks = spec.way is not None and spec.way.has_checks
        self.has_checks = spec.repairs.check is not None or way_has_checks

    @classmethod
    def of_plan(cls, plan: Plan, context: JobContext, source: RowSource) -> Self:
        """Return the object that asks for a completion of each row of a run."""
        spec = plan.spec
        return cls(
            spec,
            plan.seed,
            sampling=spec.chat.sampling,
            chat_options=spec.chat.options,
            is_chat=spec.is_chat,
            control_tokens=context.model.control_tokens,
        )

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        """Return the columns of a completion, and those that repairs and a way of several requests (`spec.way`) add."""
        fields = list(OUTPUT_FIELDS)
        common_names = {field.name for field in fields}
        for name in answer_columns(spec.chat.sampling, has_tools=spec.has_tools):
            if name not in common_names:
                fields.append(answer_field(name, spec))
        if spec.n > 1:
            fields = [_list_field_if_per_completion(field) for field in fields]
        if spec.repairs.may_ask_again:
            fields += output_fields(ATTEMPTS)
        if spec.way is not None:
            fields += output_fields(spec.way.columns)
        return fields

    @staticmethod
    def is_tried(spec: RunSpec) -> bool:
        """Return True: a preview or dry run may ask some of the run's rows."""
        return True

    def is_deterministic(self, row: Row) -> bool:
        """Return whether nothing is drawn at random for a row."""
        run_temperature = self._sampling.get("temperature")
        return row.own_sampling.get("temperature", run_temperature) == 0

    def item(self, row: Row, number: int) -> Item[Answer]:
        """Ask for the completions of a row."""
        request = self.request(row, row_seed(self._seed, number))
        check_values = json.loads(row.values) if row.values else None  # for a check function
        if self._way is not None:  # the row's answer takes several requests, such as tool calls
            item = self._way.item(request)
        else:
            item = generated(request, self._repairs, check_values, self._control_tokens)
        del request, row  # the item holds what it still needs
        prompt_answer = yield from item
        return self.answer(prompt_answer)

    def prompt_item(self, row: Row, seed: int) -> Item[Answer]:
        """Ask a row's prompt once, as one prompt of a chain."""
        request = self.request(row, seed)
        item = generated(request, NO_REPAIRS)
        del request, row  # the item holds what it still needs
        prompt_answer = yield from item
        return self.answer(prompt_answer)

    def failed(self, reason: str) -> Answer:
        """Return the answer of a row that cannot be asked."""
        return failed_answer(reason, self._n)

    def request(self, row: Row, seed: int) -> Request:
        """Return the request of a row's prompt. seed: used if the row names no seed."""
        row_values = row.own_sampling
        if not self._has_row_tools:
            row_values.pop("tools", None)  # with `tool_choice` "none", a column of tools is ignored
        sampling = {**self._sampling, **row_values}
        chat_options = self._chat_options
        if "tools" in row_values:
            # Tools are a chat option. The row's tools replace the run's, and the run's other options stay.
            run_values = {**self._sampling, **self._chat_options}
            sampling, chat_options = split_chat_options({**run_values, **row_values})
        if sampling.get("temperature") != 0:
            sampling = {"seed": seed, **sampling}  # a seed that the row names stays
        prompt = prompt_of(row, is_json=self._is_chat)
        if self._is_chat:
            return Request(
                prompt=None, messages=prompt, sampling=sampling, chat_options=chat_options
            )
        return Request(prompt=prompt, messages=None, sampling=sampling)

    def answer(self, prompt_answer: PromptAnswer) -> Answer:
        """Return a row's answer. If the row has several samples, a field with a value for each sample is a tuple."""
        failed_sample = prompt_answer.failed_sample
        if failed_sample is not None:
            failed = answer_of_failed_request(failed_sample, self._n)
            return replace(failed, attempts=1)  # a request that failed is not asked again
        samples = prompt_answer.samples
        first = prompt_answer.first
        columns = {**self._logprobs(samples), **_extra_columns(prompt_answer.extras)}
        return Answer(
            completion=self._one_or_all([sample.text for sample in samples]),
            finish_reason=self._one_or_all([finish_reason_of(sample) for sample in samples]),
            prompt_tokens=first.num_prompt_tokens,
            completion_tokens=self._one_or_all(prompt_answer.num_generated),
            cached_tokens=first.num_cached_tokens,
            error=first.error,
            reasoning=self._one_or_all([sample.reasoning for sample in samples]),
            tool_calls=self._one_or_all([_calls_text(sample) for sample in samples]),
            tool_call_error=self._one_or_all([sample.tool_call_error for sample in samples]),
            columns=columns,
            attempts=prompt_answer.attempts,
            check_error=prompt_answer.check_error,
        )

    def _one_or_all(self, values: Sequence[Any]) -> Any:
        """Return the values of a row's samples: a tuple, or the one value of a row with one sample."""
        return values[0] if self._n == 1 else tuple(values)

    def _logprobs(self, samples: Samples) -> dict[str, pa.Array]:
        """Return the columns of log probabilities that the run asks for.

        Counts their bytes. Raises InvalidJob if the shard's rows so far take more than MAX_LOGPROB_BYTES.
        """
        columns = {}
        if self._sampling.get("logprobs") is not None:
            logprobs = self._one_or_all([sample.logprobs for sample in samples])
            columns["logprobs"] = _logprob_array(logprobs, self._logprob_type, is_list=self._n > 1)
        if self._sampling.get("prompt_logprobs") is not None:
            logprobs = samples[0].prompt_logprobs
            columns["prompt_logprobs"] = _logprob_array(logprobs, self._logprob_type)

        self._logprob_bytes += sum(array.nbytes for array in columns.values())
        if self._logprob_bytes > MAX_LOGPROB_BYTES:
            raise InvalidJob(
                f"log probabilities of a shard take more than {MAX_LOGPROB_BYTES} bytes: submit with a smaller "
                "rows_per_shard, or ask for fewer"
            )
        return columns


def _list_field_if_per_completion(field: pa.Field) -> pa.Field:
    """Return the output field for a run with several completions per row.

    A field that is named in PER_COMPLETION holds a list, with one value for each completion. Other fields stay as they
    are.
    """
    if field.name in PER_COMPLETION:
        return field.with_type(pa.list_(field.type))
    return field


def _extra_columns(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that `spec.way`, if there is one, adds to an answer. Lists and objects become JSON texts."""
    columns = {}
    for name, value in extras.items():
        is_json = isinstance(value, list | dict)
        columns[name] = json.dumps(value, ensure_ascii=False) if is_json else value
    return columns


def _calls_text(sample: Completion) -> str | None:
    """Return a sample's tool calls as JSON. The ids of the calls depend only on the answer."""
    if not sample.tool_calls:
        return None
    seed = json.dumps([sample.text, sample.tool_calls])
    return json.dumps(with_ids(sample.tool_calls, seed), ensure_ascii=False)


@cache
def logprobs_type(number_type: str, is_list: bool = False) -> pa.DataType:
    """Return the type of log probabilities: for each token, a list of entries.

    The first entry is the token itself. The other entries are the likeliest tokens at the token's position.
    number_type: the type of each log probability. is_list: whether a row has several completions.
    """
    entry = pa.struct(
        [
            ("token_id", pa.int32()),
            ("token", pa.string()),
            ("logprob", pa.type_for_alias(number_type)),
            ("rank", pa.int32()),
        ]
    )
    entries_of_token = pa.list_(entry)
    completion_type = pa.list_(entries_of_token)
    return pa.list_(completion_type) if is_list else completion_type


def _logprob_array(logprobs: Any, number_type: str, is_list: bool = False) -> pa.Array:
    """Return a row's log probabilities as an array of length 1. Python's objects would take ten times the memory."""
    exact = pa.array([_arrow_logprobs(logprobs)], logprobs_type("float32", is_list))
    return exact.cast(logprobs_type(number_type, is_list))


def _arrow_logprobs(logprobs: Any) -> Any:
    """Return log probabilities as Arrow takes them: each token's mapping as a list of tuples.

    logprobs: the mapping of one token; or a list of mappings, one for each token; or a tuple of such lists, one for
    each completion.
    """
    if logprobs is None:
        return None
    if isinstance(logprobs, Mapping):
        return [
            (token_id, text_token(entry), entry.logprob, entry.rank)
            for token_id, entry in logprobs.items()
        ]
    return [_arrow_logprobs(inner) for inner in logprobs]
