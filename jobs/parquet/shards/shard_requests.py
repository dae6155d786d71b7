"""From a shard's rendered rows to the requests they need, and from completions back to rows."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from jobs.context.answers import Answer, AnswerMemo, failed_answer
from jobs.context.check_options import NO_REPAIRS, RepairOptions
from jobs.context.check_processes import Checks
from jobs.parquet.prompts.prompt_chain import Chain
from jobs.parquet.prompts.row_sampling import split
from jobs.parquet.shards.shard_embeddings import ShardEmbeddings
from jobs.parquet.shards.shard_labels import ShardLabels
from jobs.parquet.tables.row_values import RowProblem
from jobs.prompts.attempts import Attempted, Attempts, num_generated
from jobs.prompts.responses import parse_tool_calls, with_ids
from jobs.tasks import Completion, Request

#: What is asked of prompts for which nothing is generated.
Measure = ShardLabels | ShardEmbeddings


@dataclass(slots=True)
class _Group:
    """Rows that one request answers, or one for each of several prompts. text: empty once it is not needed
    any more. key: names the prompt in the memo; None where tokens are drawn. answers: to those before.
    attempts: its way to an answer, where answers are tried again."""

    text: str
    rows: list[int]
    key: bytes | None
    answers: tuple[Answer, ...] = ()
    attempts: Attempts | None = None


class ShardRequests:
    """Holds one answer for each row.

    rows: the text of each row, or why it has none. sampling: as in the plan. row_seed: the seed of a row,
    counted within the shard; used when tokens are drawn. run, memo: where the answers of other shards are.
    let_go: told of each text that is not held here any more. n: completions of each row. chat_options: as of
    Request. has_own_sampling: the texts are those of a SampledSource. has_tools: calls of tools are looked
    for in the answers. chain: where each row has several prompts; the texts are those of a ChainSource.
    measure: where labels or embeddings are asked for; then nothing is drawn.
    repairs, checks: what is asked of the answers, and what checks them; where a function does, the texts are
    those of a CheckedSource.

    Requests come sorted by text, so that shared prefixes meet in the cache. With temperature 0 equal texts
    have equal answers: they are one request, and none where another shard of the run, on the same worker,
    has the answer. A prompt that another shard is at comes last, when its answer may be there; if it is not,
    it is computed here too, so that no shard waits for another. A row's next prompt comes before other rows.

    rows_unasked: how many have no text.

    Made in any thread; then all methods belong to one, but `close`, which comes last.
    """

    def __init__(
        self,
        rows: Sequence[str | RowProblem],
        sampling: Mapping[str, Any],
        row_seed: Callable[[int], int],
        is_chat: bool,
        run: str = "",
        memo: AnswerMemo | None = None,
        let_go: Callable[[str], None] = lambda text: None,
        n: int = 1,
        chat_options: Mapping[str, Any] = MappingProxyType({}),
        has_own_sampling: bool = False,
        has_tools: bool = False,
        chain: Chain | None = None,
        measure: Measure | None = None,
        repairs: RepairOptions = NO_REPAIRS,
        checks: Checks | None = None,
    ) -> None:
        self._repairs, self._checks = repairs, checks or Checks()
        self._n, self._has_tools, self._chain, self._measure = n, has_tools, chain, measure
        self._answers: list[Answer | None] = [
            self._failed(row) if isinstance(row, RowProblem) else None for row in rows
        ]
        # A run's own seed is where the rows' seeds come from; one in a column is the row's.
        self._shared = {name: value for name, value in sampling.items() if name != "seed"}
        self._has_own_sampling = has_own_sampling
        self._row_seed = row_seed
        self._is_chat, self._chat_options = is_chat, chat_options
        self._memo = AnswerMemo(0) if memo is None else memo
        self._let_go = let_go
        self._sent: list[_Group] = []
        self._following: deque[tuple[_Group, Request]] = deque()
        self._begun: set[bytes] = set()
        self.rows_done = self.rows_unasked = sum(answer is not None for answer in self._answers)
        self.rows_open = 0
        self.generated_tokens = self.prompt_tokens = 0
        groups = _groups(rows, run.encode(), self._is_greedy)
        self._unsent = [group for group in groups if not self._take_known(group)]
        self._before_prior: list[tuple[int, Sequence[Completion]]] = []
        if measure is not None and measure.prior is not None and self._unsent:
            self._unsent.append(_Group(measure.prior, [], None))  # goes first, and is no row's

    @property
    def num_rows(self) -> int:
        return len(self._answers)

    @property
    def num_requests(self) -> int:
        """Requests that were pulled, and at most so many more."""
        return len(self._sent) + len(self._following) + len(self._unsent)

    @property
    def has_more(self) -> bool:
        return bool(self._following)

    def requests(self) -> Iterator[Request]:
        postponed: deque[_Group] = deque()
        while self._following or self._unsent or postponed:
            if self._following:
                group, request = self._following.popleft()
                self._sent.append(group)
                yield request
            elif self._unsent:
                group = self._unsent.pop()
                if self._take_known(group):
                    continue
                if self._begin(group):
                    yield self._send(group)
                else:
                    postponed.append(group)
            elif not self._take_known(group := postponed.popleft()):
                yield self._send(group)

    @property
    def inspects(self) -> bool:
        return self._repairs.check is not None

    def inspect(self, index: int, completions: Sequence[Completion]) -> None:
        """See OpenTask: in any thread."""
        attempts = self._sent[index].attempts
        assert attempts is not None, "inspected without a check"
        attempts.inspect(completions[0])

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        """Take all samples of a request and give them to every row that asked for it."""
        group = self._sent[index]
        if self._measure is not None and self._measure.awaits_prior:
            self._await_prior(index, completions, self._measure)
            return
        if group.attempts is not None:
            following = group.attempts.deliver(completions[0])
            if following is not None:
                self._following.append((group, following))
                return
            completions, group.attempts = [group.attempts.outcome], None
        has_tools = self._has_tools if self._chain is None else self._chain.has_tools(len(group.answers))
        answer = (
            _answer_of(completions, self._n, has_tools)
            if self._measure is None
            else self._measure.answer(completions)
        )
        self.generated_tokens += answer.all_completion_tokens
        self.prompt_tokens += completions[0].num_prompt_tokens
        whole = answer if self._chain is None else self._go_on(group, answer, self._chain)
        if whole is None:
            return
        self.rows_open -= len(group.rows)
        self._answer(group, whole)
        if group.key is not None:
            if whole.error is None:
                self._memo.put(group.key, whole)
            self._end(group.key)

    def answers(self) -> list[Answer]:
        """Return the answers in row order, once every request was delivered."""
        answers = [answer for answer in self._answers if answer is not None]
        assert len(answers) == self.num_rows, "answers() before every request was delivered"
        return answers

    def close(self) -> None:
        """Leave to others what was sent and not delivered; may be called more than once."""
        for key in list(self._begun):
            self._end(key)

    def _send(self, group: _Group) -> Request:
        self._sent.append(group)
        self.rows_open += len(group.rows)
        prompt, own = self._split(group.text)
        if self._measure is not None:
            self._drop_text(group)
            return self._request(prompt, self._measure.values, kind=self._measure.kind)
        seed = self._row_seed(group.rows[0])
        if self._chain is not None:
            return self._chain.request(prompt, own, (), seed)
        row = split(group.text)[1] if self._repairs.function is not None else None
        self._drop_text(group)  # the engine has it from here on
        sampling = {**self._shared, **own}
        if not _is_greedy(sampling):
            sampling = {"seed": seed, **sampling}
        request = self._request(prompt, sampling)
        if self._repairs.is_asked_for:
            group.attempts = Attempts(request, row, self._repairs, self._checks)
        return request

    def _request(self, prompt: str, values: Mapping[str, Any], kind: str = "generate") -> Request:
        if self._is_chat:
            return Request(None, json.loads(prompt), values, self._chat_options, kind)
        return Request(prompt, None, values, kind=kind)

    def _await_prior(self, index: int, completions: Sequence[Completion], measure: Measure) -> None:
        """Keep what came before the prompt without content; deliver it when that has come."""
        if self._sent[index].rows:
            self._before_prior.append((index, completions))
            return
        measure.take_prior(completions)
        waiting, self._before_prior = self._before_prior, []
        for each in waiting:
            self.deliver(*each)

    def _go_on(self, group: _Group, answer: Answer, chain: Chain) -> Answer | None:
        """Return what comes of a row all in all; None where it has another prompt, which then follows."""
        group.answers = (*group.answers, answer)
        problem = None
        if not chain.is_over(group.answers):
            prompt, own = self._split(group.text)
            try:
                request = chain.request(prompt, own, group.answers, self._row_seed(group.rows[0]))
            except RowProblem as found:
                problem = str(found)
            else:
                self._following.append((group, request))
                return None
        self._drop_text(group)
        return chain.answer(group.answers, problem)

    def _failed(self, problem: RowProblem) -> Answer:
        if self._chain is not None:
            return self._chain.answer((), str(problem))
        if self._measure is not None:
            return self._measure.failed(str(problem))
        return failed_answer(str(problem), self._n)

    def _drop_text(self, group: _Group) -> None:
        self._let_go(group.text)
        group.text = ""

    def _split(self, text: str) -> tuple[str, Mapping[str, Any]]:
        """Return what a row's source has rendered, and the sampling values that the row brings."""
        if self._repairs.function is not None:
            text, _ = split(text)
        return split(text) if self._has_own_sampling else (text, {})

    def _is_greedy(self, text: str) -> bool:
        if self._measure is not None:
            return True
        own = self._split(text)[1] if self._has_own_sampling else {}
        return _is_greedy({**self._shared, **own}) if self._chain is None else self._chain.is_greedy(own)

    def _take_known(self, group: _Group) -> bool:
        """Answer a group with what another shard has computed; return whether there was such."""
        answer = None if group.key is None else self._memo.get(group.key)
        if answer is None:
            return False
        self._answer(group, answer)
        self._drop_text(group)
        return True

    def _answer(self, group: _Group, answer: Answer) -> None:
        for row in group.rows:
            self._answers[row] = answer
        self.rows_done += len(group.rows)

    def _begin(self, group: _Group) -> bool:
        """Take a group on; return False where another shard is at its prompt."""
        if group.key is not None:
            if not self._memo.begin(group.key):
                return False
            self._begun.add(group.key)
        return True

    def _end(self, key: bytes) -> None:
        if key in self._begun:
            self._begun.discard(key)
            self._memo.end(key)


