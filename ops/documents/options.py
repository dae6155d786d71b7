"""What can be said of a block without running it: that it parses, and that its options exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import click

from jobs.cli import main as tokenmill
from ops.documents.blocks import ROOT, Block

#: Programs whose first argument is a command with options of its own.
_WITH_COMMANDS = {"tokenmill", "rq", "pip", "mkdocs", "honcho", "docker", "kubectl", "systemctl", "helm"}

#: Shell words behind which another command begins.
_BREAKS = {"&&", "||", ";", "|", "&"}

_OPTION = re.compile(r"--[a-z][a-z0-9-]*")
_HELP_S = 120.0


class BadSyntax(Exception):
    """A block that no shell, or no Python, would take."""


def check_syntax(block: Block) -> None:
    """Raise BadSyntax where the block does not parse."""
    if block.language == "python":
        try:
            compile(block.body, block.place, "exec")
        except SyntaxError as error:
            raise BadSyntax(f"{block.place}: {error}") from error
        return
    done = subprocess.run(["bash", "-n", "-c", block.body], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadSyntax(f"{block.place}: {done.stderr}")


def simple_commands(block: Block) -> list[list[str]]:
    """The commands of a block of `sh`, each as its words, without the variables that are set before it."""
    if block.language != "sh":
        return []
    found: list[list[str]] = []
    for line in block.body.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word not in _BREAKS:
                words.append(word)
                continue
            while words and re.match(r"[A-Za-z_]\w*=", words[0]):
                words.pop(0)
            if words:
                found.append(words)
            words = []
    return found


def unknown_options(words: list[str], *, run: bool = True) -> list[str] | None:
    """Options of a command that its `--help` does not have; None where there is no help to ask here.

    run: ask programs other than our own and RQ's too, by starting them.
    """
    given = [match[0] for word in words if (match := _OPTION.match(word))]
    if not given:
        return []
    text = _help(_prefix(words), run)
    if text is None:
        return None
    known = set(_OPTION.findall(re.sub(r"--\[no-\]", "--", text)))
    return [option for option in given if option not in known]


def _prefix(words: list[str]) -> tuple[str, ...]:
    """The words before the options: a program, or also its command."""
    if words[0] == "python" and words[1:2] == ["-m"]:
        return tuple(words[:3])
    if words[0] in {"bash", "sh"}:
        return tuple(words[:2])
    return tuple(words[:2] if words[0] in _WITH_COMMANDS else words[:1])


@cache
def _help(prefix: tuple[str, ...], run: bool) -> str | None:
    if prefix[0] in {"tokenmill", "rq"}:
        return _click_help(prefix)
    if not run or prefix[0] in {"bash", "sh"}:
        return None
    command = [sys.executable, *prefix[1:]] if prefix[0] == "python" else list(prefix)
    beside = Path(sys.executable).parent / prefix[0]
    if beside.exists():
        command[0] = str(beside)
    elif shutil.which(command[0]) is None:
        return None
    done = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, check=False, timeout=_HELP_S, cwd=ROOT
    )
    return done.stdout + done.stderr if done.returncode == 0 else None


def _click_help(prefix: tuple[str, ...]) -> str:
    """The help of a command of ours or of RQ's; nothing where there is no such command."""
    from rq.cli.cli import main as rq

    group: click.Group = tokenmill if prefix[0] == "tokenmill" else rq
    command = group.commands.get(prefix[1]) if len(prefix) > 1 else group
    return "" if command is None else command.get_help(click.Context(command))
