"""Which values stop an engine from starting, what it takes where none is given, and where it launches."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from engine import ConfigError, Engine, EngineConfig, SamplingParams
from engine.attention.torch_backend import TorchBackend
from engine.cpu_kernels import processor
from engine.run.check_up import check_up
from engine.run.forward import model_runner
from engine.run.forward.memory import allowed_bytes
from tests.engine.checkpoints import SHAPES, make_checkpoint

PACKAGE = Path(engine.__file__).parent
SMALL = {"kv_cache_bytes": 1 << 22}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 513}, "max_model_len=513 is more than the model's 512"),
        (
            {"max_model_len": 400, "kv_cache_bytes": 1 << 17},
            "raise kv_cache_bytes .* or lower max_model_len",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs must be a positive integer"),
        ({"max_num_batched_tokens": 256, "max_num_seqs": 256}, "must exceed max_num_seqs=256"),
        ({"memory_utilization": 0.0}, "memory_utilization"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3: 4 attention heads cannot be shared"),
        ({"async_scheduling": 1}, "async_scheduling must be true, false or None, got 1"),
        ({"dtype": "int8"}, "supported are 'auto', 'float32', 'bfloat16', 'float16'"),
        ({"device": "meta"}, "not supported"),
        ({"attention_backend": "flash_attn"}, "does not run on device='cpu'; use 'auto'"),
        (
            {"attention_backend": "xformers"},
            "no attention backend; use one of 'auto', 'cpu', 'flash_attn', ",
        ),
        ({"seed": "a"}, "seed"),
        ({"model": ""}, "model must be"),
    ],
)
def test_a_bad_value_stops_the_start_and_is_named(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(EngineConfig(**{"model": str(folder), **SMALL, **changes}))


def test_a_tokenizer_larger_than_the_embeddings_is_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start, and in a check before it."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    content = json.loads((copy / "tokenizer.json").read_text())
    first = max(content["model"]["vocab"].values()) + 1
    content["model"]["vocab"] |= {f"added{place}": first + place for place in range(900)}
    (copy / "tokenizer.json").write_text(json.dumps(content))
    config = EngineConfig(model=str(copy), **SMALL)
    with Engine(config):
        assert "prompts with tokens beyond these are refused" in caplog.text
    (found,) = (
        each for each in check_up(config) if each.subject == "tokenizer" and each.grade == "warning"
    )
    assert "the model has embeddings for" in found.text


def test_max_model_len_is_what_the_model_has_and_the_pool_holds(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And it is logged."""
    with (
        caplog.at_level("INFO", logger="engine"),
        Engine(EngineConfig(str(folder), dtype="float32", kv_cache_bytes=1 << 17)) as built,
    ):
        num_blocks = (1 << 17) // (3 * 2 * 16 * 2 * 16 * 4)
        assert built.max_model_len == num_blocks * 16 < 512
        (completion,) = built.generate(
            [[5] * 20], SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)
        )
        assert completion.finish_reason == "length"
        assert completion.num_prompt_tokens + len(completion.token_ids) == built.max_model_len
    assert f"sequences of up to {num_blocks * 16} tokens" in caplog.text


BFLOAT16_CPU = frozenset({"avx512f", "avx512_bf16"})


@pytest.mark.parametrize(
    ("name", "wanted", "flags", "served", "said"),
    [
        ("gqa1_untied", "auto", frozenset(), "float32", None),
        ("gqa2_tied_hub", "auto", BFLOAT16_CPU, "bfloat16", None),
        (
            "gqa2_tied_hub",
            "auto",
            frozenset({"avx512f"}),
            "float32",
            "takes float32 rather than the check",
        ),
        (
            "gqa2_tied_hub",
            "bfloat16",
            frozenset({"avx512f"}),
            "bfloat16",
            "slower than 'float32' here",
        ),
        (
            "gqa1_untied",
            "float16",
            BFLOAT16_CPU,
            "float16",
            "on CPUs there are kernels for float32",
        ),
    ],
)
def test_dtype_auto_is_the_checkpoints_unless_this_cpu_would_convert_it(
    name: str,
    wanted: str,
    flags: frozenset[str],
    served: str,
    said: str | None,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And what the engine computes in is what its identity says, and the log why."""
    monkeypatch.setattr(processor, "processor_flags", lambda: flags)
    with Engine(EngineConfig(str(folders[name]), dtype=wanted, device="cpu", **SMALL)) as built:
        assert built._open_runner().dtype == getattr(torch, served)
        assert built.identity.dtype == served
        assert len(built.generate([[5, 6]], SamplingParams(max_tokens=3))) == 1
    said_so = [
        record.getMessage() for record in caplog.records if record.getMessage().startswith("dtype=")
    ]
    assert len(said_so) == (said is not None)
    assert (said or "") in "".join(said_so)


def test_memory_allowed_is_the_least_of_machine_and_cgroups(tmp_path: Path) -> None:
    """Version 2 with a limit on a parent; page cache that can be dropped counts as free."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert allowed_bytes(proc, root) == 8000 * 1024
    (proc / "self/cgroup").write_text("0::/pod/container\n")
    (root / "pod/container").mkdir(parents=True)
    (root / "pod/container/memory.max").write_text("max\n")
    (root / "pod/container/memory.current").write_text("10\n")
    (root / "pod/memory.max").write_text("5000\n")
    (root / "pod/memory.current").write_text("4000\n")
    (root / "pod/memory.stat").write_text("anon 3300\ninactive_file 700\n")
    assert allowed_bytes(proc, root) == 1700
    assert allowed_bytes(tmp_path / "nowhere", root) > 1 << 30


def test_what_takes_long_to_import_is_imported_when_it_is_needed(folder: Path) -> None:
    """Configuration, parameters and errors are for callers without torch; a start needs no list of all models."""
    code = (
        "import sys, engine; engine.SamplingParams(); engine.EngineConfig('m'); engine.InvalidPrompt;"
        "heavy = {'torch', 'transformers', 'numpy', 'xxhash'} & set(sys.modules); assert not heavy, heavy;"
        "engine.Engine; assert 'torch' in sys.modules;"
        "engine.Engine(engine.EngineConfig(sys.argv[1], kv_cache_bytes=1 << 22));"
        "heavy = {'sympy', 'transformers.models.auto'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(folder)], check=True, cwd=PACKAGE.parent, timeout=120
    )


class FakeCuda:
    """Knows which GPU is current in each thread, as CUDA does."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self.seen: set[tuple[str, str | None]] = set()

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        self._threads.current = str(device)
        yield
        self._threads.current = None

    def note_launch(self) -> None:
        self.seen.add((threading.current_thread().name, getattr(self._threads, "current", None)))


def test_an_engine_launches_on_its_own_device_from_another_thread_than_its_makers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of two GPUs in one process; the fake's GPUs compute on the CPU."""
    cuda, forward = FakeCuda(), TorchBackend.forward

    def launch(*arguments: Any) -> torch.Tensor:
        cuda.note_launch()
        return forward(*arguments)

    monkeypatch.setattr(model_runner, "on_device", cuda.on_device)
    monkeypatch.setattr(TorchBackend, "forward", launch)
    folder = make_checkpoint(tmp_path / "model", SHAPES[0])
    config = EngineConfig(
        str(folder), attention_backend="torch", device="cpu", kv_cache_bytes=1 << 22
    )
    with Engine(config) as engine:
        used = threading.Thread(
            target=engine.generate, args=(["hello"], SamplingParams(max_tokens=3)), name="another"
        )
        used.start()
        used.join()
    assert cuda.seen == {(threading.current_thread().name, "cpu"), ("another", "cpu")}
