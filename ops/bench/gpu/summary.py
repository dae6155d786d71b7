"""One table of what gpu.sh's sections found; whatever else failed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ops.bench.report import spread

Row = tuple[str, str]
Speeds = dict[
    tuple[str, str], dict[int, float]
]  # (variant, sampling) -> output tokens per second by turn


def summarize(out: Path, ran: dict[str, dict[str, Any]]) -> Iterator[Row]:
    """Rows of the last table. ran: status and seconds of each section."""
    for name, section in ran.items():
        yield f"section {name}", f"{section['status']}, {section['seconds']:.0f} s"
    found = {path.stem: read_json(path) for path in out.glob("*.json")}
    yield from _ceilings(found)
    for name in ("run", "fp8", "graphs-and-overlap"):
        yield from _runs(found.get(name) or {})
    yield from _scoring(found.get("scoring") or {})
    yield from _profile(found.get("profile") or {})
    for name in ("kernels", "products", "sampler"):
        for case in (found.get(name) or {}).get("kernels", ()):
            share = case["floor_s"] / case["seconds"]
            yield case["name"], f"{1e6 * case['seconds']:,.1f} µs, {share:.0%} of its floor's speed"
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
            yield "copies", f"{rates['bandwidth'] / 1e9:,.0f} GB/s"
            yield "products", f"{rates['flops'] / 1e12:,.0f} TFLOP/s"
            return


def _runs(throughput: dict[str, Any]) -> Iterator[Row]:
    speeds: Speeds = {}
    for run in throughput.get("runs", ()):
        speeds.setdefault((run["variant"], run["sampling"]), {})[run["turn"]] = run["tok_s"]
    for (variant, sampling), by_turn in speeds.items():
        tok_s = sorted(by_turn.values())[len(by_turn) // 2]
        share = tok_s * throughput["floor_s"] / throughput["out_tokens"]
        shown = f"{spread(list(by_turn.values()), 0)} tok/s"
        yield f"256 sequences, {variant}, {sampling}", f"{shown}; {share:.0%} of the floor's"
    for what, faster, slower in (
        ("graphs ÷ eager, overlap", "graphs, overlap", "eager, overlap"),
        ("graphs ÷ eager, no overlap", "graphs", "eager"),
        ("overlap ÷ none, graphs", "graphs, overlap", "graphs"),
        ("overlap ÷ none, eager", "eager, overlap", "eager"),
        ("FP8 KV cache ÷ the model's dtype", "FP8 KV cache", "graphs, overlap"),
    ):
        above, below = (
            speeds.get((variant, "temperature 0.6"), {}) for variant in (faster, slower)
        )
        ratios = [above[turn] / tok_s for turn, tok_s in below.items() if turn in above]
        if ratios:
            yield what, f"{spread(ratios)} times"


def _scoring(scoring: dict[str, Any]) -> Iterator[Row]:
    seconds: dict[tuple[str, str], list[float]] = {}
    for run in scoring.get("scoring", ()):
        seconds.setdefault((run["shape"], run["variant"]), []).append(run["seconds"])
    for (shape, variant), values in seconds.items():
        yield f"{shape}, {variant}", f"{spread(values)} s"


def _profile(profile: dict[str, Any]) -> Iterator[Row]:
    for part, steps in profile.items():
        yield (
            f"the run, a step of {part}",
            f"{steps['ms_per_step']:.2f} ms, the device idle for {steps['idle_share']:.1%}",
        )


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "")
