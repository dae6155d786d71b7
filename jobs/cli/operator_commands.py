"""Commands for operators of queues and workers.

`tokenmill info`, `flood`, `drain`, `requeue`, `restore-check` and `doctor`.
"""

import importlib
import json
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import click
import redis
from redis.exceptions import NoPermissionError, RedisError

from jobs.cli.status_text import NO_WORKER_TEXT, print_troubles, table
from jobs.common.display import duration_text, plural, safe_name
from jobs.common.keys import EPOCHS_KEY, RESTORED_KEY
from jobs.common.rq_jobs import SUSPENDED_KEY, command_channel
from jobs.common.stored import text
from jobs.common.workers import (
    RESTORED_TEXT,
    SUSPENDED,
    SUSPENDED_TEXT,
    Worker,
    are_paused,
    are_suspended,
    claimed_jobs,
    read_workers,
)
from jobs.doctor.findings import Examination, Finding, Level, check_installation, examine, fault
from jobs.doctor.redis_server import Role, check_permissions, check_server, not_served, reach
from jobs.queues import (
    REQUEUE_LIMIT,
    RESUBMIT,
    QueueCounts,
    count_claimed,
    count_queues,
    head_ages,
    queue_names,
    requeue,
    requeue_all,
)
from jobs.queues.flood import RUN, UNNAMED, cancel_waiting, read_producers

#: The most names that a message lists.
MAX_SHOWN = 5
#: The most producers that `flood` shows.
MAX_PRODUCERS = 20
#: RQ's command that ends a worker.
_SHUTDOWN = {"command": "shutdown"}


@click.command()
@click.argument("queues", nargs=-1)
@click.pass_obj
def info(connection: redis.Redis, /, queues: tuple[str, ...]) -> None:
    """Count the jobs in QUEUES, or in all queues, and list the workers.

    Unlike `rq info` this command reads no job, so no pickle is loaded. Exits with 1 if a named queue does not exist.
    """
    print_troubles(connection)
    known_names = queue_names(connection)
    shown_names = queues or known_names
    workers = read_workers(connection)
    # Workers have recorded these two values, which are outdated if Redis is full. The present values replace them below
    # if this Redis user may read them. A producer's user may not.
    num_claimed_by_queue = claimed_jobs(workers)
    is_suspended = are_suspended(workers)
    with suppress(NoPermissionError):
        num_claimed_by_queue = count_claimed(connection, shown_names)
        is_suspended = bool(connection.exists(SUSPENDED_KEY))

    missing = []
    for queue in count_queues(connection, shown_names):
        if _exists(queue, known_names):
            num_claimed = num_claimed_by_queue.get(queue.name, 0)
            click.echo(_queue_line(queue, num_claimed))
        else:
            missing.append(queue.name)
    for worker in workers:
        if worker.registered:
            click.echo(_worker_line(worker, is_suspended))
    if not queues and not known_names and not workers:
        click.echo(f"no queue; {NO_WORKER_TEXT}")
    if are_paused(workers):
        click.secho(f"no worker claims anything: {RESTORED_TEXT}", fg="red")
    if is_suspended:
        click.secho(SUSPENDED_TEXT, fg="red")
    if missing:
        raise _no_queue_error(missing, known_names)


def _exists(queue: QueueCounts, known_names: list[str]) -> bool:
    """Whether a queue exists. known_names: RQ's list, which can lack a queue that still has jobs."""
    has_jobs = any(queue.counts.values())
    return has_jobs or queue.name in known_names


def _no_queue_error(missing: list[str], known_names: list[str]) -> click.ClickException:
    """Return the error for names that no queue has. It says which queues there are."""
    existing = f"there are {_names(known_names)}" if known_names else "there is none"
    return click.ClickException(f"no queue is named {_names(missing)}: {existing}")


def _check_queue(connection: redis.Redis, name: str) -> None:
    """Raise ClickException if there is no queue of this name."""
    known_names = queue_names(connection)
    [queue] = count_queues(connection, [name])
    if not _exists(queue, known_names):
        raise _no_queue_error([name], known_names)


def _queue_line(queue: QueueCounts, num_claimed: int) -> str:
    """Return a queue's line of `info`. num_claimed: the number of jobs that workers have claimed from the queue."""
    counts = [f"{count} {state}" for state, count in queue.counts.items()]
    counts.insert(1, f"{num_claimed} claimed")  # after the waiting jobs
    return f"queue {safe_name(queue.name)}: {', '.join(counts)}"


