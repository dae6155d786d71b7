"""`tokenmill report`: a finished run's page, written again."""

from __future__ import annotations

import json
import os

import click
import redis

from ..errors import InvalidJob
from ..runs.names import MANIFEST, REPORT
from ..runs.output import named_run
from ..runs.report import report_html
from ..runs.state import RunState
from .errors_told import errors_told


@click.command()
@click.argument("run")
@click.option("--price-per-hour", type=click.FloatRange(0), help="What a worker's machine costs.")
@click.option("--output", type=click.Path(dir_okay=False), help="Another place than the run's folder.")
@click.pass_obj
def report(connection: redis.Redis, /, run: str, price_per_hour: float | None, output: str | None) -> None:
    """Write a finished run's page again, and print where it is.

    RUN is its id or its output folder, on this machine. What the page shows is in the run's manifest.
    """
    with errors_told():
        run, found = named_run(connection, run)
        folder = RunState(connection, run).facts()["output"] if found is None else found.folder
        path = os.path.join(folder, MANIFEST)
        try:
            with open(path, encoding="utf-8") as file:
                manifest = json.load(file)
            page = report_html(manifest, price_per_hour)
        except OSError as error:
            what = f"{path} cannot be read ({error}): a run has a report when it is finished"
            raise InvalidJob(what) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidJob(f"{path} is no manifest of this version of Tokenmill: {error}") from None
        target = output or os.path.join(folder, REPORT)
        temporary = f"{target}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(page)
        os.replace(temporary, target)
        click.echo(target)
