"""How the command line tells errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import click
import redis

from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.doctor.redis_server import NOT_SERVED, not_served
from jobs.errors import JobsError


def _shown(error: Exception) -> str:
    """Return an error's text fit to be shown: it may repeat paths and names that others wrote."""
    return safe_name(str(error), MAX_TEXT_CHARS)


@contextmanager
def errors_told() -> Iterator[None]:
    """Turn errors that a user can act on into one line and exit status 1."""
    try:
        yield
    except JobsError as error:
        raise click.ClickException(f"{type(error).__name__}: {_shown(error)}") from error
    except NOT_SERVED as error:
        found = not_served(click.get_current_context().find_root().params["url"], error)
        raise click.ClickException(safe_name(f"{found.found}: {found.mend}", MAX_TEXT_CHARS)) from error
    except redis.exceptions.RedisError as error:
        raise click.ClickException(f"Redis refused ({type(error).__name__}): {_shown(error)}") from error
