"""What a finished run tells of itself in its manifest, and the page that is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from jobs.cli.commands import main
from jobs.context import JobContext
from jobs.runs.statistics.lengths import BOUNDS, count_lengths, read_lengths
from jobs.runs.statistics.part_stats import PartStats
from jobs.runs.statistics.reasons import Reasons
from jobs.runs.statistics.report import report_html
from jobs.runs.statistics.run_statistics import MAX_BINS, RunStatistics
from tests.jobs.answering import score_parquet, work_off

MakeContext = Callable[[], JobContext]
PART = PartStats("0" * 16, 0, 10, 0, 100, 50, 20, 40, 0.0, 10.0, "m", "f", "float32", "cpu", "0.1", "w-1")


class Page(HTMLParser):
    """What a page holds: its tags with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def finished(
    redis: Redis, make_context: MakeContext, tmp_path: Path, **arguments: Any
) -> tuple[Path, dict[str, Any]]:
    prompts = [f"secret {n} " + "x" * n for n in range(38)] + [None, None]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    out = tmp_path / "out"
    score_parquet(make_context(), str(tmp_path / "in.parquet"), str(out), rows_per_shard=10, **arguments)
    names = iter(("w-1", "w-2", "w-2", "w-<b>3</b>"))
    work_off(redis, lambda: replace(make_context(), worker_name=next(names)))
    return out, json.loads((out / "_manifest.json").read_text())


