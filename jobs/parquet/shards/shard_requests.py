"""From a shard's rows to the requests they need, and from completions back to rows."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from jobs.context.answers import Answer, AnswerMemo
from jobs.context.under_way import UnderWay
from jobs.parquet.asks.ask import Ask, Asked
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.tables.columns import RowProblem
from jobs.tasks import Completion, Request


@dataclass(slots=True)
class _Group:
    """Rows that are asked together; `key` names them in the memo, `row` and `asked` stay until they are answered.

    num_requests: that it has led to. delivered: what each got, by its place, with num_tokens. so_far: the others'
    tokens.
    """

    row: Row | None
    rows: list[int]
    key: bytes | None
    asked: Asked | None = None
    num_requests: int = 0
    delivered: dict[int, Sequence[Completion]] = field(default_factory=dict)
    num_tokens: int = 0
    so_far: Mapping[int, Mapping[int, Sequence[int]]] = field(default_factory=dict)


class ShardRequests:
    """Holds one answer for each row. Made in any thread; then all methods belong to one, but `inspect` and `close`.

    rows: an Answer stands for a row that has one already. number_of: gives a row's number in the run. memo: holds the
    answers of other shards. let_go: called with each row whose texts are not held here any more.
    Rows are asked in order, so that shared prefixes meet in the cache; what a row asks next comes before other rows.
    Equal rows with equal answers are asked once, and not at all where another shard on the same worker has it. A row
    that another shard is at comes last; if it has no answer then, it is computed here too, so that no shard waits for
    another.
    """

    def __init__(
        self,
        rows: Sequence[Row | RowProblem | Answer],
        ask: Ask,
        number_of: Callable[[int], int],
        memo: AnswerMemo | None = None,
        let_go: Callable[[Row], None] = lambda row: None,
    ) -> None:
        self._ask, self._number_of, self._let_go = ask, number_of, let_go
        self._memo = AnswerMemo(0) if memo is None else memo
        self._answers = [_answer_of(row, ask) for row in rows]
        # Requests under way: their group, their place in it, and how many tokens they continue.
        self._sent: list[tuple[_Group, int, int] | None] = []
        self._following: deque[tuple[_Group, int, Request]] = deque()
        self._open: dict[int, _Group] = {}  # groups under way, by their first rows
        self.answered: list[tuple[int, int, Answer]] = []  # row, tokens generated for it and equal ones, answer
        self._begun: set[bytes] = set()
        self.rows_done = sum(answer is not None for answer in self._answers)
        self.rows_unasked = sum(isinstance(row, RowProblem) for row in rows)
        self.rows_open = 0
        self.generated_tokens = self.prompt_tokens = self.rows_resumed = self.tokens_resumed = 0
        groups = _groups(rows, ask)
        self._unsent = [group for group in groups if not self._take_known(group)]
        self._awaits_before = False
        if ask.before is not None and self._unsent:
            self._following.append((_Group(None, [], None), 0, ask.before))

    @property
    def num_rows(self) -> int:
        return len(self._answers)

    @property
    def num_requests(self) -> int | None:
        """Requests that were pulled, and at most so many more; None where rows may begin with several."""
        if self._unsent and not self._ask.is_single:
            return None
        return len(self._sent) + len(self._following) + len(self._unsent)

    @property
    def has_more(self) -> bool:
        return not self._awaits_before and bool(self._following or self._unsent)

    def requests(self) -> Iterator[Request]:
        postponed: deque[_Group] = deque()
        while self._following or self._unsent or postponed:
            if self._following:
                group, place, request = self._following.popleft()
                if place in group.delivered or (group.rows and group.asked is None):
                    continue  # of another execution, or of no use any more
                self._sent.append((group, place, len(request.continued)))
                self._awaits_before = not group.rows
                request = self._ask.timed(request)
                yield replace(request, resumed=group.so_far[place]) if place in group.so_far else request
                if self._awaits_before:
                    return
            elif self._unsent:
                group = self._unsent.pop()
                if self._take_known(group):
                    continue
                if self._take_on(group):
                    self._begin(group)
                else:
                    postponed.append(group)
            elif not self._take_known(group := postponed.popleft()):
                self._begin(group)

    @property
    def inspects(self) -> bool:
        return self._ask.inspects

    def inspect(self, index: int, completions: Sequence[Completion]) -> None:
        sent = self._sent[index]
        assert sent is not None, "inspected once delivered"
        group, place, _ = sent
        if (asked := group.asked) is not None:
            asked.inspect(place, completions)

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        """Take all samples of a request and give them to every row that asked for it."""
        sent = self._sent[index]
        assert sent is not None, "delivered twice"
        group, place, num_continued = sent
        if not group.rows:
            self._ask.take_before(completions)
            self._awaits_before = False
            return
        self._sent[index] = None
        self.prompt_tokens += completions[0].num_prompt_tokens
        self.generated_tokens += sum(len(each.token_ids) - each.num_continued for each in completions)
        self.tokens_resumed += sum(max(0, each.num_continued - num_continued) for each in completions)
        group.num_tokens += sum(max(0, len(each.token_ids) - num_continued) for each in completions)
        self._take(group, place, completions)

    def _take(self, group: _Group, place: int, completions: Sequence[Completion]) -> None:
        if group.asked is None:  # it has failed by another of its requests
            return
        found = group.asked.then(place, completions)
        if not isinstance(found, Answer):
            group.delivered[place] = completions
            self._follow(group, found)
            return
        group.asked = None
        group.delivered.clear()
        del self._open[group.rows[0]]
        self.rows_open -= len(group.rows)
        self._answer(group, found)
        if group.key is not None:
            if found.error is None:
                self._memo.put(group.key, found)
            self._end(group.key)

    def answers(self) -> list[Answer]:
        """Return the answers in row order, once every request was delivered."""
        answers = [answer for answer in self._answers if answer is not None]
        assert len(answers) == self.num_rows, "answers() before every request was delivered"
        return answers

    def resume(self, under_way: Mapping[int, UnderWay]) -> None:
        """Take rows up where another execution has left them, before a request is pulled. Raises JobsError."""
        groups = [group for group in reversed(self._unsent) if group.rows[0] in under_way]
        self._unsent = [group for group in self._unsent if group.rows[0] not in under_way]
        for group in groups:
            was = under_way[group.rows[0]]
            self._take_on(group)
            self._begin(group)
            if group.asked is None:
                continue
            group.so_far, group.num_tokens = was.so_far, was.num_tokens
            self.rows_resumed += len(group.rows)
            self.tokens_resumed += was.num_tokens
            for place, completions in was.delivered:
                if group.asked is not None:
                    group.asked.inspect(place, completions)
                    self._take(group, place, completions)

    def under_way(self, so_far: Mapping[int, Mapping[int, Sequence[int]]]) -> dict[int, UnderWay]:
        tokens: defaultdict[int, dict[int, Mapping[int, Sequence[int]]]] = defaultdict(dict)
        for index, samples in so_far.items():
            if (sent := self._sent[index]) is not None and sent[0].rows:
                group, place, num_continued = sent
                tokens[group.rows[0]][place] = {number: each[num_continued:] for number, each in samples.items()}
        found = (
            (row, UnderWay(tuple(group.delivered.items()), tokens.get(row, {}), group.num_tokens))
            for row, group in self._open.items()
        )
        return {row: each for row, each in found if each.can_be_kept}

    def close(self) -> None:
        """Leave to others what was sent and not delivered; may be called more than once."""
        for key in list(self._begun):
            self._end(key)

    def _begin(self, group: _Group) -> None:
        row = self._taken(group)
        try:
            group.asked = self._ask.begin(row, self._number_of(group.rows[0]))
        except RowProblem as problem:
            self._answer(group, self._ask.failed(str(problem)))
            return
        self.rows_open += len(group.rows)
        self._open[group.rows[0]] = group
        requests, group.asked.requests = group.asked.requests, ()  # the engine has them from here on
        self._follow(group, requests)

    def _follow(self, group: _Group, requests: Iterable[Request]) -> None:
        for request in requests:
            self._following.append((group, group.num_requests, request))
            group.num_requests += 1

    def _taken(self, group: _Group) -> Row:
        row, group.row = group.row, None
        assert row is not None, "asked twice"
        self._let_go(row)
        return row

    def _take_known(self, group: _Group) -> bool:
        """Answer a group with what another shard has computed; return whether there was such."""
        answer = None if group.key is None else self._memo.get(group.key)
        if answer is None:
            return False
        self._answer(group, answer)
        self._taken(group)
        return True

    def _answer(self, group: _Group, answer: Answer) -> None:
        for place, row in enumerate(group.rows):
            self._answers[row] = answer
            self.answered.append((row, 0 if place else group.num_tokens, answer))
        self.rows_done += len(group.rows)

    def _take_on(self, group: _Group) -> bool:
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


def _answer_of(row: Row | RowProblem | Answer, ask: Ask) -> Answer | None:
    if isinstance(row, Row):
        return None
    return row if isinstance(row, Answer) else ask.failed(str(row))


def _groups(rows: Sequence[Row | RowProblem | Answer], ask: Ask) -> list[_Group]:
    """Return equal rows with equal answers together, and each other row by itself, the last one first."""
    together: dict[Row, _Group] = {}
    groups = []
    for number, row in enumerate(rows):
        if not isinstance(row, Row):
            continue
        if (known := together.get(row)) is not None:
            known.rows.append(number)
        elif ask.is_greedy(row):
            groups.append(together.setdefault(row, _Group(row, [number], ask.key_of(row))))
        else:
            groups.append(_Group(row, [number], None))
    groups.reverse()  # of equal rows the last one first, too
    return sorted(groups, key=attrgetter("row"), reverse=True)
