"""What each Triton kernel takes of a GPU in the sizes that are shipped, without one.

    python -m ops.bench.static                       # all cases on Hopper; some minutes
    python -m ops.bench.static --only Qwen3-0.6B     # cases whose names begin so
    python -m ops.bench.static --target 86           # another kind of GPU, which must hold every kernel
    python -m ops.bench.static --table A.json B.json # the table of RESULTS.md, from what --json wrote

Each case is run on tensors without values, at row counts that would betray a launch whose arguments are
compiled in: what it launches is compiled, each variant once. The exit status is 1 if a kernel
spills, does not fit, or is not what ops/bench/static/kernel_cases.py asks of it.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported: the interpreter compiles nothing
if __name__ == "__main__" and find_spec("triton") is None:
    sys.exit("python -m ops.bench.static needs the package triton: pip install triton")

import triton

from engine.attention.triton_backend import FP8_CAPABILITY
from engine.kernels import gpu_kind
from ops.bench.report import print_table
from ops.bench.static.compiled import (
    HOPPER,
    TARGETS,
    Target,
    Usage,
    Variant,
    compile_variant,
    recorded,
)
from ops.bench.static.kernel_cases import Case, Kernel
from ops.bench.static.table import UnusableReport, table_lines

#: One, a multiple of 16 and not, few and many for a tile; each a row count that a step may have.
ROWS = (1, 2, 15, 16, 17, 31, 64, 255, 256, 1000, 8192)


@dataclass(frozen=True)
class Asked:
    """A variant that a case's launches ask for, and with which row counts."""

    case: str
    variant: Variant
    rows: tuple[int, ...]

    @property
    def where(self) -> str:
        """For a sentence about it."""
        return f"{self.variant.name}, {self.case}"


def variants_of(case: Case, rows: Sequence[int] = ROWS) -> list[Asked]:
    """Every variant that the case's launches ask for."""
    asked: dict[Variant, list[int]] = {}
    for num_rows in rows:
        seen: set[Variant] = set()
        with recorded(seen.add):
            case.launch(num_rows)
        for variant in seen:
            asked.setdefault(variant, []).append(num_rows)
    return [Asked(case.name, variant, tuple(own)) for variant, own in asked.items()]


def variant_problems(asked: Sequence[Asked], kernels: Mapping[str, Kernel]) -> Iterator[str]:
    """What would compile too often, a sentence each."""
    by_layer: dict[tuple[str, ...], list[Asked]] = {}
    for each in asked:
        name, constants = each.variant.name, each.variant.named_constants
        layer = (
            [str(constants.get(what)) for what in kernels[name].of_layer] if name in kernels else []
        )
        by_layer.setdefault((name, each.case, *layer), []).append(each)
    for (name, *_), own in by_layer.items():
        if name not in kernels:
            yield f"{own[0].where}: it has no line in KERNELS"
        elif len(own) > kernels[name].variants:
            yield (
                f"{own[0].where}: {len(own)} variants, at most {kernels[name].variants} wanted; "
                f"they differ in {', '.join(_differences(own))}, by row counts {[each.rows for each in own]}"
            )


def _differences(asked: Sequence[Asked]) -> list[str]:
    """Arguments that are not compiled alike."""
    kinds = [
        {
            name: (kind, each.variant.named_constants.get(name), i in each.variant.aligned)
            for i, (name, kind) in enumerate(each.variant.signature)
        }
        for each in asked
    ]
    return [name for name in kinds[0] if len({kind[name] for kind in kinds}) > 1]


def usage_problems(
    asked: Sequence[Asked], usages: Mapping[Variant, Usage], kernels: Mapping[str, Kernel]
) -> Iterator[str]:
    """What spills, does not fit or loads badly on Hopper, a sentence each."""
    products: dict[tuple[str, str], set[str]] = {}
    for each in asked:
        name, usage, in_16_bits = (
            each.variant.name,
            usages[each.variant],
            not each.variant.is_float32,
        )
        wanted = kernels.get(name, Kernel(launches="unknown"))
        if usage.spill_bytes:
            yield f"{each.where}: spills {usage.spill_bytes} bytes with {usage.registers} registers"
        warps = wanted.warps if in_16_bits else 1
        if each.variant.is_fp8 and wanted.fp8_warps is not None:
            warps = wanted.fp8_warps
        if usage.programs * usage.num_warps < warps:
            yield (
                f"{each.where}: {usage.programs} programs of {usage.num_warps} warps on a multiprocessor, "
                f"{warps} warps wanted; {usage.registers} registers, "
                f"{usage.shared_bytes:,} bytes shared"
            )
        # shared memory is laid out for products of 16-bit numbers, 8 of them: FP8 ones are copied by 8 bytes
        wide = wanted.wide / 2 if each.variant.is_fp8 else wanted.wide
        if in_16_bits and usage.wide_share < wide:
            yield (
                f"{each.where}: {usage.wide_share:.0%} of its loads' bytes by 16, {wide:.0%} wanted; "
                f"it loads {_counts(usage.loads)}"
            )
        if in_16_bits and min(usage.buffers, default=0) < wanted.buffers:
            yield (
                f"{each.where}: loops copy to {list(usage.buffers)} buffers, {wanted.buffers} of each tensor "
                "wanted: with one, no copy overlaps the products"
            )
        if each.variant.is_fp8 and wanted.keeps_float16 and usage.from_float16:
            yield (
                f"{each.where}: {usage.from_float16} conversions of float16, none wanted: FP8 numbers are to be "
                "multiplied as the float16 ones that they become first"
            )
        if in_16_bits and wanted.product:
            products.setdefault((each.where, wanted.product), set()).update(usage.products)
    for (where, product), found in products.items():
        if product not in found:
            yield f"{where}: no {product} instruction, found {sorted(found)}"


