"""`tokenmill info` and `tokenmill requeue`: RQ's commands, for queues whose jobs nobody vouches for."""

import click
import redis

from jobs.cli.errors_told import errors_told
from jobs.common.display import safe_name
from jobs.common.workers import read_workers
from jobs.watch.job_actions import REQUEUE_LIMIT, requeue, requeue_all
from jobs.watch.queues import count_queues, queue_names

MAX_SHOWN = 5


@click.command()
@click.argument("queues", nargs=-1)
@click.pass_obj
def info(connection: redis.Redis, /, queues: tuple[str, ...]) -> None:
    """Count the jobs in QUEUES, or in all queues, and list the workers.

    Unlike `rq info` it reads no job, so no pickle. Exits with 1 where a named queue does not exist.
    """
    with errors_told():
        known = queue_names(connection)
        seen = count_queues(connection, queues or known)
        missing = [each.name for each in seen if each.name not in known and not any(each.counts.values())]
        for counts in seen:
            if counts.name not in missing:
                places = ", ".join(f"{count} {place}" for place, count in counts.counts.items())
                click.echo(f"queue {safe_name(counts.name)}: {places}")
        for each in read_workers(connection):
            if not (fields := each.registered):
                continue
            job = f", job {fields['current_job']}" if "current_job" in fields else ""
            click.echo(
                f"worker {safe_name(each.name)}: {fields.get('state', '?')} on {fields.get('queues', '?')}{job}; "
                f"{fields.get('successful_job_count', 0)} finished, {fields.get('failed_job_count', 0)} failed; "
                f"last seen {fields.get('last_heartbeat', '?')}"
            )
        if missing:
            others = f": there are {_ids(known)}" if known else ": there is none"
            raise click.ClickException(f"no queue is named {_ids(missing)}{others}")


@click.command("requeue")
@click.option("--queue", required=True, help="The queue whose failed jobs are meant.")
@click.option("--all", "is_all", is_flag=True, help="All failed jobs of the queue, the oldest first.")
@click.option("--limit", type=click.IntRange(1), default=REQUEUE_LIMIT, show_default=True, help="With --all.")
@click.argument("job_ids", nargs=-1)
@click.pass_obj
def requeue_command(connection: redis.Redis, /, queue: str, is_all: bool, limit: int, job_ids: tuple[str, ...]) -> None:
    """Put failed jobs back on their queue: those with JOB_IDS, or --all.

    Unlike `rq requeue` it reads no job, so no pickle. Exits with 1 where a named job could not be requeued.
    """
    if bool(job_ids) == is_all:
        raise click.UsageError("name the jobs, or give --all")
    with errors_told():
        if not is_all:
            done = requeue(connection, queue, job_ids)
            click.echo(f"requeued {len(done)} jobs")
            if left := [job_id for job_id in job_ids if job_id not in done]:
                raise click.ClickException(f"not among the failed jobs of {safe_name(queue)}: {_ids(left)}")
            return
        num_done, left = requeue_all(connection, queue, limit)
        click.echo(f"requeued {num_done} jobs")
        if left:
            click.echo(f"{len(left)} are listed as failed but gone: {_ids(left)}", err=True)


def _ids(job_ids: list[str]) -> str:
    more = f" and {len(job_ids) - MAX_SHOWN} more" if len(job_ids) > MAX_SHOWN else ""
    return ", ".join(map(safe_name, job_ids[:MAX_SHOWN])) + more
