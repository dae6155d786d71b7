"""Writes and reads parts. A part is the output file of one shard, with statistics in its footer."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs import errors
from jobs.common.release import commit
from jobs.context.answers import Answer
from jobs.context.deadlines import EXPIRED
from jobs.context.served_model import ServedModel
from jobs.parquet.asks.batch_lines import LEFT_OUT
from jobs.parquet.asks.kinds import kind_of
from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.parsed_answers import parsed_columns, parsed_fields
from jobs.parquet.tables.columns import (
    JSON,
    OWN_METADATA,
    ROW_NUMBER,
    ColumnChoice,
    as_number,
    has_comma_digits,
    missing_column,
)
from jobs.parquet.tables.table_child import STATISTICS
from jobs.parquet.tables.table_reading import look_at
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec
from jobs.runs.statistics.run_statistics import MAX_PART_LABELS, PartStats, count_lengths

#: An answer's field that says from which row of which earlier run the answer was taken. The run's `reused_column` names
#: the output column.
REUSED = "reused"
#: An answer's field that names the model that answered, in a run that asks two models.
MODEL = "model"


def without_own_keys(schema: pa.Schema) -> pa.Schema:
    """Return the schema of a part without the statistics that its metadata hold."""
    metadata = dict(schema.metadata or {})
    metadata.pop(STATISTICS, None)
    return schema.with_metadata(metadata or None)


def columns_kept(spec: RunSpec) -> ColumnChoice:
    """Return which of the input's columns the output has."""
    if spec.keep is None:
        return ColumnChoice(without=tuple(spec.drop or ()))
    names = list(spec.keep)
    if spec.filename_column:
        names.append(spec.filename_column)
    if spec.order:  # the output is sorted by this column
        names.append(ROW_NUMBER)
    return ColumnChoice(tuple(names))


def embedding_size(spec: RunSpec, model: ServedModel) -> int:
    """Return how many numbers an embedding of a run has."""
    return spec.dimensions or model.embedding_size


def output_schema(
    schema: pa.Schema, spec: RunSpec, path: str = "", embedding_size: int = 0
) -> pa.Schema:
    """Return the output's columns: the input's columns that are kept, then the columns of the answers.

    schema: the input's schema. path: the input's first file, for errors. Raises ColumnConflict or MissingColumn.
    """
    kept_or_dropped = [*(spec.keep or ()), *(spec.drop or ())]
    for column in kept_or_dropped:
        if column not in schema.names:
            raise missing_column(column, path, schema)
    names_to_keep = columns_kept(spec).chosen_from(schema.names)
    if names_to_keep is None:
        names_to_keep = schema.names
    input_names = [name for name in schema.names if name in names_to_keep]
    taken_names = set(input_names)
    answer_columns = []
    for field, name in zip(answer_fields(spec, embedding_size), answer_names(spec), strict=True):
        if name in taken_names:
            raise errors.ColumnConflict(
                name,
                "rename it where it comes from (a file, a folder's name or filename_column), leave it out with "
                "`drop`, or give the added columns another output_prefix",
            )
        taken_names.add(name)
        answer_columns.append(field.with_name(name))

    input_columns = [_output_field(schema.field(name)) for name in input_names]
    return pa.schema([*input_columns, *answer_columns], metadata=schema.metadata)


def _output_field(field: pa.Field) -> pa.Field:
    """Return a field without the metadata that only templates read.

    A column of JSON keeps its metadata, because write_jsonl reads them.
    """
    if has_comma_digits(field):  # its texts become numbers; see as_number
        field = field.with_type(pa.float64())
    metadata = dict(field.metadata or {})
    is_json_column = JSON.items() <= metadata.items()
    if not is_json_column:
        metadata = {key: value for key, value in metadata.items() if key not in OWN_METADATA}
    return field.with_metadata(metadata or None)  # None removes the metadata


def answer_fields(spec: RunSpec, embedding_size: int = 0) -> list[pa.Field]:
    """Return the Arrow fields of a run's answers, with the names of Answer's fields."""
    fields = list(kind_of(spec).fields(spec, embedding_size))
    fields += parsed_fields(spec.parsed_types, spec.n)
    if spec.reused_column:
        fields.append(pa.field(REUSED, pa.string()))
    if spec.escalate_below:
        fields.append(pa.field(MODEL, pa.string()))
    return fields


def answer_names(spec: RunSpec) -> list[str]:
    """Return the output's name for each of the `answer_fields`, in the same order."""
    names = []
    for field in answer_fields(spec):
        name = spec.output_prefix + field.name
        if field.name == REUSED and spec.reused_column is not None:
            name = spec.reused_column
        names.append(name)
    return names


def with_answers(
    batch: pa.RecordBatch, answers: list[Answer], schema: pa.Schema, spec: RunSpec
) -> pa.Table:
    """Return the kept columns of a batch, followed by the columns of its rows' answers. schema: see output_schema."""
    field_names = [field.name for field in answer_fields(spec)]
    num_kept = len(schema) - len(field_names)
    columns: list[Any] = [
        as_number(batch.field(name), batch.column(name)) for name in schema.names[:num_kept]
    ]
    parsed = parsed_columns(spec.parsed_types, answers)
    for name, arrow_type in zip(field_names, schema.types[num_kept:], strict=True):
        values = parsed.get(name)
        if values is None:
            values = [answer.column(name) for answer in answers]
        columns.append(answer_column(values, arrow_type))
    return pa.Table.from_arrays(columns, schema=schema)


