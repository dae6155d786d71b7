"""Carries out what a page's button asks for, and writes the outcome into the log of actions."""

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

#: The most outcomes that are remembered, for the page to which a browser is led after an action.
MAX_OUTCOMES = 200
#: Actions that are carried out at a time.
MAX_AT_ONCE = 4
#: Seconds for which all pages show the outcome of a long action.
SHOWN_S = 20.0


@dataclass(frozen=True)
class ActionResult:
    """What an action did. what: such as "retry". about: what it was done to. outcome: one sentence for a person."""

    what: str
    about: str
    outcome: str


@dataclass
class ActionContext:
    """What an action works with. progress: what a long action has done so far, for a person."""

    connection: Redis
    failures: FailureIndex
    progress: str = ""

    def report(self, text: str) -> None:
        """Note what has been done so far."""
        self.progress = text


Action = Callable[[ActionContext, Form], ActionResult]


@dataclass
class RunningAction:
    """An action under way, or one that has just ended."""

    context: ActionContext
    future: Future[str]
    ended_at: float = field(default=0.0)


class ActionRunner:
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
        self._long: list[RunningAction] = []

    def begin(self, action: Action, who: str, form: Form) -> RunningAction:
        """Begin an action. Its future returns a mark, by which `outcome` finds the sentence."""
        context = ActionContext(self._connection, self._failures)
        future: Future[str] = self._pool.submit(self._carry_out, action, context, who, form)
        return RunningAction(context, future)

    def leave(self, running: RunningAction) -> None:
        """Let a long action go on by itself. All pages show how it goes."""
        with self._lock:
            self._long.append(running)

    def outcome(self, mark: str) -> str:
        """Return the sentence about an action's outcome; "" if the mark is not known."""
        with self._lock:
            return self._outcomes.get(mark, "")

    def long_texts(self) -> list[str]:
        """Return what long actions have done so far, and the outcomes of those that ended a moment ago."""
        now = self._clock()
        texts = []
        with self._lock:
            for running in self._long:
                if running.future.done() and not running.ended_at:
                    running.ended_at = now
            self._long = [
                running
                for running in self._long
                if not running.ended_at or now - running.ended_at < SHOWN_S
            ]
            for running in self._long:
                if not running.future.done():
                    texts.append(f"At work: {running.context.progress or 'it has begun'}.")
                elif running.future.exception() is None:
                    texts.append(self._outcomes.get(running.future.result(), ""))
                else:
                    reason = safe_name(str(running.future.exception()), 200)
                    texts.append(f"Nothing was done: {reason}.")
        return [text for text in texts if text]

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _carry_out(self, action: Action, context: ActionContext, who: str, form: Form) -> str:
        """Return the mark of the outcome. Raises RedisError if nothing was done."""
        try:
            result = action(context, form)
        except RedisError as error:
            if not context.progress:
                raise
            reason = safe_name(str(error), 200)
            result = ActionResult(
                "stopped halfway", "", f"It ended early, after: {context.progress} ({reason})."
            )
        text = result.outcome
        entry = LogEntry(self._clock(), who, result.what, safe_name(result.about), result.outcome)
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
