"""The runner, which sends the requests of a job's items and delivers the completions; and the task that uses it.

A place is the number of a prompt or row within the job.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

from jobs.context.answers import AnswerMemo
from jobs.context.checks import Checks
from jobs.errors import AdapterAwaited
from jobs.items.item import Ask, Samples, T
from jobs.items.records import NOTHING, Progress, Reply, Tokens
from jobs.items.under_way import Answered, Entry, ItemUnderWay, Sent
from jobs.tasks import OpenTask, Request

PromptTokens = Mapping[int, Tokens]
"""The tokens so far of requests that were sent and not delivered, by the index of the request."""


@dataclass(slots=True)
class Counts:
    """Counts what a runner has done.

    done: the prompts or rows with an answer. open: the prompts or rows whose items are under way.
    resumed: the prompts or rows that an earlier execution had begun.
    resumed_tokens: the tokens that an earlier execution had generated.
    """

    done: int = 0
    open: int = 0
    resumed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    resumed_tokens: int = 0


class ItemRunner(Generic[T]):
    """Drives the items of one job. All methods must be called in one thread, except `inspect` and the constructor.

    Items are begun in their order, so that a prefix which neighbouring prompts share is still in the cache. The later
    requests of an item come before items that are not begun. An item that another job of the process is computing comes
    last. If that job has no answer by then, this runner computes the item as well, so that no job waits for another.

    answers: for each prompt or row, the answer that is already known, or None. memo: holds the answers of other jobs.
    keeps_replies: whether `answered` also holds the replies that each item was sent, for a journal that holds replies
    in place of answers. expired: returns None before the deadline; after the deadline, it returns the answer for items
    that were not begun. answered: the answers that this runner has found, in the order in which it found them.
    """

    def __init__(
        self,
        entries: Sequence[Entry[T]],
        answers: list[T | None],
        ask: Ask[T],
        checks: Checks,
        memo: AnswerMemo,
        *,
        keeps_replies: bool = False,
        expired: Callable[[], T | None] = lambda: None,
    ) -> None:
        self._ask = ask
        self._checks = checks
        self._memo = memo
        self._keeps_replies = keeps_replies
        self._expired = expired
        self._answers = answers
        self.answered: list[Answered[T]] = []
        self.counts = Counts(done=sum(answer is not None for answer in answers))

        # All requests that were sent, by index. None takes the place of a request whose completions were delivered.
        self._sent: list[Sent[T] | None] = []
        # Requests of items under way that wait to be sent.
        self._to_send: deque[tuple[Sent[T], Request]] = deque()
        # Items under way, by the number of the first prompt or row that the item answers.
        self._open: dict[int, Entry[T]] = {}
        self._claimed_keys: set[bytes] = set()
        # Items that are not begun.
        self._not_begun: deque[Entry[T]] = deque()
        for entry in entries:
            if not self._take_known_answer(entry):
                self._not_begun.append(entry)

        # The opening item, while it is under way.
        self._opening: Entry[Any] | None = None
        opening = ask.opening() if self._not_begun else None
        if opening is not None:
            no_places: list[int] = []  # the opening item answers no prompt or row
            self._opening = Entry(no_places, lambda: opening)
            self._begin(self._opening)

    @property
    def num_places(self) -> int:
        """The number of prompts or rows."""
        return len(self._answers)

    @property
    def num_requests(self) -> int | None:
        """Return how many requests were sent or wait to be sent; None if items may begin with several requests."""
        if self._not_begun and not self._ask.is_single:
            return None
        return len(self._sent) + len(self._to_send) + len(self._not_begun)

    @property
    def has_more(self) -> bool:
        """Whether `requests` would yield a request now."""
        return bool(self._to_send) or (self._opening is None and bool(self._not_begun))

    @property
    def inspects(self) -> bool:
        """Whether completions must go through `inspect`, in another thread, before they are delivered."""
        return self._ask.has_checks

    def requests(self) -> Iterator[Request]:
        """Yield the requests; see OpenTask."""
        postponed: deque[Entry[T]] = deque()  # items that other jobs are computing
        while True:
            if self._to_send:
                sent, request = self._to_send.popleft()
                yield self._send(sent, request)
            elif self._opening is not None:
                # Other items begin once the opening item has ended. The worker then calls `requests` again.
                return
            elif self._not_begun:
                entry = self._not_begun.popleft()
                if self._answer_without_asking(entry):
                    continue
                if self._claim(entry):
                    self._begin(entry)
                else:
                    postponed.append(entry)
            elif postponed:
                entry = postponed.popleft()
                if not self._answer_without_asking(entry):
                    self._begin(entry)
            else:
                return

    def inspect(self, index: int, samples: Samples) -> None:
        """Run the checks that follow from the completions of request `index`. May be called in any thread.

        Raises JobsError if a check can never work.
        """
        sent = self._sent[index]
        if sent is not None and sent.entry.item is not None:
            sent.entry.item.receive(sent.step, sent.number, samples)

    def deliver(self, index: int, samples: Samples) -> None:
        """Take all completions of request `index`. The completions may come in any order."""
        sent = self._sent[index]
        assert sent is not None, "delivered twice"
        self._sent[index] = None
        entry = sent.entry
        item = entry.item
        assert item is not None
        self._count(sent, samples)

        # This changes nothing if `inspect` has already given the completions to the item.
        item.receive(sent.step, sent.number, samples)
        entry.num_awaited -= 1
        if entry.num_awaited > 0:
            entry.add_received(sent.number, samples)
        else:
            self._go_on(entry)

    def resume(self, progress_of: Mapping[int, Progress]) -> None:
        """Go on with items that another execution has begun. Must be called before `requests`. Raises JobsError.

        progress_of: how far the other execution has come with each of these items, by the number of the first prompt or
        row that the item answers.
        """
        already_begun = []
        not_begun: deque[Entry[T]] = deque()
        for entry in self._not_begun:
            if entry.first_place in progress_of:
                already_begun.append(entry)
            else:
                not_begun.append(entry)
        self._not_begun = not_begun
        for entry in already_begun:
            progress = progress_of[entry.first_place]
            entry.resumed = progress
            entry.num_tokens = progress.num_tokens
            self.counts.resumed += len(entry.places)
            self.counts.resumed_tokens += progress.num_tokens
            self._claim(entry)  # if another job has the claim, both compute the item
            self._begin(entry)

    def under_way(self, tokens_of: PromptTokens) -> dict[int, Progress]:
        """Return the progress of items under way, by the number of the first prompt or row that the item answers.

        An item is left out if it has no progress, or if no record can hold its progress.
        tokens_of: see PromptTokens. A sample's tokens begin with the tokens of `Request.continued`.
        """
        # new_tokens_of[first_place][number]: the new tokens of request `number` of the item's present step.
        new_tokens_of: defaultdict[int, dict[int, Tokens]] = defaultdict(dict)
        for index, tokens_by_sample in tokens_of.items():
            sent = self._sent[index]
            # A delivered request needs no tokens. The opening item is recorded nowhere: each execution asks it again.
            if sent is None or sent.entry.is_opening:
                continue
            new_tokens = {
                sample: token_ids[sent.num_continued :]
                for sample, token_ids in tokens_by_sample.items()
            }
            new_tokens_of[sent.entry.first_place][sent.number] = new_tokens

        progress_of: dict[int, Progress] = {}
        for first_place, entry in self._open.items():
            new_tokens_by_number = new_tokens_of.get(first_place, {})
            progress = Progress(
                entry.replies, entry.received, new_tokens_by_number, entry.num_tokens
            )
            if progress.can_be_written:
                progress_of[first_place] = progress
        return progress_of

    def answers(self) -> list[T]:
        """Return the answers in the order of the job's prompts or rows. Call this once all requests were delivered."""
        answers = [answer for answer in self._answers if answer is not None]
        assert len(answers) == self.num_places, "answers() before every request was delivered"
        return answers

    def close(self) -> None:
        """Give up the items that have no answer, so that other jobs may compute them. May be called more than once."""
        for memo_key in list(self._claimed_keys):
            self._release(memo_key)

    # One item

    def _begin(self, entry: Entry[T]) -> None:
        """Begin an item. If another execution has begun it before, replay that execution's progress."""
        assert entry.make is not None, "begun twice"
        make = entry.make
        entry.make = None
        entry.item = ItemUnderWay(make(), self._checks)
        if not entry.is_opening:
            self.counts.open += len(entry.places)
            self._open[entry.first_place] = entry
        entry.item.begin(list(entry.resumed.replies))
        if len(entry.item.replies) != len(entry.resumed.replies):
            # The replay did not end at the step at which the other execution stopped. So the completions and tokens
            # in `entry.resumed`, which belong to that step, do not count.
            entry.resumed = NOTHING
        self._go_on(entry)

    def _go_on(self, entry: Entry[T]) -> None:
        """Note the requests of an item's next step, or take the item's answer."""
        item = entry.item
        assert item is not None
        entry.replies = tuple(item.replies)
        entry.received = {}
        if item.is_done:
            self._end(entry)
            return

        resumed = entry.resumed
        entry.resumed = NOTHING  # later steps have nothing to resume
        step_number = item.num_steps
        requests = item.take_requests()
        entry.num_awaited = len(requests)
        for number, request in enumerate(requests):
            if number in resumed.received:
                samples = resumed.received[number]
                entry.add_received(number, samples)
                entry.num_awaited -= 1
                item.receive(step_number, number, samples)
                continue
            if number in resumed.tokens:
                request = replace(request, resumed=resumed.tokens[number])
            sent = Sent(entry, step_number, number, len(request.continued))
            self._to_send.append((sent, request))
        requests.clear()  # the item may hold this list, and with it the prompts
        if entry.num_awaited == 0:  # another execution has received all of this step
            self._go_on(entry)

    def _send(self, sent: Sent[T], request: Request) -> Request:
        """Note that a request is sent; return it in the form in which it is sent."""
        self._sent.append(sent)
        return self._ask.prepared(request)

    def _count(self, sent: Sent[T], samples: Samples) -> None:
        """Count the tokens of a request's completions."""
        if sent.entry.is_opening:
            return
        counts = self.counts
        counts.prompt_tokens += samples[0].num_prompt_tokens
        for sample in samples:
            # A sample has, in this order: the tokens of the answer that the request continues, the tokens of another
            # execution, and the tokens that were generated now. A failed sample may lack all of them.
            num_generated = len(sample.token_ids) - sample.num_continued
            num_resumed = max(0, sample.num_continued - sent.num_continued)
            num_by_any_execution = max(0, len(sample.token_ids) - sent.num_continued)
            counts.generated_tokens += num_generated
            counts.resumed_tokens += num_resumed
            sent.entry.num_tokens += num_by_any_execution

    def _end(self, entry: Entry[T]) -> None:
        """Take the answer of an item that has returned, and remember it for other jobs."""
        item = entry.item
        entry.item = None
        assert item is not None
        if entry.is_opening:
            self._opening = None
            return

        assert item.answer is not None, "an item returned no answer"
        del self._open[entry.first_place]
        self.counts.open -= len(entry.places)
        replies = tuple(item.replies) if self._keeps_replies else ()
        self._answer(entry, item.answer, replies)
        if entry.memo_key is not None:
            if self._ask.is_remembered(item.answer):
                self._memo.put(entry.memo_key, item.answer)
            self._release(entry.memo_key)

    def _answer(self, entry: Entry[T], answer: T, replies: tuple[Reply, ...] = ()) -> None:
        """Note the answer to each prompt or row of an item. Only the first prompt or row counts the item's tokens."""
        self._settle(entry, answer)
        num_tokens = entry.num_tokens
        for place in entry.places:
            self.answered.append(Answered(place, num_tokens, answer, replies))
            num_tokens = 0

    def _settle(self, entry: Entry[T], answer: T) -> None:
        """Set the answer of each prompt or row of the item. Drop the item if it was not begun."""
        for place in entry.places:
            self._answers[place] = answer
        self.counts.done += len(entry.places)
        make = entry.make
        entry.make = None
        if make is not None:
            # The item is not run, but `make` must be called all the same: until this call, the memory of the item's row
            # counts as used.
            make().close()

    def _answer_without_asking(self, entry: Entry[T]) -> bool:
        """Answer an item without beginning it, if possible. Return whether the item now has an answer."""
        return self._take_known_answer(entry) or self._let_expire(entry)

    def _let_expire(self, entry: Entry[T]) -> bool:
        """Answer an item as expired if the deadline has passed. Return whether the deadline has passed.

        This answer is not put into a journal, because a later submission may have a later deadline.
        """
        answer = self._expired()
        if answer is None:
            return False
        self._settle(entry, answer)
        return True

    # The memo of the process

    def _take_known_answer(self, entry: Entry[T]) -> bool:
        """Answer an item with another job's answer to an equal item; return whether there is such an answer."""
        answer = None if entry.memo_key is None else self._memo.get(entry.memo_key)
        if answer is None:
            return False
        self._answer(entry, answer)
        return True

    def _claim(self, entry: Entry[T]) -> bool:
        """Tell the memo that this job computes an item; return False if another job computes it already."""
        if entry.memo_key is None:
            return True
        if not self._memo.begin(entry.memo_key):
            return False
        self._claimed_keys.add(entry.memo_key)
        return True

    def _release(self, memo_key: bytes) -> None:
        """Give up this job's claim to an item, if it has a claim. Other jobs may then compute the item."""
        if memo_key in self._claimed_keys:
            self._claimed_keys.discard(memo_key)
            self._memo.end(memo_key)


