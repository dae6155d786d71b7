"""`tokenmill dashboard`: shows queues, workers, runs and failed jobs in a browser."""

import importlib
from typing import Any

import click

#: Imported by name: it is a package of its own, which imports this one.
SERVE = "tokenmill_dashboard.serve"


@click.command()
@click.option("--bind", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=9181, show_default=True)
@click.option("--host", "hosts", multiple=True, metavar="NAME", help="A name, or name:port, of a proxy before it.")
@click.option("--show-prompts", is_flag=True, help="Show jobs' arguments, which hold prompts.")
@click.option("--queue", "queues", multiple=True, metavar="NAME", help="A queue for /metrics, which needs one.")
@click.pass_context
def dashboard(context: click.Context, /, **options: Any) -> None:
    """Show what waits, runs and fails in a browser.

    On other addresses than 127.0.0.1 browsers have to log in with the token in TOKENMILL_DASHBOARD_TOKEN.
    """
    try:
        found: Any = importlib.import_module(SERVE)
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is not installed: pip install 'tokenmill[dashboard]'") from None
    try:
        found.serve(context.find_root().params["url"], **options)
    except found.NotServed as refused:
        raise click.ClickException(str(refused)) from None
