"""What can be said of a block without running it: that it parses, and that its options exist."""

import re
import shlex
import subprocess
from functools import cache

import click

from jobs.cli import main as tokenmill
from ops.documents.blocks import Block

#: Shell words behind which another command begins.
_BREAKS = {"&&", "||", ";", "|", "&"}

_OPTION = re.compile(r"--[a-z][a-z0-9-]*")


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
    done = subprocess.run(
        ["bash", "-n", "-c", block.body], capture_output=True, text=True, check=False
    )
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


def unknown_options(words: list[str]) -> list[str]:
    """Options of a command of ours or of RQ's that its `--help` does not have."""
    if words[0] not in ("tokenmill", "rq") or len(words) < 2:
        return []
    given = [match[0] for word in words if (match := _OPTION.match(word))]
    known = set(_OPTION.findall(re.sub(r"--\[no-\]", "--", _help(*words[:3]))))
    return [option for option in given if option not in known]


@cache
def _help(program: str, name: str, below: str = "") -> str:
    """The help of a program's command; nothing where there is no such command.

    below: the command of a group such as `tokenmill keys`; otherwise it is not looked at.
    """
    from rq.cli.cli import main as rq

    group: click.Group = tokenmill if program == "tokenmill" else rq
    command = group.commands.get(name)
    if isinstance(command, click.Group):
        command = command.commands.get(below)
    return "" if command is None else command.get_help(click.Context(command))
