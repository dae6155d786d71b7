"""The checks of `tokenmill doctor --role dashboard`, besides those of Redis. The doctor imports this module by name."""

import os
from collections.abc import Iterator

from jobs.doctor.findings import Examination, Finding, fault, missing_packages, ok
from tokenmill.dashboard.serve import check_tokens
from tokenmill.serving import NotServed


def checks() -> list[Examination]:
    """Return the checks for a machine on which a dashboard runs."""
    return [Examination("dashboard", _check)]


def _check() -> Iterator[Finding]:
    """Check that the dashboard's packages are installed, and that its tokens are right."""
    yield from missing_packages("dashboard")
    try:
        tokens = check_tokens(os.environ, "127.0.0.1")
    except NotServed as error:
        problem, _, remedy = str(error).partition(":")
        yield fault("dashboard", problem, remedy.removeprefix(" "))
        return
    if tokens:
        yield ok("dashboard", "browsers log in with a token")
    else:
        yield ok("dashboard", "no token is set: it serves 127.0.0.1 only")
