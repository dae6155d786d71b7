"""Commands of who operates queues and workers: `tokenmill info`, `requeue`, `doctor` and `dashboard`."""

import importlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import click
import redis
from redis.exceptions import RedisError

from jobs.common.display import safe_name
from jobs.common.keys import EPOCHS_KEY, RESTORED_KEY
from jobs.common.stored import text
from jobs.common.workers import RESTORED_TEXT, are_held, read_workers
from jobs.doctor.findings import Examination, Finding, Level, check_installation, examine, fault
from jobs.doctor.redis_server import check_permissions, check_server, not_served, reach
from jobs.queues import REQUEUE_LIMIT, RESUBMIT, count_queues, queue_names, requeue, requeue_all

MAX_SHOWN = 5


@click.command()
@click.argument("queues", nargs=-1)
@click.pass_obj
def info(connection: redis.Redis, /, queues: tuple[str, ...]) -> None:
    """Count the jobs in QUEUES, or in all queues, and list the workers.

    Unlike `rq info` it reads no job, so no pickle. Exits with 1 where a named queue does not exist.
    """
    known = queue_names(connection)
    seen = count_queues(connection, queues or known)
    missing = [
        each.name for each in seen if each.name not in known and not any(each.counts.values())
    ]
    for counts in seen:
        if counts.name not in missing:
            places = ", ".join(f"{count} {place}" for place, count in counts.counts.items())
            click.echo(f"queue {safe_name(counts.name)}: {places}")
    listed = read_workers(connection)
    for each in listed:
        if not (fields := each.registered):
            continue
        state = "silent" if each.is_silent else fields.get("state", "?")
        job = f", job {fields['current_job']}" if "current_job" in fields else ""
        click.echo(
            f"worker {safe_name(each.name)}: {state} on {fields.get('queues', '?')}{job}; "
            f"{fields.get('successful_job_count', 0)} finished, {fields.get('failed_job_count', 0)} failed; "
            f"last seen {fields.get('last_heartbeat', '?')}"
        )
    if are_held(listed):
        click.secho(f"no worker claims anything: {RESTORED_TEXT}", fg="red")
    if missing:
        others = f": there are {_ids(known)}" if known else ": there is none"
        raise click.ClickException(f"no queue is named {_ids(missing)}{others}")


@click.command("restore-check")
@click.option("--confirm", is_flag=True, help="Let the workers claim what is queued now.")
@click.pass_obj
def restore_check(connection: redis.Redis, /, confirm: bool) -> None:
    """Say whether workers claim nothing because Redis came back with older data. With --confirm they go on.

    Prompts that were answered after that data was saved are queued again, and would be answered twice. Needs the
    workers' Redis user. Exits with 1 while claims are held.
    """
    held_since: Any = connection.get(RESTORED_KEY)
    if held_since is None:
        click.echo("claims are not held: no worker has seen Redis come back with older data")
        return
    click.echo(
        f"claims are held since {safe_name(text(held_since))}: Redis came back with older data"
    )
    for counts in count_queues(connection, queue_names(connection)):
        if waiting := counts.counts["waiting"]:
            click.echo(f"queue {safe_name(counts.name)}: {waiting} waiting")
    if not confirm:
        raise click.ClickException(
            "cancel the prompts that you have answers of, then give --confirm"
        )
    connection.delete(RESTORED_KEY, EPOCHS_KEY)
    click.echo("confirmed: the workers claim what is queued")


@click.command("requeue")
@click.option("--queue", required=True, help="The queue whose failed jobs are meant.")
@click.option(
    "--all", "is_all", is_flag=True, help="All failed jobs of the queue, the oldest first."
)
@click.option(
    "--limit", type=click.IntRange(1), default=REQUEUE_LIMIT, show_default=True, help="With --all."
)
@click.argument("job_ids", nargs=-1)
@click.pass_obj
def requeue_command(
    connection: redis.Redis, /, queue: str, is_all: bool, limit: int, job_ids: tuple[str, ...]
) -> None:
    """Put failed jobs back on their queue: those with JOB_IDS, or --all.

    Unlike `rq requeue` it reads no job, so no pickle. Jobs of a cancelled run stay failed: submit the run again. Exits
    with 1 if a named job could not be requeued.
    """
    if bool(job_ids) == is_all:
        raise click.UsageError("name the jobs, or give --all")
    found = requeue_all(connection, queue, limit) if is_all else requeue(connection, queue, job_ids)
    click.echo(f"requeued {len(found.done)} jobs")
    left = []
    if found.cancelled:
        left.append(f"{len(found.cancelled)} not requeued: {_ids(found.cancelled)}: {RESUBMIT}")
    if found.missing and is_all:
        left.append(f"{len(found.missing)} are listed as failed but gone: {_ids(found.missing)}")
    elif found.missing:
        left.append(f"not among the failed jobs of {safe_name(queue)}: {_ids(found.missing)}")
    if left and not is_all:
        raise click.ClickException("; ".join(left))
    for line in left:
        click.echo(line, err=True)


