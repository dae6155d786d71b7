"""Jinja templates of a run: what they give, what is refused, and that none of them runs away."""

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.errors import InvalidJob, MissingColumn, OutputHoldsAnotherRun, WrongColumnType
from jobs.parquet.prompts import jinja_source
from jobs.prompts import template_texts
from jobs.prompts.jinja_environment import render as render_texts
from jobs.prompts.template_texts import JinjaTexts, TemplateProblem
from jobs.runs.plans.spec import RunSpec
from tests.jobs.answering import FakeCompletion, queued_jobs, score_parquet, work_off
from tests.jobs.conftest import Invoke, MakeContext

Prompts = Callable[..., list[str]]


def render(text: str, **values: Any) -> str:
    return render_texts([text], values)[0]


@pytest.fixture
def prompts(redis: Redis, make_context: MakeContext, tmp_path: Path) -> Prompts:
    """Returns the prompt of each row of in.parquet, or its error."""

    def run(template: Any, output: str = "out", **arguments: Any) -> list[str]:
        def answer(request: Any) -> FakeCompletion:
            return FakeCompletion(request.prompt or json.dumps(request.messages))

        source, out = str(tmp_path / "in.parquet"), str(tmp_path / output)
        arguments = {"template": template, "template_format": "jinja", **arguments}
        score_parquet(make_context(), source, out, **arguments)
        work_off(redis, make_context, answer=answer)
        rows = pq.read_table(out).to_pylist()
        return [row["completion"] if row["error"] is None else row["error"] for row in rows]

    return run


def test_a_template_over_columns_nulls_and_lists(prompts: Prompts, tmp_path: Path) -> None:
    tags = pa.array([["a", "b"], [], None], pa.list_(pa.string()))
    facts = pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int8()))
    pq.write_table(
        pa.table({"text": ["{x}", "y", None], "tags": tags, "f": facts}), tmp_path / "in.parquet"
    )
    template = "{{ text }}{% if tags %}: {% for t in tags %}{{ loop.index }}{{ t }}{% endfor %}{% endif %} {{ f }}\n"
    assert prompts(template, defaults={"f": "-"}) == [
        '{x}: 1a2b {"k": 1}\n',
        "y -\n",
        "the template: a value that the template writes is null: give it a default, such as {{ name or 'none' }}",
    ]


def test_a_chat_of_jinja_texts(prompts: Prompts, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2], "b": ["p", None]}), tmp_path / "in.parquet")
    template = [
        {"role": "system", "content": "fixed {a}"},
        {"role": "user", "content": "{{ a }}{{ b or '' }}"},
    ]
    assert [[each["content"] for each in json.loads(text)] for text in prompts(template)] == [
        ["fixed {a}", "1p"],
        ["fixed {a}", "2"],
    ]


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("no column", "names no column"),
        ("{{ a", "line 1: unexpected end"),
        ("\n{% include 'x' %}{{ a }}", "line 2: include reads other"),
        ("{% extends 'x' %}{{ a }}", "extends"),
        ("{% block b %}{{ a }}{% endblock %}", "block"),
        ("{{ a | random }}", "No filter named 'random'"),
        ("{{" + "(" * 5000 + "a" + ")" * 5000 + "}}", "too deeply"),
        ("{% for x in a %}" * 30 + "{% endfor %}" * 30, "too deeply"),
        ([{"role": "user"}], "exactly"),
    ],
)
def test_templates_that_cannot_be_are_refused_when_planned(
    prompts: Prompts, tmp_path: Path, template: Any, match: str
) -> None:
    pq.write_table(pa.table({"a": [[1]], "raw": [b"x"]}), tmp_path / "in.parquet")
    with pytest.raises(InvalidJob, match=match):
        prompts(template)


