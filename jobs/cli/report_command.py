"""`tokenmill report`: a finished run's page, written again."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click
import redis

from jobs.cli.errors_told import errors_told
from jobs.errors import InputNotFound, InvalidJob
from jobs.runs.output import named_run
from jobs.runs.plans.names import MANIFEST, REPORT
from jobs.runs.plans.paths import is_stored
from jobs.runs.redis_state.state import RunState
from jobs.runs.statistics.report import report_html

if TYPE_CHECKING:
    from jobs.parquet.outputs.read_back import FolderReader


@click.command()
@click.argument("run")
@click.option("--price-per-hour", type=click.FloatRange(0), help="What a worker's machine costs.")
@click.option("--output", type=click.Path(dir_okay=False), help="Another place than the run's folder.")
@click.pass_obj
def report(connection: redis.Redis, /, run: str, price_per_hour: float | None, output: str | None) -> None:
    """Write a finished run's page again, and print where it is.

    RUN is its id or its output folder, on this machine or in a store whose keys are in the environment. What
    the page shows is in the run's manifest.
    """
    with errors_told():
        run, found = named_run(connection, run)
        folder = RunState(connection, run).facts()["output"] if found is None else found.folder
        reader = _stored(folder) if is_stored(folder) else None
        path = os.path.join(folder, MANIFEST)
        try:
            manifest = json.loads(_read(path) if reader is None else reader.text(MANIFEST))
            page = report_html(manifest, price_per_hour)
        except (OSError, InputNotFound) as error:
            what = f"{path} cannot be read ({error}): a run has a report when it is finished"
            raise InvalidJob(what) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidJob(f"{path} is no manifest of this version of Tokenmill: {error}") from None
        if reader is not None and output is None:
            click.echo(reader.write(REPORT, page))
            return
        target = output or os.path.join(folder, REPORT)
        temporary = f"{target}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(page)
        os.replace(temporary, target)
        click.echo(target)


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _stored(folder: str) -> FolderReader:
    try:
        from jobs.parquet.outputs.read_back import FolderReader

        return FolderReader(folder)
    except ImportError as error:
        raise InvalidJob(f"{folder} is in a store, and there is no {error.name} here to read it") from None
