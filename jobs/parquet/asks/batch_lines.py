"""Rows that are lines of OpenAI's batch files: each is a job of its own, whose response is its answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from jobs.context import JobContext
from jobs.context.answers import Answer, failed_answer
from jobs.context.checks import RepairOptions
from jobs.errors import JobsError
from jobs.parquet.asks.ask import OUTPUT_FIELDS, Ask, Asked, row_seed
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.tables.columns import RowProblem
from jobs.prompts.batch_lines import failure_text, line_task
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion, OpenTask, Request


class BatchLines(Ask):
    """Asks what each line says: it brings its own sampling values, and may have several prompts."""

    is_single = is_compared = False

    def __init__(self, plan: Plan, context: JobContext) -> None:
        self._plan, self._context = plan, context
        self._versions = dict[str, str]()  # of functions that check answers

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        return list(OUTPUT_FIELDS)

    def is_greedy(self, row: Row) -> bool:
        return False  # responses tell which line they are of

    def key_of(self, row: Row) -> bytes:
        """Leave out what a line is called."""
        line = json.loads(row.prompt)
        version = ""
        if isinstance(line, dict):
            line.pop("custom_id", None)
            version = self._version_of(line.get("body"))
        return super().key_of(Row(json.dumps(line), values=version))

    def _version_of(self, body: Any) -> str:
        """Return the version of the function that checks a line's answer; "" if there is none, or it cannot be used."""
        check = body.get("check") if isinstance(body, dict) else None
        function = check.get("function") if isinstance(check, dict) else None
        if not isinstance(function, str):
            return ""
        if function not in self._versions:
            try:
                self._versions[function] = self._context.checks.version(RepairOptions({"function": function}))
            except JobsError:  # the line gets this error when it is asked
                self._versions[function] = ""
        return self._versions[function]

    def begin(self, row: Row, number: int) -> Asked:
        context = replace(self._context, job_id=f"{self._plan.run}-{number}")
        seed, aliases = row_seed(self._plan.seed, number), self._plan.spec.model_alias or ()
        try:
            line = _Line(line_task(json.loads(row.prompt), seed, aliases).open(context))
        except JobsError as error:
            raise RowProblem(failure_text(error)) from error
        self.inspects = self.inspects or line.inspects
        return line


class _Line(Asked):
    def __init__(self, task: OpenTask) -> None:
        self._task, self.inspects = task, task.inspects
        self.requests = list(task.requests())
        self._num_awaited = len(self.requests)
        self._error: JobsError | None = None

    def inspect(self, place: int, completions: Sequence[Completion]) -> None:
        """See OpenTask. What cannot be checked costs its line."""
        if self.inspects:
            try:
                self._task.inspect(place, completions)
            except JobsError as error:
                self._error = error

    def then(self, place: int, completions: Sequence[Completion]) -> Answer | Sequence[Request]:
        self._num_awaited -= 1
        try:
            if self._error is not None:
                raise self._error
            self._task.deliver(place, completions)
            following = list(self._task.requests()) if self._task.has_more else []
            self._num_awaited += len(following)
            return following if self._num_awaited else _answer_of(self._task.result())
        except JobsError as error:
            return failed_answer(failure_text(error))


def _answer_of(body: Mapping[str, Any]) -> Answer:
    usage, text = body["usage"], json.dumps(body, ensure_ascii=False)
    if "data" in body:
        failed = next((each for each in body["data"] if "error" in each), None)
        if failed is not None:
            return failed_answer(f"input {failed['index']}: {failed['error']}", 1, usage["prompt_tokens"])
        return Answer(text, "stop", usage["prompt_tokens"], 0, 0, None)
    failed = next((choice for choice in body["choices"] if "error" in choice), None)
    prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if failed is not None:
        return failed_answer(f"choice {failed['index']}: {failed['error']}", 1, prompt, cached)
    reason = body["choices"][0]["finish_reason"]
    return Answer(text, reason, prompt, usage["completion_tokens"], cached, None)