def answer_column(values: Sequence[Any], kind: pa.DataType) -> pa.ChunkedArray:
    """Return a column of answers' values. Values that are Arrow arrays already are not copied."""
    if any(isinstance(value, pa.Array) for value in values):
        null = pa.nulls(1, kind)
        arrays = [null if value is None else value for value in values]
        return pa.chunked_array(arrays, kind)
    if pa.types.is_struct(kind):
        # Probabilities are pairs of name and value. Arrow would put pairs into a struct in their order, not by name.
        values = [dict(value) if isinstance(value, tuple) else value for value in values]
    return pa.chunked_array([pa.array(values, kind)])


def write_part(
    sink: Any, schema: pa.Schema, batches: Iterable[pa.RecordBatch | pa.Table], stats: PartStats
) -> None:
    """Write a part as Parquet, with its statistics in the footer."""
    with pq.ParquetWriter(sink, schema, write_page_checksum=True) as writer:
        for batch in batches:
            writer.write(batch)
        writer.add_key_value_metadata({STATISTICS: stats.to_text()})


def part_stats(answers: Sequence[Answer], model: ServedModel, **other_fields: Any) -> PartStats:
    """Return the statistics of a shard's answers. other_fields: the fields of PartStats that are not about answers."""
    good_answers = [answer for answer in answers if answer.error is None]
    finish_reasons: Counter[str] = Counter()
    labels: Counter[str] = Counter()
    for answer in good_answers:
        finish_reasons.update(answer.all_finish_reasons)
        label = answer.column("label")
        if label is not None:  # None in a run without labels
            labels[label] += 1
    return PartStats(
        **other_fields,
        rows=len(answers),
        errors=len(answers) - len(good_answers),
        failed_checks=sum(answer.check_error is not None for answer in good_answers),
        cut=sum(answer.is_cut for answer in answers),
        expired=sum(answer.error == EXPIRED for answer in answers),
        rows_reused=sum(answer.reused is not None for answer in answers),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        completion_tokens=sum(answer.all_completion_tokens for answer in answers),
        cached_tokens=sum(answer.cached_tokens for answer in answers),
        model=model.name,
        fingerprint=model.fingerprint,
        dtype=model.dtype,
        attention_backend=model.attention_backend,
        version=version("tokenmill"),
        commit=commit(),
        prompt_lengths=count_lengths(answer.prompt_tokens for answer in good_answers),
        completion_lengths=count_lengths(_completion_lengths(good_answers)),
        finish_reasons=dict(finish_reasons),
        labels=dict(labels.most_common(MAX_PART_LABELS)),
        left_out=dict(_left_out(good_answers).most_common(MAX_PART_LABELS)),
    )


def _completion_lengths(answers: Iterable[Answer]) -> Iterator[int]:
    """Yield the number of tokens of each completion. A row may have several completions."""
    for answer in answers:
        lengths = answer.completion_tokens
        if isinstance(lengths, tuple):
            yield from lengths
        else:
            yield lengths


def _left_out(answers: Iterable[Answer]) -> Counter[str]:
    """Count, for each argument's name, the lines that were answered without this argument."""
    counts: Counter[str] = Counter()
    for answer in answers:
        names = answer.column(LEFT_OUT)
        if names:
            counts.update(names.split(", "))
    return counts


def read_part_stats(storage: Storage, plan: Plan, shard: int, run: str | None = None) -> PartStats:
    """Read a part's statistics from its footer. Raises PartDamaged.

    run: the id of the run that wrote the part; by default the plan's run. A run's id depends on its folder's path.
    So if the folder was moved, its plan and its parts have different ids.
    """
    path = plan.part_path(shard)
    expected_rows = plan.shards[shard].rows
    expected_run = run or plan.run
    try:
        contents = look_at(storage, path)
    except (errors.CorruptParquet, errors.TableNotRead) as error:
        reason = error.argument("reason")
        raise errors.PartDamaged(path, f"not readable as Parquet: {reason}") from error
    except (errors.InputNotFound, errors.PathSwapped):
        # The folder lists the part's name, so something with this name is there.
        raise errors.PartDamaged(path, "it is a link, or no regular file") from None
    if not contents.statistics:
        raise errors.PartDamaged(path, "Tokenmill did not write it")
    try:
        stats = PartStats.from_text(contents.statistics)
    except ValueError as error:
        raise errors.PartDamaged(path, f"its statistics are unreadable: {error}") from None
    if (stats.run, stats.shard) != (expected_run, shard):
        raise errors.PartDamaged(path, f"it belongs to shard {stats.shard} of run {stats.run}")
    if contents.rows != expected_rows or stats.rows != expected_rows:
        raise errors.PartDamaged(path, f"it has {contents.rows} rows, expected {expected_rows}")
    return stats
