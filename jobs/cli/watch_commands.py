"""`tokenmill status`, `tokenmill runs` and `tokenmill workers`."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import click
import redis

from jobs.cli.status_text import (
    NO_WORKER_TEXT,
    gone_text,
    print_failures,
    print_troubles,
    rate,
    status_text,
    table,
)
from jobs.common.display import bytes_text, duration_text, safe_name
from jobs.common.release import release_text
from jobs.common.workers import WorkerSample, read_workers
from jobs.errors import JobsError, UnknownRun
from jobs.runs.output import RunOutput, named_run, output_here, read_output
from jobs.runs.watching.reading import MAX_RUNS, list_runs, read_planned, run_reasons
from jobs.runs.watching.snapshot import STATES, RunSnapshot, left_text, obstacles

#: Seconds between two tables of --watch.
WATCH_EVERY_S = 2.0
#: The most ended runs that `status` without a run shows.
MAX_ENDED = 10
#: Tables show only the end of a longer path.
MAX_PATH_CHARS = 60
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
watch_option = click.option(
    "--watch", is_flag=True, help="Show it again every two seconds, until Ctrl-C."
)
#: The columns of runs with numbers, which are aligned to the right.
_NUMBER_HEADS = ("ROWS", "ERRORS", "ROWS/S", "TOK/S", "LEFT", "SUBMITTED")
#: The columns that say what a worker's engine does.
_WORKER_ACTIVITY = ("BATCH", "WAITING", "KV")
#: The columns of workers with numbers, which are aligned to the right.
_WORKER_NUMBERS = ("PID", "UP", "MEMORY", *_WORKER_ACTIVITY, "SEEN")


@click.command()
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(STATES),
    help="Only runs in this state. May be given several times.",
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=MAX_RUNS, show_default=True)
@json_option
@click.pass_obj
def runs(connection: redis.Redis, /, states: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List the runs that were submitted last.

    Only runs that Redis knows are listed. Redis keeps a run's keys for 30 days after the run's last part was written.
    The run's folder stays.
    """
    print_troubles(connection)
    snapshots = list_runs(connection, limit, states)
    if as_json:
        click.echo(json.dumps([snapshot.to_object() for snapshot in snapshots]))
    else:
        click.echo(runs_table(snapshots, time.time()))


@click.command()
@json_option
@watch_option
@click.pass_obj
def workers(connection: redis.Redis, /, as_json: bool, watch: bool) -> None:
    """List the workers: where each runs, what it serves, and what it holds.

    A "draining" worker takes nothing new. A "silent" worker is frozen, cut off or dead; --json has its last numbers.
    """

    def show() -> str:
        """Return the present table, or the JSON."""
        known_workers = read_workers(connection)
        samples = [worker.sample for worker in known_workers if worker.sample is not None]
        if not as_json:
            return workers_table(samples)
        objects = []
        for sample in samples:
            flags = {"silent": sample.is_silent, "draining": sample.state == "draining"}
            objects.append({**sample.to_object(), **flags})
        return json.dumps(objects)

    show_or_watch(show, watch, warn=partial(print_troubles, connection))


@click.command()
@click.argument("run", required=False)
@json_option
@click.option(
    "--watch", is_flag=True, help="Show it again every two seconds, until Ctrl-C or the end of RUN."
)
@click.pass_obj
def status(connection: redis.Redis, /, run: str | None, as_json: bool, watch: bool) -> None:
    """Print the state of a run, or of all runs.

    RUN is a run's id or its output folder. A folder works even if Redis has lost the run, and shows its finished parts
    even if Redis does not answer. Without RUN, all open runs are shown, and the runs that ended last.
    """
    warn = partial(print_troubles, connection)
    if run is None:
        show_or_watch(lambda: _runs_in_short(connection, as_json), watch, warn=warn)
    else:
        shown = _ShownRun(connection, run, as_json)
        try:
            show_or_watch(shown.read, watch, is_over=shown.is_over, warn=warn)
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            shown.print_folder()
            raise
        shown.print_failures()


