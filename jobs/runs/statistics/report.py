"""Makes a page about a finished run from its manifest and some rows. The page has no script and fetches nothing."""

import math
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from jobs.common.display import (
    MAX_TEXT_CHARS,
    duration_text,
    plural,
    price_text,
    printable,
    safe_name,
    to_json,
)
from jobs.runs.statistics.run_statistics import BOUNDS, outcome_text

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1.25rem; max-width: 60rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; } p { margin: .25rem 0; }
.soft, dt, th { color: GrayText; font-weight: 500; } .bad { color: light-dark(#b3261e, #ff8a80); }
dl, .pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem 1.5rem; }
.pair { grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); } dd { margin: 0; font-size: 1.2rem; }
table { width: 100%; border-collapse: collapse; font-size: .93rem; }
th, td { text-align: left; padding: .35rem .6rem .35rem 0; border-bottom: 1px solid GrayText; overflow-wrap: anywhere; }
.n { text-align: right; white-space: nowrap; } svg { width: 100%; display: block; }
svg text { fill: GrayText; font-size: 12px; } svg rect { fill: light-dark(#0b62c4, #58a6ff); }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Run {run}</title>
<style>{style}</style>
</head>
<body>
<main>
{sections}
</main>
</body>
</html>
"""

# Sizes of a chart, in the units of its SVG.
_WIDTH = 640
_HEIGHT = 190
#: The space to the left of the bars, for the number of the highest one.
_LEFT_MARGIN = 64
#: The space below the bars, for their labels.
_BOTTOM_MARGIN = 26


class Examples(NamedTuple):
    """Some rows of a run. columns: the output's columns. rows: each row's number, and its values in these columns."""

    columns: Sequence[str] = ()
    rows: Sequence[tuple[int, Sequence[Any]]] = ()


def report_html(
    manifest: Mapping[str, Any],
    price_per_hour: float | None = None,
    examples: Examples | None = None,
) -> str:
    """Return the report of a finished run as an HTML page.

    price_per_hour: what a worker's machine costs an hour, in any currency. Without it, no cost is shown.
    examples: rows that are shown.
    """
    statistics = manifest["statistics"]
    rows = manifest["rows"]
    errors = manifest["errors"]
    failed_checks = manifest.get("failed_checks", 0)
    cut = manifest.get("cut", 0)
    state = "none with an error"
    if errors or failed_checks or cut:
        state = f'<span class="bad">{outcome_text(errors, failed_checks, cut)}</span>'
    began = ""
    if rows:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest["started_at"]))
    num_rows = f"{rows:,} {plural('row', rows)}"
    sections = [
        f"<h1>Run {_text(manifest['run'])}</h1>",
        f"<p>{num_rows}, {state}. <span class=soft>{_text(began)}</span></p>",
        f"<p class=soft>{_text(manifest['model'])}, {_text(manifest['dtype'])}; "
        f"Tokenmill {_text(manifest['version'])}</p>",
        _figures(manifest, statistics, price_per_hour),
        _arguments(manifest),
        _counts(manifest, statistics),
        _examples(examples),
        _throughput(statistics["timeline"]),
        '<div class="pair">',
        _lengths("Tokens of prompts", statistics["prompt_lengths"]),
        _lengths("Tokens of answers", statistics["completion_lengths"]),
        "</div>",
        _errors(errors, statistics["reasons"]),
        _workers(statistics),
    ]
    return _PAGE.format(run=_text(manifest["run"]), style=_STYLE, sections="\n".join(sections))


def _figures(
    manifest: Mapping[str, Any], statistics: Mapping[str, Any], price: float | None
) -> str:
    """Return the numbers at the top of the page."""
    seconds = statistics["working_seconds"]
    worker_seconds = statistics["worker_seconds"]
    prompt_tokens = manifest["prompt_tokens"]
    cached_tokens = manifest["cached_tokens"]
    rows_a_second = "-"
    tokens_a_second = "-"
    if seconds > 0:
        rows_a_second = _number(manifest["rows"] / seconds)
        tokens_a_second = _number(manifest["generated_tokens"] / seconds)
    cached_share = f"{cached_tokens / prompt_tokens:.1%}" if prompt_tokens else "-"
    figures = [
        ("Time", duration_text(seconds)),
        ("Rows a second", rows_a_second),
        ("Prompt tokens", f"{prompt_tokens:,}"),
        ("Of these cached", cached_share),
        ("Answer tokens", f"{manifest['completion_tokens']:,}"),
        ("Tokens a second", tokens_a_second),
        ("Time of workers", duration_text(worker_seconds)),
    ]
    shown_if_any = {
        "Rows reused": "rows_reused",
        "Asked again": "rows_escalated",
        "Tokens resumed": "tokens_resumed",
    }
    for name, key in shown_if_any.items():
        if manifest.get(key):
            figures.append((name, f"{manifest[key]:,}"))
    if price is not None:
        figures.append((f"Cost at {price:g} an hour", price_text(worker_seconds / 3600 * price)))
    cells = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in figures
    )
    note = _note_on_figures(idle_s=manifest["seconds"] - seconds)
    return f"<dl>{cells}</dl><p class=soft>{_text(note)}</p>"


def _note_on_figures(idle_s: float) -> str:
    """Return the text below the numbers at the top. idle_s: the seconds in which no worker had a shard."""
    note = (
        "Answer tokens are the tokens of the output's rows. Tokens a second and tokens of workers are generated tokens:"
        " they count the answer to equal prompts once, and they count each attempt at an answer."
    )
    if idle_s < 1:
        return note
    return f"Time and chart leave out {duration_text(idle_s)} during which no worker had a shard. {note}"


#: The titles of arguments that say what a run asks, in the order in which they are shown.
_ARGUMENT_TITLES = {
    "template": "Template",
    "prompts": "Prompts",
    "prompt_column": "Column of prompts",
    "messages_column": "Column of chats",
    "query_column": "Column of queries",
    "document_column": "Column of documents",
    "image_column": "Columns of pictures",
    "task": "Task",
    "labels": "Labels",
    "check": "Check",
    "input_format": "Format",
}
#: Arguments that have a line of their own on the page.
_HAVE_OWN_LINE = {"input", "output", "sampling", *_ARGUMENT_TITLES}
#: Arguments that say where prompts come from. Without any of these, prompts come from the column "prompt".
_SOURCES = (
    "template",
    "prompts",
    "prompt_column",
    "messages_column",
    "query_column",
    "input_format",
)
#: The most input files that the page names.
MAX_INPUTS = 10


def _arguments(manifest: Mapping[str, Any]) -> str:
    """Return the table of the run's arguments, with its input files and its output folder."""
    arguments = manifest.get("arguments", {})
    entries: list[tuple[str, Any]] = []  # a title, and the value beside it
    if arguments and arguments.keys().isdisjoint(_SOURCES):
        entries.append(("Column of prompts", "prompt"))  # the default
    for name, title in _ARGUMENT_TITLES.items():
        if arguments.get(name) is not None:
            entries.append((title, arguments[name]))
    if manifest.get("sampling"):
        entries.append(("Sampling", manifest["sampling"]))
    if "seed" in manifest:
        entries.append(("Seed", str(manifest["seed"])))
    other_options = {}
    for name, value in arguments.items():
        if name not in _HAVE_OWN_LINE:
            other_options[name] = value
    if other_options:
        entries.append(("Other options", other_options))
    inputs = manifest.get("inputs", [])
    if inputs:
        entries.append(("Input", _inputs_text(inputs)))
    if "output" in arguments:
        entries.append(("Output", arguments["output"]))
    if not entries:
        return ""
    rows = ""
    for title, value in entries:
        rows += f"<tr><th>{title}</th><td>{_value_html(value)}</td></tr>"
    return f"<h2>What was asked</h2><table>{rows}</table>"


def _inputs_text(inputs: Sequence[Mapping[str, Any]]) -> str:
    """Return the first input files and their numbers of rows, one a line."""
    lines = []
    for file in inputs[:MAX_INPUTS]:
        rows = file["rows"]
        lines.append(f"{file['path']} ({rows:,} {plural('row', rows)})")
    num_more = len(inputs) - len(lines)
    if num_more > 0:
        lines.append(f"and {num_more:,} more files")
    return "\n".join(lines)


def _counts(manifest: Mapping[str, Any], statistics: Mapping[str, Any]) -> str:
    """Return tables that count answers by finish reason, by label and by check.

    A further table counts a batch file's lines by the argument that was left out.
    """
    # Manifests of older versions lack some of these counts.
    finish_reasons = statistics.get("finish_reasons") or {}
    labels = statistics.get("labels") or {}
    left_out = statistics.get("left_out") or {}
    tables = [_table_of_shares("How answers ended", finish_reasons)]
    tables.append(_table_of_shares("Labels", labels))
    if manifest.get("arguments", {}).get("check"):
        failed = manifest["failed_checks"]
        passed = manifest["rows"] - manifest["errors"] - failed
        rows = [("passed", passed, ""), ("failed", failed, "")]
        tables.append(_table("Checks", ("", "Answers", ""), rows))
    tables.append(_table("Arguments that were left out", ("", "Lines"), list(left_out.items())))

    sections = "".join(f"<section>{table}</section>" for table in tables if table)
    return f'<div class="pair">{sections}</div>' if sections else ""


def _table_of_shares(title: str, counts: Mapping[str, int]) -> str:
    """Return a table of counts of answers, each with its share of all; "" if there are no counts."""
    total = sum(counts.values())
    rows = [(name, count, f"{count / total:.1%}") for name, count in counts.items()]
    return _table(title, ("", "Answers", "Share"), rows)


def _examples(examples: Examples | None) -> str:
    """Return the table of example rows."""
    if examples is None or not examples.columns or not examples.rows:
        return ""
    heads = "".join(f"<th>{_text(name)}</th>" for name in ("Row", *examples.columns))
    body = ""
    for row, values in examples.rows:
        cells = "".join(f"<td>{_value_html(value)}</td>" for value in values)
        body += f"<tr><td class=n>{row:,}</td>{cells}</tr>"
    return f"<h2>Examples</h2><table><tr>{heads}</tr>{body}</table>"


#: The most characters and lines of a value on the page.
MAX_VALUE_CHARS = 1000
MAX_VALUE_LINES = 40


def _value_html(value: Any) -> str:
    """Return the beginning of a value as HTML; "" for None. A text keeps its line breaks. Other values become JSON."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else to_json(value)
    lines = text[:MAX_VALUE_CHARS].split("\n")
    html_lines = []
    for line in lines[:MAX_VALUE_LINES]:
        shown_line = printable(line.removesuffix("\r"))
        html_lines.append(escape(shown_line))
    html = "<br>".join(html_lines)
    is_whole = len(text) <= MAX_VALUE_CHARS and len(lines) <= MAX_VALUE_LINES
    return html if is_whole else f"{html}..."


def _throughput(timeline: Mapping[str, Any]) -> str:
    """Return the chart of tokens generated a second."""
    bin_s = timeline["bin_s"]
    tokens = timeline["tokens"]  # by bin
    if bin_s <= 0 or not any(tokens):
        return ""
    tokens_per_s = [count / bin_s for count in tokens]
    labels = [duration_text(bin_s * bin_index) for bin_index in range(len(tokens))]
    note = "<p class=soft>A shard's tokens count evenly from its beginning to its end.</p>"
    return _chart("Tokens generated a second", tokens_per_s, labels) + note


def _lengths(title: str, lengths: Mapping[str, int]) -> str:
    """Return a chart that counts rows by their number of tokens. lengths: see count_lengths."""
    if not lengths:
        return ""
    counts = {int(bound): count for bound, count in lengths.items()}
    shortest = min(counts)
    longest = max(counts)
    # Ranges without rows are drawn too, so that a few long answers stand apart from the rest.
    bounds = [bound for bound in BOUNDS if shortest <= bound <= longest]
    bars = [counts.get(bound, 0) for bound in bounds]
    labels = [f"{bound:,}" for bound in bounds]
    chart = _chart(title, bars, labels)
    note = "Rows by their number of tokens. The number below a bar is the upper end of its range."
    return f"<section>{chart}<p class=soft>{note}</p></section>"


def _chart(title: str, values: Sequence[float], labels: Sequence[str]) -> str:
    """Return a bar chart as SVG, with its heading. labels: the text below each bar. At most seven labels are drawn."""
    highest = max(values)
    max_bar_height = _HEIGHT - _BOTTOM_MARGIN
    step = (_WIDTH - _LEFT_MARGIN) / len(values)
    bars_per_label = math.ceil(len(values) / 7)
    shapes = [f'<text x="{_LEFT_MARGIN - 6}" y="12" text-anchor="end">{_number(highest)}</text>']
    for index, (value, label) in enumerate(zip(values, labels, strict=True)):
        left = _LEFT_MARGIN + index * step
        bar_height = max_bar_height * value / highest if highest else 0.0
        size = f'width="{0.9 * step:.1f}" height="{bar_height:.1f}"'
        shapes.append(f'<rect x="{left:.1f}" y="{max_bar_height - bar_height:.1f}" {size}/>')
        if index % bars_per_label == 0:
            shapes.append(f'<text x="{left:.1f}" y="{_HEIGHT - 8}">{_text(label)}</text>')

    attributes = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_text(title)}"'
    return f"<h2>{_text(title)}</h2><svg {attributes}>{''.join(shapes)}</svg>"


def _table(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[Any]],
    num_left_out: int = 0,
    noun: str = "rows",
) -> str:
    """Return a table with its heading; "" if there are no rows.

    num_left_out: how many things the table leaves out; a note below the table says so. noun: the name of these things.
    """
    if not rows:
        return ""
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = ""
    for row in rows:
        cells = "".join(map(_cell, row))
        body += f"<tr>{cells}</tr>"
    note = f"<p class=soft>And {num_left_out:,} more {noun}.</p>" if num_left_out > 0 else ""
    return f"<h2>{title}</h2><table><tr>{head}</tr>{body}</table>{note}"


def _cell(value: Any) -> str:
    """Return a cell of a table. Integers are aligned to the right."""
    if isinstance(value, int):
        return f"<td class=n>{value:,}</td>"
    return f"<td>{_text(value)}</td>"


def _errors(errors: int, reasons: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of errors: each reason, how many rows have it, and some of these rows."""
    rows = []
    num_listed = 0
    for reason in reasons:
        examples = ", ".join(map(str, reason["examples"]))
        rows.append((reason["rows"], reason["reason"], examples))
        num_listed += reason["rows"]
    heads = ("Rows", "Reason", "Such as row")
    return _table(
        "Rows with an error",
        heads,
        rows,
        num_left_out=errors - num_listed,
        noun="rows, whose reasons are not listed",
    )


def _workers(statistics: Mapping[str, Any]) -> str:
    """Return the table of workers and their shares of the run."""
    workers = statistics["workers"]
    rows = []
    for worker in workers:
        name = worker["name"] or "not told"
        row = (
            name,
            worker["rows"],
            worker["errors"],
            worker["generated_tokens"],
            duration_text(worker["seconds"]),
        )
        rows.append(row)
    heads = ("Name", "Rows", "Errors", "Tokens", "Time")
    num_left_out = statistics["num_workers"] - len(workers)
    return _table("Workers", heads, rows, num_left_out=num_left_out, noun="workers")


def _text(value: object) -> str:
    """Return a value's text, safe in HTML."""
    return escape(safe_name(str(value), MAX_TEXT_CHARS))


def _number(value: float) -> str:
    """Return a number without decimals if it is whole or at least 100; else with three significant digits."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"