def _worker_line(worker: Worker, is_suspended: bool) -> str:
    """Return a worker's line of `info`. is_suspended: whether `rq suspend` has suspended all workers."""
    fields = worker.registered
    state = "silent" if worker.is_silent else fields.get("state", "?")
    if state == SUSPENDED and not is_suspended:
        state = "was suspended"  # the worker has not written a newer state yet
    job = f", job {fields['current_job']}" if "current_job" in fields else ""
    return (
        f"worker {safe_name(worker.name)}: {state} on {fields.get('queues', '?')}{job}; "
        f"{fields.get('successful_job_count', 0)} finished, {fields.get('failed_job_count', 0)} failed; "
        f"last seen {fields.get('last_heartbeat', '?')}"
    )


@click.command()
@click.argument("queue")
@click.option(
    "--stop",
    "producer",
    help="Cancel all waiting jobs of this producer: a name from the table, or - for jobs without a producer.",
)
@click.pass_obj
def flood(connection: redis.Redis, /, queue: str, producer: str | None) -> None:
    """Say whose jobs wait in QUEUE, or cancel the jobs of one producer.

    A producer is a run, or the name under "producer" in a job's meta. The API server writes the project's name there.
    In a long queue, 10,000 jobs are read, spread over its length. --stop needs the workers' Redis user.
    """
    if producer is None:
        _print_producers(connection, queue)
    else:
        _stop_producer(connection, queue, producer)


def _stop_producer(connection: redis.Redis, queue: str, producer: str) -> None:
    """Cancel the waiting jobs of a producer. Raises UsageError for a run, which `tokenmill cancel` cancels."""
    if producer.startswith(RUN):
        run = producer.removeprefix(RUN)
        raise click.UsageError(f"a run is cancelled by `tokenmill cancel {run}`")
    try:
        num_cancelled = cancel_waiting(connection, queue, producer)
    except NoPermissionError as error:
        raise click.ClickException(
            f"--stop needs the workers' Redis user: {safe_name(str(error))}"
        ) from error
    if not num_cancelled and producer != UNNAMED:
        _check_producer(connection, queue, producer)
    click.echo(f"cancelled {num_cancelled} waiting {plural('job', num_cancelled)}")


def _check_producer(connection: redis.Redis, queue: str, producer: str) -> None:
    """Raise ClickException if no job of this producer waits on a queue. The error lists producers whose jobs wait."""
    producers = list(read_producers(connection, queue).num_jobs)
    if producer not in producers:
        hint = f"there are {_names(producers)}" if producers else "none waits there"
        raise click.ClickException(
            f"no job of {safe_name(producer)} waits on queue {safe_name(queue)}: {hint}"
        )


def _print_producers(connection: redis.Redis, queue: str) -> None:
    """Print how many jobs of each producer wait on a queue, and the command that cancels them."""
    producers = read_producers(connection, queue)
    head_age_s = head_ages(connection, [queue], time.time()).get(queue)
    first_waiting_text = ""
    if producers.num_waiting and head_age_s is not None:
        first_waiting_text = f", the first for {duration_text(head_age_s)}"
    click.echo(f"queue {safe_name(queue)}: {producers.num_waiting} waiting{first_waiting_text}")
    rows = []
    for name in list(producers.num_jobs)[:MAX_PRODUCERS]:
        shown_count = str(producers.estimate(name))
        if producers.is_sample:
            shown_count = f"about {shown_count}"
        shown_name = "no producer named" if name == UNNAMED else name
        rows.append((shown_count, shown_name, safe_name(_stop_command(queue, name))))
    if producers.is_sample:
        click.echo(
            f"{producers.num_read:,} of them were read, spread over the queue: a producer with few jobs may be missing"
        )
    if rows:
        click.echo(table(("JOBS", "WHOSE", "STOP WITH"), rows, numbers=["JOBS"]))
    num_more = len(producers.num_jobs) - len(rows)
    if num_more:
        click.echo(f"and {num_more} {plural('producer', num_more)} with fewer jobs")


