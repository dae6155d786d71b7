"""One table of what gpu.sh's sections found, each estimate beside what it is of; whatever else failed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ops.bench.estimate import PART_S, TEMPERATURE_06, TOK_S, beside
from ops.bench.table import spread

Row = tuple[str, str]
Speeds = dict[tuple[str, str], dict[int, float]]  # (variant, sampling) -> output tokens per second by turn


def summarize(out: Path, ran: dict[str, dict[str, Any]], *, dry_run: bool = False) -> Iterator[Row]:
    """Rows of the last table. ran: status and seconds of each section.

    dry_run: its figures are a tiny model's on a CPU, which say nothing of the estimates.
    """
    for name, section in ran.items():
        yield f"section {name}", f"{section['status']}, {section['seconds']:.0f} s"
    found = {path.stem: read_json(path) for path in out.glob("*.json")}
    yield from _ceilings(found)
    for name in ("run", "graphs-and-overlap"):
        yield from _runs(found.get(name) or {}, dry_run)
    yield from _profile(found.get("profile") or {}, dry_run)
    for name in ("kernels", "products", "sampler"):
        for case in (found.get(name) or {}).get("kernels", ()):
            share = case["floor_s"] / case["seconds"]
            yield case["name"], f"{1e6 * case['seconds']:,.1f} µs, {share:.0%} of its floor's speed"
    yield from _sweep(found.get("sweep") or [])
    if "tests" in ran:
        tests = re.findall(r"\d+ (?:passed|failed|error|skipped)", _last_line(out / "tests.log"))
        yield "GPU tests", ", ".join(tests) or "no result"


def read_json(path: Path) -> Any:
    """What a section wrote, None if it did not get so far."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _ceilings(found: dict[str, Any]) -> Iterator[Row]:
    for section in found.values():
        if isinstance(section, dict) and "ceilings" in section:
            rates = section["ceilings"]
            yield (
                "copies, reads",
                " and ".join(f"{rates[name] / 1e9:,.0f} GB/s" for name in ("bandwidth", "read_bandwidth")),
            )
            yield "products", f"{rates['flops'] / 1e12:,.0f} TFLOP/s"
            return


def _runs(throughput: dict[str, Any], dry_run: bool) -> Iterator[Row]:
    speeds: Speeds = {}
    for run in throughput.get("runs", ()):
        speeds.setdefault((run["variant"], run["sampling"]), {})[run["turn"]] = run["tok_s"]
    for (variant, sampling), by_turn in speeds.items():
        tok_s = sorted(by_turn.values())[len(by_turn) // 2]
        share = tok_s * throughput["floor"]["seconds"] / throughput["out_tokens"]
        shown = f"{spread(list(by_turn.values()), 0)} tok/s"
        if variant == "graphs, overlap" and sampling in TOK_S:
            shown = beside(tok_s, TOK_S[sampling], "tok/s", 0, dry_run=dry_run)
        yield f"256 sequences, {variant}, {sampling}", f"{shown}; {share:.0%} of the floor's"
    for what, faster, slower in (
        ("graphs ÷ eager, overlap", "graphs, overlap", "eager, overlap"),
        ("graphs ÷ eager, no overlap", "graphs", "eager"),
        ("overlap ÷ none, graphs", "graphs, overlap", "graphs"),
        ("overlap ÷ none, eager", "eager, overlap", "eager"),
    ):
        above, below = (speeds.get((variant, TEMPERATURE_06), {}) for variant in (faster, slower))
        ratios = [above[turn] / tok_s for turn, tok_s in below.items() if turn in above]
        if ratios:
            yield what, f"{spread(ratios)} times"


def _profile(profile: dict[str, Any], dry_run: bool) -> Iterator[Row]:
    for num_seqs, steps in profile.get("steps", {}).items():
        yield (
            f"{num_seqs} sequences, a step",
            f"{steps['ms_per_step']:.2f} ms, the device idle for {steps['idle_share']:.1%}",
        )
    if "run" in profile:
        yield "the run, idle while all decode", f"{profile['run']['idle_share']:.1%}"
        for part, estimated in PART_S.items():
            yield f"the run, {part}", beside(profile["run"]["parts_s"][part], estimated, "s", dry_run=dry_run)


def _sweep(tried: list[dict[str, Any]]) -> Iterator[Row]:
    for batch in dict.fromkeys(each["batch"] for each in tried):
        timed = [each for each in tried if each["batch"] == batch and each["seconds"] is not None]
        if timed:
            best, engines = min(timed, key=lambda each: float(each["seconds"])), timed[0]
            choice = ", ".join(f"{name} {value}" for name, value in best["choice"].items())
            yield (
                f"decode attention, {batch}",
                f"{choice}: {engines['seconds'] / best['seconds']:.2f} times as fast as the engine's choice",
            )


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "")
