"""`tokenmill dashboard` and `tokenmill serve`, which serve HTTP, and `tokenmill keys`."""

import importlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click
import redis

from jobs.api_keys import ProjectLimits, add_key, known_keys, list_keys, revoke_key, set_limits


@click.command()
@click.option("--bind", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=9181, show_default=True)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Host name, or name:port, of a proxy through which browsers reach the dashboard.",
)
@click.option("--show-prompts", is_flag=True, help="Show jobs' arguments, which hold prompts.")
@click.option(
    "--queue",
    "queues",
    multiple=True,
    metavar="NAME",
    help="A queue that /metrics counts. Without a queue there is no /metrics.",
)
@click.pass_context
def dashboard(context: click.Context, /, **options: Any) -> None:
    """Serve pages that show what waits, runs and fails.

    On another address than 127.0.0.1, browsers must log in with the token in TOKENMILL_DASHBOARD_TOKEN.
    """
    _run_server("tokenmill.dashboard.serve", "dashboard", context, options)


@click.command()
@click.option("--bind", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True)
@click.option(
    "--prompts-queue",
    default="prompts",
    show_default=True,
    metavar="NAME",
    help="The queue of prompts.",
)
@click.option(
    "--runs-queue", default="bulk", show_default=True, metavar="NAME", help="The queue of batches."
)
@click.option(
    "--folder",
    metavar="DIR",
    help="The folder of files and batches, on a disk or in a store (s3://bucket/prefix). It must lie below the "
    "workers' data roots. Without --folder there are no files and batches.",
)
@click.option(
    "--timeout",
    type=click.IntRange(1, 86400),
    default=600,
    show_default=True,
    help="Seconds that an answer may take.",
)
@click.option(
    "--drain",
    type=click.IntRange(0, 86400),
    default=3,
    show_default=True,
    help="Seconds that requests have to end after SIGTERM.",
)
@click.pass_context
def serve(context: click.Context, /, **options: Any) -> None:
    """Serve OpenAI's HTTP API. Calls go to the queue of prompts, batches to the queue of runs.

    On another address than 127.0.0.1, clients need a key that `tokenmill keys add` has made.
    """
    _run_server("tokenmill.server.serve", "server", context, options)


def _run_server(
    module_name: str, extra: str, context: click.Context, options: Mapping[str, Any]
) -> None:
    """Run a server until it is stopped.

    module_name: the server's module. It is imported here, because `tokenmill.server` and `tokenmill.dashboard` import
    `jobs`.
    extra: the extra of Tokenmill that installs what the server needs.
    """
    try:
        module: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"{error.name} is not installed: pip install 'tokenmill[{extra}]'"
        ) from None
    try:
        module.serve(context.find_root().params["url"], **options)
    except module.NotServed as error:
        raise click.ClickException(str(error)) from None


@click.group()
def keys() -> None:
    """Add, list, limit and revoke the keys of `tokenmill serve`'s clients."""


@keys.command("add")
@click.argument("project")
@click.option("--name", default="", help="What the key is for, as lists show it.")
@click.pass_obj
def add_command(connection: redis.Redis, /, project: str, name: str) -> None:
    """Make a key of PROJECT and print it.

    The key is never shown again, because only its hash is kept.
    """
    click.echo(add_key(connection, project, name))


@keys.command("list")
@click.pass_obj
def list_command(connection: redis.Redis, /) -> None:
    """List the keys by their ids, without their secrets."""
    for key in list_keys(connection):
        day = time.strftime("%Y-%m-%d", time.gmtime(key.created_at))
        click.echo(f"{key.id}  {day}  {key.project}  {key.name}".rstrip())


@keys.command("limit")
@click.argument("project")
@click.option("--requests-per-minute", type=click.IntRange(1), help="Most requests of the project.")
@click.option("--open-batches", type=click.IntRange(0), help="Most batches that have not ended.")
@click.option("--stored-bytes", type=click.IntRange(0), help="Most bytes of all uploads.")
@click.option(
    "--tokens-queued",
    type=click.IntRange(0),
    help="Most tokens of all calls and open batches, estimated.",
)
@click.option("--none", "is_unlimited", is_flag=True, help="Lift all limits.")
@click.pass_obj
def limit_command(
    connection: redis.Redis, /, project: str, is_unlimited: bool, **limits: int | None
) -> None:
    """Limit what PROJECT's clients take, and print the limits.

    The options replace all earlier limits: a limit whose option is left out is lifted. If no option is given, nothing
    changes.
    """
    has_limits = any(limit is not None for limit in limits.values())
    if has_limits and is_unlimited:
        raise click.UsageError("--none lifts all limits: leave out --none, or the other options")
    if has_limits or is_unlimited:
        set_limits(connection, project, ProjectLimits(**limits))
    project_limits = asdict(known_keys(connection).limits_of(project))
    shown_limits = []
    for name, limit in project_limits.items():
        if limit is not None:
            shown_limits.append(f"{name} {limit}")
    click.echo(f"{project}: {', '.join(shown_limits) or 'no limits'}")


@keys.command("revoke")
@click.argument("key_id", metavar="ID")
@click.pass_obj
def revoke_command(connection: redis.Redis, /, key_id: str) -> None:
    """Revoke the key that `tokenmill keys list` shows with this ID."""
    if not revoke_key(connection, key_id):
        raise click.ClickException(f"no key has the id {key_id!r}: see `tokenmill keys list`")
    click.echo(f"revoked {key_id}")