def test_columns_are_checked_as_for_other_templates(prompts: Prompts, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "raw": [b"x"]}), tmp_path / "in.parquet")
    with pytest.raises(MissingColumn, match="'b'"):
        prompts("{{ a }} {{ b }}")
    with pytest.raises(WrongColumnType, match="'raw'"):
        prompts("{{ raw }}")
    with pytest.raises(InvalidJob, match="'c' has a default"):
        prompts("{{ a }}", defaults={"c": ""})
    prompts("{{ a }}")
    with pytest.raises(OutputHoldsAnotherRun, match="template_format"):
        prompts("{a}", template_format="fields")


def test_a_format_that_is_none_and_one_without_a_template_are_refused() -> None:
    with pytest.raises(InvalidJob, match="'fields' or 'jinja'"):
        RunSpec.from_arguments("/in", "/out", template="{a}", template_format="mustache")
    with pytest.raises(InvalidJob, match="give one too"):
        RunSpec.from_arguments("/in", "/out", template_format="jinja")


ROW = {
    "xs": [{"a": 1, "n": "x"}, {"a": 2, "n": "y"}],
    "d": {"k": 1, "l": [2]},
    "s": "ab,cD",
    "f": 1.256,
    "day": datetime.date(2024, 2, 29),
    "none": None,
}


