"""Tools in the batch: while a chat's answer calls tools, these are run, and the chat goes on with their results."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from jobs.common.display import MAX_NAME_CHARS, brief
from jobs.context.checks import TOOL, Checks, RepairOptions
from jobs.context.values import listed, some_text, whole_number
from jobs.errors import InvalidJob, InvalidValue
from jobs.items.item import Check, Item
from jobs.prompts.generated import PromptAnswer, hashed_seed, merged
from jobs.prompts.messages import normal_messages
from jobs.prompts.responses import with_ids
from jobs.prompts.ways.way import Way, WayOption
from jobs.tasks import Completion, Request

DEFAULT_MAX_TURNS, MOST_TURNS, MOST_TOOLS = 8, 100, 64


def _functions(name: str, value: Any) -> list[str]:
    functions = listed(name, value, 'a list such as ["weather:forecast"]', 1, MOST_TOOLS)
    dotted = [
        some_text(f"a function of {name}", each, MAX_NAME_CHARS).replace(":", ".")
        for each in functions
    ]
    for function in dotted:
        if "." not in function.strip("."):
            raise InvalidValue(
                f"a function of {name} is {{}}: write module:function", brief(function)
            )
    return dotted


@dataclass(frozen=True)
class ToolUse(Way):
    """Runs the tools that a chat's answers call, in child processes with their limits.

    tool: dotted names of functions; the last part is the tool's name. A function gets the call's arguments by name.
    What it returns is the result: a text as it is, all else as JSON. max_turns: answers of a row at most.
    """

    tool: list[str]
    max_turns: int = DEFAULT_MAX_TURNS

    options: ClassVar = {
        "tool": WayOption(
            _functions, "A function that answers the calls of a tool.", is_repeatable=True
        ),
        "max_turns": WayOption(
            partial(whole_number, most=MOST_TURNS),
            f"Answers of a chat at most; {DEFAULT_MAX_TURNS} by default.",
            int,
        ),
    }
    columns: ClassVar = {"messages": "string", "turns": "int64"}
    has_checks = True

    def admit(self, checks: Checks) -> None:
        """Raise InvalidJob for a function that this worker does not allow."""
        for function in self.tool:
            checks.admit(RepairOptions({TOOL: function}))

    def version(self, checks: Checks) -> str:
        """Return the versions of the functions' files. Raises InvalidJob."""
        return " ".join(checks.version(RepairOptions({TOOL: function})) for function in self.tool)

    def check(self, sampling: Mapping[str, Any], tools: list[dict[str, Any]]) -> None:
        """Raise InvalidJob unless each tool that is offered has a function."""
        offered = [tool["function"]["name"] for tool in tools]
        if sampling.get("n", 1) != 1:
            raise InvalidJob("tool and n: a chat goes on behind one answer: leave n out")
        for name in offered:
            if name not in self._function_of:
                raise InvalidValue("the tool {} has no function: give it with tool", brief(name))
        for name in self._function_of:
            if name not in offered:
                raise InvalidValue(
                    "tool has a function {}, and tools offers no such tool", brief(name)
                )

    @property
    def _function_of(self) -> dict[str, str]:
        return {function.rsplit(".", 1)[1]: function for function in self.tool}

    def item(self, request: Request) -> Item[PromptAnswer]:
        """Ask a chat, run the tools that its answer calls, and go on, until an answer calls none."""
        assert request.messages is not None
        seed = request.sampling.get("seed")
        messages = list(request.messages)
        answers: list[Completion] = []
        error: str | None = None
        while error is None:
            sampling = dict(request.sampling)
            if answers and seed is not None:
                sampling["seed"] = hashed_seed(f"{seed}:turn {len(answers)}")
            ((completion,),) = yield [replace(request, messages=messages, sampling=sampling)]
            answers.append(completion)
            if completion.finish_reason == "error" or not completion.tool_calls:
                break
            if len(answers) == self.max_turns:
                error = (
                    f"the answer of turn {self.max_turns} calls tools still: give more max_turns"
                )
                break
            calls = with_ids(completion.tool_calls, f"{len(messages)}/{completion.text}")
            turns: list[dict[str, Any]] = [
                {"role": "assistant", "content": completion.text, "tool_calls": calls}
            ]
            for call in calls:
                name = call["function"]["name"]
                question = RepairOptions({TOOL: self._function_of[name]})
                reply = yield Check(question, None, call["function"]["arguments"])
                outcome = json.loads(reply)
                if "error" in outcome:
                    error = f"tool {name}: {outcome['error']}"
                    break
                result = {"role": "tool", "tool_call_id": call["id"], "content": outcome["result"]}
                turns.append(result)
            try:
                messages += normal_messages(turns)
            except InvalidJob as problem:  # a result that no prompt can hold
                error = error or f"the results of tools: {problem}"

        last = answers[-1]
        if last.finish_reason != "error" and error is None:
            messages.append({"role": "assistant", "content": last.text})
        extras = {"messages": messages, "turns": len(answers)}
        return merged(last, answers, answers, extras, error)
