"""A part: the output file of one shard, with statistics in its footer."""

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs import errors
from jobs.common.release import commit
from jobs.context.answers import Answer
from jobs.context.served_model import ServedModel
from jobs.parquet.asks.kinds import kind_of
from jobs.parquet.files.storage import Storage
from jobs.parquet.tables.columns import JSON, OWN_METADATA, ROW_NUMBER, ColumnChoice, missing_column
from jobs.parquet.tables.table_child import STATISTICS
from jobs.parquet.tables.table_reading import look_at
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec
from jobs.runs.statistics.run_statistics import PartStats, count_lengths

#: Which row of an earlier run a row's answer was taken from, in the column that the run names.
REUSED = "reused"
#: The name of the model that answered, in a run that asks two.
MODEL = "model"


def without_own_keys(schema: pa.Schema) -> pa.Schema:
    metadata = {key: each for key, each in (schema.metadata or {}).items() if key != STATISTICS}
    return schema.with_metadata(metadata or None)


def columns_kept(spec: RunSpec) -> ColumnChoice:
    ours = tuple(filter(None, (spec.filename_column, ROW_NUMBER if spec.order else None)))
    return ColumnChoice(None if spec.keep is None else (*spec.keep, *ours), tuple(spec.drop or ()))


def embedding_size(spec: RunSpec, model: ServedModel) -> int:
    return spec.dimensions or model.embedding_size


def output_schema(schema: pa.Schema, spec: RunSpec, path: str = "", embedding_size: int = 0) -> pa.Schema:
    """Return the output's columns: the input's, then the answers'. Raises ColumnConflict or MissingColumn."""
    for column in (*(spec.keep or ()), *(spec.drop or ())):
        if column not in schema.names:
            raise missing_column(column, path, schema)
    chosen = columns_kept(spec).of(schema.names)
    kept = [name for name in schema.names if chosen is None or name in chosen]
    pairs = zip(answer_fields(spec, embedding_size), answer_names(spec), strict=True)
    answers = [field.with_name(name) for field, name in pairs]
    for number, field in enumerate(answers):
        if field.name in kept or field.name in (each.name for each in answers[:number]):
            raise errors.ColumnConflict(
                field.name,
                "rename it in the input, in its folders, or as filename_column, leave it out with `drop`, or "
                "give the added columns another output_prefix",
            )
    fields = list(map(schema.field, kept))
    for place, field in enumerate(fields):  # without what templates alone want to know of it
        metadata = dict(field.metadata or {})
        if not JSON.items() <= metadata.items():  # which the writer of lines reads
            metadata = {key: value for key, value in metadata.items() if key not in OWN_METADATA}
        fields[place] = field.with_metadata(metadata or None)
    return pa.schema([*fields, *answers], metadata=schema.metadata)


def answer_fields(spec: RunSpec, embedding_size: int = 0) -> list[pa.Field]:
    more = [name for name, is_there in ((REUSED, spec.reused_column), (MODEL, spec.escalate_below)) if is_there]
    return [*kind_of(spec).fields(spec, embedding_size), *(pa.field(name, pa.string()) for name in more)]


def answer_names(spec: RunSpec) -> list[str]:
    """Return the columns of answer_fields as the output names them."""
    names = [field.name for field in answer_fields(spec)]
    return [spec.reused_column or "" if name == REUSED else spec.output_prefix + name for name in names]


def with_answers(batch: pa.RecordBatch, answers: list[Answer], schema: pa.Schema, spec: RunSpec) -> pa.Table:
    """Return the kept columns of a batch with the answers of its rows behind them, by what output_schema returned."""
    names = [field.name for field in answer_fields(spec)]
    kept, types = schema.names[: -len(names)], schema.types[-len(names) :]
    added = [answer_column(answers, *each) for each in zip(names, types, strict=True)]
    return pa.Table.from_arrays([*map(batch.column, kept), *added], schema=schema)


def answer_column(answers: Sequence[Answer], name: str, kind: pa.DataType) -> pa.ChunkedArray:
    """Return what answers have by a name; of arrays that hold a value each, without a copy."""
    values = [answer.column(name) for answer in answers]
    if any(isinstance(each, pa.Array) for each in values):
        return pa.chunked_array([pa.nulls(1, kind) if each is None else each for each in values], kind)
    return pa.chunked_array([pa.array(values, kind)])


def write_part(sink: Any, schema: pa.Schema, batches: Iterable[pa.RecordBatch | pa.Table], stats: PartStats) -> None:
    with pq.ParquetWriter(sink, schema, write_page_checksum=True) as writer:
        for batch in batches:
            writer.write(batch)
        writer.add_key_value_metadata({STATISTICS: stats.to_text()})


def part_stats(answers: Sequence[Answer], model: ServedModel, **known: Any) -> PartStats:
    """Sum up the answers of a shard's rows. known: other fields of PartStats."""
    good = [answer for answer in answers if answer.error is None]
    tokens = [each.completion_tokens for each in good]
    return PartStats(
        **known,
        rows=len(answers),
        errors=len(answers) - len(good),
        failed_checks=sum(answer.check_error is not None for answer in good),
        cut=sum(answer.is_cut for answer in answers),
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
        prompt_lengths=count_lengths(each.prompt_tokens for each in good),
        completion_lengths=count_lengths(
            each for own in tokens for each in (own if isinstance(own, tuple) else (own,))
        ),
    )


def read_part_stats(storage: Storage, plan: Plan, shard: int, run: str | None = None) -> PartStats:
    """Read a part's statistics from its footer. run: that wrote it, where its folder was moved. Raises PartDamaged."""
    path, rows, run = plan.part_path(shard), plan.shards[shard].rows, run or plan.run
    try:
        found = look_at(storage, path)
    except (errors.CorruptParquet, errors.TableNotRead) as error:
        raise errors.PartDamaged(path, f"not readable as Parquet: {error.args[1]}") from error
    except (errors.InputNotFound, errors.PathSwapped):  # its name is there
        raise errors.PartDamaged(path, "it is a link, or no regular file") from None
    if not found.statistics:
        raise errors.PartDamaged(path, "Tokenmill did not write it")
    try:
        stats = PartStats.from_text(found.statistics)
    except ValueError as error:
        raise errors.PartDamaged(path, f"its statistics are unreadable: {error}") from None
    if (stats.run, stats.shard) != (run, shard):
        raise errors.PartDamaged(path, f"it belongs to shard {stats.shard} of run {stats.run}")
    if found.rows != rows or stats.rows != rows:
        raise errors.PartDamaged(path, f"it has {found.rows} rows, expected {rows}")
    return stats
