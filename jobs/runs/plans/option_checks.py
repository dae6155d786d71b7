"""Checks of a run's options: of the smaller ones, each brought into one form, and of what goes together with what."""

from collections.abc import Collection, Mapping
from typing import Any

from jobs.common.display import MAX_NAME_CHARS, MAX_SHOWN_CHARS, brief
from jobs.context.served_model import ServedModel
from jobs.context.values import column_name
from jobs.errors import InvalidJob, InvalidValue, check_limit, unlike
from jobs.prompts.arguments import checked_text
from jobs.prompts.messages import NAMES as CHAT_NAMES
from jobs.prompts.messages import forces_call
from jobs.prompts.response_options import NAMES as RESPONSE_NAMES
from jobs.runs.plans.names import OPENAI_BATCH

#: How exactly log probabilities are written, and how templates are; the first by default.
LOGPROB_TYPES = ("float32", "float16")
TEMPLATE_FORMATS = ("fields", "jinja")


def column_names(name: str, value: Any) -> list[str]:
    """Return the columns of a list, each once and sorted: their order changes nothing. Raises InvalidValue."""
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise unlike(
            name, value, f"""a list of columns: on the command line of RQ write {name}:='["id"]'"""
        )
    return sorted({column_name(f"a column of {name}", each) for each in value})


def image_columns(name: str, value: Any) -> list[str] | None:
    if not isinstance(value, str | list | tuple):
        raise unlike(name, value, "a column, or a list of columns")
    names = [value] if isinstance(value, str) else value
    return list(dict.fromkeys(column_name(f"a column of {name}", each) for each in names)) or None


#: What a run of batch files may be given as well.
_BESIDE_BATCHES = ("encoding", "input_format", "limit", "model_alias", "only_new", "rows_per_shard")
#: Arguments that such a run has in its normal form, with the values that they have there.
_OF_BATCHES = {
    "prompt_column": ("prompt",),
    "keep": (["custom_id"],),
    "single_file": (True, "openai-batch"),
}


def check_batch(arguments: Mapping[str, Any]) -> None:
    """Raise InvalidJob for an argument that the lines of batch files say, or that fits no such run."""
    for name, value in arguments.items():
        if name in _BESIDE_BATCHES or value in (None, False, "", [], {}):
            continue
        if name == "sampling" and isinstance(value, dict) and value.keys() == {"seed"}:
            continue  # the run's, for the lines that name none
        if value not in _OF_BATCHES.get(name, ()):
            raise InvalidJob(
                f"{name} and a batch file: its lines say what is asked, and its output has OpenAI's form: "
                "leave it out, or score the file as jsonl"
            )


def model_alias(name: str, value: Any) -> list[str] | None:
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise unlike(name, value, 'names such as ["gpt-4o-mini"], or ["*"]')
    return value or None


def sampling_columns(name: str, value: Any) -> dict[str, str]:
    """Return for names of sampling values the columns that hold each row's. Raises InvalidJob."""
    if not isinstance(value, dict):
        raise unlike(name, value, 'a mapping such as {"max_tokens": "limit"}')
    for each in value:
        if not isinstance(each, str) or len(each) > MAX_NAME_CHARS:
            raise InvalidValue(
                f"{name} has {{}}, expected the name of a sampling value", brief(each)
            )
        if each == "n":
            raise InvalidJob(
                "n cannot come from a column: all rows of a run have as many completions"
            )
        if each in CHAT_NAMES and each != "tools":
            raise InvalidJob(
                f"{each} cannot come from a column: give one for all rows, in sampling"
            )
        if each in RESPONSE_NAMES:
            raise InvalidJob(
                f"{each} cannot come from a column: the output has the same columns for all rows"
            )
    return {
        each: column_name(f"the column for {each}", column)
        for each, column in sorted(value.items())
    }


