"""From the lines of a batch file to their requests, and from completions back to OpenAI's responses."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from jobs.context.answers import Answer, failed_answer
from jobs.errors import JobsError
from jobs.parquet.prompts.prompt_source import RowSource
from jobs.parquet.tables.row_values import RowProblem
from jobs.prompts.batch_lines import failure_text
from jobs.tasks import Completion, OpenTask, Request


class BatchSource(RowSource):
    """The lines of a batch file: each is its own JSON."""

    columns = ("request",)
    is_chat = False

    def check(self, schema: pa.Schema) -> None:
        """Any line may be read."""

    def render(self, values: Mapping[str, Any]) -> str:
        (text,) = values.values()
        if not isinstance(text, str):
            raise RowProblem("there is no request")
        return text


@dataclass(slots=True)
class _Line:
    """A line under way. pulled: how many requests it has by now. left: those that were not delivered.
    error: what looking at one's answer raised."""

    row: int
    task: OpenTask
    pulled: int = 0
    left: int = 0
    error: JobsError | None = None


class BatchRequests:
    """Holds one answer for each line, whose completion is the JSON of OpenAI's response.

    rows: each line's JSON, or why it has none. open_task: opens the task of a line, named by its row within
    the shard; raises JobsError where the line cannot be asked. let_go: told of each text that is not held
    here any more.

    Stands in ShardRequests' place; a line brings its own sampling values, and may have several prompts.
    """

    def __init__(
        self,
        rows: Sequence[str | RowProblem],
        open_task: Callable[[int, Any], OpenTask],
        let_go: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._answers: list[Answer | None] = [
            failed_answer(str(row)) if isinstance(row, RowProblem) else None for row in rows
        ]
        self._unsent = [(number, row) for number, row in enumerate(rows) if isinstance(row, str)][::-1]
        self._open_task, self._let_go = open_task, let_go
        self._sent: list[tuple[_Line, int, int]] = []
        self._following: deque[tuple[_Line, Request]] = deque()
        self.inspects = False
        self.rows_done = self.rows_unasked = len(rows) - len(self._unsent)
        self._num_rows = len(rows)
        self.generated_tokens = self.prompt_tokens = 0

    @property
    def rows_open(self) -> int:
        """Rows that are being answered."""
        return self._num_rows - len(self._unsent) - self.rows_done

    @property
    def num_requests(self) -> int | None:
        """Lines are looked into as they are sent: until then it is not known how many prompts they have."""
        return None if self._unsent else len(self._sent) + len(self._following)

    def requests(self) -> Iterator[Request]:
        while self._following or self._unsent:
            if self._following:
                line, request = self._following.popleft()
                self._sent.append((line, line.pulled, len(request.continued)))
                line.pulled += 1
                yield request
                continue
            row, text = self._unsent.pop()
            self._let_go(text)
            try:
                task = self._open_task(row, json.loads(text))
                self._pull(_Line(row, task))
            except JobsError as error:
                self._answer(row, failed_answer(failure_text(error)))
            else:
                self.inspects = self.inspects or task.inspects

    @property
    def has_more(self) -> bool:
        return bool(self._following)

    def _pull(self, line: _Line) -> None:
        """Take the requests that a line has now."""
        requests = list(line.task.requests())
        line.left += len(requests)
        self._following += [(line, request) for request in requests]

    def inspect(self, index: int, completions: Sequence[Completion]) -> None:
        """See OpenTask: in any thread. What cannot be checked costs its line."""
        line, place, _ = self._sent[index]
        if line.task.inspects:
            try:
                line.task.inspect(place, completions)
            except JobsError as error:
                line.error = error

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        """Take all samples of a request."""
        line, place, num_continued = self._sent[index]
        line.left -= 1
        self.prompt_tokens += completions[0].num_prompt_tokens
        self.generated_tokens += sum(len(each.token_ids) - num_continued for each in completions)
        if self._answers[line.row] is not None:  # it has failed by another of its prompts
            return
        try:
            if line.error is not None:
                raise line.error
            line.task.deliver(place, completions)
            if line.task.has_more:
                self._pull(line)
            if line.left == 0:
                self._answer(line.row, _answer_of(line.task.result()))
        except JobsError as error:
            self._answer(line.row, failed_answer(failure_text(error)))

    def answers(self) -> list[Answer]:
        """Return the answers in row order, once every request was delivered."""
        answers = [answer for answer in self._answers if answer is not None]
        assert len(answers) == len(self._answers), "answers() before every request was delivered"
        return answers

    def close(self) -> None:
        """Nothing is held for others."""

    def _answer(self, row: int, answer: Answer) -> None:
        self._answers[row] = answer
        self.rows_done += 1


def _answer_of(body: Mapping[str, Any]) -> Answer:
    """Return the row of a response. A choice that failed, which OpenAI's types have not, fails its line."""
    if "data" in body:
        return _answer_of_embeddings(body)
    choices, usage = body["choices"], body["usage"]
    failed = next((choice for choice in choices if "error" in choice), None)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    if failed is not None:
        return failed_answer(
            f"choice {failed['index']}: {failed['error']}", 1, usage["prompt_tokens"], cached
        )
    return Answer(
        completion=json.dumps(body, ensure_ascii=False),
        finish_reason=choices[0]["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=cached,
        error=None,
    )


def _answer_of_embeddings(body: Mapping[str, Any]) -> Answer:
    """Return the row of embeddings. One that failed fails its line, as a choice does."""
    num_tokens = body["usage"]["prompt_tokens"]
    failed = next((each for each in body["data"] if "error" in each), None)
    if failed is not None:
        return failed_answer(f"input {failed['index']}: {failed['error']}", 1, num_tokens)
    return Answer(json.dumps(body, ensure_ascii=False), "stop", num_tokens, 0, 0, None)