def fit_problems(asked: Sequence[Asked], usages: Mapping[Variant, Usage]) -> Iterator[str]:
    """What spills or does not fit on some GPU, a sentence each."""
    for each in asked:
        usage = usages[each.variant]
        if usage.spill_bytes:
            yield f"{each.where}: spills {usage.spill_bytes} bytes with {usage.registers} registers"
        if not usage.programs:
            yield (
                f"{each.where}: no program fits, with {usage.registers} registers of {usage.num_warps} warps and "
                f"{usage.shared_bytes:,} bytes shared"
            )


def compile_all(asked: Iterable[Asked], target: Target = HOPPER) -> dict[Variant, Usage]:
    """Each variant once."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # for the assembler to report on each kernel
        return {
            variant: compile_variant(variant, target)
            for variant in dict.fromkeys(each.variant for each in asked)
        }


def print_usages(asked: Sequence[Asked], usages: Mapping[Variant, Usage]) -> None:
    """A row for each kernel and case, over its variants."""
    by_case: dict[tuple[str, str], list[Usage]] = {}
    for each in asked:
        by_case.setdefault((each.variant.name, each.case), []).append(usages[each.variant])
    rows = [
        [
            f"{name}: {case}",
            str(len(own)),
            _range(usage.registers for usage in own),
            _range(usage.spill_bytes for usage in own),
            _range(round(usage.shared_bytes / 1024) for usage in own),
            _range(usage.num_warps for usage in own),
            _range(usage.programs for usage in own),
            f"{min(usage.wide_share for usage in own):.0%}",
            ", ".join(sorted({kind for usage in own for kind in usage.products})) or "-",
        ]
        for (name, case), own in sorted(by_case.items())
    ]
    header = [
        "variants",
        "registers",
        "spills, bytes",
        "shared, KiB",
        "warps",
        "programs per SM",
        "by 16",
    ]
    print_table(["kernel: sizes", *header, "products"], rows)


def _range(values: Iterable[int]) -> str:
    """Least and most, or the one that all are."""
    found = list(values)
    return f"{min(found)}..{max(found)}" if min(found) < max(found) else str(found[0])


def _counts(counts: Mapping[int, int]) -> str:
    return ", ".join(f"{what}×{count}" for what, count in counts.items()) or "-"


def print_table_of_files(paths: Sequence[Path], kernels: Mapping[str, Kernel]) -> int:
    """Print what several runs found; returns 2 if a file cannot be part of it."""
    try:
        print("\n".join(table_lines(paths, kernels)))
    except UnusableReport as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def as_json(each: Asked, usage: Usage) -> dict[str, object]:
    """A variant of a case, for the file."""
    variant = each.variant
    return {
        "case": each.case, "kernel": variant.name, "rows": each.rows, **asdict(usage),
        "constants": variant.named_constants, "options": dict(variant.options),
    }  # fmt: skip


def main() -> int:
    """Compile and print; returns 1 if something is wrong, 2 if there is no such case or file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="cases whose names begin with one of these")
    parser.add_argument(
        "--no-compile", action="store_true", help="only say which variants are asked for"
    )
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument(
        "--table",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="print one table of these files, which --json wrote; nothing is compiled",
    )
    parser.add_argument(
        "--cases", default="ops.bench.static.kernel_cases", help="a module with CASES and KERNELS"
    )
    parser.add_argument("--kernels", nargs="+", help="only these kernels")
    parser.add_argument("--target", type=int, choices=TARGETS, default=90)
    options = parser.parse_args()
    target = TARGETS[options.target]
    gpu_kind.assumed = target.kind
    module = importlib.import_module(options.cases)
    if options.table:
        return print_table_of_files(options.table, module.KERNELS)
    chosen = [case for case in module.CASES if case.name.startswith(tuple(options.only or ("",)))]
    if not chosen:
        print(
            f"no case begins with {options.only}; there are {[case.name for case in module.CASES]}"
        )
        return 2
    asked = [each for case in chosen for each in variants_of(case)]
    if target.kind < FP8_CAPABILITY:  # the engine refuses an FP8 cache there
        asked = [each for each in asked if not each.variant.is_fp8]
    if options.kernels:
        asked = [each for each in asked if each.variant.name in options.kernels]
    wrong = list(variant_problems(asked, module.KERNELS))
    if not (options.only or options.kernels):
        unused = set(module.KERNELS) - {each.variant.name for each in asked}
        wrong += [f"{name}: no case launches it" for name in sorted(unused)]
    usages: dict[Variant, Usage] = {}
    if not options.no_compile:
        usages = compile_all(asked, target)
        if target is HOPPER:
            wrong += usage_problems(asked, usages, module.KERNELS)
        else:
            wrong += fit_problems(asked, usages)
        print_usages(asked, usages)
    if options.json:
        kernels = [as_json(each, usages[each.variant]) for each in asked if each.variant in usages]
        report = {
            "target": target.capability,
            "triton": triton.__version__,
            "variants": len({each.variant for each in asked}),
            "kernels": kernels,
            "problems": wrong,
        }
        options.json.write_text(json.dumps(report))
    print(
        "\n".join(wrong)
        or f"nothing is wrong with {len({each.variant for each in asked})} variants"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
