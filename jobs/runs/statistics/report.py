"""A finished run as one page, made of its manifest alone: no script, and nothing is fetched from anywhere."""

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from jobs.common.display import MAX_TEXT_CHARS, duration_text, safe_name
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

_WIDTH, _HEIGHT, _LEFT, _BELOW = 640, 190, 64, 26


def report_html(manifest: Mapping[str, Any], price_per_hour: float | None = None) -> str:
    """Return the page, which shows no prompts or answers. price_per_hour: of a worker's machine, in any money."""
    statistics = manifest["statistics"]
    rows, errors = manifest["rows"], manifest["errors"]
    outcome = outcome_text(errors, manifest.get("failed_checks", 0), manifest.get("cut", 0))
    is_good = outcome == outcome_text(0, 0, 0)
    state = "none with an error" if is_good else f'<span class="bad">{outcome}</span>'
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest["started_at"])) if rows else ""
    sections = [
        f"<h1>Run {_text(manifest['run'])}</h1>",
        f"<p>{rows:,} rows, {state}. <span class=soft>{_text(began)}</span></p>",
        f"<p class=soft>{_text(manifest['model'])}, {_text(manifest['dtype'])}; "
        f"Tokenmill {_text(manifest['version'])}</p>",
        _figures(manifest, statistics, price_per_hour),
        _throughput(statistics["timeline"]),
        '<div class="pair">',
        _lengths("Tokens of prompts", statistics["prompt_lengths"]),
        _lengths("Tokens of answers", statistics["completion_lengths"]),
        "</div>",
        _errors(errors, statistics["reasons"]),
        _workers(statistics),
    ]
    return _PAGE.format(run=_text(manifest["run"]), style=_STYLE, sections="\n".join(sections))


def _figures(manifest: Mapping[str, Any], statistics: Mapping[str, Any], price: float | None) -> str:
    seconds, spent = statistics["working_seconds"], statistics["worker_seconds"]
    prompts, cached = manifest["prompt_tokens"], manifest["cached_tokens"]
    figures = [
        ("Time", duration_text(seconds)),
        ("Rows a second", _number(manifest["rows"] / seconds) if seconds > 0 else "-"),
        ("Prompt tokens", f"{prompts:,}"),
        ("Of these cached", f"{cached / prompts:.1%}" if prompts else "-"),
        ("Answer tokens", f"{manifest['completion_tokens']:,}"),
        ("Tokens a second", _number(manifest["generated_tokens"] / seconds) if seconds > 0 else "-"),
        ("Time of workers", duration_text(spent)),
    ]
    more = (("Rows reused", "rows_reused"), ("Asked again", "rows_escalated"), ("Tokens resumed", "tokens_resumed"))
    figures += [(name, f"{manifest[key]:,}") for name, key in more if manifest.get(key)]
    if price is not None:
        figures.append((f"Cost at {price:g} an hour", f"{spent / 3600 * price:,.2f}"))
    cells = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in figures)
    notes = [
        "Answer tokens are those of the output's rows. Tokens a second, and those of workers, were generated:"
        " equal prompts are answered once, and an answer that was asked for again counts each time."
    ]
    if (idle := manifest["seconds"] - seconds) >= 1:
        notes.insert(0, f"Time and chart leave out {duration_text(idle)} during which no worker had a shard.")
    return f"<dl>{cells}</dl><p class=soft>{_text(' '.join(notes))}</p>"


def _throughput(timeline: Mapping[str, Any]) -> str:
    width, tokens = timeline["bin_s"], timeline["tokens"]
    if width <= 0 or not any(tokens):
        return ""
    marks = [duration_text(width * place) for place in range(len(tokens))]
    note = "<p class=soft>A shard's tokens count evenly from its beginning to its end.</p>"
    return _chart("Tokens generated a second", [count / width for count in tokens], marks) + note


def _lengths(title: str, lengths: Mapping[str, int]) -> str:
    if not lengths:
        return ""
    known = {int(bound): count for bound, count in lengths.items()}
    # Ranges without rows are drawn too: few long answers stand apart from the others.
    bounds = [bound for bound in BOUNDS if min(known) <= bound <= max(known)]
    chart = _chart(title, [known.get(bound, 0) for bound in bounds], [f"{bound:,}" for bound in bounds])
    return f"<section>{chart}<p class=soft>Rows by most tokens of each range.</p></section>"


def _chart(title: str, values: Sequence[float], marks: Sequence[str]) -> str:
    most, height, step = max(values), _HEIGHT - _BELOW, (_WIDTH - _LEFT) / len(values)
    shapes = [f'<text x="{_LEFT - 6}" y="12" text-anchor="end">{_number(most)}</text>']
    for place, (value, mark) in enumerate(zip(values, marks, strict=True)):
        tall, left = height * value / most if most else 0.0, _LEFT + place * step
        size = f'width="{0.9 * step:.1f}" height="{tall:.1f}"'
        shapes.append(f'<rect x="{left:.1f}" y="{height - tall:.1f}" {size}/>')
        if place % max(1, -(-len(values) // 7)) == 0:
            shapes.append(f'<text x="{left:.1f}" y="{_HEIGHT - 8}">{_text(mark)}</text>')
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_text(title)}">{"".join(shapes)}</svg>'
    return f"<h2>{_text(title)}</h2>{svg}"


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]], rest: int, of_rest: str) -> str:
    """Return a table and how many more there are, nothing without rows."""
    if not rows:
        return ""
    cells = (
        "".join(f"<td class=n>{each:,}</td>" if isinstance(each, int) else f"<td>{_text(each)}</td>" for each in row)
        for row in rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    head = "".join(f"<th>{each}</th>" for each in heads)
    more = f"<p class=soft>And {rest:,} more {of_rest}.</p>" if rest > 0 else ""
    return f"<h2>{title}</h2><table><tr>{head}</tr>{body}</table>{more}"


def _errors(errors: int, reasons: Sequence[Mapping[str, Any]]) -> str:
    rows = [(each["rows"], each["reason"], ", ".join(map(str, each["examples"]))) for each in reasons]
    rest = errors - sum(each["rows"] for each in reasons)
    heads = ("Rows", "Reason", "Such as row")
    return _table("Rows with an error", heads, rows, rest, "rows, whose reasons are not listed")


def _workers(statistics: Mapping[str, Any]) -> str:
    workers = statistics["workers"]
    counts = ("rows", "errors", "generated_tokens")
    rows = [
        (each["name"] or "not told", *(each[name] for name in counts), duration_text(each["seconds"]))
        for each in workers
    ]
    heads = ("Name", "Rows", "Errors", "Tokens", "Time")
    return _table("Workers", heads, rows, statistics["num_workers"] - len(workers), "workers")


def _text(value: object) -> str:
    return escape(safe_name(str(value), MAX_TEXT_CHARS))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
