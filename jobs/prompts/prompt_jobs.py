"""Makes the tasks of `jobs.complete` and `jobs.chat` from their arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jobs.context.checks import NO_REPAIRS, REPAIR_OPTIONS, RepairOptions, split_repair_options
from jobs.errors import InvalidJob
from jobs.prompts.arguments import (
    SPLIT_TOKENS,
    Unusable,
    check_choices,
    parse_model,
    parse_prompts,
    parse_sampling,
    refuse_chat_options,
    splits_control_tokens,
)
from jobs.prompts.generated import check_repairs, reseeded
from jobs.prompts.messages import normal_messages, split_chat_options
from jobs.prompts.pictures import pictured_task
from jobs.prompts.prompt_task import PromptTask
from jobs.prompts.responses import (
    chat_completion,
    chat_response_options,
    completion_options,
    text_completion,
)
from jobs.prompts.templated_task import templated_task
from jobs.prompts.ways.table import WAY_OPTIONS, check_way_fits, split_way, way_of
from jobs.prompts.ways.way import Way
from jobs.tasks import Parts, Request, Task


def _seeded(requests: Sequence[Request | Unusable]) -> list[Request | Unusable]:
    """Return the requests, each with its own seed, so that equal prompts do not get equal answers.

    The first request keeps its seed. Every other request gets a seed made of that seed and the request's index.
    """
    seeded: list[Request | Unusable] = []
    for index, request in enumerate(requests):
        if index > 0 and isinstance(request, Request):
            request = replace(request, sampling=reseeded(request.sampling, f"{index}"))
        seeded.append(request)
    return seeded


class _SplitOptions(NamedTuple):
    """The keyword arguments of a job. way_options: the arguments that ask for a Way."""

    sampling: dict[str, Any]
    repairs: RepairOptions
    way_options: dict[str, Any]


def _split_options(options: Mapping[str, Any]) -> _SplitOptions:
    """Split keyword arguments into sampling values, checks of answers, and options of ways. Raises InvalidJob."""
    sampling = dict(options)
    way_options: dict[str, Any] = {}
    if sampling.keys() & WAY_OPTIONS.keys():
        sampling, way_options = split_way(sampling)
    repairs = NO_REPAIRS
    if sampling.keys() & REPAIR_OPTIONS:
        sampling, repairs = split_repair_options(sampling)
    return _SplitOptions(parse_sampling(sampling), repairs, way_options)


def _checked_way(
    options: Mapping[str, Any],
    sampling: Mapping[str, Any],
    repairs: RepairOptions,
    tools: list[dict[str, Any]],
) -> Way | None:
    """Return the way that the options ask for; None without options.

    Raises InvalidJob for an argument that cannot be combined with the way.
    """
    if not options:
        return None
    way = way_of(options)
    if way is not None:
        check_way_fits(way, sampling, repairs)
        way.check(sampling, tools)
    return way


def asked_task(make: Callable[[str, Any], Task], *, tokens_are_text: bool, **sources: Any) -> Task:
    """Return the task for the argument that says what to ask. Raises InvalidJob unless exactly one argument says it.

    make: called with "prompt" or "messages" and its value; returns the task. If a template is given instead, the value
    is made from the template.
    tokens_are_text: whether control tokens in the answers that fill in a template are read as plain text.
    sources: the possible arguments by name; None for an argument that is not given.
    """
    given_names = [name for name, value in sources.items() if value is not None]
    if not given_names:
        name = next(iter(sources))
        raise InvalidJob(
            f"{name} is missing: give it, or {name}_template, which makes it from the answers of other jobs"
        )
    if len(given_names) > 1:
        raise InvalidJob(f"{' and '.join(given_names)} each say what to ask: give one of them")
    [name] = given_names
    if not name.endswith("_template"):
        return make(name, sources[name])
    filled_name = name.removesuffix("_template")
    return templated_task(
        name, sources[name], partial(make, filled_name), tokens_are_text=tokens_are_text
    )


def complete_task(
    prompt: object = None, *, prompt_template: object = None, model: object = None, **options: Any
) -> Task:
    """Return the task of `jobs.complete`. Raises InvalidJob."""
    model_name = parse_model(model)
    arguments, repairs, way_options = _split_options(options)
    refuse_chat_options(arguments)
    tokens_are_text = splits_control_tokens(arguments)
    arguments.pop(SPLIT_TOKENS, None)  # the engine does not know this option
    sampling, response_options = completion_options(arguments)
    check_repairs(repairs, sampling, prompt_only=response_options.prompt_only)
    way = _checked_way(way_options, sampling, repairs, tools=[])

    def task(_: str, value: object) -> PromptTask:
        """Return the task for prompts that stand in the job, or that were made from a template."""
        prompts = parse_prompts(value)
        check_choices(len(prompts), sampling)
        has_token_ids = any(isinstance(prompt, list) for prompt in prompts)
        if repairs.check is not None and has_token_ids:
            raise InvalidJob(
                "check and a prompt of token ids do not go together, because a check's reason is a text: "
                "give the prompt as a text"
            )
        requests: list[Request | Unusable] = []
        for prompt in prompts:
            if isinstance(prompt, Unusable):
                requests.append(prompt)
            else:
                requests.append(Request(prompt=prompt, messages=None, sampling=sampling))
        return PromptTask(
            _seeded(requests),
            partial(text_completion, options=response_options),
            model_name,
            sampling,
            repairs,
            tokens_are_text=tokens_are_text,
            way=way,
        )

    return asked_task(
        task, tokens_are_text=tokens_are_text, prompt=prompt, prompt_template=prompt_template
    )


def chat_task(
    messages: object = None,
    *,
    messages_template: object = None,
    model: object = None,
    **options: Any,
) -> Task:
    """Return the task of `jobs.chat`. Raises InvalidJob."""
    model_name = parse_model(model)
    arguments, repairs, way_options = _split_options(options)
    arguments, chat_options = split_chat_options(arguments)
    sampling, response_options = chat_response_options(arguments)
    check_repairs(repairs, sampling, has_tools="tools" in chat_options)
    way = _checked_way(way_options, sampling, repairs, tools=chat_options.get("tools", []))

    def task(messages: Parts) -> PromptTask:
        """Return the task for a chat whose pictures are loaded."""
        request = Request(
            prompt=None, messages=messages, sampling=sampling, chat_options=chat_options
        )
        respond = partial(chat_completion, options=response_options)
        return PromptTask([request], respond, model_name, sampling, repairs, way=way)

    def parsed(_: str, value: object) -> Task:
        """Return the task for messages that stand in the job, or that were made from a template."""
        return pictured_task(normal_messages(value), task)

    return asked_task(
        parsed, tokens_are_text=True, messages=messages, messages_template=messages_template
    )
