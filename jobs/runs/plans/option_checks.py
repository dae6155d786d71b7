"""Checks of a run's smaller options, each brought into one form. Needs no pyarrow."""

from collections.abc import Mapping, Sequence
from typing import Any

from jobs.common.display import MAX_NAME_CHARS, brief, is_unicode
from jobs.context.check_options import split_repair_options
from jobs.errors import InvalidJob, InvalidValue, unlike
from jobs.prompts.arguments import checked_text
from jobs.prompts.response_options import NAMES as RESPONSE_NAMES


def column_name(argument: str, value: Any) -> str:
    """Return what can be the name of a column. Raises InvalidValue."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
        raise unlike(argument, value, f"the name of a column, at most {MAX_NAME_CHARS} characters")
    return value


def optional_column(argument: str, value: Any) -> str | None:
    """Return what can be the name of a column; None stays None. Raises InvalidValue."""
    return None if value is None else column_name(argument, value)


def column_names(argument: str, value: Any) -> list[str] | None:
    """Return the columns of a list, each once and sorted: their order changes nothing. None stays None."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise unlike(argument, value, f"""a list of columns: on the command line of RQ write {argument}:='["id"]'""")
    return sorted({column_name(f"a column of {argument}", each) for each in value})


def output_prefix(value: Any) -> str:
    """Return the text that stands before the names of the added columns. Raises InvalidValue."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
        raise unlike("output_prefix", value, f"a text of at most {MAX_NAME_CHARS} characters")
    if not is_unicode(value):
        raise InvalidJob("output_prefix is not valid Unicode: it holds half of a surrogate pair")
    return value


def whole_number(argument: str, value: Any, most: int | None = None) -> int:
    """Return a number from 1 on. Raises InvalidValue."""
    if isinstance(value, str):
        raise InvalidValue(f"{argument} arrived as the text {{}}: write {argument}:=1000", brief(value))
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most and value > most):
        until = "on" if most is None else f"to {most}"
        raise unlike(argument, value, f"an integer from 1 {until}")
    return value


def one_of(argument: str, value: Any, known: Sequence[str]) -> str:
    """Return which of some texts a value is, by default the first. Raises InvalidValue."""
    if value is None:
        return known[0]
    if value not in known:
        raise unlike(argument, value, " or ".join(map(repr, known)))
    return str(value)


def truth(name: str, value: Any) -> bool:
    """Return whether an option is wished for. Raises InvalidValue."""
    if value is not None and not isinstance(value, bool):
        raise unlike(name, value, f"true or false: write {name}:=true")
    return bool(value)


def reused(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run does with rows that earlier ones have answered, as fields of a RunSpec. Raises InvalidJob."""
    column = optional_column("reused_column", options.get("reused_column"))
    return {"only_new": truth("only_new", options.get("only_new")), "reused_column": column}


def order(options: Mapping[str, Any]) -> str | None:
    """Return by what a run's rows are sorted; None for the input's order. Raises InvalidValue or InvalidJob."""
    if options.get("order") is None:
        return None
    if options.get("only_new"):
        raise InvalidJob("order sorts the rows of a whole run, and only_new leaves some out: give one of them")
    return one_of("order", options["order"], ["prefix"])


#: What a run of batch files may be given as well.
_BESIDE_BATCHES = ("input_format", "limit", "model_alias", "only_new", "rows_per_shard")

#: The same of what its own arguments are in their normal form.
_OF_BATCHES = {"prompt_column": ("prompt",), "keep": (["custom_id"],), "single_file": (True, "openai-batch")}


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


def model_alias(value: Any, is_batch: bool) -> list[str] | None:
    """Return names for the served model in lines of batch files; None for none. Raises InvalidJob."""
    if value is None or value == []:
        return None
    if not is_batch:
        raise InvalidJob("model_alias is for batch files, whose lines name a model: input_format openai-batch")
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise unlike("model_alias", value, 'names such as ["gpt-4o-mini"], or ["*"]')
    return value


def sampling_columns(value: Any) -> dict[str, str]:
    """Return for names of sampling values the columns that hold each row's. Raises InvalidJob."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise unlike("sampling_columns", value, 'a mapping such as {"max_tokens": "limit"}')
    for name in value:
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARS:
            raise InvalidValue("sampling_columns has {}, expected the name of a sampling value", brief(name))
        if name == "n":
            raise InvalidJob("n cannot come from a column: all rows of a run have as many completions")
        if name in RESPONSE_NAMES:
            raise InvalidJob(f"{name} cannot come from a column: the output has the same columns for all rows")
    return {name: column_name(f"the column for {name}", column) for name, column in sorted(value.items())}


#: How exactly log probabilities are written; the first by default.
LOGPROB_TYPES = ("float32", "float16")


def defaults(value: Any, has_template: bool) -> dict[str, str]:
    """Return for columns of a run's templates what stands for null. Raises InvalidJob."""
    if value is None or value == {}:
        return {}
    if not isinstance(value, dict):
        raise unlike("defaults", value, 'a mapping such as {"name": "nobody"}')
    if not has_template:
        raise InvalidJob("defaults stand for null in a template, and there is none: give a template too")
    for column, text in value.items():
        checked_text(text, f"the default of column {brief(column)}")
    return {column_name("a column of defaults", column): text for column, text in sorted(value.items())}


TEMPLATE_FORMATS = ("fields", "jinja")


def template_format(options: Mapping[str, Any]) -> str:
    """Return how a template is written. Raises InvalidJob."""
    value = one_of("template_format", options.get("template_format"), TEMPLATE_FORMATS)
    if value == "jinja" and options.get("prompts") is not None:
        raise InvalidJob("template_format is 'jinja', and prompts have {column} templates alone: leave it out")
    if value == "jinja" and options.get("template") is None:
        raise InvalidJob("template_format says how a template is written, and there is none: give one too")
    return value


def repairs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is asked of the answers, as fields of a RunSpec. Raises InvalidJob."""
    _, found = split_repair_options(options)
    columns = column_names("check_columns", options.get("check_columns"))
    if columns is not None and found.function is None:
        raise InvalidJob("check_columns are for a function that checks, and there is none")
    return {
        "check": found.check,
        "check_columns": columns,
        "max_attempts": found.max_attempts,
        "continue_on_length": found.continue_on_length,
        "repair_template": found.template,
    }