def _stop_command(queue: str, producer: str) -> str:
    """Return the command that cancels a producer's waiting jobs."""
    if producer.startswith(RUN):
        return f"tokenmill cancel {producer.removeprefix(RUN)}"
    return f"tokenmill flood {shlex.quote(queue)} --stop {shlex.quote(producer)}"


@click.command("restore-check")
@click.option("--confirm", is_flag=True, help="Let the workers claim what is queued now.")
@click.pass_obj
def restore_check(connection: redis.Redis, /, confirm: bool) -> None:
    """Say whether workers have stopped claiming jobs because Redis came back with older data.

    --confirm lets the workers go on. Prompts that were answered after the older data was saved are still queued in it.
    Workers would answer these prompts twice. This command needs the workers' Redis user. Exits with 1 while workers
    claim nothing.
    """
    try:
        stopped_since: Any = connection.get(RESTORED_KEY)
    except NoPermissionError as error:
        raise click.ClickException(
            f"restore-check needs the workers' Redis user: {safe_name(str(error))}"
        ) from error
    if stopped_since is None:
        click.echo("workers may claim jobs: none has seen Redis come back with older data")
        return
    click.echo(
        f"workers have claimed nothing since {safe_name(text(stopped_since))}: "
        "Redis came back with older data"
    )
    for queue in count_queues(connection, queue_names(connection)):
        num_waiting = queue.counts["waiting"]
        if num_waiting:
            click.echo(f"queue {safe_name(queue.name)}: {num_waiting} waiting")
    if not confirm:
        raise click.ClickException("cancel the prompts whose answers you have, then give --confirm")
    connection.delete(RESTORED_KEY, EPOCHS_KEY)
    click.echo("confirmed: the workers claim what is queued")


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="WORKER...")
@click.pass_obj
def drain(connection: redis.Redis, /, names: tuple[str, ...]) -> None:
    """Have workers finish the jobs that they have begun, put their other jobs back on the queue, and stop.

    A first SIGTERM does the same. `tokenmill workers` shows the names. Exits with 1 if a named worker does not listen.
    """
    absent = []
    for name in names:
        num_listeners = connection.publish(command_channel(name), json.dumps(_SHUTDOWN))
        if num_listeners:
            click.echo(f"worker {safe_name(name)} drains and stops")
        else:
            absent.append(safe_name(name))
    if absent:
        raise click.ClickException(
            f"no worker named {', '.join(absent)} listens: it is dead or cut off from Redis, or "
            "`tokenmill workers` shows another name"
        )


@click.command("requeue")
@click.option("--queue", required=True, help="The queue of the failed jobs.")
@click.option(
    "--all",
    "is_all",
    is_flag=True,
    help="All failed jobs of the queue that another try may help, the oldest first.",
)
@click.option(
    "--error",
    metavar="TEXT",
    default="",
    help="With --all: only jobs whose error contains TEXT. Jobs whose request is wrong are included.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=REQUEUE_LIMIT,
    show_default=True,
    help="With --all: the most jobs.",
)
@click.argument("job_ids", nargs=-1)
@click.pass_obj
def requeue_command(
    connection: redis.Redis,
    /,
    queue: str,
    is_all: bool,
    error: str,
    limit: int,
    job_ids: tuple[str, ...],
) -> None:
    """Put failed jobs back on their queue: the jobs with JOB_IDS, or --all.

    Unlike `rq requeue` this command reads no job's payload, so no pickle is loaded. Jobs of a cancelled run stay
    failed: submit the run again. With --all but without --error, jobs whose request is wrong stay failed too. Exits
    with 1 if there is no such queue, or if a named job could not be requeued.
    """
    names_jobs = len(job_ids) > 0
    if names_jobs == is_all:  # both are given, or neither
        raise click.UsageError("name the jobs, or give --all")
    if error and not is_all:
        raise click.UsageError("--error goes with --all")
    _check_queue(connection, queue)
    requeued = (
        requeue_all(connection, queue, limit, error)
        if is_all
        else requeue(connection, queue, job_ids)
    )
    client_at_fault = requeued.client_at_fault
    cancelled = requeued.cancelled
    missing = requeued.missing
    num_requeued = len(requeued.done)
    click.echo(f"requeued {num_requeued} {plural('job', num_requeued)}")

    problems = []
    if client_at_fault:
        problems.append(
            f"{len(client_at_fault)} left, because what they ask for is wrong and they would fail again: "
            f"{_names(client_at_fault)}: to put some back all the same, give a part of their error with --error, or "
            "name their ids in place of --all"
        )
    if cancelled:
        problems.append(f"{len(cancelled)} not requeued: {_names(cancelled)}: {RESUBMIT}")
    if missing and is_all:
        verb = "is" if len(missing) == 1 else "are"
        problems.append(f"{len(missing)} {verb} listed as failed but gone: {_names(missing)}")
    elif missing:
        problems.append(f"not among the failed jobs of {safe_name(queue)}: {_names(missing)}")
    if problems and not is_all:
        raise click.ClickException("; ".join(problems))
    for problem in problems:
        click.echo(problem, err=True)


