"""The sections of gpu.sh: what each runs, for how long at most, and how it runs dry."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

OUT = Path("ops/out/gpu")
DEFAULT = "graphs, overlap"
SHIPPED = "Qwen3-0.6B, bfloat16"  # of ops/bench/static/kernel_cases.py
TESTS = "tests/engine"  # engines and kernels of most are on a GPU where there is one
NOT_ON_GPU = "not slip_in_a_kernel"  # faulty on purpose: one may take the device down with it
TEST_PROCESSES = 12
# The suite turns every warning into an error, for the versions it is developed with; others warn of more.
PYTEST = ("pytest", "-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default", "-rs")


@dataclass(frozen=True)
class Section:
    """One command: its module and arguments, its seconds at most, and the arguments of a dry run."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    dry_run: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Of its log, and of what it writes."""
        return self.name.replace(" ", "-")


def sections(out: Path, models: Path) -> list[Section]:
    """What is run, the most wanted first. models: folder for checkpoints that several of them use."""

    def bench(name: str, limit_s: float, *command: str, dry_run: Sequence[str] = ()) -> Section:
        command = (*command, "--json", str(out / f"{name.replace(' ', '-')}.json"))
        return Section(name, limit_s, command, (*command, *dry_run, "--dry-run"))

    checkpoint = ("--model", str(models / "model"))
    processes = ("-n", str(TEST_PROCESSES)) if find_spec("xdist") else ()
    quick_tests = (
        f"{TESTS}/test_gpu.py::test_bfloat16_heads_of_128_follow_float32",
        f"{TESTS}/test_kernels_at_model_size.py::test_norms",
    )
    demo = (
        "ops.bench.gpu.accuracy",
        "--rows",
        "300",
        "--device",
        "cuda",
        "--attention-backend",
        "triton",
    )
    return [
        bench(
            "compile", 200, "ops.bench.throughput", *checkpoint, "--variants", DEFAULT, "--warm-up-alone",
        ),
        Section(
            "tests", 200, (*PYTEST, *processes, "-m", "not long", "-k", NOT_ON_GPU, TESTS),
            (*PYTEST, *quick_tests), {"GPU_TESTS_ON_CPU": "1"},
        ),
        bench("run", 120, "ops.bench.throughput", *checkpoint, "--variants", DEFAULT, "--rounds", "1"),
        bench("scoring", 90, "ops.bench.gpu.scoring", *checkpoint),
        bench(
            "fp8", 60, "ops.bench.throughput", *checkpoint, "--variants", DEFAULT, "FP8 KV cache", "--sampling",
            "temperature 0.6", "--rounds", "2", "--seconds", "50",
        ),
        bench("profile", 70, "ops.bench.gpu.step_profile", *checkpoint),
        bench("kernels", 60, "ops.bench.kernels", "--only", "attention", "layers"),
        bench("products", 30, "ops.bench.kernels", "--only", "products"),
        bench("sampler", 30, "ops.bench.kernels", "--only", "sampler"),
        bench(
            "graphs and overlap", 110, "ops.bench.throughput", *checkpoint, "--sampling", "temperature 0.6",
            "--seconds", "80", dry_run=("--rounds", "1"),
        ),
        Section(
            "accuracy", 45, demo,
            ("ops.bench.gpu.accuracy", "--rows", "3", "--batches", "1", "2", "--device", "cpu"),
        ),
        Section("host time", 45, ("ops.bench.host_time",), ("ops.bench.host_time", "--cases", "8x40")),
        Section(
            "static", 60, ("ops.bench.static", "--only", SHIPPED), ("ops.bench.static", "--no-compile"),
        ),
    ]  # fmt: skip