class _ShownRun:
    """A run whose state is printed once or repeatedly.

    Attributes:
        snapshot: what Redis knew of the run when `read` was last called; None if Redis has lost the run.
    """

    snapshot: RunSnapshot | None = None

    def __init__(self, connection: redis.Redis, name: str, as_json: bool) -> None:
        """name: the run's id or its output folder."""
        self._connection = connection
        self._name = name
        self._as_json = as_json

    def is_over(self) -> bool:
        """Whether the run had ended, or Redis had lost it, when `read` was last called."""
        return self.snapshot is None or not self.snapshot.is_active

    def read(self) -> str:
        """Read the run's present state, and return it as text or JSON. Raises UnknownRun."""
        connection = self._connection
        run, output = named_run(connection, self._name)
        try:
            snapshot = read_planned(connection, run)
        except UnknownRun:
            if output is None:
                raise
            self.snapshot = None
            if self._as_json:
                return output_json(output)
            return _output_text(output, redis_answers=True)
        self.snapshot = snapshot
        if self._as_json:
            reasons = [vars(reason) for reason in run_reasons(connection, snapshot.run)]
            return json.dumps({**snapshot.to_object(), "reasons": reasons})
        if output is None:
            output = output_here(snapshot.output, snapshot.run)
        num_gone_parts = 0
        if output is not None and snapshot.finished:
            num_gone_parts = output.num_gone_parts
        lines = [status_text(snapshot, num_gone_parts)]
        lines += [f"waits    {obstacle}" for obstacle in obstacles(connection, snapshot)]
        return "\n".join(lines)

    def print_folder(self) -> None:
        """Print what the run's output folder says while Redis does not answer.

        Prints nothing if the user has named the run by its id, or wants JSON.
        """
        if self._as_json:
            return
        # An error of the folder is not shown. The user needs to know that Redis does not answer.
        with suppress(JobsError):
            output = read_output(self._name)
            if output is not None:
                click.echo(_output_text(output, redis_answers=False))

    def print_failures(self) -> None:
        """Print why shards had failed when `read` was last called."""
        if self.snapshot is not None and not self._as_json:
            print_failures(self._connection, self.snapshot)


def output_json(output: RunOutput) -> str:
    """Return, as JSON, what a run's output folder says about the run. Redis is not asked."""
    plan = output.plan
    return json.dumps(
        {
            "run": plan.run,
            "state": output.state,
            "output": output.folder,
            "model": str(plan.model),
            "rows": plan.rows,
            "errors": output.errors,
            "shards": len(plan.shards),
            "shards_done": output.parts,
        }
    )


def _output_text(output: RunOutput, *, redis_answers: bool) -> str:
    """Return lines with what a run's output folder says about the run. Redis is not asked.

    redis_answers: whether Redis has said that it does not know the run; False if Redis does not answer at all.
    """
    state = output.state
    if state == "forgotten" and not redis_answers:
        state = "not finished"
    errors = "" if output.errors is None else f", {output.errors} with an error"
    lines = [
        f"run {output.plan.run}: {state}",
        f"output   {output.folder}",
        f"rows     {output.plan.rows}{errors}",
        f"shards   {output.parts} of {len(output.plan.shards)} done",
        *gone_text(output.num_gone_parts, output.folder),
    ]
    if state == "forgotten":
        lines.append("this Redis does not know it any more: submit it again")
    return "\n".join(lines)


def _runs_in_short(connection: redis.Redis, as_json: bool) -> str:
    """Return a table of the open runs and the runs that ended last. With `as_json`, return all listed runs as JSON."""
    snapshots = list_runs(connection)
    if as_json:
        return json.dumps([snapshot.to_object() for snapshot in snapshots])
    shown_runs = []
    num_ended = 0
    for run in snapshots:
        if not run.is_active:
            num_ended += 1
        if run.is_active or num_ended <= MAX_ENDED:
            shown_runs.append(run)
    return runs_table(shown_runs, time.time())