def _answer_of(completions: Sequence[Completion], n: int, has_tools: bool) -> Answer:
    """Return what a row has of its samples. With one of them the row fails."""
    samples = sorted(completions, key=lambda sample: sample.index)
    first = samples[0]
    failed = next((each for each in samples if each.finish_reason == "error"), None)
    if failed is not None:
        reason = failed.error or "the engine gave no reason"
        answer = failed_answer(reason, n, first.num_prompt_tokens, first.num_cached_tokens)
        return replace(answer, attempts=1)
    prompt, cached = first.num_prompt_tokens, first.num_cached_tokens
    parts = [_texts_of(each, has_tools) for each in samples]
    if n == 1:
        ((text, reason, calls),) = parts
        tokens = num_generated(first)
        answer = Answer(text, reason, prompt, tokens, cached, first.error, first.reasoning, calls)
        if not isinstance(first, Attempted):
            return answer
        return replace(answer, attempts=first.attempts, check_error=first.check_error)
    texts, reasons, all_calls = zip(*parts, strict=True)
    counts = tuple(len(each.token_ids) for each in samples)
    reasonings = tuple(each.reasoning for each in samples)
    return Answer(texts, reasons, prompt, counts, cached, None, reasonings, all_calls)


def _texts_of(sample: Completion, has_tools: bool) -> tuple[str, str, str | None]:
    """Return a sample's content, why it ended, and its calls of tools as JSON."""
    calls, content = parse_tool_calls(sample.text) if has_tools else ([], sample.text)
    if not calls:
        return sample.text, sample.finish_reason, None
    reason = "tool_calls" if sample.finish_reason == "stop" else sample.finish_reason
    return content, reason, json.dumps(with_ids(calls, sample.text), ensure_ascii=False)


def _is_greedy(sampling: Mapping[str, Any]) -> bool:
    return sampling.get("temperature") == 0


def _groups(rows: Sequence[str | RowProblem], run: bytes, is_greedy: Callable[[str], bool]) -> list[_Group]:
    """Return the rows of each greedy text together, and each other row by itself, the last text first."""
    together: dict[str, _Group] = {}
    groups = []
    for number, row in enumerate(rows):
        if not isinstance(row, str):
            continue
        if (known := together.get(row)) is not None:
            known.rows.append(number)
        elif is_greedy(row):
            key = blake2b(row.encode(), digest_size=16, key=run).digest()
            groups.append(together.setdefault(row, _Group(row, [number], key)))
        else:
            groups.append(_Group(row, [number], None))
    return sorted(groups, key=lambda group: (group.text, group.rows[0]), reverse=True)