@pytest.mark.parametrize(
    "template",
    [
        "{% for x in xs if x.a > 1 %}{{ loop.length }}{{ x.n }}{% else %}none{% endfor %}",
        "{% for x in xs recursive %}{{ x.a }}{% endfor %}{{ xs|map(attribute='n')|join(', ') }}",
        "{% set a, b = 1, s %}{{ b ~ '-' ~ a }}{{ s|upper }}{{ s.split(',')[1] }}{{ s[:2] }}",
        "{% macro m(x, y='k') %}<{{ x }}{{ y }}>{% endmacro %}{{ m(s) }}{{ m(1, y='z') }}",
        "{% macro m() %}{{ caller(1) }}{% endmacro %}{% call(a) m() %}{{ a }}{{ f }}{% endcall %}",
        "{% set ns = namespace(n=0) %}{% for x in xs %}{% set ns.n = ns.n + x.a * 2 %}{% endfor %}{{ ns.n }}",
        "{{ '%.2f of %s' % (f, s) }} {{ f|round(1) }} {{ 7 // 2 }} {{ 2 ** 10 }} {{ 7 % 4 }} {{ 'a' * 3 }}",
        "{% if 'ab' in s and s not in ['q'] and none is none %}{{ none or 'else' }}{% endif %}",
        "{{ day.strftime('%d %B %Y') }} {{ day }} {{ xs|sum(attribute='a') }} {{ (xs|first).n }}",
        "{% for k, v in d.items() %}{{ k }}{% endfor %}{% for g, l in xs|groupby('n') %}{{ g }}{% endfor %}",
        "{% filter upper %}a{{ s }}{% endfilter %}{{ s|replace('b', 'XX') }}{{ s.replace('b', 'Y') }}\n",
        "{{ ['p', 'q']|join('+') }}{{ '-'.join(['r', 's']) }}{{ s|indent(2) }}{{ {'a': 5}['a'] }}",
        "{{ xs|selectattr('a', 'equalto', 2)|map(attribute='n')|first }}{{ s|truncate(4, true) }}",
        "{% for i in range(3) %}{% set t %}{{ i }}{% endset %}{{ t }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    ],
)
def test_ordinary_templates_give_what_jinja_gives(template: str) -> None:
    assert render(template, **ROW) == jinja2.Environment(keep_trailing_newline=True).from_string(
        template
    ).render(ROW)


def test_what_has_no_text_of_its_own_is_json_or_an_error() -> None:
    assert render(
        "{{ d }}|{{ xs|map(attribute='a')|list }}|{{ d.items()|list }}|{{ 'é' ~ d }}|{{ d|tojson }}",
        **ROW,
    ) == ('{"k": 1, "l": [2]}|[1, 2]|[["k", 1], ["l", [2]]]|é{"k": 1, "l": [2]}|{"k": 1, "l": [2]}')
    for text in (
        "{{ none }}",
        "{{ 'a' ~ none }}",
        "{{ d.items() }}",
        "{{ absent }}",
        "{{ xs|map('upper') }}",
    ):
        with pytest.raises(TemplateProblem):
            render(text, **ROW)


#: Each takes unbounded memory, or holds an interpreter's lock for seconds or for ever.
BOMBS = {
    "a format's width": "{{ '%(k)99999999d' % {'k': 1} * 9 }}",
    "an indent": "{% set ns = namespace(l=[1]) %}{% for i in range(400) %}{% set ns.l = [ns.l] %}{% endfor %}"
    "{{ [ns.l, ns.l, ns.l]|tojson(indent=100000)|length }}",
    "a text": "{{ 'a' * 10000000000 }}",
    "a power": "{{ 10 ** 1000000000 }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a sum of lists": "{% set l = ('x'*400000)|map('list')|list %}{{ l|sum(start=[])|length }}",
    "reject in": "{% set l = range(60000)|list %}{{ l|reject('in', l[::-1] * 2)|list|length }}",
    "equal lists": "{% set l = [0] * 4000000 %}{% for i in range(9999) %}{% if l == [0] * 4000000 %}"
    "{% endif %}{% endfor %}",
    "a macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "doubled": "{% set ns = namespace(l=[1]) %}{% for i in range(150) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
}


@pytest.mark.processes
@pytest.mark.parametrize("template", BOMBS.values(), ids=BOMBS)
def test_no_template_runs_away(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_texts, "LIMIT_S", 0.5)
    with pytest.raises(TemplateProblem, match=r"memory|more than 0\.5 s|limit"):
        JinjaTexts([template]).render({})


@pytest.mark.parametrize(
    "template",
    [
        "{{ s.__class__.__mro__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ lipsum(5) }}",
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    ],
)
def test_no_template_leaves_its_sandbox(template: str) -> None:
    with pytest.raises(TemplateProblem):
        render(template, **ROW)


def test_a_row_whose_template_runs_away_fails_alone(
    prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jinja_source, "LIMIT_S", 1.0)
    pq.write_table(pa.table({"n": [1, 10**9, 2]}), tmp_path / "in.parquet")
    assert prompts("{{ 'x' * n }}") == [
        "x",
        "the template: it takes more memory than the process that renders it may have",
        "xx",
    ]
    assert prompts("{% if n > 99 %}{{ 10 ** n }}{% endif %}{{ n }}", output="slow") == [
        "1",
        "the template went on for more than 1 s",
        "2",
    ]


def test_the_command_line_knows_jinja_by_a_files_name(
    invoke: Invoke, redis: Redis, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "in.parquet")
    submit = ("submit", tmp_path / "in.parquet")
    for number, (name, options) in enumerate(
        [("t.j2", []), ("t.jinja", []), ("t.txt", ["--template-format", "jinja"])]
    ):
        (tmp_path / name).write_text("{% if a %}{{ a }}{% endif %}\n")
        result = invoke(
            *submit, tmp_path / f"out{number}", "--template-file", tmp_path / name, *options
        )
        assert result.exit_code == 0, result.output
        job = queued_jobs(redis)[-1]
        assert job.kwargs["template_format"] == "jinja"
        assert job.kwargs["template"] == "{% if a %}{{ a }}{% endif %}"
    (tmp_path / "t.j2").write_text("{a}")
    result = invoke(
        *submit,
        tmp_path / "out",
        "--template-file",
        tmp_path / "t.j2",
        "--template-format",
        "fields",
    )
    assert result.exit_code == 0, result.output
    assert (
        "MissingColumn"
        in invoke(
            *submit, tmp_path / "o", "--template", "{{ b }}", "--template-format", "jinja"
        ).output
    )
