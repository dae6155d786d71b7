"""Carries out what a page's button asks for, tells what came of it, and writes it into the log of actions."""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from redis import Redis
from redis.exceptions import RedisError

from jobs.common.display import safe_name
from tokenmill.dashboard.actions.forms import Form
from tokenmill.dashboard.actions.log import LogEntry, write_entry
from tokenmill.dashboard.failures.index import FailureIndex

#: The most outcomes that are remembered, so that the page that a browser is led to can tell them.
MAX_OUTCOMES = 200
#: Actions that are carried out at a time.
MAX_AT_ONCE = 4
#: Seconds for which the outcome of a long action is told on all pages.
TOLD_S = 20.0


@dataclass(frozen=True)
class Deed:
    """What an action did. what: such as "retry". about: what it was done to. outcome: one sentence that tells it."""

    what: str
    about: str
    outcome: str


@dataclass
class Hands:
    """What an action works with. progress: what has been done so far, for an action that takes long."""

    connection: Redis
    failures: FailureIndex
    progress: str = ""

    def tell(self, text: str) -> None:
        """Tell what has been done so far."""
        self.progress = text


Act = Callable[[Hands, Form], Deed]


@dataclass
class UnderWay:
    """An action under way, or one that has just ended."""

    hands: Hands
    future: Future[str]
    is_long: bool = False
    ended_at: float = field(default=0.0)


class Deeds:
    """Carries out actions in threads of its own, so that one that takes long goes on when its page is left.

    Safe to call from many threads. clock: Unix seconds.
    """

    def __init__(
        self, connection: Redis, failures: FailureIndex, clock: Callable[[], float] = time.time
    ) -> None:
        self._connection = connection
        self._failures = failures
        self._clock = clock
        self._pool = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="tokenmill-actions")
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[str, str] = OrderedDict()
        self._under_way: list[UnderWay] = []

    def begin(self, act: Act, who: str, form: Form) -> UnderWay:
        """Begin an action. Its future tells a mark, by which `outcome` finds the sentence."""
        hands = Hands(self._connection, self._failures)
        future: Future[str] = self._pool.submit(self._carry_out, act, hands, who, form)
        return UnderWay(hands, future)

    def leave(self, deed: UnderWay) -> None:
        """Let a long action go on by itself; all pages tell of it."""
        deed.is_long = True
        with self._lock:
            self._under_way.append(deed)

    def outcome(self, mark: str) -> str:
        """Return the sentence that tells an action's outcome; "" if it is not known."""
        with self._lock:
            return self._outcomes.get(mark, "")

    def long_ones(self) -> list[str]:
        """Return what long actions have done so far, and the outcomes of those that ended a moment ago."""
        now = self._clock()
        texts = []
        with self._lock:
            for deed in self._under_way:
                if deed.future.done() and not deed.ended_at:
                    deed.ended_at = now
            self._under_way = [
                deed
                for deed in self._under_way
                if not deed.ended_at or now - deed.ended_at < TOLD_S
            ]
            for deed in self._under_way:
                if not deed.future.done():
                    texts.append(f"At work: {deed.hands.progress or 'it has begun'}.")
                elif deed.future.exception() is None:
                    texts.append(self._outcomes.get(deed.future.result(), ""))
                else:
                    reason = safe_name(str(deed.future.exception()), 200)
                    texts.append(f"Nothing was done: {reason}.")
        return [text for text in texts if text]

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _carry_out(self, act: Act, hands: Hands, who: str, form: Form) -> str:
        """Return the mark of the outcome. Raises RedisError if nothing was done."""
        try:
            deed = act(hands, form)
        except RedisError as error:
            if not hands.progress:
                raise
            reason = safe_name(str(error), 200)
            deed = Deed(
                "stopped halfway", "", f"It ended early, after: {hands.progress} ({reason})."
            )
        text = deed.outcome
        entry = LogEntry(self._clock(), who, deed.what, safe_name(deed.about), deed.outcome)
        try:
            write_entry(self._connection, entry)
        except RedisError as error:
            text += f" The log of actions could not be written: {safe_name(str(error), 200)}."
        mark = secrets.token_urlsafe(9)
        with self._lock:
            self._outcomes[mark] = text
            while len(self._outcomes) > MAX_OUTCOMES:
                self._outcomes.popitem(last=False)
        return mark
