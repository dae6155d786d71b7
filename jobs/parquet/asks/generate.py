"""Rows whose answers are generated: by one prompt, again where a check does not take the answer, or by several."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pyarrow as pa

from jobs.context.answers import Answer, failed_answer
from jobs.context.checks import Checks
from jobs.errors import InvalidJob
from jobs.parquet.asks.ask import OUTPUT_FIELDS, ROW_FIELDS, Ask, Asked, AskedOnce, no_answer, request_of, row_seed
from jobs.parquet.asks.scores import LABEL_FIELDS, Labels
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import StepSource
from jobs.parquet.tables.columns import RowProblem
from jobs.prompts.attempts import Attempts, hashed_seed, num_generated
from jobs.prompts.messages import OF_VALUES, ChatOptions, split_chat_options
from jobs.prompts.response_options import LOGPROBS
from jobs.prompts.responses import text_token, with_ids
from jobs.runs.plans.prompt_steps import answer_columns
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion, Request

ATTEMPTS = (pa.field("attempts", pa.int64()), pa.field("check_error", pa.string()))

OF_EACH_COMPLETION = frozenset(
    {"completion", "finish_reason", "completion_tokens", "reasoning", "tool_calls", "tool_call_error", "logprobs"}
)

#: Of a shard's rows together, all held until its part is written: some 20 for each token that is named.
MAX_LOGPROB_BYTES = 1 << 30


def answer_field(name: str, spec: RunSpec) -> pa.Field:
    return pa.field(name, logprobs_type(spec.logprob_type) if name in LOGPROBS else pa.string())


class Generate(Ask):
    """Asks for `n` completions of each row, or is one prompt of a Chain.

    sampling, chat: of its prompt. control_tokens: of Attempts, unless the prompt allows them.
    """

    is_tried = True

    def __init__(
        self,
        spec: RunSpec,
        seed: int,
        checks: Checks,
        sampling: Mapping[str, Any],
        chat: ChatOptions,
        is_chat: bool,
        control_tokens: Collection[str] = (),
    ) -> None:
        self._values = {name: value for name, value in sampling.items() if name != "seed"}
        self._chat, self._is_chat, self._n = chat, is_chat, spec.n
        self._logprob_type, self._logprob_bytes = spec.logprob_type, 0
        self._seed, self._repairs, self._checks = seed, spec.repairs, checks
        self._control_tokens = control_tokens if chat.get(OF_VALUES, True) else ()
        self.inspects = spec.repairs.check is not None

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        own = answer_columns(spec.chat[0], has_tools=spec.has_tools)[2:]
        fields = [*OUTPUT_FIELDS, *(answer_field(each, spec) for each in own)]
        if spec.n > 1:
            fields = [f.with_type(pa.list_(f.type)) if f.name in OF_EACH_COMPLETION else f for f in fields]
        return [*fields, *(ATTEMPTS if spec.repairs.is_asked_for else ())]

    def is_greedy(self, row: Row) -> bool:
        return row.own_sampling.get("temperature", self._values.get("temperature")) == 0

    def begin(self, row: Row, number: int) -> Asked:
        request = self.request(row, row_seed(self._seed, number))
        if not self._repairs.is_asked_for:
            return AskedOnce(request, self.answer)
        given = json.loads(row.values) if row.values else None
        attempts = Attempts(request, given, self._repairs, self._checks, self._control_tokens)
        return _Tried(request, attempts, self.answer)

    def failed(self, reason: str) -> Answer:
        return failed_answer(reason, self._n)

    def request(self, row: Row, seed: int) -> Request:
        own = row.own_sampling
        values, chat = {**self._values, **own}, self._chat
        if "tools" in own:
            values, chat = split_chat_options({**values, **chat, **own})
        if values.get("temperature") != 0:
            values = {"seed": seed, **values}
        return request_of(row, self._is_chat, values, chat)

    def answer(self, completions: Sequence[Completion]) -> Answer:
        samples = sorted(completions, key=lambda sample: sample.index)
        first = samples[0]
        failed = next((each for each in samples if each.finish_reason == "error"), None)
        if failed is not None:
            return replace(no_answer(failed, self._n), attempts=1)
        found = [(*_texts_of(each), num_generated(each), each.reasoning, each.tool_call_error) for each in samples]
        text, reason, calls, tokens, reasoning, no_call = found[0] if self._n == 1 else zip(*found, strict=True)
        attempts, problem = (first.attempts, first.check_error) if isinstance(first, Attempts) else (0, None)
        return Answer(
            completion=text,
            finish_reason=reason,
            prompt_tokens=first.num_prompt_tokens,
            completion_tokens=tokens,
            cached_tokens=first.num_cached_tokens,
            error=first.error,
            reasoning=reasoning,
            tool_calls=calls,
            tool_call_error=no_call,
            columns=self._logprobs(samples),
            attempts=attempts,
            check_error=problem,
        )

    def _logprobs(self, samples: Sequence[Completion]) -> dict[str, pa.Array]:
        of_texts = [each.logprobs for each in samples]
        kind = self._logprob_type
        found = {"logprobs": of_texts if self._n > 1 else of_texts[0], "prompt_logprobs": samples[0].prompt_logprobs}
        columns = {
            # As an array that holds one value: of Python's it would take a tenfold.
            name: pa.array([_entries(each)], logprobs_type("float32", of_each)).cast(logprobs_type(kind, of_each))
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


class _Tried(AskedOnce):
    def __init__(self, request: Request, attempts: Attempts, answer: Callable[[Sequence[Completion]], Answer]) -> None:
        super().__init__(request, answer)
        self._attempts = attempts

    def inspect(self, place: int, completions: Sequence[Completion]) -> None:
        self._attempts.inspect(completions[0])

    def then(self, place: int, completions: Sequence[Completion]) -> Answer | Sequence[Request]:
        following = self._attempts.deliver(completions[0])
        return super().then(place, [self._attempts]) if following is None else [following]


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
    kind = pa.list_(pa.list_(pa.struct([(name, pa.type_for_alias(each)) for name, each in names.items()])))
    return pa.list_(kind) if of_each else kind


def _entries(found: Any) -> Any:
    if isinstance(found, Mapping):
        return [(token_id, text_token(each), each.logprob, each.rank) for token_id, each in found.items()]
    return None if found is None else [_entries(each) for each in found]


class Chain(Ask):
    """What a run asks of each row, one prompt after the other. seed: the run's. control_tokens: see row_source."""

    def __init__(self, spec: RunSpec, seed: int, checks: Checks, control_tokens: Collection[str] = ()) -> None:
        self.steps, self.seed = spec.steps, seed
        self.sources = [StepSource(step, spec.defaults, (), control_tokens) for step in spec.steps]
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
        source = self._chain.sources[len(self._answers)]
        known = json.loads(self._row.values or "{}")
        known |= {step.name: answer.completion for step, answer in zip(self._chain.steps, self._answers, strict=False)}
        return self._row._replace(prompt=source.render({name: known[name] for name in source.columns}))

    def _request(self, row: Row) -> Request:
        number = len(self._answers)  # the first prompt has the row's seed
        seed = hashed_seed(f"{self._seed}:{number}") if number else self._seed
        return self._chain.prompts[number].request(row, seed)
