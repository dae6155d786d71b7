"""Defines what a way is: a method by which several requests lead to the answer of a prompt."""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from jobs.context.checks import Checks, RepairOptions
from jobs.items.item import Item
from jobs.prompts.generated import PromptAnswer
from jobs.tasks import Request


@dataclass(frozen=True)
class WayOption:
    """An argument of jobs and runs, which is also an option of the command line.

    parse: reads the option's value, or raises InvalidJob. help, type, is_repeatable: how the command line shows and
    reads the option.
    """

    parse: Callable[[str, Any], Any]
    help: str
    type: type = str
    is_repeatable: bool = False


class Way(abc.ABC):
    """A method by which several requests lead from a prompt to its answer.

    options: the way's arguments, by name. A job or a run that gives the first argument uses the way.
    columns: the columns that the way adds to an answer, each with Arrow's name of its type.
    """

    options: ClassVar[Mapping[str, WayOption]]
    columns: ClassVar[Mapping[str, str]]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the way that parsed options ask for."""
        return cls(**values)

    @classmethod
    def main_option(cls) -> str:
        """Return the name of the argument that asks for the way."""
        return next(iter(cls.options))  # the first one

    @abc.abstractmethod
    def check(self, sampling: Mapping[str, Any], tools: list[dict[str, Any]]) -> None:
        """Raise InvalidJob for sampling values or tools that cannot be combined with this way."""

    @abc.abstractmethod
    def item(self, request: Request) -> Item[PromptAnswer]:
        """Return the Item that asks a prompt in this way. An Item is a generator of requests and checks."""

    @property
    def child_checks(self) -> Sequence[RepairOptions]:
        """Return the checks that the way leaves to child processes. A call of a tool counts as a check."""
        return ()

    @property
    def has_checks(self) -> bool:
        """Whether the way leaves checks or tool calls to child processes."""
        return bool(self.child_checks)

    def admit(self, checks: Checks) -> None:
        """Raise InvalidJob if the way needs a function that this worker does not allow."""
        for child_check in self.child_checks:
            checks.admit(child_check)

    def prepare(self, checks: Checks) -> None:
        """Raise InvalidJob if one of the checks can never work. This may take as long as importing a function."""
        for child_check in self.child_checks:
            checks.prepare(child_check)

    def version(self, checks: Checks) -> str:
        """Return a text that changes when the files of the way's functions change. Raises InvalidJob."""
        return " ".join(checks.version(child_check) for child_check in self.child_checks)