@pytest.mark.parametrize("arguments", [{}, {"single_file": "parquet"}])
def test_a_finished_run_has_a_page_beside_its_manifest(
    redis: Redis, make_context: MakeContext, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    out, manifest = finished(redis, make_context, tmp_path, **arguments)
    told = manifest["statistics"]
    assert sum(told["prompt_lengths"].values()) == sum(told["completion_lengths"].values()) == 38
    assert {each["name"]: each["rows"] for each in told["workers"]} == {
        "w-1": 10,
        "w-2": 20,
        "w-<b>3</b>": 10,
    }
    assert [(each["rows"], each["examples"]) for each in told["reasons"]] == [(2, [38, 39])]
    text = (out / "_report.html").read_text()
    assert text == report_html(manifest)
    page = Page(text)
    assert "2 with an error" in page.text
    assert "w-<b>3</b>" in page.text, "names are text"
    assert "secret" not in text, "nothing of the rows"
    if not arguments:
        assert pq.read_table(out).num_rows == 40, "readers of the folder pass the page by"


def test_the_page_needs_no_script_and_fetches_nothing(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    page = Page((finished(redis, make_context, tmp_path)[0] / "_report.html").read_text())
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "a", "form"}
    assert not [
        attrs for _, attrs in page.tags if attrs.keys() & {"src", "href", "onload", "onclick", "style"}
    ]
    assert {"svg", "table", "main", "title"} <= tags


def test_it_is_written_again_with_a_price(redis: Redis, make_context: MakeContext, tmp_path: Path) -> None:
    out, manifest = finished(redis, make_context, tmp_path)
    url = f"unix://{redis.connection_pool.connection_kwargs['path']}"
    (out / "_report.html").unlink()
    result = CliRunner().invoke(main, ["--url", url, "report", str(out), "--price-per-hour", "1e6"])
    assert (result.exit_code, result.output.strip()) == (0, str(out / "_report.html")), result.output
    spent = manifest["statistics"]["worker_seconds"] / 3600 * 1e6
    assert f"{spent:,.2f}" in (out / "_report.html").read_text()
    again = CliRunner().invoke(
        main, ["--url", url, "report", manifest["run"], "--output", str(tmp_path / "r")]
    )
    assert again.exit_code == 0, again.output
    assert (tmp_path / "r").read_text() == report_html(manifest)
    lengths = {"prompt_lengths": {}, "completion_lengths": {"8": 30, "64": 1}}
    skewed = report_html({**manifest, "statistics": {**manifest["statistics"], **lengths, "timeline": {}}})
    assert skewed.count('class="bar"') == 7, "8, 12, 16, 24, 32, 48 and 64: the gap is seen"
    (out / "_manifest.json").write_text("[]")
    refused = CliRunner().invoke(main, ["--url", url, "report", manifest["run"]])
    assert refused.exit_code == 1
    assert "is no manifest" in refused.output


def test_an_older_part_counts_all_the_same() -> None:
    statistics = RunStatistics()
    statistics.add(PartStats.from_text(PART.to_text()))
    assert statistics.to_object(Reasons())["workers"][0]["name"] == ""


def test_a_parts_statistics_are_read_by_older_and_newer_versions_while_workers_are_replaced() -> None:
    """An older one takes these names and no other; a newer one may have written others."""
    first = {
        *("run", "shard", "rows", "errors", "prompt_tokens", "completion_tokens", "cached_tokens"),
        *("generated_tokens", "started_at", "ended_at", "model", "fingerprint", "dtype", "attention_backend"),
        "version",
    }
    assert set(json.loads(PART.to_text())) == first
    assert PartStats.from_text(PART.to_text(), PART.later_text()) == PART
    newer = json.dumps({**json.loads(PART.to_record()), "of_a_later_version": [1]})
    assert PartStats.from_text(newer) == PartStats.from_text(PART.to_record())
    for bad, why in (("[]", "not a mapping"), ('{"worker": 1}', "no name"), ("nonsense", "Expecting value")):
        with pytest.raises(ValueError, match=why):
            PartStats.from_text(PART.to_text(), bad)


def test_redis_keeps_no_lengths() -> None:
    part = replace(PART, prompt_lengths={"4": 10})
    assert PartStats.from_text(part.to_record()) == replace(part, prompt_lengths={})


moments = st.floats(0, 1e6)


@given(
    st.lists(
        st.tuples(moments, moments, st.integers(0, 10**6), st.sampled_from("abc")), min_size=1, max_size=60
    )
)
def test_tokens_over_time_add_up_and_workers_are_not_counted_twice(
    spans: list[tuple[float, float, int, str]],
) -> None:
    statistics = RunStatistics()
    for start, length, tokens, worker in spans:
        statistics.add(
            replace(PART, started_at=start, ended_at=start + length, generated_tokens=tokens, worker=worker)
        )
    told = statistics.to_object(Reasons())
    line = told["timeline"]
    assert len(line["tokens"]) <= MAX_BINS
    assert all(count >= 0 for count in line["tokens"])
    assert sum(line["tokens"]) == pytest.approx(
        sum(tokens for _, _, tokens, _ in spans), rel=1e-3, abs=MAX_BINS
    )
    whole = max(start + length for start, length, *_ in spans) - min(start for start, *_ in spans)
    assert all(each["seconds"] <= whole * 1.001 + 1e-6 for each in told["workers"])
    counts = {"rows": 1, "errors": 0, "prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
    served = {"run": "r", "model": "m", "dtype": "d", "version": "v", "generated_tokens": 0}
    Page(report_html({**counts, **served, "started_at": 0.0, "seconds": whole, "statistics": told}, 2.0))


def test_time_in_which_no_worker_had_a_shard_is_left_out_and_told() -> None:
    statistics = RunStatistics()
    for start in (1e9, 1e9 + 5, 1e9 + 3 * 86400):
        statistics.add(replace(PART, started_at=start, ended_at=start + 10))
    told = statistics.to_object(Reasons())
    assert (told["working_seconds"], told["timeline"]["bin_s"]) == (25.0, pytest.approx(25 / 9))
    assert told["timeline"]["tokens"][-1] == pytest.approx(40 / 10 * 25 / 9, abs=0.1)
    assert all(told["timeline"]["tokens"])
    counts = {"rows": 50, "errors": 0, "prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 120}
    served = {"run": "r", "model": "m", "dtype": "d", "version": "v", "generated_tokens": 120}
    whole = {"started_at": 1e9, "seconds": 3 * 86400 + 10.0}
    text = Page(report_html({**counts, **served, **whole, "statistics": told})).text
    assert "Time25 sRows a second2" in text
    assert "leave out 71 h 59 min during which no worker had a shard" in text
    older = {name: value for name, value in told.items() if name != "working_seconds"}
    assert "Time72 h 0 min" in Page(report_html({**counts, **served, **whole, "statistics": older})).text


@given(st.lists(st.integers(0, 10**9)))
def test_each_length_is_in_the_range_that_ends_next(lengths: list[int]) -> None:
    found = read_lengths(count_lengths(lengths))
    assert sum(found.values()) == len(lengths)
    for bound, count in found.items():
        before = BOUNDS[BOUNDS.index(bound) - 1] if bound else -1
        assert count == sum(before < length <= bound for length in lengths)


@pytest.mark.parametrize("value", [None, [], "x", {"5": 1}, {"4": -1}, {"4": "x"}, {"4": 1e300}])
def test_lengths_that_are_none_count_as_nothing(value: Any) -> None:
    assert read_lengths(value) == {}