def _names(names: list[str]) -> str:
    """Return names or ids as a list for people: the first MAX_SHOWN of them, and how many more there are."""
    first_names = ", ".join(map(safe_name, names[:MAX_SHOWN]))
    if len(names) > MAX_SHOWN:
        return f"{first_names} and {len(names) - MAX_SHOWN} more"
    return first_names


#: The module with the checks of each role. It is imported late, because its package imports this package.
CHECKS = {"worker": "worker.doctor", "dashboard": "tokenmill.dashboard.doctor"}

#: Roles with rules of their own in Redis.
#: Roles whose Redis users have rules of their own. All other roles have a producer's rules.
_ROLES_WITH_RULES: dict[str, Role] = {"worker": "worker", "dashboard": "dashboard"}

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.FAULT: "red"}


@click.command()
@click.option(
    "--role",
    type=click.Choice(["worker", "producer", "dashboard"]),
    help="What runs on this machine, and so what is checked.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def doctor(context: click.Context, /, role: str | None, as_json: bool) -> None:
    """Say what is wrong here, and how to mend it. Changes nothing.

    Looks at Redis, at the rights of the Redis user, at settings and at the installation. With the role worker, it also
    looks at the model, memory, GPU and data roots. That role is the default if a worker is installed. Exits with 1 if
    there is a fault, else 0.
    """
    url = context.find_root().params["url"]
    if role is None:
        has_worker = find_spec("torch") is not None and find_spec("pydantic_settings") is not None
        role = "worker" if has_worker else "producer"
    findings = []
    for finding in examine(_examinations(url, role)):
        findings.append(finding)
        if not as_json:
            _print_finding(finding)
    counts = Counter(finding.level for finding in findings)
    faults = counts[Level.FAULT]
    warnings = counts[Level.WARNING]
    if as_json:
        content = {
            "version": version("tokenmill"),
            "role": role,
            "faults": faults,
            "warnings": warnings,
            "findings": [finding._asdict() for finding in findings],
        }
        click.echo(json.dumps(content, indent=2))
    else:
        click.echo(f"faults: {faults}, warnings: {warnings}, ok: {counts[Level.OK]}")
    context.exit(1 if faults else 0)


def _print_finding(finding: Finding) -> None:
    """Print a finding, and on the next line how to mend it."""
    level = click.style(f"{finding.level:8}", fg=_COLOURS[finding.level])
    click.echo(f"{level} {finding.subject:13} {finding.text}")
    if finding.mend:
        indent = " " * 22  # the width of the two columns before the text
        click.echo(f"{indent} -> {finding.mend}")


def _examinations(url: str, role: str) -> Iterator[Examination]:
    """Yield the examinations that `doctor` makes for a role. url: the URL of Redis."""
    yield Examination("redis", lambda: _check_redis(url, role))
    yield Examination("installation", check_installation)
    if role not in CHECKS:
        return
    try:
        yield from importlib.import_module(CHECKS[role]).checks()
    except ImportError as error:
        problem = f"the {role} cannot be imported ({error})"
        finding = fault("installation", problem, f"pip install 'tokenmill[{role}]'")
        yield Examination("installation", lambda: [finding])


def _check_redis(url: str, role: str) -> Iterator[Finding]:
    """Yield the findings about Redis, and about the rights of the Redis user."""
    try:
        server = reach(url)
    except RedisError as error:
        yield not_served(url, error)
        return
    with server.client:
        yield from check_server(server)
        yield from check_permissions(server, _ROLES_WITH_RULES.get(role, "producer"))
