"""Reads what a run asks, from the job that planned it. Redis keeps that for a week."""

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

#: Arguments that hold words of prompts. They are shown only where prompts are.
PROMPTS = ("template", "prompts", "defaults", "repair_template", "labels", "prompt_name", "check")
#: Arguments that a page tells elsewhere.
_ELSEWHERE = ("input", "output", "sampling", "queue")
MAX_SHOWN = 50


@dataclass(frozen=True)
class Asked:
    """What a run asks. Texts are safe to show.

    inputs: files, folders and globs. sampling, options: names with values. prompts: the arguments with words of
    prompts, by name; empty unless they may be shown. has_prompts: whether there are such arguments. command: it submits
    the same run; "" if it is not known, or would show prompts.
    """

    inputs: tuple[str, ...]
    sampling: dict[str, str]
    options: dict[str, str]
    prompts: dict[str, str]
    has_prompts: bool
    command: str


def read_asked(connection: Redis, run: RunSnapshot, *, with_prompts: bool) -> Asked | None:
    """Return what a run asks; None if its planning job is gone, or says too much to be read. Raises RedisError."""
    if run.plan_job is None:
        return None
    key = rq_jobs.job_key(run.plan_job)
    num_bytes: Any = connection.hstrlen(key, "data")
    if not 0 < num_bytes <= MAX_PAYLOAD_BYTES:
        return None
    arguments = payload(connection.hget(key, "data")).get("kwargs")
    if not isinstance(arguments, dict):
        return None
    inputs = arguments.get("input")
    names = inputs if isinstance(inputs, list) else [inputs]
    sampling = arguments.get("sampling")
    return Asked(
        tuple(safe_name(str(name), MAX_TEXT_CHARS) for name in names[:MAX_SHOWN]),
        _shown(sampling if isinstance(sampling, dict) else {}),
        _shown(arguments, without=(*PROMPTS, *_ELSEWHERE)),
        _shown({name: arguments[name] for name in PROMPTS if name in arguments})
        if with_prompts
        else {},
        any(name in arguments for name in PROMPTS),
        submit_command(arguments, run.queue, with_prompts=with_prompts),
    )


#: Arguments that `tokenmill submit` takes as options with one value, and as options without.
_VALUES = (
    *(
        "prompt_column",
        "messages_column",
        "template",
        "template_format",
        "input_format",
        "encoding",
    ),
    *("delimiter", "decimal", "filename_column", "rows_per_shard", "limit", "order", "model"),
    *("max_errors", "task", "query_column", "document_column", "dimensions", "output_prefix"),
    *("logprob_type", "max_attempts", "reused_column", "webhook", "on_end", "priority"),
)
_FLAGS = ("calibrate", "continue_on_length", "only_new", "inline_pictures", "reuse_from_any_model")


def submit_command(arguments: Mapping[str, Any], queue: str, *, with_prompts: bool) -> str:
    """Return the command that submits a run with these arguments; "" if it has one whose option is not known here."""
    words = ["tokenmill", "submit"]
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if value is None or name in ("input", "output", "queue"):
            continue
        if name in PROMPTS and not with_prompts:
            return ""
        if name == "sampling" and isinstance(value, dict):
            words += [option, json.dumps(value, ensure_ascii=False)] if value else []
        elif name == "reuse" and isinstance(value, list):
            for folder in value:
                words += [option, str(folder)]
        elif name in _FLAGS and isinstance(value, bool):
            words += [option] if value else []
        elif name in _VALUES and type(value) in (str, int, float):
            words += [option, str(value)]
        else:
            return ""
    inputs = arguments.get("input")
    names = inputs if isinstance(inputs, list) else [inputs]
    words += ["--queue", queue, *map(str, names), str(arguments.get("output"))]
    return printable(shlex.join(words))


def _shown(values: Mapping[str, Any], without: tuple[str, ...] = ()) -> dict[str, str]:
    """Return values as texts by name. None stands for a value that was not given."""
    shown = {}
    for name, value in list(values.items())[:MAX_SHOWN]:
        if name in without or value is None:
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        shown[safe_name(name, 60)] = printable(text[:MAX_TEXT_CHARS], allowed="\n")
    return shown


def quoted(text: str) -> str:
    """Return a text as a shell takes it for one word."""
    return shlex.quote(text)
