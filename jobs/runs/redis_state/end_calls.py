"""Whom a submission wants told of its run's end: a host by HTTP, a function of the user's, or both."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from jobs.common.display import brief
from jobs.context.webhooks import MAX_URL_CHARS, check_host, host_of
from jobs.errors import InvalidValue

#: Fields of a run's hash: what the last submission asks for, the last one that was told of, and the last one
#: of which it was told that it has failed.
WEBHOOK, ON_END, TOLD, TOLD_FAILED = "webhook", "on_end", "told_submission", "told_failed_submission"
ASKED_FOR = (WEBHOOK, ON_END)

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


@dataclass(frozen=True)
class EndCalls:
    """What a submission asks for. webhook: a URL. on_end: the dotted name of a function."""

    webhook: str | None = None
    on_end: str | None = None

    @classmethod
    def parse(cls, webhook: Any, on_end: Any) -> EndCalls:
        """Raise InvalidJob for what is no URL, or no name of a function."""
        if webhook is not None:
            host_of(webhook)
        if on_end is not None and not (
            isinstance(on_end, str) and len(on_end) <= MAX_URL_CHARS and _FUNCTION.fullmatch(on_end)
        ):
            raise InvalidValue(
                "on_end is {}, expected a function as module.name, which workers must allow "
                "(TOKENMILL_ALLOWED_FUNCTIONS)",
                brief(on_end),
            )
        return cls(webhook, on_end)

    def check_allowed(self, hosts: Collection[str], functions: Collection[str]) -> None:
        """Raise InvalidJob for what this worker may not call. hosts, functions: those that it may."""
        if self.webhook is not None:
            check_host(self.webhook, hosts)
        if self.on_end is not None and self.on_end not in functions:
            raise InvalidValue(
                "on_end is {}, which this worker does not allow: add it to TOKENMILL_ALLOWED_FUNCTIONS",
                brief(self.on_end),
            )

    def to_fields(self) -> dict[str, str]:
        """Return them as fields of a run's hash."""
        given = {WEBHOOK: self.webhook, ON_END: self.on_end}
        return {name: value for name, value in given.items() if value is not None}


NO_CALLS = EndCalls()
