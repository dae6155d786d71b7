"""What a submission wishes beside its run's arguments: whom to tell, and how many errors stop it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jobs.common.display import brief
from jobs.context.served_model import parse_model
from jobs.context.values import truth
from jobs.context.webhooks import MAX_URL_CHARS, check_host, host_of
from jobs.errors import InvalidValue, unlike
from jobs.runs.plans.paths import run_path
from jobs.runs.plans.spec import check_queue_name

#: Fields of a run's hash: what the last submission asks for, and the last ones of which an end or a failure was told.
WEBHOOK, ON_END, TOLD, TOLD_FAILED = "webhook", "on_end", "told_submission", "told_failed_submission"
ASKED_FOR = (WEBHOOK, ON_END)

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_LIMIT = re.compile(r"(?P<rows>\d{1,15})|(?P<percent>\d+(\.\d+)?(e-\d+)?)%", re.ASCII)
#: A share is judged only from this many finished rows on, while more rows are to come.
MIN_JUDGED_ROWS = 100


@dataclass(frozen=True)
class ErrorLimit:
    rows: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, value: Any) -> ErrorLimit:
        """Read a number of rows, a share like "5%", or None for the default. Raises InvalidValue."""
        if value is None:
            return DEFAULT_LIMIT
        found = _LIMIT.fullmatch(str(value).strip()) if type(value) in (int, str) else None
        if found and found["rows"]:
            return cls(rows=int(found["rows"]))
        if found and (share := float(found["percent"]) / 100) <= 1:
            return cls(share=share)
        raise unlike("max_errors", value, "a number of rows, or a share of them like '5%'")

    @classmethod
    def stored(cls, text: str | None) -> ErrorLimit:
        """Return a run's limit as Redis has it, the default for what is none."""
        with suppress(InvalidValue):
            return cls.parse(text)
        return DEFAULT_LIMIT

    def told(self, rows: int, errors: int, is_whole: bool = False, *, judges_few: bool = False) -> str | None:
        """Say how rows pass the limit, or None. A whole run needs some row to succeed, unless the limit is 100%."""
        if is_whole and 0 < rows == errors and self.share != 1:
            return f"all its {rows} rows have an error, and --max-errors is no 100%: look at column `error`"
        most = self.rows if self.share is None else self.share * rows
        says_nothing = self.rows is None and rows < MIN_JUDGED_ROWS and not judges_few
        if most is None or errors <= most or says_nothing:
            return None
        return (
            f"{errors} of {rows} rows have an error, more than --max-errors {self} allows: look at column "
            "`error` of its parts"
        )

    def __str__(self) -> str:
        return str(self.rows) if self.share is None else f"{self.share * 100:g}%"


#: A run of which nearly every row fails is one with a wrong column, template or model.
DEFAULT_LIMIT = ErrorLimit(share=0.9)

_ANY_MODEL = "reuse_from_any_model"
#: Arguments of jobs.score_parquet that are a submission's, but for its queue.
WISHES = ("model", "max_errors", WEBHOOK, ON_END, "reuse", _ANY_MODEL)


@dataclass(frozen=True)
class Submission:
    """What one submission of a run says beside the run's arguments.

    model: the only one whose worker may plan the run, or resume it. limit: beyond it the run is stopped. webhook,
    on_end: a URL, and a function's dotted name, that are told of its end. reuse: outputs of earlier runs, whose answers
    it takes.
    """

    queue: str
    model: str | None = None
    limit: ErrorLimit = DEFAULT_LIMIT
    webhook: str | None = None
    on_end: str | None = None
    reuse: tuple[str, ...] = ()
    reuse_from_any_model: bool = False

    @classmethod
    def split(cls, queue: str, arguments: Mapping[str, Any]) -> tuple[Submission, dict[str, Any]]:
        """Part the arguments of jobs.score_parquet into those of a submission and the run's own. Raises InvalidJob."""
        check_queue_name(queue)
        own = dict(arguments)
        given = {name: own.pop(name, None) for name in WISHES}
        model, limit = parse_model(given["model"]), ErrorLimit.parse(given["max_errors"])
        if given[WEBHOOK] is not None:
            host_of(given[WEBHOOK])
        reuse, any_model = [] if given["reuse"] is None else given["reuse"], truth(_ANY_MODEL, given[_ANY_MODEL])
        outputs = tuple(map(run_path, reuse if isinstance(reuse, list | tuple) else [reuse]))
        return cls(queue, model, limit, given[WEBHOOK], _function(given[ON_END]), outputs, any_model), own

    @property
    def calls(self) -> dict[str, str]:
        return {name: call for name in ASKED_FOR if (call := getattr(self, name)) is not None}

    def check_calls(self, hosts: Collection[str], functions: Collection[str]) -> None:
        """Raise InvalidJob for what this worker may not call. hosts, functions: those that it may."""
        if self.webhook is not None:
            check_host(self.webhook, hosts)
        if self.on_end is not None and self.on_end not in functions:
            raise InvalidValue(
                "on_end is {}, which this worker does not allow: add it to TOKENMILL_ALLOWED_FUNCTIONS",
                brief(self.on_end),
            )

    def to_arguments(self) -> dict[str, Any]:
        limit = None if self.limit == DEFAULT_LIMIT else str(self.limit)
        named = {"queue": self.queue, "model": self.model, "max_errors": limit, "reuse": list(self.reuse)}
        given = {**named, _ANY_MODEL: self.reuse_from_any_model, **self.calls}
        return {name: value for name, value in given.items() if value}


def _function(name: Any) -> str | None:
    if name is None or (isinstance(name, str) and len(name) <= MAX_URL_CHARS and _FUNCTION.fullmatch(name)):
        return name
    raise unlike("on_end", name, "a function as module.name, which workers must allow (TOKENMILL_ALLOWED_FUNCTIONS)")
