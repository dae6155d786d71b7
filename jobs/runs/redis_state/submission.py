"""Reads a submission's own arguments, such as who gets notices of the run's end and how many errors stop the run."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jobs.common.display import brief
from jobs.context.deadlines import parse_deadline
from jobs.context.values import truth, whole_number
from jobs.context.webhooks import MAX_URL_CHARS, check_host, host_of
from jobs.errors import InvalidValue, wrong_value_error
from jobs.prompts.arguments import parse_model
from jobs.runs.plans.paths import run_path
from jobs.runs.plans.spec import check_queue_name

#: Fields of a run's hash: the notices that the last submission asks for.
WEBHOOK = "webhook"
ON_END = "on_end"
NOTICES = (WEBHOOK, ON_END)
#: The field of a run's hash that holds the last submission's deadline, in Unix seconds.
DEADLINE = "deadline"
#: The field of a run's hash that holds the last submission's priority; without it the priority is 1.
PRIORITY = "priority"
MAX_PRIORITY = 100
#: Fields of a run's hash: the number of the last submission whose end was notified, and the number of the last
#: submission whose failure was notified.
END_NOTIFIED = "told_submission"
FAILURE_NOTIFIED = "told_failed_submission"

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_LIMIT = re.compile(r"(?P<rows>\d{1,15})|(?P<percent>\d+(\.\d+)?(e-\d+)?)%", re.ASCII)
#: While a run goes on, a share is judged only after this many finished rows.
MIN_JUDGED_ROWS = 100


@dataclass(frozen=True)
class ErrorLimit:
    """How many rows of a run may have an error before the run is stopped: a number of rows, or a share of the rows."""

    rows: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, value: Any) -> ErrorLimit:
        """Read a number of rows, a share like "5%", or None for the default. Raises InvalidValue."""
        if value is None:
            return DEFAULT_LIMIT
        expected = "a number of rows, or a share of them like '5%'"
        if type(value) not in (int, str):
            raise wrong_value_error("max_errors", value, expected)
        match = _LIMIT.fullmatch(str(value).strip())
        if match is None:
            raise wrong_value_error("max_errors", value, expected)
        if match["rows"] is not None:
            return cls(rows=int(match["rows"]))
        percent = float(match["percent"])
        if percent > 100:
            raise wrong_value_error("max_errors", value, expected)
        return cls(share=percent / 100)

    @classmethod
    def from_stored(cls, text: str | None) -> ErrorLimit:
        """Return the limit that Redis has for a run; the default limit for None, and for a text that is no limit."""
        with suppress(InvalidValue):
            return cls.parse(text)
        return DEFAULT_LIMIT

    def excess(
        self, rows: int, errors: int, has_ended: bool = False, *, judges_few: bool = False
    ) -> str | None:
        """Return why a run with too many errors must stop, as a sentence; None if the limit allows the errors.

        rows, errors: how many rows are judged, and how many of them have an error.
        has_ended: whether the run has ended. Then at least one row must have no error, unless the limit is 100%.
        judges_few: whether a limit such as "5%" already holds for fewer than MIN_JUDGED_ROWS rows.
        """
        has_only_errors = rows > 0 and errors == rows
        if has_ended and has_only_errors and self.share != 1:
            all_rows = "its only row has" if rows == 1 else f"all its {rows} rows have"
            return f"{all_rows} an error, and --max-errors is not 100%: look at column `error`"
        max_errors: float | None
        if self.share is None:
            max_errors = self.rows
        else:
            max_errors = self.share * rows
            if rows < MIN_JUDGED_ROWS and not judges_few:
                return None
        if max_errors is None or errors <= max_errors:
            return None
        return (
            f"{errors} of {rows} rows have an error, more than --max-errors {self} allows: look at column "
            "`error` of its parts"
        )

    def __str__(self) -> str:
        if self.share is None:
            return str(self.rows)
        return f"{self.share * 100:g}%"


#: If nearly every row fails, the run has a wrong column, template or model.
DEFAULT_LIMIT = ErrorLimit(share=0.9)

_ANY_MODEL = "reuse_from_any_model"
#: Arguments of jobs.score_parquet that belong to a submission and not to its run. The queue, which is not in this list,
#: belongs to the submission too.
SUBMISSION_ARGUMENTS = (
    "model",
    "max_errors",
    WEBHOOK,
    ON_END,
    DEADLINE,
    PRIORITY,
    "reuse",
    _ANY_MODEL,
)


@dataclass(frozen=True)
class Submission:
    """The arguments of jobs.score_parquet that belong to one submission, and not to the run itself.

    model: only workers that serve this model may plan the run or resume it; None for any model.
    limit: how many errors stop the run.
    webhook: a URL that is called at the run's end. on_end: the dotted name of a function that is called at the run's
    end.
    reuse: outputs of earlier runs whose answers are taken.
    deadline: the time after which no row is begun, in Unix seconds.
    priority: the run's share of the queue's workers, as a multiple of the share of a run with priority 1.
    """

    queue: str
    model: str | None = None
    limit: ErrorLimit = DEFAULT_LIMIT
    webhook: str | None = None
    on_end: str | None = None
    reuse: tuple[str, ...] = ()
    reuse_from_any_model: bool = False
    deadline: float | None = None
    priority: int = 1

    @classmethod
    def split(
        cls, queue: str, arguments: Mapping[str, Any], now: float | None = None
    ) -> tuple[Submission, dict[str, Any]]:
        """Split arguments of jobs.score_parquet into a submission and the run's arguments. Raises InvalidJob.

        now: the start of a deadline that is given as a duration, in Unix seconds; by default the present time.
        """
        check_queue_name(queue)  # raises for a name that is not valid
        run_arguments = dict(arguments)
        submission_arguments = {
            name: run_arguments.pop(name, None) for name in SUBMISSION_ARGUMENTS
        }
        webhook = submission_arguments[WEBHOOK]
        if webhook is not None:
            host_of(webhook)  # raises for a URL that is not valid

        deadline = None
        if submission_arguments[DEADLINE] is not None:
            deadline = parse_deadline(DEADLINE, submission_arguments[DEADLINE], now)
        priority = 1
        if submission_arguments[PRIORITY] is not None:
            priority = whole_number(PRIORITY, submission_arguments[PRIORITY], MAX_PRIORITY)
        reuse = submission_arguments["reuse"]
        if reuse is None:
            reuse = []
        elif not isinstance(reuse, list | tuple):
            reuse = [reuse]
        submission = cls(
            queue=queue,
            model=parse_model(submission_arguments["model"]),
            limit=ErrorLimit.parse(submission_arguments["max_errors"]),
            webhook=webhook,
            reuse=tuple(map(run_path, reuse)),
            on_end=_function_name(submission_arguments[ON_END]),
            reuse_from_any_model=truth(_ANY_MODEL, submission_arguments[_ANY_MODEL]),
            deadline=deadline,
            priority=priority,
        )
        return submission, run_arguments

    @property
    def calls(self) -> dict[str, str]:
        """Return the webhook and the function that are called at the run's end, by the names of their arguments."""
        calls = {}
        if self.webhook is not None:
            calls[WEBHOOK] = self.webhook
        if self.on_end is not None:
            calls[ON_END] = self.on_end
        return calls

    def check_calls(self, hosts: Collection[str], functions: Collection[str]) -> None:
        """Raise InvalidJob for a webhook or a function that this worker may not call.

        hosts, functions: the hosts and the functions that this worker may call.
        """
        if self.webhook is not None:
            check_host(self.webhook, hosts)
        if self.on_end is not None and self.on_end not in functions:
            raise InvalidValue(
                "on_end is {}, which this worker does not allow: add it to TOKENMILL_ALLOWED_FUNCTIONS",
                brief(self.on_end),
            )

    def to_arguments(self) -> dict[str, Any]:
        """Return the arguments of jobs.score_parquet that make this submission, without those at their defaults."""
        arguments = {
            "queue": self.queue,
            "model": self.model,
            "max_errors": None if self.limit == DEFAULT_LIMIT else str(self.limit),
            "reuse": list(self.reuse),
            _ANY_MODEL: self.reuse_from_any_model,
            DEADLINE: self.deadline,
            PRIORITY: None if self.priority == 1 else self.priority,
            **self.calls,
        }
        # Arguments at their defaults have empty values here.
        return {name: value for name, value in arguments.items() if value}


def _function_name(name: Any) -> str | None:
    """Return a function's dotted name, or None. Raises InvalidValue."""
    if name is None:
        return None
    if isinstance(name, str) and len(name) <= MAX_URL_CHARS and _FUNCTION.fullmatch(name):
        return name
    raise wrong_value_error(
        "on_end",
        name,
        "a function as module.name, which workers must allow (TOKENMILL_ALLOWED_FUNCTIONS)",
    )