def defaults(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise unlike(name, value, 'a mapping such as {"name": "nobody"}')
    for column, text in value.items():
        checked_text(text, f"the default of column {brief(column)}")
    return {
        column_name(f"a column of {name}", column): text for column, text in sorted(value.items())
    }


GENERATE, EMBED, CLASSIFY, RERANK = TASKS = ("generate", "embed", "classify", "rerank")
#: Of a shard's rows together, all held until its part is written: numbers of 4 bytes, probabilities of 88.
MAX_NUMBERS, MAX_PROBABILITIES = 1 << 26, 4_000_000


def check_shard(count: int, what: str, rows: int, most: int) -> None:
    """Raise InvalidJob where a shard of so many rows, each with `count` of something, has more than `most`."""
    check_limit(
        count * rows,
        most,
        f"{count} {what} make {{}} in a shard of {rows} rows",
        "give fewer rows_per_shard",
    )


def check_served(options: Mapping[str, Any], model: ServedModel) -> None:
    """Raise InvalidJob where the served model does no such thing, or a shard would hold too much. options: a run's."""
    task, dimensions, prompt_name = (
        options[name] for name in ("task", "dimensions", "prompt_name")
    )
    rows_per_shard = options["rows_per_shard"]
    if options["image_column"] and not model.reads_pictures:
        raise InvalidJob(f"the worker serves {model.name!r}, which reads no pictures")
    if task == GENERATE and options["input_format"] != OPENAI_BATCH and not model.generates:
        raise InvalidJob(
            f"the worker serves {model.name!r}, which has no LM head: it embeds or classifies"
        )
    if task == EMBED and not model.embedding_size:
        raise InvalidJob(
            f"the worker serves {model.name!r}, which gives no embeddings: it has no modules.json that says "
            "how, and TOKENMILL_POOLING is not set"
        )
    if task == CLASSIFY:
        if not model.classes:
            raise InvalidJob(
                f"the worker serves {model.name!r}, which has no sequence-classification head"
            )
        check_shard(len(model.classes), "labels", rows_per_shard, MAX_PROBABILITIES)
    if task == RERANK:
        model.check_ranks()
    if dimensions is not None and dimensions > model.embedding_size:
        raise InvalidJob(
            f"dimensions is {dimensions}, and embeddings of {model.name!r} have {model.embedding_size}"
        )
    if prompt_name is not None and prompt_name not in model.embedding_prompts:
        raise InvalidValue(
            "prompt_name is {}, and {} has {}",
            brief(prompt_name),
            brief(model.name),
            ", ".join(model.embedding_prompts)[:MAX_SHOWN_CHARS] or "none",
        )
    if task == EMBED:
        check_shard(
            dimensions or model.embedding_size,
            "numbers of an embedding",
            rows_per_shard,
            MAX_NUMBERS,
        )


_OF_ANSWERS = (
    "labels",
    "calibrate",
    "check",
    "check_columns",
    "continue_on_length",
    "repair_template",
)
#: Sampling values that say how a prompt is read, and nothing of an answer.
OF_PROMPTS = ("truncate_prompt_tokens", *CHAT_NAMES)


def check_read(
    values: Mapping[str, Any], what: str, read: Collection[str], whose: str = "sampling"
) -> None:
    """Raise InvalidValue for a sampling value that says something of an answer. what: the kind of ask."""
    for name in values:
        if name not in read or (name == "tool_choice" and forces_call(values)):
            raise InvalidValue(
                f"{whose} has {{}}, and for {what} nothing is generated: leave it out", brief(name)
            )


def check_nothing_generated(options: Mapping[str, Any], *, is_chat: bool) -> None:
    """Raise InvalidJob for what a run cannot have that asks for labels or another task. options: the run's."""
    task, labels, rows_per_shard = (options[name] for name in ("task", "labels", "rows_per_shard"))
    has_task = task != GENERATE
    if has_task and is_chat:
        raise InvalidJob(
            f"task {task!r} is of texts: give prompt_column or a template that is a text"
        )
    if not has_task and labels is None:
        return
    check_shard(len(labels or ()), "labels", rows_per_shard, MAX_PROBABILITIES)
    has_prompts = bool(options["prompts"])  # of which all but the last are answered
    if has_task:
        check_read(options["sampling"], f"task {task!r}", () if task == RERANK else OF_PROMPTS[:1])
    elif not has_prompts:
        check_read(options["sampling"], "labels", OF_PROMPTS)
    elif options["calibrate"]:
        raise InvalidJob(
            "calibrate and prompts do not go together: without content, earlier prompts have no answers"
        )
    for name in ("sampling_columns", *(("prompts", *_OF_ANSWERS) if has_task else ())):
        if options[name]:
            kind = f"task {task!r}" if has_task else "labels"
            raise InvalidJob(f"{name} and {kind} do not go together: nothing is generated")
