"""Asks rows that are lines of OpenAI's batch files.

Each line has its own arguments. It gets the answer that a job with the same arguments would get, in the form of an
OpenAI response.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, Self

import pyarrow as pa

from jobs.context import JobContext
from jobs.context.adapters import Adapters
from jobs.context.answers import Answer, failed_answer
from jobs.context.checks import TOOL, RepairOptions
from jobs.errors import InvalidJob, JobsError, ResultTooLarge
from jobs.items.item import Item, side_by_side
from jobs.parquet.asks.ask import OUTPUT_FIELDS, RowAsk, row_seed
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import RowSource
from jobs.prompts.batch_lines import Drops, body_maker, failure_text, line_task
from jobs.prompts.prompt_task import PromptTask
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec

#: The column with the names of arguments that were left out of a line.
LEFT_OUT = "left_out"


class BatchLines(RowAsk):
    """Asks the rows of an OpenAI batch file. Each row is a line of the file, with one or more prompts."""

    is_single = False  # a line with several prompts begins with several requests

    def __init__(self, plan: Plan, context: JobContext) -> None:
        self._plan = plan
        self._context = replace(context, adapters=Adapters(plan.model.adapters))
        #: The versions of the functions that lines name, by the functions' dotted names.
        self._versions: dict[str, str] = {}
        self._is_sampling_value = cache(self._look_up_sampling)

    @classmethod
    def of_plan(cls, plan: Plan, context: JobContext, source: RowSource) -> Self:
        """Return the object that asks the lines of a run."""
        return cls(plan, context)

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        """Return the columns that every generating run has, and `left_out` if arguments of lines may be left out."""
        fields = list(OUTPUT_FIELDS)
        if spec.drop_unsupported:
            fields.append(pa.field(LEFT_OUT, pa.string()))
        return fields

    @staticmethod
    def is_compared(spec: RunSpec) -> bool:
        """Return False: a response holds the time at which it was made, so no two responses are equal."""
        return False

    def is_deterministic(self, row: Row) -> bool:
        """Return False: a response holds the id of its own line, so equal lines do not have equal answers."""
        return False

    def key_of(self, row: Row) -> bytes:
        """Return a line's key. The key does not depend on the custom_id."""
        line = json.loads(row.prompt)
        version = ""
        if isinstance(line, dict):
            line.pop("custom_id", None)
            version = self._version_of(line.get("body"))
        # A key covers all fields of a row. The version takes a field that a line does not use.
        deciding_row = Row(json.dumps(line), values=version)
        return super().key_of(deciding_row)

    def _version_of(self, body: Any) -> str:
        """Return the joined versions of the functions that a line names; "" for a line that cannot be used."""
        if not isinstance(body, dict):
            return ""
        checks = [body.get("check")]
        tool_names = body.get(TOOL)
        if isinstance(tool_names, list):
            for tool_name in tool_names:
                if isinstance(tool_name, str):
                    dotted = tool_name.replace(":", ".")  # a line may write module:function
                    # A tool is listed as if it were a check, because RepairOptions reads both in the same way.
                    checks.append({TOOL: dotted})
        versions = []
        for check in checks:
            if isinstance(check, dict):
                versions.append(self._function_version(check))
        return "".join(versions)

    def _function_version(self, check: dict[str, Any]) -> str:
        """Return the version of the function that a check names; "" if it names none.

        check: the check of a line, or a tool in the form of a check.
        """
        options = RepairOptions(check)
        name = options.function
        if not isinstance(name, str):
            return ""
        if name not in self._versions:
            try:
                self._versions[name] = self._context.checks.version(options)
            except JobsError:  # the line gets this error when it is asked
                self._versions[name] = ""
        return self._versions[name]

    def item(self, row: Row, number: int) -> Item[Answer]:
        """Ask the prompts of a line. If the line cannot be asked or checked, the error of its answer says why."""
        # A line's task is made in the same way as the task of a job, so it needs a job id.
        context = replace(self._context, job_id=f"{self._plan.run}-{number}")
        seed = row_seed(self._plan.seed, number)
        line = json.loads(row.prompt)
        del row  # so that the line's texts are in memory only once
        try:
            spec = self._plan.spec
            # Collects the arguments that are left out of the line.
            drops = Drops(self._is_sampling_value) if spec.drop_unsupported else None
            aliases = spec.model_alias or ()
            described_task = line_task(line, seed, aliases, spec.batch_endpoint, drops)
            task = described_task.task_to_open(context)
            assert isinstance(task, PromptTask)
            make_body = body_maker(line)
            del line

            task.check(context)
            if task.has_checks:
                self.has_checks = True
            control_tokens = context.model.control_tokens
            items = [task.item(prompt, control_tokens) for prompt in task.prompts]
            answers = yield from side_by_side(items)
            num_chars = sum(answer.num_chars for answer in answers)
            if num_chars > context.max_result_bytes:
                raise ResultTooLarge(context.max_result_bytes)

            result = task.result(answers, context)
            answer = _answer_of(result, make_body)
            if drops is not None and drops.left_out:
                answer = replace(answer, columns={LEFT_OUT: ", ".join(drops.left_out)})
            return answer
        except JobsError as error:
            return failed_answer(failure_text(error))

    def _look_up_sampling(self, name: str) -> bool:
        """Return whether the engine knows a sampling value of this name."""
        try:
            self._context.check_sampling({name: None})  # None is refused only for an unknown name
        except InvalidJob:
            return False
        return True


def _answer_of(
    result: dict[str, Any], make_body: Callable[[dict[str, Any]], dict[str, Any]]
) -> Answer:
    """Return a line's answer: its response as JSON, or the error of the first entry that failed.

    result: the result of the line's task. make_body: see body_maker.
    """
    usage = result["usage"]
    num_prompt_tokens = usage["prompt_tokens"]
    num_cached_tokens = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    is_list = "data" in result  # such as embeddings: nothing is generated
    entries = result["data"] if is_list else result["choices"]
    entry_noun = "input" if is_list else "choice"
    for entry in entries:
        if "error" in entry:
            reason = f"{entry_noun} {entry['index']}: {entry['error']}"
            return failed_answer(
                reason, prompt_tokens=num_prompt_tokens, cached_tokens=num_cached_tokens
            )

    finish_reason = "stop" if is_list else entries[0]["finish_reason"]
    return Answer(
        completion=json.dumps(make_body(result), ensure_ascii=False),
        finish_reason=finish_reason,
        prompt_tokens=num_prompt_tokens,
        completion_tokens=usage.get("completion_tokens", 0),
        cached_tokens=num_cached_tokens,
        error=None,
    )
