"""Files, templates and checks that stand for gigabytes, through a real worker: each costs its own."""

import gzip
import re
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rq.job import Job, JobStatus

from tests.e2e.conftest import RealWorkers

GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
MIB = 1 << 20

#: What a worker and its children may take in all beyond what the worker takes at rest.
MOST_BYTES = 250 * MIB


def write_bombs(folder: Path) -> dict[str, str]:
    """Write files whose run fails; return by name what the error says."""
    table = pa.table({"prompt": ["a"], "other": ["x" * (300 * MIB)]})
    pq.write_table(table, folder / "page.parquet", compression="zstd", use_dictionary=False)
    nulls = pa.ListArray.from_arrays([0, 40_000_000], pa.nulls(40_000_000, pa.int64()))
    pq.write_table(
        pa.table({"prompt": ["a"], "other": nulls}), folder / "nulls.parquet", compression="zstd"
    )
    with (folder / "footer.parquet").open("wb") as file:  # a hole, but for its ends
        file.write(b"PAR1")
        file.seek((3 << 30) - 8)
        file.write((2 << 30).to_bytes(4, "little") + b"PAR1")
    (folder / "names.jsonl").write_text(
        "".join(f'{{"prompt": "a", "{n}": 1}}\n' for n in range(20_000))
    )
    batch = pa.record_batch({"prompt": ["x" * (300 * MIB)]})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(folder / "batch.arrow", batch.schema, options=options) as stream:
        stream.write_batch(batch)
    memory = "reading it took more than"
    return {
        "page.parquet": memory,
        "nulls.parquet": memory,
        "footer.parquet": memory,
        "names.jsonl": "more than 10000 columns",
        "batch.arrow": memory,
    }


def tree_bytes(pid: int) -> int:
    """Memory that a process and those below it have to themselves, as far as they are there."""
    total, waiting = 0, [pid]
    while waiting:
        each = Path(f"/proc/{waiting.pop()}")
        try:
            found = re.search(r"RssAnon:\s+(\d+) kB", (each / "status").read_text())
            waiting += map(int, (each / "task" / each.name / "children").read_text().split())
        except OSError:
            continue
        total += int(found[1]) << 10 if found else 0
    return total


def test_bombs_fail_by_name_and_take_little_memory(workers: RealWorkers) -> None:
    folder, bulk = workers.folder, workers.queue("bulk")
    errors = write_bombs(folder)
    (folder / "lines.jsonl.gz").write_bytes(
        gzip.compress(b'{"prompt": "4 May"}\n' + bytes(64 * MIB))
    )
    pq.write_table(pa.table({"prompt": ["4 May"]}), folder / "one.parquet")
    process = workers.start()
    workers.result(bulk.enqueue("jobs.complete", "warm", **GREEDY), 300)
    before, most, is_over = tree_bytes(process.pid), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.01):
            most[0] = max(most[0], tree_bytes(process.pid))

    watching = threading.Thread(target=watch)
    watching.start()

    def score(name: str, output: str, **options: Any) -> Job:
        call = {"sampling": GREEDY, **options}
        return bulk.enqueue("jobs.score_parquet", str(folder / name), str(folder / output), **call)

    template = "{{ prompt }}{{ '%(k)99999999d' % {'k': 1} * 9 }}"
    runs = {name: score(name, f"out-{name}") for name in errors}
    lines = score("lines.jsonl.gz", "lines")
    jinja = score(
        "one.parquet", "jinja", template=template, template_format="jinja", max_errors="100%"
    )
    schema = score("one.parquet", "schema", check={"json": {"allOf": [True] * 170_000}})
    for job in (*runs.values(), lines, jinja, schema):
        workers.result(job, 300)
    planned = (runs["page.parquet"], runs["nulls.parquet"], lines, jinja)
    shards = [
        Job.fetch(f"{each.return_value()['run']}-00000", workers.redis, serializer="json")
        for each in planned
    ]
    for job in shards:
        workers.result(job, 300)
    fine = workers.result(bulk.enqueue("jobs.complete", "hello", **GREEDY))
    is_over.set()
    watching.join()

    told = {**runs, "page.parquet": shards[0], "nulls.parquet": shards[1]}
    for name, words in errors.items():
        assert told[name].get_status(refresh=True) == JobStatus.FAILED, name
        error = str(told[name].latest_result().exc_string)
        assert words in error, (name, error)
        assert name in error
    assert "before it could check anything" in str(schema.latest_result().exc_string)
    assert fine.return_value is not None
    assert process.poll() is None
    assert most[0] - before < MOST_BYTES, most[0] - before
    for output, words in (("lines", "line 2 has more than the limit"), ("jinja", "the template")):
        (part,) = (folder / output).glob("part-*")
        assert words in str(pq.read_table(part)["error"].to_pylist()[-1])
