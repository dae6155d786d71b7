"""What `tokenmill doctor --role dashboard` looks at beside Redis. Imported by name."""

import os
from collections.abc import Iterator

from jobs.doctor.findings import Examination, Finding, fault, missing, ok
from tokenmill.dashboard.serve import check_tokens
from tokenmill.serving import NotServed


def checks() -> list[Examination]:
    """Return what is looked at where a dashboard runs."""
    return [Examination("dashboard", _check)]


def _check() -> Iterator[Finding]:
    yield from missing("dashboard")
    try:
        tokens = check_tokens(os.environ, "127.0.0.1")
    except NotServed as error:
        yield fault("dashboard", str(error).partition(":")[0], str(error).partition(": ")[2])
        return
    who = "browsers log in with a token" if tokens else "no token is set: it serves 127.0.0.1 only"
    yield ok("dashboard", who)
