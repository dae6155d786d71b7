"""Carries out the actions of pages, and writes their outcomes into the log of actions."""

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

#: The most outcomes that are remembered. A browser's next page shows the outcome of its action.
MAX_OUTCOMES = 200
#: The most actions that are carried out at once.
MAX_AT_ONCE = 4
#: The seconds for which all pages show the outcome of a long action.
SHOWN_S = 20.0


@dataclass(frozen=True)
class ActionResult:
    """What an action did.

    what: the action, such as "retry". about: what it was done to. outcome: a sentence for a person.
    """

    what: str
    about: str
    outcome: str


@dataclass
class ActionContext:
    """What an action uses. progress: what a long action has done so far, in words for a person."""

    connection: Redis
    failures: FailureIndex
    progress: str = ""

    def report(self, text: str) -> None:
        """Record how far the action is, for pages to show."""
        self.progress = text


#: A function that carries out a form.
Action = Callable[[ActionContext, Form], ActionResult]


@dataclass
class RunningAction:
    """An action that runs or has ended lately.

    future: returns the id of the outcome. ended_at: when a long action was first seen to have ended, in Unix seconds;
    0 while it runs.
    """

    context: ActionContext
    future: Future[str]
    ended_at: float = field(default=0.0)


class ActionRunner:
    """Carries out actions in its own threads, so that a long action goes on when the browser leaves its page.

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
        #: Sentences by the outcome's id, the oldest first.
        self._outcomes: OrderedDict[str, str] = OrderedDict()
        self._long_actions: list[RunningAction] = []

    def begin(self, action: Action, who: str, form: Form) -> RunningAction:
        """Begin an action, and return it. Its future returns the id of the outcome. who: the name of the login."""
        context = ActionContext(self._connection, self._failures)
        future: Future[str] = self._pool.submit(self._carry_out, action, context, who, form)
        return RunningAction(context, future)

    def leave(self, running: RunningAction) -> None:
        """Let a long action go on without its page. `long_texts` then reports it to every page."""
        with self._lock:
            self._long_actions.append(running)

    def outcome(self, outcome_id: str) -> str:
        """Return the sentence about an outcome; "" if the id is not known."""
        with self._lock:
            return self._outcomes.get(outcome_id, "")

    def long_texts(self) -> list[str]:
        """Return sentences about long actions: their progress, and for SHOWN_S their outcome."""
        now = self._clock()
        with self._lock:
            shown_actions = []
            for running in self._long_actions:
                if running.future.done() and not running.ended_at:
                    running.ended_at = now
                if not running.ended_at or now - running.ended_at < SHOWN_S:
                    shown_actions.append(running)
            self._long_actions = shown_actions
            texts = [self._long_text(running) for running in shown_actions]
        return [text for text in texts if text]

    def _long_text(self, running: RunningAction) -> str:
        """Return a sentence about a long action; "" if its outcome is no longer remembered."""
        if not running.future.done():
            return f"At work: {running.context.progress or 'it has begun'}."
        error = running.future.exception()
        if error is not None:
            return f"Nothing was done: {safe_name(str(error), 200)}."
        return self._outcomes.get(running.future.result(), "")

    def close(self) -> None:
        """Begin no more actions. Those that run go on."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _carry_out(self, action: Action, context: ActionContext, who: str, form: Form) -> str:
        """Carry out an action, and log it. Return the id of the outcome. Raises RedisError if nothing was done."""
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
        outcome_id = secrets.token_urlsafe(9)
        with self._lock:
            self._outcomes[outcome_id] = text
            while len(self._outcomes) > MAX_OUTCOMES:
                self._outcomes.popitem(last=False)
        return outcome_id
