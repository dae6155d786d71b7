"""How the command line tells errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import click
import redis

from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.doctor.redis_server import NOT_SERVED, not_served
from jobs.errors import JobsError


@contextmanager
def errors_told() -> Iterator[None]:
    """Turn errors that a user can act on, and whose texts others wrote in part, into one line and exit status 1."""
    cause: Exception
    try:
        yield
        return
    except JobsError as error:
        text, cause = f"{type(error).__name__}: {error}", error
    except NOT_SERVED as error:
        found = not_served(click.get_current_context().find_root().params["url"], error)
        text, cause = f"{found.found}: {found.mend}", error
    except redis.exceptions.RedisError as error:
        text, cause = f"Redis refused ({type(error).__name__}): {error}", error
    raise click.ClickException(safe_name(text, MAX_TEXT_CHARS)) from cause
