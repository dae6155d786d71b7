"""Brings options of a run into one form, and refuses options that cannot be combined."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jobs.common.display import MAX_NAME_CHARS, brief
from jobs.context.adapters import ADAPTER
from jobs.context.served_model import ServedModel
from jobs.context.values import check_shard, column_name
from jobs.errors import InvalidJob, InvalidValue, wrong_value_error
from jobs.prompts.arguments import checked_text
from jobs.prompts.messages import CHAT_OPTIONS, forces_call
from jobs.prompts.responses import RESPONSE_NAMES
from jobs.prompts.scoring.kind import MAX_PROBABILITIES, TRUNCATION
from jobs.prompts.scoring.table import RUN_SCORINGS
from jobs.runs.plans.names import OPENAI_BATCH

#: The types in which log probabilities are written. The first is the default.
LOGPROB_TYPES = ("float32", "float16")
#: The languages of templates. The first is the default.
TEMPLATE_FORMATS = ("fields", "jinja")
MAP = "map"
STRUCT = "struct"
#: The forms in which the probabilities of labels are written. The first is the default.
PROBABILITIES = (MAP, STRUCT)
#: The most labels of a struct. Each is a column of the file.
MAX_STRUCT_LABELS = 1000


def column_names(name: str, value: Any) -> list[str]:
    """Return the names in a list of columns, each once and in alphabetical order. Raises InvalidValue."""
    if not isinstance(value, list | tuple):
        raise wrong_value_error(
            name,
            value,
            f"""a list of columns such as ["id"]; on the command line of RQ, {name}:='["id"]'""",
        )
    return sorted({column_name(f"a column of {name}", column) for column in value})


def image_columns(name: str, value: Any) -> list[str] | None:
    """Return the columns of pictures, each once; None for an empty list. Raises InvalidValue."""
    if not isinstance(value, str | list | tuple):
        raise wrong_value_error(name, value, "a column, or a list of columns")
    names = [value] if isinstance(value, str) else value
    columns = [column_name(f"a column of {name}", column) for column in names]
    return list(dict.fromkeys(columns)) or None


#: Arguments that a run of batch files may have with any value.
_BESIDE_BATCHES = (
    "batch_endpoint",
    "drop_unsupported",
    "encoding",
    "inline_pictures",
    "input_format",
    "limit",
    "model_alias",
    "only_new",
    "rows_per_shard",
)
#: Arguments that RunSpec sets itself in a run of batch files, each with the values that a producer may give.
_BATCH_VALUES = {
    "prompt_column": ("prompt",),
    "keep": (["custom_id"],),
    "single_file": (True, "openai-batch"),
}


def check_batch(arguments: Mapping[str, Any]) -> None:
    """Raise InvalidJob for an argument that a run of batch files cannot have, such as one that the files' lines set."""
    for name, value in arguments.items():
        is_empty = value in (None, False, "", [], {})
        if name in _BESIDE_BATCHES or is_empty:
            continue
        if name == "sampling" and isinstance(value, dict) and value.keys() == {"seed"}:
            continue  # lines without a seed use the run's seed
        usable_values = _BATCH_VALUES.get(name, ())
        if value not in usable_values:
            raise InvalidJob(
                f"{name} and a batch file do not go together: the file's lines say what is asked, and the output has "
                f"OpenAI's form: leave {name} out, or score the file as jsonl"
            )


def model_alias(name: str, value: Any) -> list[str] | None:
    """Return the names that stand for the served model; None for an empty list. Raises InvalidValue."""
    are_names = False
    if isinstance(value, list):
        are_names = all(isinstance(alias, str) and alias for alias in value)
    if not are_names:
        raise wrong_value_error(name, value, 'names such as ["gpt-4o-mini"], or ["*"]')
    return value or None


def batch_endpoint(name: str, value: Any) -> str | None:
    """Return the endpoint that the lines of batch files must ask for. Raises InvalidValue."""
    if not isinstance(value, str) or not value.startswith("/v1/"):
        raise wrong_value_error(name, value, "an endpoint such as '/v1/chat/completions'")
    return value


def sampling_columns(name: str, value: Any) -> dict[str, str]:
    """Return the columns of sampling values, by the names of the values. Raises InvalidJob."""
    if not isinstance(value, dict):
        raise wrong_value_error(name, value, 'a mapping such as {"max_tokens": "limit"}')
    for sampling_name in value:
        if not isinstance(sampling_name, str) or len(sampling_name) > MAX_NAME_CHARS:
            raise InvalidValue(
                f"{name} has {{}}, expected the name of a sampling value", brief(sampling_name)
            )
        _check_from_column(sampling_name)
    columns = {}
    for sampling_name in sorted(value):
        columns[sampling_name] = column_name(
            f"the column for {sampling_name}", value[sampling_name]
        )
    return columns


