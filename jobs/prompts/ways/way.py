"""What a way is from a prompt to its answer, beside asking it once."""

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from jobs.context.checks import Checks
from jobs.items.item import Item
from jobs.prompts.generated import PromptAnswer
from jobs.tasks import Request


@dataclass(frozen=True)
class WayOption:
    """An argument of jobs and runs, and an option of the command line.

    parse: makes its value of its name and what was given, or raises InvalidJob. help, type, is_repeatable: as the
    command line shows and reads it.
    """

    parse: Callable[[str, Any], Any]
    help: str
    type: type = str
    is_repeatable: bool = False


class Way(abc.ABC):
    """A way from a prompt to its answer.

    options: its arguments, by name; the first one asks for the way.
    columns: what it adds to an answer beside the completion, with Arrow's names of their types.
    has_checks: whether its items yield checks.
    """

    options: ClassVar[Mapping[str, WayOption]]
    columns: ClassVar[Mapping[str, str]]
    has_checks: bool

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the way that parsed options ask for."""
        return cls(**values)

    @abc.abstractmethod
    def check(self, sampling: Mapping[str, Any], tools: list[dict[str, Any]]) -> None:
        """Raise InvalidJob for sampling values or tools that it cannot do with."""

    @abc.abstractmethod
    def item(self, request: Request) -> Item[PromptAnswer]:
        """Return what asks a prompt in this way."""

    def admit(self, checks: Checks) -> None:  # noqa: B027 - most call no function
        """Raise InvalidJob for a function that this worker does not allow."""

    def version(self, checks: Checks) -> str:
        """Return what changes with the functions that it calls."""
        return ""