class ItemsTask(OpenTask):
    """Sends the requests of a runner's items. A subclass sets `runner`, or leaves it None if there are no items."""

    runner: ItemRunner[Any] | None = None

    def requests(self) -> Iterator[Request]:
        """Yield the runner's requests."""
        return iter(()) if self.runner is None else self.runner.requests()

    @property
    def num_requests(self) -> int | None:
        """Return the runner's number of requests; 0 if there is no runner."""
        return 0 if self.runner is None else self.runner.num_requests

    @property
    def has_more(self) -> bool:
        """Whether the runner has requests now."""
        return self.runner is not None and self.runner.has_more

    @property
    def inspects(self) -> bool:
        """Whether the runner's items are checked."""
        return self.runner is not None and self.runner.inspects

    def inspect(self, index: int, completions: Samples) -> None:
        """Have the runner run checks."""
        assert self.runner is not None, "nothing was asked"
        self.runner.inspect(index, completions)

    def deliver(self, index: int, completions: Samples) -> None:
        """Give the runner completions. Raises AdapterAwaited if the files of the request's adapter have changed."""
        assert self.runner is not None, "nothing was asked"
        for completion in completions:
            if completion.lacks_adapter:
                raise AdapterAwaited(completion.error)
        self.runner.deliver(index, completions)

    def close(self) -> None:
        """Have the runner give up the items that have no answer."""
        if self.runner is not None:
            self.runner.close()
