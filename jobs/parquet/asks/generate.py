"""Rows that have one prompt each; it is asked again where a check does not take the answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from jobs.context.answers import Answer, failed_answer
from jobs.context.check_processes import Checks
from jobs.errors import InvalidJob
from jobs.parquet.asks.ask import OUTPUT_FIELDS, Ask, Asked, AskedOnce, no_answer, request_of, row_seed
from jobs.parquet.asks.logprobs import logprobs_type, logprobs_value
from jobs.parquet.prompts.prompt_source import Row
from jobs.prompts.attempts import Attempted, Attempts, num_generated
from jobs.prompts.messages import ChatOptions
from jobs.prompts.response_options import LOGPROBS
from jobs.prompts.responses import parse_tool_calls, with_ids
from jobs.runs.plans.prompt_steps import answer_columns
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion, Request

ATTEMPTS = (pa.field("attempts", pa.int64()), pa.field("check_error", pa.string()))

#: What each completion of a row has of its own.
OF_EACH_COMPLETION = frozenset(
    {"completion", "finish_reason", "completion_tokens", "reasoning", "tool_calls", "logprobs"}
)

#: Of a shard's rows together, all held until its part is written: some 20 for each token that is named.
MAX_LOGPROB_BYTES = 1 << 30


def answer_field(name: str, spec: RunSpec) -> pa.Field:
    """Return the column of this name of answer_columns."""
    return pa.field(name, logprobs_type(spec.logprob_type) if name in LOGPROBS else pa.string())


class Generated:
    """A prompt of each row of a shard. sampling, chat: its values, and what its chats have."""

    def __init__(self, spec: RunSpec, sampling: Mapping[str, Any], chat: ChatOptions, is_chat: bool) -> None:
        self._values = {name: value for name, value in sampling.items() if name != "seed"}
        self._chat, self._is_chat, self._n = chat, is_chat, spec.n
        self._logprob_type, self._logprob_bytes = spec.logprob_type, 0

    def is_greedy(self, row: Row) -> bool:
        """Return whether equal rows have equal answers."""
        return row.own_sampling.get("temperature", self._values.get("temperature")) == 0

    def request(self, row: Row, seed: int) -> Request:
        """Return what a row asks. seed: its own, unless its values have one."""
        values = {**self._values, **row.own_sampling}
        if values.get("temperature") != 0:
            values = {"seed": seed, **values}
        return request_of(row, self._is_chat, values, self._chat.template)

    def answer(self, completions: Sequence[Completion]) -> Answer:
        """Return what a row has of its samples. With one of them the row fails.

        Raises InvalidJob where log probabilities take more than a shard may hold.
        """
        samples = sorted(completions, key=lambda sample: sample.index)
        first = samples[0]
        prompt, cached = first.num_prompt_tokens, first.num_cached_tokens
        failed = next((each for each in samples if each.finish_reason == "error"), None)
        if failed is not None:
            return replace(no_answer(failed, self._n), attempts=1)
        columns = self._logprobs(samples)
        parts = [_texts_of(each, self._chat.has_tools) for each in samples]
        if self._n == 1:
            ((text, reason, calls),) = parts
            tokens = num_generated(first)
            answer = Answer(text, reason, prompt, tokens, cached, first.error, first.reasoning, calls, columns)
            if not isinstance(first, Attempted):
                return answer
            return replace(answer, attempts=first.attempts, check_error=first.check_error)
        texts, reasons, all_calls = zip(*parts, strict=True)
        counts = tuple(len(each.token_ids) for each in samples)
        reasonings = tuple(each.reasoning for each in samples)
        return Answer(texts, reasons, prompt, counts, cached, None, reasonings, all_calls, columns)

    def _logprobs(self, samples: Sequence[Completion]) -> dict[str, pa.Array]:
        of_texts = [each.logprobs for each in samples]
        found = {"logprobs": of_texts if self._n > 1 else of_texts[0], "prompt_logprobs": samples[0].prompt_logprobs}
        columns = {
            name: logprobs_value(each, self._logprob_type, self._n > 1 and name in OF_EACH_COMPLETION)
            for name, each in found.items()
            if self._values.get(name) is not None
        }
        self._logprob_bytes += sum(each.nbytes for each in columns.values())
        if self._logprob_bytes > MAX_LOGPROB_BYTES:
            raise InvalidJob(
                f"log probabilities of a shard take more than {MAX_LOGPROB_BYTES} bytes: submit with a smaller "
                "rows_per_shard, or ask for fewer"
            )
        return columns


class Generate(Ask):
    """Asks for `n` completions of each row. seed: the run's; a row's own follows from it."""

    def __init__(self, spec: RunSpec, seed: int, checks: Checks) -> None:
        self._prompt = Generated(spec, *spec.chat, spec.is_chat)
        self.is_greedy = self._prompt.is_greedy  # type: ignore[method-assign]
        self._n, self._seed, self._repairs, self._checks = spec.n, seed, spec.repairs, checks
        self.inspects = spec.repairs.check is not None

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        fields = [*OUTPUT_FIELDS, *(answer_field(each, spec) for each in answer_columns(*spec.chat)[2:])]
        if spec.n > 1:
            lists = [pa.field(each.name, pa.list_(each.type)) for each in fields]
            fields = [lists[at] if each.name in OF_EACH_COMPLETION else each for at, each in enumerate(fields)]
        return [*fields, *(ATTEMPTS if spec.repairs.is_asked_for else ())]

    def is_greedy(self, row: Row) -> bool:
        return self._prompt.is_greedy(row)

    def begin(self, row: Row, number: int) -> Asked:
        request = self._prompt.request(row, row_seed(self._seed, number))
        if not self._repairs.is_asked_for:
            return AskedOnce(request, self._prompt.answer)
        given = json.loads(row.values) if row.values else None
        return _Tried(request, Attempts(request, given, self._repairs, self._checks), self._prompt)

    def failed(self, reason: str) -> Answer:
        return failed_answer(reason, self._n)


class _Tried(Asked):
    """A row whose answer may be tried again."""

    def __init__(self, request: Request, attempts: Attempts, prompt: Generated) -> None:
        self.requests, self._attempts, self._prompt = [request], attempts, prompt

    def inspect(self, place: int, completions: Sequence[Completion]) -> None:
        self._attempts.inspect(completions[0])

    def then(self, place: int, completions: Sequence[Completion]) -> Answer | Sequence[Request]:
        following = self._attempts.deliver(completions[0])
        return self._prompt.answer([self._attempts.outcome]) if following is None else [following]


def _texts_of(sample: Completion, has_tools: bool) -> tuple[str, str, str | None]:
    """Return a sample's content, why it ended, and its calls of tools as JSON."""
    calls, content = parse_tool_calls(sample.text) if has_tools else ([], sample.text)
    if not calls:
        return sample.text, sample.finish_reason, None
    reason = "tool_calls" if sample.finish_reason == "stop" else sample.finish_reason
    return content, reason, json.dumps(with_ids(calls, sample.text), ensure_ascii=False)
