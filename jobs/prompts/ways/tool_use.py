"""Tool use: while a chat's answer calls tools, the tools are run, and the chat goes on with their results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from jobs.common.display import brief
from jobs.context.checks import TOOL, RepairOptions
from jobs.context.values import whole_number
from jobs.errors import InvalidJob, InvalidValue
from jobs.items.item import Item
from jobs.prompts.generated import PromptAnswer, merged, reseeded
from jobs.prompts.pictures import without_pictures
from jobs.prompts.ways.tool_calls import after_calls, parse_functions
from jobs.prompts.ways.way import Way, WayOption
from jobs.tasks import Completion, Request

DEFAULT_MAX_TURNS = 8


@dataclass(frozen=True)
class ToolUse(Way):
    """Runs the tools that a chat's answers call, in child processes with limits.

    tool: dotted names of functions. The last part of each is the name of the tool. A function gets the arguments of the
    call by name. What it returns is the call's result: a text as it is, any other value as JSON.
    max_turns: the most answers of a chat.
    """

    tool: list[str]
    max_turns: int = DEFAULT_MAX_TURNS

    options: ClassVar = {
        "tool": WayOption(
            parse_functions, "A function that answers the calls of a tool.", is_repeatable=True
        ),
        "max_turns": WayOption(
            partial(whole_number, most=100),
            f"The most answers of a chat; {DEFAULT_MAX_TURNS} by default.",
            int,
        ),
    }
    columns: ClassVar = {"messages": "string", "turns": "int64"}

    @property
    def child_checks(self) -> Sequence[RepairOptions]:
        """Return a check of kind TOOL for each function. A child process carries it out by calling the function."""
        return [RepairOptions({TOOL: function}) for function in self.tool]

    def check(self, sampling: Mapping[str, Any], tools: list[dict[str, Any]]) -> None:
        """Raise InvalidJob unless each offered tool has one function, and each function belongs to an offered tool."""
        offered = [tool["function"]["name"] for tool in tools]
        for name in offered:
            if name not in self._function_of:
                raise InvalidValue(
                    "the tool {} has no function: name one in the option `tool`", brief(name)
                )
        for name in self._function_of:
            if name not in offered:
                raise InvalidValue(
                    "`tool` gives a function for {}, which `tools` does not offer", brief(name)
                )
        if len(self._function_of) < len(self.tool):
            raise InvalidJob("`tool` has two functions of one name: give each tool one function")

    @property
    def _function_of(self) -> dict[str, str]:
        """Return the dotted name of each tool's function, by the tool's name."""
        function_of = {}
        for function in self.tool:
            _, _, tool_name = function.rpartition(".")
            function_of[tool_name] = function
        return function_of

    def item(self, request: Request) -> Item[PromptAnswer]:
        """Return the Item that asks a chat and runs the tools that an answer calls, until an answer calls no tool."""
        messages = request.messages or []  # never empty, because only a chat has tools
        answers: list[Completion] = []
        error: str | None = None
        while error is None:
            turn = replace(request, messages=messages)
            if answers:
                sampling = reseeded(request.sampling, f"turn {len(answers)}")
                # A tool_choice may force a call in the first answer. Later answers are free.
                sampling.pop("tool_choice", None)
                turn = replace(turn, sampling=sampling)
            [[completion]] = yield [turn]  # one request with one sample
            answers.append(completion)
            if completion.finish_reason == "error":
                break
            if not completion.tool_calls:
                messages = [*messages, {"role": "assistant", "content": completion.text}]
                break
            if len(answers) == self.max_turns:
                error = (
                    f"the answer of turn {self.max_turns} still calls tools: give more max_turns"
                )
            else:
                chat = yield from after_calls(messages, completion, self._function_of)
                messages = chat.messages
                error = chat.error

        extras = {"messages": without_pictures(messages), "turns": len(answers)}
        return merged(answers[-1], prefills=answers, samples=answers, extras=extras, error=error)
