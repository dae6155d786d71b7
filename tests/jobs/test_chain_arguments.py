"""Several prompts of each row: what may be asked of a run, and how a command line says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from jobs.context import JobContext
from jobs.errors import ColumnConflict, InvalidJob, MissingColumn
from jobs.installed import check_sampling
from jobs.parquet.survey import survey_parquet
from jobs.runs.plans.spec import MAX_ROWS_PER_SHARD, RunSpec
from tests.jobs.answering import queued_jobs, score_parquet
from tests.jobs.chains import GREEDY, TWO, write
from tests.jobs.conftest import Invoke

MakeContext = Callable[[], JobContext]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompts": []}, "prompts is \\[\\], expected a list"),
        ({"prompts": "short"}, "expected a list"),
        ({"prompts": [{"name": "a"}]}, r"prompts\[0\] is"),
        ({"prompts": [{"name": "a b", "template": "{text}"}]}, "expected a word"),
        ({"prompts": [{"name": "a", "template": "{text}"}] * 2}, "there already"),
        ({"prompts": [{"name": "error", "template": "{text}"}]}, "column 'error', which is there already"),
        ({"prompts": [TWO[0], {"name": "short_finish_reason", "template": "{text}"}]}, "there already"),
        ({"prompts": TWO[::-1]}, "names 'short', which has no answer yet"),
        ({"prompts": [{"name": "a", "template": "{a}"}]}, "names 'a', which has no answer yet"),
        ({"prompts": [{"name": "a", "template": "text"}]}, "names no column"),
        ({"prompts": [{"name": "a", "template": "{text.x}"}]}, "no plain column name"),
        ({"prompts": [{"name": "a", "template": ""}]}, "names no column"),
        ({"prompts": [{**TWO[0], "sampling": {"seed": 3}}]}, "has seed of its own"),
        ({"prompts": [{**TWO[0], "sampling": {"n": 2}}]}, "has n of its own"),
        ({"prompts": [{**TWO[0], "sampling": 3}]}, "expected a mapping"),
        ({"prompts": [{**TWO[0], "sampling": {"tools": [{}]}}]}, "tools belongs to a chat"),
        ({"prompts": [{**TWO[0], "sampling": {"logprobs": 3}}]}, "logprobs is not built for a run"),
        ({"prompts": [{**TWO[0], "sampling": {"max_tokens": "3"}}]}, "max_tokens:=3"),
        ({"sampling": {"n": 2}}, "n is one"),
        ({"template": "{text}"}, "template and prompts each say"),
        ({"messages_column": "text"}, "messages_column and prompts each say"),
        ({"template_format": "jinja"}, "prompts have {column} templates alone"),
        ({"defaults": {"nothing": "x"}}, "no column that the template names"),
        ({"input_format": "openai-batch"}, "prompts and a batch file"),
        (
            {
                "prompts": [{**TWO[0], "sampling": {"max_tokens": 3}}],
                "sampling_columns": {"max_tokens": "id"},
            },
            "comes from a column",
        ),
        (
            {"prompts": [{"name": "a", "template": "{text}" * 30}], "rows_per_shard": MAX_ROWS_PER_SHARD},
            "pieces",
        ),
        (
            {"prompts": [{"name": f"p{n}", "template": "{text}"} for n in range(21)]},
            "more than the limit of 20",
        ),
        ({"prompts": [{**TWO[0], "sampling": {"max_tokns": 3}}]}, "max_tokns"),
    ],
)
def test_what_cannot_be_is_refused_by_name_before_anything_is_enqueued(
    make_context: MakeContext, redis: Redis, tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    write(tmp_path, ["a"])
    context = replace(make_context(), check_sampling=check_sampling)
    with pytest.raises(InvalidJob, match=says):
        score_parquet(
            context, str(tmp_path / "in.parquet"), str(tmp_path / "out"), **{"prompts": TWO, **arguments}
        )
    assert queued_jobs(redis) == []


def test_columns_are_checked_for_all_prompts(make_context: MakeContext, tmp_path: Path) -> None:
    write(tmp_path, ["a"], short=["b"])
    source, out = str(tmp_path / "in.parquet"), str(tmp_path / "out")
    with pytest.raises(ColumnConflict, match=r"'short'.*give the prompt of this name another one"):
        score_parquet(make_context(), source, out, prompts=TWO, drop=["short"])
    missing = [{"name": "a", "template": "{text}"}, {"name": "b", "template": "{a} {nowhere}"}]
    with pytest.raises(MissingColumn, match="nowhere"):
        score_parquet(make_context(), source, out, prompts=missing)
    with pytest.raises(InvalidJob, match="later ones are made of answers"):
        survey_parquet(make_context(), source, prompts=TWO)


def test_the_same_prompts_are_the_same_run_and_other_ones_another(tmp_path: Path) -> None:
    def spec(*prompts: Any, **options: Any) -> RunSpec:
        return RunSpec.from_arguments(str(tmp_path), str(tmp_path / "out"), prompts=list(prompts), **options)

    biased = {**TWO[0], "sampling": {"logit_bias": {5: 1}}}
    assert RunSpec.from_json(spec(biased, TWO[1]).to_json()) == spec(biased, TWO[1])
    assert spec(*TWO).run == spec({**TWO[0], "sampling": {}}, TWO[1], prompt_column="prompt").run
    assert spec(*TWO).run != spec(TWO[0]).run
    assert spec(*TWO).run != spec(*TWO, sampling=GREEDY).run
    for damaged in (5, [], [{"name": "a"}], [[]], {"name": "a"}):
        with pytest.raises(InvalidJob):
            _ = RunSpec.from_json({**spec(*TWO).to_json(), "prompts": damaged}).steps


def test_the_command_line_takes_prompts_by_name_or_as_json(
    invoke: Invoke, redis: Redis, tmp_path: Path
) -> None:
    write(tmp_path, ["a"])
    source, out = tmp_path / "in.parquet", tmp_path / "out"
    named = ["--prompt", "short={text} = In short:", "--prompt", "title={short}"]
    for options in (
        named,
        ["--prompts", '[{"name": "title", "template": "{text}", "sampling": {"stop": "."}}]'],
    ):
        result = invoke("submit", source, out, *options)
        assert result.exit_code == 0, result.output
    jobs = queued_jobs(redis)
    assert [job.kwargs["prompts"] for job in jobs] == [
        [{"name": "short", "template": "{text} = In short:"}, {"name": "title", "template": "{short}"}],
        [{"name": "title", "template": "{text}", "sampling": {"stop": "."}}],
    ]
    for options, says in [
        (["--prompt", "{text}"], "expected NAME=TEMPLATE"),
        (["--prompt", "a={text}", "--prompt", "a={text}"], "given twice"),
        (["--prompt", "a={text}", "--template", "{text}"], "--template and --prompt each say"),
        (["--prompts", "{}"], "is JSON, but no list"),
        (["--prompt", "a={text}", "--template-format", "jinja"], "prompts have"),
    ]:
        result = invoke("submit", source, out, *options)
        assert result.exit_code != 0
        assert says in result.output
    assert "--prompt NAME=TEMPLATE" in invoke("submit", "--help").output
