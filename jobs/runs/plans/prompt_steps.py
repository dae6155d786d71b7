"""Several prompts of each row, one after the other, each a template over columns and earlier answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.common.display import MAX_NAME_CHARS, brief
from jobs.errors import InvalidJob, InvalidValue
from jobs.prompts.chat_options import ChatOptions, split_chat_options
from jobs.prompts.templates.template_texts import template_texts
from jobs.runs.plans.template import MAX_SHARD_PIECES, Template

#: Prompts of a row; each is a turn in the batch.
MAX_STEPS = 20

#: Columns of a row as a whole, which no prompt's may be named like.
ROW_COLUMNS = ("prompt_tokens", "completion_tokens", "cached_tokens", "error")

#: What a prompt's columns besides its answer's end with.
FINISH_REASON, REASONING, TOOL_CALLS = "_finish_reason", "_reasoning", "_tool_calls"


@dataclass(frozen=True)
class PromptStep:
    """One of a row's prompts. sampling: all of its values, those of the run included."""

    name: str
    template: Template
    sampling: Mapping[str, Any]
    chat: ChatOptions

    @property
    def is_chat(self) -> bool:
        return self.template.roles is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that hold what comes of it, its answer's first."""
        endings = ["", FINISH_REASON]
        endings += [REASONING] if self.sampling.get("separate_reasoning") else []
        endings += [TOOL_CALLS] if self.chat.has_tools else []
        return tuple(self.name + ending for ending in endings)


def parse_prompts(value: Any) -> list[dict[str, Any]] | None:
    """Return a run's prompts in their normal form, mappings of name, template and, if any, sampling.

    Raises InvalidJob.
    """
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise InvalidValue(
            'prompts is {}, expected a list such as [{{"name": "summary", "template": "..."}}, ...]',
            brief(value),
        )
    if len(value) > MAX_STEPS:
        raise InvalidJob(f"prompts has {len(value)} entries, more than the limit of {MAX_STEPS}")
    return [_parse_prompt(each, number) for number, each in enumerate(value)]


def _parse_prompt(value: Any, number: int) -> dict[str, Any]:
    if not isinstance(value, dict) or not {"name", "template"} <= value.keys() <= {
        "name",
        "template",
        "sampling",
    }:
        raise InvalidValue(
            f"prompts[{number}] is {{}}, expected an object of name, template and, if at all, sampling",
            brief(value),
        )
    name, sampling = value["name"], value.get("sampling")
    longest = MAX_NAME_CHARS - len(FINISH_REASON)
    if not isinstance(name, str) or not name.isidentifier() or len(name) > longest:
        raise InvalidValue(
            f"the name of prompts[{number}] is {{}}, expected a word of letters, digits and _, at most "
            f"{longest} characters",
            brief(name),
        )
    template_texts(value["template"])
    if sampling is not None and not isinstance(sampling, dict):
        raise InvalidValue(f"the sampling of prompt {name!r} is {{}}, expected a mapping", brief(sampling))
    try:  # its keys as in the plan
        sampling = json.loads(json.dumps(sampling))
    except (TypeError, ValueError, RecursionError):
        raise InvalidJob(f"the sampling of prompt {name!r} cannot be written as JSON") from None
    for key in ("n", "seed"):
        if (sampling or {}).get(key) is not None:
            raise InvalidJob(f"prompt {name!r} has {key} of its own, which is one for all prompts of a run")
    return {"name": name, "template": value["template"], **({"sampling": sampling} if sampling else {})}


def make_steps(
    prompts: Sequence[Mapping[str, Any]],
    sampling: Mapping[str, Any],
    parse_sampling: Callable[[dict[str, Any], bool], dict[str, Any]],
    from_columns: Collection[str],
    rows_per_shard: int,
) -> tuple[PromptStep, ...]:
    """Return the prompts of a run with what each may name and ask checked.

    prompts: as parse_prompts returned them. sampling: the run's. parse_sampling: of values, and whether they
    are a chat's. from_columns: sampling values that each row brings. Raises InvalidJob.
    """
    steps = []
    for prompt in prompts:
        template, name = Template.parse(prompt["template"]), prompt["name"]
        is_chat = template.roles is not None
        own = parse_sampling(prompt.get("sampling") or {}, is_chat)  # by the names that the run's have
        if twice := sorted(own.keys() & from_columns):
            raise InvalidJob(
                f"{twice[0]} comes from a column, and prompt {name!r} has its own: leave one out"
            )
        values, chat = split_chat_options(parse_sampling({**sampling, **own}, is_chat))
        if values.get("n", 1) != 1:
            raise InvalidJob("n is one where a row has several prompts: an answer of several fills in none")
        steps.append(PromptStep(name, template, values, chat))
    _check_names(steps)
    pieces = sum(len(text) for step in steps for text in step.template.texts)
    if pieces * rows_per_shard > MAX_SHARD_PIECES:
        raise InvalidJob(
            f"the templates have {pieces} pieces, {pieces * rows_per_shard} in a shard of {rows_per_shard} "
            f"rows, more than the limit of {MAX_SHARD_PIECES}: shorten them, or give fewer rows_per_shard"
        )
    return tuple(steps)


def _check_names(steps: Sequence[PromptStep]) -> None:
    """Raise InvalidJob where two columns would have one name, or a template names an answer not there yet."""
    taken = set(ROW_COLUMNS)
    for step in steps:
        for column in step.columns:
            if column in taken:
                raise InvalidJob(
                    f"prompt {step.name!r} has a column {column!r}, which is there already: rename it"
                )
            taken.add(column)
    for number, step in enumerate(steps):
        named = step.template.columns
        if not named:
            raise InvalidJob(
                f"the template of prompt {step.name!r} names no column and no earlier prompt, so that every "
                "row would ask the same: write {column} where a row's value goes"
            )
        for later in steps[number:]:
            if later.name in named:
                raise InvalidJob(
                    f"the template of prompt {step.name!r} names {later.name!r}, which has no answer yet "
                    "there: name columns and earlier prompts"
                )
