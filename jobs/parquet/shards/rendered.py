"""The rows of a planned run as they are asked, shard by shard, for who looks at them beside the run."""

from __future__ import annotations

from collections.abc import Iterator, Set

from jobs.context import JobContext
from jobs.context.shard_bytes import ShardBytes
from jobs.parquet.files.storage import Storage
from jobs.parquet.prompts.prompt_source import PromptSource, render_rows
from jobs.parquet.shards.shard_texts import ShardTexts
from jobs.parquet.tables.added_columns import with_added_values
from jobs.parquet.tables.column_choice import ColumnChoice
from jobs.parquet.tables.line_problems import split_problems
from jobs.parquet.tables.row_reader import RowReader
from jobs.parquet.tables.row_values import RowProblem
from jobs.runs.plans.plan import Plan


def rendered_shards(
    context: JobContext, storage: Storage, plan: Plan, source: PromptSource, only: Set[int] | None = None
) -> Iterator[tuple[int, list[str | RowProblem]]]:
    """Yield the rows of each shard with the number of its first.

    only: rows, counted over all files; shards that hold none of them are left out. Raises InputError.
    """
    reader, file = None, -1
    added = {column.name for column in plan.added_columns}
    choice = ColumnChoice(tuple(name for name in source.columns if name not in added))
    try:
        for number in range(len(plan.shards)) if only is None else plan.shards_of(only):
            shard, start = plan.shards[number], plan.first_row(number)
            if shard.rows == 0:
                continue
            planned = plan.files[shard.file]
            if reader is None or shard.file != file or not reader.reaches(shard):
                if reader is not None:
                    reader.close()
                reader = RowReader(storage, plan.rows_path(planned), shard, choice)
                file = shard.file
            texts = ShardTexts(planned.path, source.columns, ShardBytes(context.shard_bytes.limit))
            for batch in reader.read(shard, context.check_interrupted):
                batch, problems = split_problems(batch)
                batch = with_added_values(batch, plan.added_columns, planned.values)
                texts.add(render_rows(source, batch, problems))
            yield start, texts.gathered()
    finally:
        if reader is not None:
            reader.close()