def show_or_watch(
    show: Callable[[], str],
    watch: bool,
    sleep: Callable[[float], None] = time.sleep,
    is_over: Callable[[], bool] = lambda: False,
    warn: Callable[[], None] = lambda: None,
) -> None:
    """Print the text that `show` returns.

    watch: whether to print it again every WATCH_EVERY_S, until Ctrl-C. On a terminal, the screen is cleared each time.
    is_over: returns whether the text is final.
    warn: prints what is wrong with Redis, above each text. Its errors during an outage are dropped, because the text
    reports the outage.
    """
    warn()
    click.echo(show())
    is_terminal = sys.stdout.isatty()
    with suppress(KeyboardInterrupt):
        while watch and not is_over():
            sleep(WATCH_EVERY_S)
            try:
                text = show()
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
                text = f"no answer from Redis ({safe_name(str(error))}); still trying"
            if is_terminal:
                click.clear()
            with suppress(redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                warn()
            click.echo(text)


def runs_table(runs: Sequence[RunSnapshot], now: float) -> str:
    """Return a table of runs. now: Unix seconds."""
    if not runs:
        return "no run: `tokenmill submit FILE OUT` makes one"
    heads = ("RUN", "STATE", *_NUMBER_HEADS, "OUTPUT")
    rows = [_run_row(run, now) for run in runs]
    return table(heads, rows, _NUMBER_HEADS)


def _run_row(run: RunSnapshot, now: float) -> tuple[str, ...]:
    """Return a run's cells of the table. An empty cell is "-"."""
    return (
        run.run,
        run.state,
        "-" if run.rows is None else f"{run.rows_done}/{run.rows}",
        str(run.errors),
        rate(run.rows_per_s),
        rate(run.tokens_per_s),
        left_text(run) or "-",
        "-" if run.submitted_at is None else duration_text(now - run.submitted_at),
        _cut_path(run.output),
    )


def workers_table(samples: Sequence[WorkerSample]) -> str:
    """Return a table of workers."""
    if not samples:
        return NO_WORKER_TEXT
    rows = [_worker_row(sample) for sample in samples]
    return table(_WORKER_HEADS, rows, _WORKER_NUMBERS)


#: The columns of the table of workers, as _worker_row fills them.
_WORKER_HEADS = (
    "WORKER",
    "STATE",
    "MODEL",
    "FINGERPRINT",
    "VERSION",
    "HOST",
    "PID",
    "UP",
    "MEMORY",
    "LANES",
    "HOLDS",
    *_WORKER_ACTIVITY,
    "SEEN",
    "PATH",
)


def _worker_row(worker: WorkerSample) -> tuple[str, ...]:
    """Return a worker's cells of the table. An empty cell is "-"."""
    # A silent worker's last sample is outdated, because other workers take over its jobs. So most cells stay empty.
    state = "silent"
    uptime = ""
    memory = ""
    held_jobs = ""
    activity: tuple[str, ...] = ("", "", "")
    if not worker.is_silent:
        state = worker.state
        uptime = duration_text(worker.up_s)
        held_jobs = ", ".join(f"{queue} {count}" for queue, count in worker.held.items())
        activity = (
            f"{worker.num_requests_running}/{worker.max_num_seqs}",
            str(worker.num_requests_waiting),
            f"{worker.kv_cache_usage:.0%}",
        )
        if worker.memory_bytes:
            memory = bytes_text(worker.memory_bytes)

    pid = str(worker.pid) if worker.pid else ""
    cells = (
        safe_name(worker.name),
        state,
        worker.model,
        worker.fingerprint[:8],
        release_text(worker.version, worker.commit),
        worker.host,
        pid,
        uptime,
        memory,
        " ".join(worker.queues),
        held_jobs,
        *activity,
        duration_text(worker.silent_s),
        _cut_path(worker.model_source),
    )
    return tuple(cell or "-" for cell in cells)


def _cut_path(path: str) -> str:
    """Return a path, or only the end of a long path."""
    if len(path) <= MAX_PATH_CHARS:
        return path
    num_kept = MAX_PATH_CHARS - len("...")
    return f"...{path[-num_kept:]}"