def _check_from_column(sampling_name: str) -> None:
    """Raise InvalidJob for a sampling value that cannot come from a column."""
    if sampling_name == "n":
        raise InvalidJob(
            "n cannot come from a column: all rows of a run have the same number of completions"
        )
    if sampling_name in CHAT_OPTIONS and sampling_name != "tools":
        raise InvalidJob(
            f"{sampling_name} cannot come from a column: give one for all rows, in sampling"
        )
    if sampling_name in RESPONSE_NAMES:
        raise InvalidJob(
            f"{sampling_name} cannot come from a column: the output has the same columns for all rows"
        )


def defaults(name: str, value: Any) -> dict[str, str]:
    """Return the texts that stand for null, by column. Raises InvalidValue."""
    if not isinstance(value, dict):
        raise wrong_value_error(name, value, 'a mapping such as {"name": "nobody"}')
    for column, text in value.items():
        checked_text(text, f"the default of column {brief(column)}")  # raises if `text` is no text
    texts = {}
    for column, text in sorted(value.items()):
        texts[column_name(f"a column of {name}", column)] = text
    return texts


GENERATE = "generate"
EMBED = "embed"
RERANK = "rerank"
TASKS = (GENERATE, *RUN_SCORINGS)


def check_served(options: Mapping[str, Any], model: ServedModel) -> None:
    """Raise InvalidJob if the served model cannot do what a run asks for. options: the fields of RunSpec."""
    task = options["task"]
    if options["image_column"] and not model.reads_pictures:
        raise InvalidJob(f"the worker serves {model.name!r}, which reads no pictures")
    if task in RUN_SCORINGS:
        RUN_SCORINGS[task].check_served(options, model)
    elif options["input_format"] != OPENAI_BATCH and not model.generates:
        raise InvalidJob(
            f"the worker serves {model.name!r}, which has no LM head: it embeds or classifies"
        )


#: Options about answers that are generated.
_ANSWER_OPTIONS = (
    "labels",
    "calibrate",
    "check",
    "check_columns",
    "continue_on_length",
    "repair_template",
)
#: Sampling values that say how a prompt is read, and by which model. They do not shape an answer.
PROMPT_VALUES = (TRUNCATION, ADAPTER, *CHAT_OPTIONS)


def refuse_generation_values(
    values: Mapping[str, Any], request: str, allowed: Collection[str], owner: str = "sampling"
) -> None:
    """Raise InvalidValue for a sampling value that shapes generated answers. Call this where nothing is generated.

    allowed: the names of values that only say how a prompt is read.
    request: what is asked for in place of an answer, such as "labels". owner: the option that holds the values. The
    error names both.
    """
    for name in values:
        # A forced tool call has to be generated. Any other tool_choice only says how the prompt is read.
        is_forced_call = name == "tool_choice" and forces_call(values)
        if name not in allowed or is_forced_call:
            raise InvalidValue(
                f"{owner} has {{}}, and for {request} nothing is generated: leave it out",
                brief(name),
            )


def check_scoring_options(options: Mapping[str, Any], *, is_chat: bool) -> None:
    """Raise InvalidJob for options that cannot be combined with labels, or with a task that generates nothing."""
    task = options["task"]
    if task in RUN_SCORINGS:
        _check_task(task, options, is_chat=is_chat)
    elif options["labels"] is not None:
        _check_labels(options)


def _check_task(task: str, options: Mapping[str, Any], *, is_chat: bool) -> None:
    """Raise InvalidJob for options that a task such as embedding cannot have."""
    if is_chat:
        raise InvalidJob(
            f"task {task!r} is for texts: give prompt_column or a template that is a text"
        )
    request = f"task {task!r}"
    refuse_generation_values(
        options["sampling"], request=request, allowed=RUN_SCORINGS[task].run_sampling_names
    )
    _refuse(("sampling_columns", "prompts", *_ANSWER_OPTIONS), options, request)


def _check_labels(options: Mapping[str, Any]) -> None:
    """Raise InvalidJob for options that cannot be combined with labels."""
    check_shard(len(options["labels"]), "labels", options["rows_per_shard"], MAX_PROBABILITIES)
    if options["prompts"]:
        # Values for generation are allowed here, because the answers to all prompts but the last are generated.
        if options["calibrate"]:
            raise InvalidJob(
                "calibrate and prompts do not go together: calibrate asks a prompt without content, and answers to "
                "earlier prompts are content"
            )
    else:
        refuse_generation_values(options["sampling"], request="labels", allowed=PROMPT_VALUES)
    _refuse(("sampling_columns",), options, "labels")


def _refuse(names: Sequence[str], options: Mapping[str, Any], request: str) -> None:
    """Raise InvalidJob if one of these options has a value. request: the option that forbids them, for the error."""
    for name in names:
        if options[name]:
            raise InvalidJob(f"{name} and {request} do not go together: nothing is generated")
