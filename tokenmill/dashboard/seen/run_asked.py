"""Reads the arguments with which a run was submitted, from its planning job. Redis keeps that job for a week."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis import Redis

from jobs.common import rq_jobs
from jobs.common.display import MAX_TEXT_CHARS, printable, safe_name
from jobs.runs.watching.snapshot import RunSnapshot
from tokenmill.dashboard.seen.jobs_seen import MAX_PAYLOAD_BYTES, payload

#: Arguments that may quote prompts. They are shown only if prompts may be shown.
PROMPTS = ("template", "prompts", "defaults", "repair_template", "labels", "prompt_name", "check")
#: Arguments that the page shows apart from the other options.
_SHOWN_APART = ("input", "output", "sampling", "queue")
#: The most inputs, and the most options, that are shown.
MAX_SHOWN = 50


@dataclass(frozen=True)
class RunArguments:
    """The arguments with which a run was submitted. Texts are safe to show.

    inputs: files, folders and globs. sampling: sampling parameters by name. options: all other arguments by name.
    prompts: the arguments of PROMPTS by name; {} if prompts may not be shown. has_prompts: whether the run has such
    arguments. command: the command that submits the same run; "" if it is not known, or would show prompts.
    """

    inputs: tuple[str, ...]
    sampling: dict[str, str]
    options: dict[str, str]
    prompts: dict[str, str]
    has_prompts: bool
    command: str


def read_arguments(
    connection: Redis, run: RunSnapshot, *, with_prompts: bool
) -> RunArguments | None:
    """Return a run's arguments; None if its planning job is gone, or is too large to be read. Raises RedisError.

    with_prompts: whether prompts may be shown.
    """
    if run.plan_job is None:
        return None
    key = rq_jobs.job_key(run.plan_job)
    num_bytes: Any = connection.hstrlen(key, "data")
    if not 0 < num_bytes <= MAX_PAYLOAD_BYTES:
        return None
    arguments = payload(connection.hget(key, "data")).get("kwargs")
    if not isinstance(arguments, dict):
        return None
    sampling = arguments.get("sampling")
    prompts = {name: arguments[name] for name in PROMPTS if name in arguments}
    return RunArguments(
        inputs=tuple(safe_name(name, MAX_TEXT_CHARS) for name in _inputs(arguments)[:MAX_SHOWN]),
        sampling=_texts(sampling) if isinstance(sampling, dict) else {},
        options=_texts(arguments, without=(*PROMPTS, *_SHOWN_APART)),
        prompts=_texts(prompts) if with_prompts else {},
        has_prompts=bool(prompts),
        command=submit_command(arguments, run.queue, with_prompts=with_prompts),
    )


#: Arguments that `tokenmill submit` takes as options with a value.
_VALUES = frozenset(
    {
        "decimal",
        "delimiter",
        "dimensions",
        "document_column",
        "encoding",
        "filename_column",
        "input_format",
        "limit",
        "logprob_type",
        "max_attempts",
        "max_errors",
        "messages_column",
        "model",
        "on_end",
        "order",
        "output_prefix",
        "priority",
        "prompt_column",
        "query_column",
        "reused_column",
        "rows_per_shard",
        "task",
        "template",
        "template_format",
        "webhook",
    }
)
#: Arguments that `tokenmill submit` takes as options without a value.
_FLAGS = ("calibrate", "continue_on_length", "only_new", "inline_pictures", "reuse_from_any_model")


def submit_command(arguments: Mapping[str, Any], queue: str, *, with_prompts: bool) -> str:
    """Return the command that submits a run with these arguments.

    Return "" if an argument is not known here, or if an argument is one of PROMPTS and prompts may not be shown.
    """
    words = ["tokenmill", "submit"]
    for name, value in arguments.items():
        if value is None or name in ("input", "output", "queue"):
            continue
        if name in PROMPTS and not with_prompts:
            return ""
        option = f"--{name.replace('_', '-')}"
        if name == "sampling" and isinstance(value, dict):
            if value:
                words += [option, json.dumps(value, ensure_ascii=False)]
        elif name == "reuse" and isinstance(value, list):
            for folder in value:
                words += [option, str(folder)]
        elif name in _FLAGS and isinstance(value, bool):
            if value:
                words.append(option)
        elif name in _VALUES and type(value) in (str, int, float):
            words += [option, str(value)]
        else:
            return ""
    words += ["--queue", queue, *_inputs(arguments), str(arguments.get("output"))]
    return printable(shlex.join(words))


def _inputs(arguments: Mapping[str, Any]) -> list[str]:
    """Return a run's inputs. A run that was submitted with one input may have it as a text instead of a list."""
    inputs = arguments.get("input")
    if not isinstance(inputs, list):
        inputs = [inputs]
    return [str(name) for name in inputs]


def _texts(values: Mapping[str, Any], without: tuple[str, ...] = ()) -> dict[str, str]:
    """Return values as texts that are safe to show, by name. Leave out None, and the names in `without`."""
    texts = {}
    for name, value in list(values.items())[:MAX_SHOWN]:
        if name in without or value is None:
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        texts[safe_name(name, 60)] = printable(text[:MAX_TEXT_CHARS], allowed="\n")
    return texts


def quoted(text: str) -> str:
    """Return a text in quotes, as one word of a shell command."""
    return shlex.quote(text)
