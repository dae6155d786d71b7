"""What a finished run tells of itself in its manifest, and the page that is made of it."""

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis

from jobs.runs.statistics.report import report_html
from jobs.runs.statistics.run_statistics import MAX_BINS, PartStats, Reasons, RunStatistics
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, work_off
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs

PART = PartStats(
    "0" * 16, 0, 10, 0, 100, 50, 20, 40, 0.0, 10.0, "m", "f", "float32", "cpu", "0.1", "w-1"
)


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


@pytest.fixture
def runs(runs: Runs, redis: Redis) -> Runs:
    """A finished run of four shards and three workers."""
    runs.write([f"secret {n} " + "x" * n for n in range(38)] + [None, None])
    runs.plan(rows_per_shard=10)
    names = iter(("w-1", "w-2", "w-2", "w-<b>3</b>"))
    work_off(redis, lambda: replace(runs.context(), worker_name=next(names)))
    return runs


def test_a_finished_run_has_a_page_beside_its_manifest(runs: Runs) -> None:
    told = runs.manifest["statistics"]
    assert sum(told["prompt_lengths"].values()) == sum(told["completion_lengths"].values()) == 38
    rows = {each["name"]: each["rows"] for each in told["workers"]}
    assert rows == {"w-1": 10, "w-2": 20, "w-<b>3</b>": 10}
    assert [(each["rows"], each["examples"]) for each in told["reasons"]] == [(2, [38, 39])]
    text = (runs.output / "_report.html").read_text()
    page = Page(text)
    assert "2 with an error" in page.text
    assert "w-<b>3</b>" in page.text, "names are text"
    assert "secret" not in text, "nothing of the prompts"
    assert "SECRET 4 XXXX" in text, "the fifth answer, which repeats its prompt in capitals"
    assert "SECRET 5" not in text, "five answers and no more"
    assert len(runs.rows()) == 40, "readers of the folder pass the page by"


def test_the_page_needs_no_script_and_fetches_nothing(runs: Runs) -> None:
    page = Page((runs.output / "_report.html").read_text())
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "a", "form"}
    assert not [
        attrs for _, attrs in page.tags if attrs.keys() & {"src", "href", "onload", "style"}
    ]
    assert {"svg", "table", "main", "title"} <= tags


def test_it_is_written_again_elsewhere_with_a_price(
    runs: Runs, invoke: Invoke, tmp_path: Path
) -> None:
    page, manifest = runs.output / "_report.html", runs.manifest
    assert invoke("report", runs.output).output.strip() == str(page)
    for out, told in (((), "--out"), (("--out", page), "must not change")):
        refused = invoke("report", runs.output, "--price-per-hour", "1e6", *out)
        assert refused.exit_code != 0
        assert told in refused.output
    elsewhere = tmp_path / "r"
    assert (
        invoke("report", manifest["run"], "--price-per-hour", "1e6", "--out", elsewhere).exit_code
        == 0
    )
    spent = manifest["statistics"]["worker_seconds"] / 3600 * 1e6
    assert f"{spent:,.2f}" in elsewhere.read_text()
    assert "secret" not in elsewhere.read_text()
    assert invoke("report", runs.output, "--prompts", "--out", elsewhere).exit_code == 0
    assert "secret 4 xxxx" in elsewhere.read_text()
    (runs.output / "part-00000.parquet").rename(tmp_path / "gone")
    assert invoke("report", runs.output, "--prompts", "--out", elsewhere).exit_code == 1


def test_it_says_what_was_asked_and_how_answers_ended(runs: Runs, tmp_path: Path) -> None:
    def answer(request: Request) -> FakeCompletion:
        is_cut = "7" in str(request.prompt)
        return FakeCompletion("a\n<b>", 0, [1], "length" if is_cut else "stop", 1)

    output = tmp_path / "asked"
    runs.score(
        answer=answer,
        output=output,
        template="Line <1>\nLine {prompt}",
        sampling={"max_tokens": 7},
        keep=["id"],
        limit=20,
    )
    page = Page((output / "_report.html").read_text())
    for text in ("Line <1>", "Line {prompt}", '{"max_tokens": 7}', str(runs.source), str(output)):
        assert text in page.text
    assert '{"keep": ["id"], "limit": 20}' in page.text
    assert "stop1890.0%" in page.text
    assert "length210.0%" in page.text
    assert "a<b>" in page.text, "of an answer's lines, which are text"
    manifest = json.loads((output / "_manifest.json").read_text())
    assert manifest["statistics"]["finish_reasons"] == {"stop": 18, "length": 2}


def test_labels_and_checks_are_counted() -> None:
    statistics = RunStatistics()
    statistics.add(replace(PART, labels={"yes": 3, "no": 1}))
    statistics.add(replace(PART, labels={"no": 6}))
    assert '"labels": {}' in replace(PART, labels={"yes": 3}).to_record(), "Redis needs none"
    told = statistics.to_object(Reasons())
    counts = {"rows": 12, "errors": 2, "failed_checks": 3, "prompt_tokens": 0, "cached_tokens": 0}
    counts |= {"completion_tokens": 0, "generated_tokens": 0}
    served = {"run": "r", "model": "m", "dtype": "d", "version": "v", "started_at": 0.0}
    arguments = {"check": {"regex": "a+"}, "prompt_column": "p"}
    manifest = {**counts, **served, "seconds": 1, "statistics": told, "arguments": arguments}
    text = Page(report_html(manifest)).text
    assert "no770.0%" in text
    assert "yes330.0%" in text
    assert "passed7" in text
    assert "failed3" in text


moments = st.floats(0, 1e6)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(moments, moments, st.integers(0, 10**6), st.sampled_from("abc")),
        min_size=1,
        max_size=60,
    )
)
def test_tokens_over_time_add_up_and_workers_are_not_counted_twice(
    spans: list[tuple[float, float, int, str]],
) -> None:
    statistics = RunStatistics()
    for start, length, tokens, worker in spans:
        statistics.add(
            replace(
                PART,
                started_at=start,
                ended_at=start + length,
                generated_tokens=tokens,
                worker=worker,
            )
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
    counts = {
        "rows": 1,
        "errors": 0,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "completion_tokens": 0,
    }
    served = {"run": "r", "model": "m", "dtype": "d", "version": "v", "generated_tokens": 0}
    Page(
        report_html(
            {**counts, **served, "started_at": 0.0, "seconds": whole, "statistics": told}, 2.0
        )
    )


def test_time_in_which_no_worker_had_a_shard_is_left_out_and_told() -> None:
    statistics = RunStatistics()
    for start in (1e9, 1e9 + 5, 1e9 + 3 * 86400):
        statistics.add(replace(PART, started_at=start, ended_at=start + 10))
    told = statistics.to_object(Reasons())
    assert (told["working_seconds"], told["timeline"]["bin_s"]) == (25.0, pytest.approx(25 / 9))
    assert told["timeline"]["tokens"][-1] == pytest.approx(40 / 10 * 25 / 9, abs=0.1)
    assert all(told["timeline"]["tokens"])
    counts = {
        "rows": 50,
        "errors": 0,
        "prompt_tokens": 1,
        "cached_tokens": 0,
        "completion_tokens": 120,
    }
    served = {"run": "r", "model": "m", "dtype": "d", "version": "v", "generated_tokens": 120}
    whole = {"started_at": 1e9, "seconds": 3 * 86400 + 10.0}
    text = Page(report_html({**counts, **served, **whole, "statistics": told})).text
    assert "Time25 sRows a second2" in text
    assert "leave out 2 d 23 h during which no worker had a shard" in text