def _ids(job_ids: list[str]) -> str:
    more = f" and {len(job_ids) - MAX_SHOWN} more" if len(job_ids) > MAX_SHOWN else ""
    return ", ".join(map(safe_name, job_ids[:MAX_SHOWN])) + more


#: Imported by name: what these look at needs packages that import this one.
CHECKS = {"worker": "worker.doctor", "dashboard": "tokenmill.dashboard.doctor"}

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.FAULT: "red"}


@click.command()
@click.option(
    "--role",
    type=click.Choice(["worker", "producer", "dashboard"]),
    help="What runs here and is looked at.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def doctor(context: click.Context, /, role: str | None, as_json: bool) -> None:
    """Say what is wrong here, and what to mend; change nothing.

    Looks at Redis, what its user may do, settings and installation; as a worker, which is the default where one is
    installed, also at model, memory, GPU and data roots. Exits with 1 where there is a fault, with 0 otherwise.
    """
    url = context.find_root().params["url"]
    role = role or (
        "worker" if find_spec("torch") and find_spec("pydantic_settings") else "producer"
    )
    found = []
    for each in examine(_examinations(url, role)):
        found.append(each)
        if not as_json:
            level, subject, text, mend = each
            click.echo(f"{click.style(f'{level:8}', fg=_COLOURS[level])} {subject:13} {text}")
            click.echo(f"{'':22} -> {mend}\n" if mend else "", nl=False)
    faults, warnings = (
        sum(each.level is level for each in found) for level in (Level.FAULT, Level.WARNING)
    )
    if as_json:
        told = {
            "version": version("tokenmill"),
            "role": role,
            "faults": faults,
            "warnings": warnings,
        }
        click.echo(json.dumps({**told, "findings": [each._asdict() for each in found]}, indent=2))
    else:
        click.echo(f"{faults} faults, {warnings} warnings, {len(found) - faults - warnings} ok")
    context.exit(1 if faults else 0)


def _examinations(url: str, role: str) -> Iterator[Examination]:
    yield Examination("redis", lambda: _check_redis(url, role))
    yield Examination("installation", check_installation)
    try:
        yield from importlib.import_module(CHECKS[role]).checks() if role in CHECKS else ()
    except ImportError as error:
        found = fault(
            "installation",
            f"the {role} cannot be imported ({error})",
            f"pip install 'tokenmill[{role}]'",
        )
        yield Examination("installation", lambda: [found])


def _check_redis(url: str, role: str) -> Iterator[Finding]:
    try:
        server = reach(url)
    except RedisError as error:
        yield not_served(url, error)
        return
    with server.client:
        yield from check_server(server)
        yield from check_permissions(server, "worker" if role == "worker" else "producer")


#: Imported by name: it is a package of its own, which imports this one.
SERVE = "tokenmill.dashboard.serve"


@click.command()
@click.option("--bind", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=9181, show_default=True)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A name, or name:port, of a proxy before it.",
)
@click.option("--show-prompts", is_flag=True, help="Show jobs' arguments, which hold prompts.")
@click.option(
    "--queue",
    "queues",
    multiple=True,
    metavar="NAME",
    help="A queue for /metrics, which needs one.",
)
@click.pass_context
def dashboard(context: click.Context, /, **options: Any) -> None:
    """Show what waits, runs and fails in a browser.

    On other addresses than 127.0.0.1 browsers have to log in with the token in TOKENMILL_DASHBOARD_TOKEN.
    """
    try:
        found: Any = importlib.import_module(SERVE)
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"{error.name} is not installed: pip install 'tokenmill[dashboard]'"
        ) from None
    try:
        found.serve(context.find_root().params["url"], **options)
    except found.NotServed as refused:
        raise click.ClickException(str(refused)) from None
