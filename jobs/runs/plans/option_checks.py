"""Checks of a run's smaller options, each by its name, and brought into one form. Needs no pyarrow."""

from collections.abc import Mapping
from typing import Any

from jobs.common.display import MAX_NAME_CHARS, brief
from jobs.context.values import column_name
from jobs.errors import InvalidJob, InvalidValue, unlike
from jobs.prompts.arguments import checked_text
from jobs.prompts.response_options import NAMES as RESPONSE_NAMES

#: How exactly log probabilities are written, and how templates are; the first by default.
LOGPROB_TYPES = ("float32", "float16")
TEMPLATE_FORMATS = ("fields", "jinja")


def column_names(name: str, value: Any) -> list[str]:
    """Return the columns of a list, each once and sorted: their order changes nothing. Raises InvalidValue."""
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise unlike(name, value, f"""a list of columns: on the command line of RQ write {name}:='["id"]'""")
    return sorted({column_name(f"a column of {name}", each) for each in value})


def share(name: str, value: Any) -> float:
    """Return a number above 0, and at most 1. Raises InvalidValue."""
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise unlike(name, value, "a number above 0, at most 1")
    return float(value)


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


def model_alias(name: str, value: Any) -> list[str] | None:
    """Return names for the served model in lines of batch files; None for none. Raises InvalidValue."""
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise unlike(name, value, 'names such as ["gpt-4o-mini"], or ["*"]')
    return value or None


def sampling_columns(name: str, value: Any) -> dict[str, str]:
    """Return for names of sampling values the columns that hold each row's. Raises InvalidJob."""
    if not isinstance(value, dict):
        raise unlike(name, value, 'a mapping such as {"max_tokens": "limit"}')
    for each in value:
        if not isinstance(each, str) or len(each) > MAX_NAME_CHARS:
            raise InvalidValue(f"{name} has {{}}, expected the name of a sampling value", brief(each))
        if each == "n":
            raise InvalidJob("n cannot come from a column: all rows of a run have as many completions")
        if each in RESPONSE_NAMES:
            raise InvalidJob(f"{each} cannot come from a column: the output has the same columns for all rows")
    return {each: column_name(f"the column for {each}", column) for each, column in sorted(value.items())}


def defaults(name: str, value: Any) -> dict[str, str]:
    """Return for columns of a run's templates what stands for null. Raises InvalidJob."""
    if not isinstance(value, dict):
        raise unlike(name, value, 'a mapping such as {"name": "nobody"}')
    for column, text in value.items():
        checked_text(text, f"the default of column {brief(column)}")
    return {column_name(f"a column of {name}", column): text for column, text in sorted(value.items())}
