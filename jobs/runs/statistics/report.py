"""A finished run as one page, made of its manifest alone: no script, and nothing is fetched from anywhere."""

import time
from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite
from typing import Any

from jobs.common.display import MAX_TEXT_CHARS, duration_text, safe_name
from jobs.runs.statistics.part_stats import outcome_text
from jobs.runs.statistics.run_statistics import BOUNDS

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #57606a; --line: #d0d7de; --page: #fff;
  --card: #f6f8fa; --mark: #0b62c4; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9aa4af; --line: #30363d;
  --page: #0d1117; --card: #161b22; --mark: #58a6ff; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem; max-width: 60rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; } .soft { color: var(--soft); } .bad { color: var(--bad); }
code, td { overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem;
  margin: 1.2rem 0; }
dl div { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; font-size: 1.2rem; font-weight: 600; }
table { width: 100%; border-collapse: collapse; font-size: .93rem; }
th, td { text-align: left; padding: .35rem .6rem .35rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 12px; }
@media (max-width: 40rem) { svg.wide text { font-size: 19px; } }
svg .bar { fill: var(--mark); } svg .axis { stroke: var(--line); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 0 1.5rem; }
.scroll { overflow-x: auto; }
"""

_WIDE, _NARROW, _HEIGHT, _LEFT, _TOP, _BOTTOM = 640, 400, 190, 64, 12, 26


def report_html(manifest: Mapping[str, Any], price_per_hour: float | None = None) -> str:
    """Return the page, which shows no prompts or answers. price_per_hour: of a worker's machine, in any money."""
    statistics = manifest.get("statistics", {})
    run, rows, errors = manifest["run"], manifest["rows"], manifest["errors"]
    outcome = outcome_text(errors, manifest.get("failed_checks", 0), manifest.get("cut", 0))
    is_good = outcome == outcome_text(0, 0, 0)
    state = "none with an error" if is_good else f'<span class="bad">{outcome}</span>'
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest["started_at"])) if rows else ""
    sections = [
        f"<h1>Run {_text(run)}</h1>",
        f"<p>{rows:,} rows, {state}. <span class=soft>{_text(began)}</span></p>",
        f"<p class=soft>{_text(manifest['model'])}, {_text(manifest['dtype'])}; "
        f"Tokenmill {_text(manifest['version'])}</p>",
        _figures(manifest, statistics, price_per_hour),
        _throughput(statistics.get("timeline", {})),
        '<div class="pair">',
        _lengths("Tokens of prompts", statistics.get("prompt_lengths", {})),
        _lengths("Tokens of answers", statistics.get("completion_lengths", {})),
        "</div>",
        _errors(errors, statistics.get("reasons", [])),
        _workers(statistics),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>Run {_text(run)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _figures(manifest: Mapping[str, Any], statistics: Mapping[str, Any], price: float | None) -> str:
    whole = manifest["seconds"] if isfinite(manifest["seconds"]) else 0.0
    seconds = statistics.get("working_seconds", whole)  # manifests of older versions have none
    prompts, cached = manifest["prompt_tokens"], manifest["cached_tokens"]
    figures = [
        ("Time", _duration(seconds)),
        ("Rows a second", _number(manifest["rows"] / seconds) if seconds > 0 else "-"),
        ("Prompt tokens", f"{prompts:,}"),
        ("Of these cached", f"{cached / prompts:.1%}" if prompts else "-"),
        ("Answer tokens", f"{manifest['completion_tokens']:,}"),
        ("Tokens a second", _number(manifest["generated_tokens"] / seconds) if seconds > 0 else "-"),
    ]
    spent = statistics.get("worker_seconds", 0.0)
    figures.append(("Time of workers", _duration(spent)))
    if price is not None:
        figures.append((f"Cost at {price:g} an hour", f"{spent / 3600 * price:,.2f}"))
    cells = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in figures)
    notes = [
        "Answer tokens are those of the output's rows. Tokens a second, and those of workers, were generated:"
        " equal prompts are answered once, and an answer that was asked for again counts each time."
    ]
    if (idle := whole - seconds) >= 1:
        notes.insert(0, f"Time and chart leave out {_duration(idle)} during which no worker had a shard.")
    return f"<dl>{cells}</dl><p class=soft>{_text(' '.join(notes))}</p>"


def _throughput(timeline: Mapping[str, Any]) -> str:
    width, tokens = timeline.get("bin_s", 0.0), timeline.get("tokens", [])
    if width <= 0 or not any(tokens):
        return ""
    rates = [count / width for count in tokens]
    marks = [(share * len(rates), _duration(share * width * len(rates))) for share in (0, 1 / 3, 2 / 3, 1)]
    chart = _chart(rates, marks, "Tokens a second over the time of the run", _WIDE)
    return (
        "<h2>Tokens generated a second</h2>"
        f"{chart}<p class=soft>A shard's tokens count evenly from its beginning to its end.</p>"
    )


def _lengths(title: str, lengths: Mapping[str, int]) -> str:
    if not lengths:
        return ""
    known = {int(bound): count for bound, count in lengths.items()}
    # Ranges without rows are drawn too: few long answers stand apart from the others.
    bounds = [bound for bound in BOUNDS if min(known) <= bound <= max(known)]
    counts = [known.get(bound, 0) for bound in bounds]
    every = max(1, -(-len(bounds) // 7))
    marks = [(place + 0.5, f"{bounds[place]:,}") for place in range(0, len(bounds), every)]
    chart = _chart([float(count) for count in counts], marks, title, _NARROW)
    return f"<section><h2>{_text(title)}</h2>{chart}<p class=soft>Rows by most tokens of each range.</p></section>"


def _chart(values: Sequence[float], marks: Sequence[tuple[float, str]], label: str, width: int) -> str:
    """Draw bars from 0. marks: what stands below, and where, counted in bars."""
    most = max(values)
    inner, height = width - _LEFT - 8, _HEIGHT - _TOP - _BOTTOM
    step = inner / len(values)
    gap = min(2.0, step / 6)
    kind = "wide" if width == _WIDE else "narrow"
    shapes = []
    for share in (0, 0.5, 1):
        y = _TOP + height * (1 - share)
        shapes.append(f'<line class="axis" x1="{_LEFT}" x2="{width - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shapes.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(most * share)}</text>')
    for place, value in enumerate(values):
        tall = height * value / most if most else 0.0
        shapes.append(
            f'<rect class="bar" x="{_LEFT + place * step + gap / 2:.1f}" y="{_TOP + height - tall:.1f}" '
            f'width="{step - gap:.1f}" height="{tall:.1f}"/>'
        )
    for at, text in marks:
        x = _LEFT + at * step
        anchor = "end" if x + 5 * len(text) > width else "middle"
        shapes.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{_text(text)}</text>')
    return (
        f'<svg class="{kind}" viewBox="0 0 {width} {_HEIGHT}" role="img" aria-label="{_text(label)}">'
        f"{''.join(shapes)}</svg>"
    )


def _errors(errors: int, reasons: Sequence[Mapping[str, Any]]) -> str:
    if not errors:
        return ""
    rows = "".join(
        f"<tr><td class=n>{each['rows']:,}</td><td>{_text(each['reason'])}</td>"
        f"<td>{', '.join(f'{row:,}' for row in each['examples'])}</td></tr>"
        for each in reasons
    )
    told = sum(each["rows"] for each in reasons)
    rest = f"<p class=soft>{errors - told:,} more rows, whose reasons are not listed.</p>" if errors > told else ""
    table = (
        "<div class=scroll><table><thead><tr><th class=n>Rows</th><th>Reason</th><th>Such as row</th></tr>"
        f"</thead><tbody>{rows}</tbody></table></div>"
    )
    return f"<h2>Rows with an error</h2>{table if rows else ''}{rest}"


def _workers(statistics: Mapping[str, Any]) -> str:
    workers = statistics.get("workers", [])
    if not workers:
        return ""
    rows = "".join(
        f"<tr><td>{_text(each['name'] or 'not told')}</td><td class=n>{each['rows']:,}</td>"
        f"<td class=n>{each['errors']:,}</td><td class=n>{each['generated_tokens']:,}</td>"
        f"<td class=n>{_duration(each['seconds'])}</td></tr>"
        for each in workers
    )
    more = statistics.get("num_workers", 0) - len(workers)
    rest = f"<p class=soft>And {more:,} more workers.</p>" if more > 0 else ""
    return (
        "<h2>Workers</h2><div class=scroll><table><thead><tr><th>Name</th><th class=n>Rows</th>"
        "<th class=n>Errors</th><th class=n>Tokens</th><th class=n>Time</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{rest}"
    )


def _text(value: object) -> str:
    return escape(safe_name(str(value), MAX_TEXT_CHARS))


def _number(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1000 if letter == 'k' else size):,.4g}{letter}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 60 else duration_text(seconds)
