"""From a shard's rendered rows to the requests they need, and from completions back to rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..tasks import Completion, Request
from .part import Answer
from .prompt_source import RowProblem


class ShardRequests:
    """Holds one answer for each row.

    rows: the text of each row, or why it has none. sampling: as in the plan. row_seed: the seed of a row,
    counted within the shard; used when tokens are drawn.

    Requests come sorted by text, so that shared prefixes meet in the cache. With temperature 0 equal texts
    have equal answers, and are one request.
    """

    def __init__(
        self,
        rows: Sequence[str | RowProblem],
        sampling: Mapping[str, Any],
        row_seed: Callable[[int], int],
        is_chat: bool,
    ) -> None:
        self._answers: list[Answer | None] = [
            Answer(None, "error", 0, 0, 0, str(row)) if isinstance(row, RowProblem) else None for row in rows
        ]
        self._is_greedy = sampling.get("temperature") == 0
        self._sampling = dict(sampling)
        self._row_seed = row_seed
        self._is_chat = is_chat
        self._texts: list[str] = []
        self._rows_of: list[list[int]] = []
        self._group(rows)
        self.rows_done = sum(answer is not None for answer in self._answers)
        self.generated_tokens = 0

    @property
    def num_rows(self) -> int:
        return len(self._answers)

    @property
    def num_requests(self) -> int:
        return len(self._texts)

    def requests(self) -> Iterator[Request]:
        for text, rows in zip(self._texts, self._rows_of, strict=True):
            sampling = (
                self._sampling if self._is_greedy else {**self._sampling, "seed": self._row_seed(rows[0])}
            )
            if self._is_chat:
                yield Request(prompt=None, messages=json.loads(text), sampling=sampling)
            else:
                yield Request(prompt=text, messages=None, sampling=sampling)

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        """Take the one sample of a request and give it to every row that asked for it."""
        (completion,) = completions
        failed = completion.finish_reason == "error"
        answer = Answer(
            completion=None if failed else completion.text,
            finish_reason=completion.finish_reason,
            prompt_tokens=completion.num_prompt_tokens,
            completion_tokens=len(completion.token_ids),
            cached_tokens=completion.num_cached_tokens,
            error=(completion.error or "the engine gave no reason") if failed else None,
        )
        for row in self._rows_of[index]:
            self._answers[row] = answer
        self.rows_done += len(self._rows_of[index])
        self.generated_tokens += answer.completion_tokens

    def answers(self) -> list[Answer]:
        """Return the answers in row order, once every request was delivered."""
        answers = [answer for answer in self._answers if answer is not None]
        assert len(answers) == self.num_rows, "answers() before every request was delivered"
        return answers

    def _group(self, rows: Sequence[str | RowProblem]) -> None:
        ordered = sorted((row, number) for number, row in enumerate(rows) if isinstance(row, str))
        for text, number in ordered:
            if self._is_greedy and self._texts and self._texts[-1] == text:
                self._rows_of[-1].append(number)
            else:
                self._texts.append(text)
                self._rows_of.append([number])
