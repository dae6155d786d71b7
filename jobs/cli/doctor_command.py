"""`tokenmill doctor`: looks for what is wrong before work is lost by it, and says what to mend."""

import importlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

import click
from redis.exceptions import RedisError

from jobs.doctor.findings import Examination, Finding, Level, check_installation, examine, fault
from jobs.doctor.redis_server import check_permissions, check_server, not_served, reach

#: Imported by name: what these look at needs packages that import this one.
CHECKS = {"worker": "worker.doctor", "dashboard": "tokenmill_dashboard.doctor"}

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.FAULT: "red"}


@click.command()
@click.option("--role", type=click.Choice(["worker", "producer", "dashboard"]), help="What runs here and is looked at.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def doctor(context: click.Context, /, role: str | None, as_json: bool) -> None:
    """Say what is wrong here, and what to mend; change nothing.

    Looks at Redis, what its user may do, settings and installation; as a worker, which is the default where one is
    installed, also at model, memory, GPU and data roots. Exits with 1 where there is a fault, with 0 otherwise.
    """
    url = context.find_root().params["url"]
    role = role or ("worker" if find_spec("torch") and find_spec("pydantic_settings") else "producer")
    found = []
    for each in examine(_examinations(url, role)):
        found.append(each)
        if not as_json:
            level, subject, text, mend = each
            click.echo(f"{click.style(f'{level:8}', fg=_COLOURS[level])} {subject:13} {text}")
            click.echo(f"{'':22} -> {mend}\n" if mend else "", nl=False)
    faults, warnings = (sum(each.level is level for each in found) for level in (Level.FAULT, Level.WARNING))
    if as_json:
        told = {"version": version("tokenmill"), "role": role, "faults": faults, "warnings": warnings}
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
        found = fault("installation", f"the {role} cannot be imported ({error})", f"pip install 'tokenmill[{role}]'")
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
