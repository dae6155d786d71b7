"""Chooses some of a run's rows as examples, for its report."""

from collections.abc import Iterator
from itertools import islice

from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.output_file import part_rows
from jobs.parquet.outputs.part import answer_names
from jobs.parquet.prompts.sources import row_source
from jobs.runs.plans.plan import Plan
from jobs.runs.statistics.report import Examples

NUM_EXAMPLES = 5
#: The most parts that are searched for rows without an error.
NUM_PARTS = 3
#: Columns with such an ending are left out of examples, because they hold numbers or long exchanges.
_LEFT_OUT_ENDINGS = ("_tokens", "logprobs", "embedding", "messages")


def shown_columns(plan: Plan) -> list[str]:
    """Return the output's columns of answers and errors, without columns that are hard to read in a report."""
    return [name for name in answer_names(plan.spec) if not name.endswith(_LEFT_OUT_ENDINGS)]


def prompt_columns(plan: Plan) -> list[str]:
    """Return the input's columns that prompts were made of. Pictures and columns that the output lacks are left out."""
    spec = plan.spec
    left_out = {*(spec.image_column or ()), *(spec.drop or ())}
    columns = []
    for name in row_source(spec).columns:
        is_kept = spec.keep is None or name in spec.keep
        if is_kept and name not in left_out:
            columns.append(name)
    return columns


def examples_of(storage: Storage, plan: Plan, *, has_prompts: bool) -> Examples:
    """Return the answers of the first rows without an error. has_prompts: whether to return their prompts too."""
    error_column = f"{plan.spec.output_prefix}error"
    columns = [name for name in shown_columns(plan) if name != error_column]
    if has_prompts:
        columns = [*prompt_columns(plan), *columns]
    good_rows = _good_rows(storage, plan, [*columns, error_column], error_column)
    rows = []
    for number, values in islice(good_rows, NUM_EXAMPLES):
        rows.append((number, [values[name] for name in columns]))
    return Examples(columns, rows)


def _good_rows(
    storage: Storage, plan: Plan, columns: list[str], error_column: str
) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the rows without an error in the first parts, with their numbers in the run."""
    for shard in range(min(NUM_PARTS, len(plan.shards))):
        for row, values in part_rows(storage, plan, shard, columns):
            if values[error_column] is None:
                yield row, values
