"""`tokenmill preview`, `submit --dry-run` and `verify`, with a real worker and the demo model."""

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from jobs.cli import main
from tests.e2e.conftest import DATES, RealWorkers
from tests.rq_workers import wait_until


def copy_of_dates(folder: Path, rows: int) -> Path:
    path = folder / "dates.parquet"
    pq.write_table(pq.read_table(DATES).slice(0, rows), path)
    return path


def run(workers: RealWorkers, *args: object) -> Result:
    return CliRunner(env={"RQ_REDIS_URL": workers.url}).invoke(main, list(map(str, args)))


def number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found[1].replace(",", ""))


@pytest.mark.long
def test_preview_shows_prompts_tokens_and_the_answers_that_the_run_gives_and_verify_gets_again(
    workers: RealWorkers, tmp_path: Path
) -> None:
    source = copy_of_dates(tmp_path, 90)
    options = ["--messages-column", "messages", "--temperature", 0, "--max-tokens", 12]
    lonely = run(workers, "preview", source, *options)
    assert (lonely.exit_code, "no worker listens on queue 'bulk'" in lonely.stderr) == (1, True)
    workers.start(queues=("bulk",))
    wait_until(lambda: workers.redis.scard("rq:workers:bulk") == 1)
    shown = run(workers, "preview", source, "--rows", 2, *options)
    assert shown.exit_code == 0, shown.stderr
    estimated = run(
        workers, "submit", source, tmp_path / "out", "--dry-run", "--price-per-hour", 2, *options
    )
    assert estimated.exit_code == 0, estimated.stderr
    assert not (tmp_path / "out").exists()
    assert workers.redis.keys("rq:job:*") == [], "what was tried is taken away"
    scored = run(workers, "submit", source, tmp_path / "out", "--wait", *options)
    assert scored.exit_code == 0, scored.stderr
    verified = run(workers, "verify", tmp_path / "out", "--sample", "10%")
    assert verified.exit_code == 0, verified.stdout + verified.stderr
    assert re.search(r"9 of 90 rows checked\nequal +9\ndifferent +0", verified.stdout)
    rows = pq.read_table(tmp_path / "out").to_pylist()
    for row in rows[:2]:
        assert f"row {row['id']}: {row['prompt_tokens']} tokens" in shown.stdout
        assert f"user: {row['messages'][-1]['content']}" in shown.stdout
        assert f"answer ({row['finish_reason']}): {row['completion']}" in shown.stdout
    told = estimated.stdout
    assert number(told, r"rows +([\d,]+), of which 0 would fail") == 90
    assert number(told, r"prompts +([\d,]+) tokens") == sum(row["prompt_tokens"] for row in rows)
    completion_tokens = sum(row["completion_tokens"] for row in rows)
    assert abs(number(told, r"answers +([\d,]+)") - completion_tokens) < 0.15 * completion_tokens
    assert re.search(r"time +(about|\d+ s to) \d+ s on one worker", told)
    assert re.search(r"cost +\d+\.\d+ to \d+\.\d+ at 2 an hour", told)
