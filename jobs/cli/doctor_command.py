"""`tokenmill doctor`: looks for what is wrong before work is lost by it, and says what to mend."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from ..common.shown import MAX_TEXT_CHARS, safe_name
from ..common.version import code_version
from ..doctor.findings import Examination, Finding, Level, examine, fault
from ..doctor.installation import check_installation
from ..doctor.permissions import check_permissions
from ..doctor.queued_jobs import check_queued_jobs
from ..doctor.redis_server import NotReached, reach, secrets_of
from ..doctor.server_settings import check_server
from ..doctor.shared_keys import check_shared_keys
from ..doctor.variables import check_variables

#: Imported by name: what these look at needs packages that import this one.
CHECKS = {"worker": "worker.doctor", "dashboard": "tokenmill_dashboard.doctor"}

REDIS_S, LOCAL_S = 30.0, 30.0

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.FAULT: "red"}
_WIDTH = 13


@click.command()
@click.option(
    "--role",
    type=click.Choice(["worker", "producer", "dashboard"]),
    help="What runs here, by the rules of this Redis user; by default worker where one is installed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def doctor(context: click.Context, /, role: str | None, as_json: bool) -> None:
    """Say what is wrong here, and what to mend.

    Looks at Redis, what its user may do, settings and installation; as a worker also at model, memory, GPU
    and data roots. Changes nothing. Exits with 1 where there is a fault, with 0 otherwise.
    """
    url = context.find_root().params["url"]
    role = role or ("worker" if find_spec("torch") and find_spec("pydantic_settings") else "producer")
    found = []
    for each in _without(secrets_of(url), examine(_examinations(url, role))):
        found.append(each)
        if not as_json:
            _print(each)
    counts = {level: sum(each.level is level for each in found) for level in Level}
    if as_json:
        _print_json(role, counts, found)
    else:
        click.echo(f"{counts[Level.FAULT]} faults, {counts[Level.WARNING]} warnings, {counts[Level.OK]} ok")
    sys.stdout.flush()
    context.exit(1 if counts[Level.FAULT] else 0)


def _examinations(url: str, role: str) -> Iterator[Examination]:
    yield Examination("redis", lambda: _check_redis(url, role), REDIS_S)
    yield Examination("installation", check_installation, LOCAL_S)
    yield Examination("settings", lambda: check_variables(os.environ, _env_file(), role), LOCAL_S)
    if role not in CHECKS:
        return
    try:
        checks: Any = importlib.import_module(CHECKS[role])
    except ImportError as error:
        found = fault(
            "installation", f"the {role} cannot be imported ({error})", f"pip install 'tokenmill[{role}]'"
        )
        yield Examination("installation", lambda: [found], LOCAL_S)
        return
    yield from checks.checks()


def _check_redis(url: str, role: str) -> Iterator[Finding]:
    try:
        server = reach(url)
    except NotReached as error:
        yield error.finding
        return
    with server.client:
        yield from check_server(server)
        yield from check_permissions(server, "worker" if role == "worker" else "producer")
        yield from check_shared_keys(server)
        yield from check_queued_jobs(server)


def _env_file() -> dict[str, str | None]:
    """Return what `.env` holds, as far as it can be read."""
    try:
        lines = Path(".env").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    pairs = (line.removeprefix("export ").partition("=") for line in lines if not line.startswith("#"))
    return {name.strip(): value for name, equals, value in pairs if equals}


def _without(secrets: list[str], findings: Iterable[Finding]) -> Iterator[Finding]:
    """Take out of findings what no message may repeat, whoever wrote it, and what a terminal may obey."""
    for each in findings:
        texts = [each.found, each.mend]
        for secret in secrets:
            texts = [text.replace(secret, "***") for text in texts]
        found, mend = (safe_name(text, MAX_TEXT_CHARS) for text in texts)
        yield Finding(each.subject, each.level, found, mend)


def _print(each: Finding) -> None:
    level = click.style(f"{each.level:8}", fg=_COLOURS[each.level], bold=each.level is Level.FAULT)
    click.echo(f"{level} {each.subject:{_WIDTH}} {each.found}")
    if each.mend:
        click.echo(f"{'':8} {'':{_WIDTH}} -> {each.mend}")


def _print_json(role: str, counts: dict[Level, int], found: list[Finding]) -> None:
    told = {
        "version": code_version(),
        "role": role,
        "faults": counts[Level.FAULT],
        "warnings": counts[Level.WARNING],
        "findings": [asdict(each) for each in found],
    }
    click.echo(json.dumps(told, indent=2))
