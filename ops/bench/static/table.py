"""The table of RESULTS.md: what each kernel takes of several kinds of GPUs, under several versions of Triton.

It is made from what `python -m ops.bench.static --target N --json FILE` wrote.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.bench.static.kernel_cases import Kernel

WRITE_ANEW = "write it anew by python -m ops.bench.static --target N --json FILE"


class UnusableReport(Exception):
    """Raised when a file cannot be part of the table."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


@dataclass(frozen=True)
class Peak:
    """The most that any variant of a kernel takes. spill_bytes: stored and loaded again. shared_bytes: of a program."""

    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0

    @property
    def cell(self) -> str:
        """Registers, and in parentheses the bytes that spill."""
        return (
            f"{self.registers} (+{self.spill_bytes})" if self.spill_bytes else f"{self.registers}"
        )

    def with_variant(self, variant: Mapping[str, int]) -> "Peak":
        """Return the most of both."""
        return Peak(
            max(self.registers, variant["registers"]),
            max(self.spill_bytes, variant["spill_bytes"]),
            max(self.shared_bytes, variant["shared_bytes"]),
        )


@dataclass(frozen=True)
class Report:
    """What one run found. target: the GPU's compute capability, such as 90. triton: the version that compiled."""

    path: Path
    target: int
    triton: str
    num_variants: int
    peaks: Mapping[str, Peak]


#: A target and the version of Triton that compiled for it.
Run = tuple[int, str]


def table_lines(paths: Sequence[Path], kernels: Mapping[str, Kernel]) -> Iterator[str]:
    """Yield the sentences that say what the table has, then the table in Markdown.

    Rows are in the order of `kernels`, versions in that of the files, and targets in that of their numbers.
    Raises UnusableReport for a file that cannot be part of it.
    """
    reports = _read_reports(paths, kernels)
    targets = sorted({target for target, _ in reports})
    versions = list(dict.fromkeys(version for _, version in reports))

    yield from _sentences(reports.values(), versions)
    yield ""
    yield _row(["kernel", "launches", *(f"sm_{target}" for target in targets), "KiB"])
    yield "|" + (len(targets) + 3) * "---|"
    for name, kernel in kernels.items():
        peaks = {run: report.peaks[name] for run, report in reports.items() if name in report.peaks}
        if not peaks:
            continue

        columns = []
        for target in targets:
            found = [peaks.get((target, version)) for version in versions]
            columns.append(" / ".join(peak.cell if peak else "-" for peak in found))
        most_shared_bytes = max(peak.shared_bytes for peak in peaks.values())
        kib = -(-most_shared_bytes // 1024)
        yield _row([f"`{_short(name)}`", kernel.launches, *columns, str(kib)])


def _read_reports(paths: Sequence[Path], kernels: Mapping[str, Kernel]) -> dict[Run, Report]:
    """Each file's; raises UnusableReport for the second of a target and version, and for an unlisted kernel."""
    reports: dict[Run, Report] = {}
    for path in paths:
        report = read_report(path)
        run = (report.target, report.triton)
        if run in reports:
            raise UnusableReport(
                path,
                f"it is of sm_{report.target} and Triton {report.triton}, as {reports[run].path} is: give one of them",
            )
        unlisted = sorted(set(report.peaks) - set(kernels))
        if unlisted:
            raise UnusableReport(
                path,
                f"it has {', '.join(unlisted)}, without a line in KERNELS: add one to "
                f"ops/bench/static/kernel_cases.py, or {WRITE_ANEW}",
            )
        reports[run] = report
    return reports


def read_report(path: Path) -> Report:
    """Read what a run wrote; raises UnusableReport if the file is not such a one."""
    try:
        found = json.loads(path.read_text())
        peaks: dict[str, Peak] = {}
        for variant in found["kernels"]:
            name = variant["kernel"]
            peaks[name] = peaks.get(name, Peak()).with_variant(variant)
        return Report(path, found["target"], found["triton"], found["variants"], peaks)
    except OSError as error:
        raise UnusableReport(path, f"it cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UnusableReport(path, f"it is no JSON ({error}): {WRITE_ANEW}") from error
    except KeyError as error:
        raise UnusableReport(path, f"it has no {error}: {WRITE_ANEW}") from error
    except TypeError as error:
        raise UnusableReport(path, f"it is not as this command writes it: {WRITE_ANEW}") from error


def _sentences(reports: Collection[Report], versions: Sequence[str]) -> Iterator[str]:
    """What a cell is, how many variants there are, and what spills."""
    yield (
        f"A cell has the most registers of a thread under Triton {' / '.join(versions)}, and in parentheses the most "
        "bytes that spill. KiB: the most shared memory of a program."
    )
    targets_of: dict[int, set[int]] = {}
    for report in reports:
        targets_of.setdefault(report.num_variants, set()).add(report.target)
    counts = [
        f"{num_variants} on {', '.join(f'sm_{target}' for target in sorted(targets))}"
        for num_variants, targets in sorted(targets_of.items(), reverse=True)
    ]
    yield f"Variants: {'; '.join(counts)}."

    for version in versions:
        spilling = {
            f"`{_short(name)}`"
            for report in reports
            if report.triton == version
            for name, peak in report.peaks.items()
            if peak.spill_bytes
        }
        yield f"Spills under Triton {version}: {', '.join(sorted(spilling)) or 'none'}."


def _short(name: str) -> str:
    return name.removesuffix("_kernel")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
