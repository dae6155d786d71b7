"""What deployments must have in common: commands that are ours, settings that exist, time to stop."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rq.cli import main as rq_command

from jobs.cli import main as tokenmill_command
from tests.rq_workers import ROOT
from worker.settings import WorkerSettings

DEPLOY = ROOT / "ops" / "deploy"

#: What is written while a worker leaves, after TOKENMILL_DRAIN_S, takes no longer.
LEAVING_S = 30

#: What an API server needs after its --drain, at most.
DRAINED_S = 15

#: What a worker reads; one that is given any other variable with our prefix does not start.
SETTINGS = {f"TOKENMILL_{name.upper()}" for name in WorkerSettings.model_fields}
DASHBOARD_SETTINGS = {"TOKENMILL_DASHBOARD_TOKEN", "TOKENMILL_DASHBOARD_TOKENS"}


def assert_is_a_command(words: Sequence[str]) -> None:
    """Fail unless the program takes these arguments, up to where it would begin."""
    program, *arguments = words
    group = {"rq": rq_command, "tokenmill": tokenmill_command}[Path(program).name]
    command: click.Command = group
    while isinstance(command, click.Group):
        command = command.commands[arguments.pop(0)]
    command.make_context(command.name, arguments)


def assert_settings_exist(environment: Mapping[str, Any], known: set[str] = SETTINGS) -> None:
    """Fail where a variable with our prefix is none that the program reads."""
    ours = {name for name in environment if name.startswith("TOKENMILL_")}
    assert ours <= known, ours - known


def option(words: Sequence[str], name: str) -> str:
    """Return the value of a command's option, written as `--name value` or `--name=value`."""
    for place, word in enumerate(words):
        if word == name:
            return words[place + 1]
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}=")
    raise KeyError(name)


def env_file(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)
