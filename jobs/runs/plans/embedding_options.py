"""Options of a run that asks for embeddings or labels, and what they go together with."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jobs.common.display import MAX_SHOWN_CHARS, brief
from jobs.context.served_model import ServedModel
from jobs.errors import InvalidJob, InvalidValue
from jobs.prompts.messages import NAMES as CHAT_NAMES

GENERATE, EMBED = TASKS = ("generate", "embed")

#: Of a shard's embeddings together, all held until its part is written: 4 bytes each.
MAX_NUMBERS = 1 << 26


def check_served(
    task: str, dimensions: int | None, prompt_name: str | None, model: ServedModel, rows_per_shard: int
) -> None:
    """Raise InvalidJob where the served model gives no such embeddings, or a shard would hold too many."""
    if task == EMBED and not model.embedding_size:
        raise InvalidJob(
            f"the worker serves {model.name!r}, which gives no embeddings: it has no modules.json that says "
            "how, and TOKENMILL_POOLING is not set"
        )
    if dimensions is not None and dimensions > model.embedding_size:
        raise InvalidJob(f"dimensions is {dimensions}, and embeddings of {model.name!r} have {model.embedding_size}")
    if prompt_name is not None and prompt_name not in model.embedding_prompts:
        raise InvalidValue(
            "prompt_name is {}, and {} has {}",
            brief(prompt_name),
            brief(model.name),
            ", ".join(model.embedding_prompts)[:MAX_SHOWN_CHARS] or "none",
        )
    size = dimensions or model.embedding_size
    if task == EMBED and size * rows_per_shard > MAX_NUMBERS:
        raise InvalidJob(
            f"embeddings of {size} numbers make more than {MAX_NUMBERS} of a shard of {rows_per_shard} rows: "
            f"give at most {MAX_NUMBERS // size} rows_per_shard"
        )


#: Of a shard's rows together, all held until its part is written: 88 bytes each.
MAX_PROBABILITIES = 4_000_000

#: What embeddings have not; of labels other checks say it.
_OF_ANSWERS = ("labels", "calibrate", "check", "check_columns", "continue_on_length", "repair_template")

#: Sampling values that say how a prompt is read, and nothing of an answer.
OF_PROMPTS = ("truncate_prompt_tokens", *CHAT_NAMES)


def check_read(values: Iterable[str], what: str, read: Collection[str], whose: str = "sampling") -> None:
    """Raise InvalidValue for a sampling value that says something of an answer. what: is asked for."""
    for name in values:
        if name not in read:
            raise InvalidValue(f"{whose} has {{}}, and for {what} nothing is generated: leave it out", brief(name))


def check_nothing_generated(options: Mapping[str, Any], *, is_chat: bool) -> None:
    """Raise InvalidJob for what a run cannot have that asks for labels or embeddings. options: the run's."""
    task, labels, rows_per_shard = (options[name] for name in ("task", "labels", "rows_per_shard"))
    if task == EMBED and is_chat:
        raise InvalidJob("embeddings are of texts: give prompt_column or a template that is a text")
    if task != EMBED and labels is None:
        return
    if labels is not None and len(labels) * rows_per_shard > MAX_PROBABILITIES:
        raise InvalidJob(
            f"{len(labels)} labels make more than {MAX_PROBABILITIES} probabilities of a shard of "
            f"{rows_per_shard} rows: give at most {MAX_PROBABILITIES // len(labels)} rows_per_shard"
        )
    has_prompts = bool(options["prompts"])  # of which all but the last are answered
    if task == EMBED:
        check_read(options["sampling"], "embeddings", OF_PROMPTS[:1])
    elif not has_prompts:
        check_read(options["sampling"], "labels", OF_PROMPTS)
    elif options["calibrate"]:
        raise InvalidJob("calibrate and prompts do not go together: without content, earlier prompts have no answers")
    for name in ("sampling_columns", *(("prompts", *_OF_ANSWERS) if task == EMBED else ())):
        if options[name]:
            kind = "task 'embed'" if task == EMBED else "labels"
            raise InvalidJob(f"{name} and {kind} do not go together: nothing is generated")
