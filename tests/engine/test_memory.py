"""The pool never overcommits: it leaves room for the rest on a GPU, and keeps to stated bytes on a CPU."""

import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import engine.run.check_up
import engine.run.forward.model_runner
from engine import ConfigError, Engine, EngineConfig, SamplingParams
from engine.attention.kv_cache import KVCache
from engine.run.check_up import check_up
from engine.run.device import SPARE_BYTES, GpuMemory
from engine.run.forward.memory import coarse_length
from engine.run.forward.model_runner import ModelRunner
from tests.engine.checkpoints import make_tokenizer
from tests.engine.graphs import simulate_graphs

MIB = 2**20
ROOT = Path(__file__).parents[2]


class FakeGpu(GpuMemory):
    """A GPU of which only the counting is real. `taken`: bytes that anyone holds now; `worst`: the most."""

    def __init__(self, total_bytes: int, taken: int = 0) -> None:
        self._total_bytes, self.taken, self.worst = total_bytes, taken, taken

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def used_bytes(self) -> int:
        return self.taken

    def peak_bytes(self, run: Callable[[], None]) -> int:
        before = self.worst = self.taken
        run()
        return self.worst - before

    def take(self, num_bytes: int, owner: object = None) -> None:
        """Until `owner` is gone, or for a moment if there is none."""
        self.worst = max(self.worst, self.taken + num_bytes)
        if owner is not None:
            self.taken += num_bytes
            weakref.finalize(owner, self.give, num_bytes)

    def give(self, num_bytes: int) -> None:
        self.taken -= num_bytes


def start_on(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, *, graph_bytes: list[int], step_bytes: int
) -> None:
    """Let engines start as on this GPU. graph_bytes: of graphs captured for measuring, and of those captured then."""
    simulate_graphs(monkeypatch)
    make_cache, capture, launch = KVCache.__init__, ModelRunner._capture_graphs, ModelRunner.launch
    bytes_left = list(graph_bytes)

    def make_cache_there(cache: KVCache, *layers: Any, **sizes: Any) -> None:
        make_cache(cache, *layers, **sizes)
        gpu.take(cache.pool.nbytes, cache)

    def capture_there(runner: ModelRunner, max_model_len: int) -> Any:
        graphs = capture(runner, max_model_len)
        gpu.take(bytes_left.pop(0), graphs)
        return graphs

    def launch_there(runner: ModelRunner, step: Any, sampling: Any) -> Any:
        gpu.take(step_bytes * len(step.token_ids))
        return launch(runner, step, sampling)

    monkeypatch.setattr(engine.run.forward.model_runner, "gpu_memory", lambda device: gpu)
    monkeypatch.setattr(KVCache, "__init__", make_cache_there)
    monkeypatch.setattr(ModelRunner, "_capture_graphs", capture_there)
    monkeypatch.setattr(ModelRunner, "launch", launch_there)


def config(folder: Path, **changes: Any) -> EngineConfig:
    """Half of 400 MiB, of which a step of 64 tokens takes 32 in the tests below."""
    values: dict[str, Any] = {
        "max_num_seqs": 5, "max_num_batched_tokens": 64, "max_model_len": 96, "memory_utilization": 0.5,
    }  # fmt: skip
    return EngineConfig(str(folder), **values | changes)


def test_an_engine_takes_what_is_left_and_serves_within_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 MiB: 30 of others, 32 of a step, 20 of graphs, the spare; the pool is the rest, to a block."""
    gpu = FakeGpu(400 * MIB, taken=30 * MIB)
    start_on(gpu, monkeypatch, graph_bytes=[20 * MIB] * 2, step_bytes=MIB // 2)
    with Engine(config(folder)) as built:
        size = built._open_runner().pool_size
        left = (200 - 30 - 32 - 20) * MIB - SPARE_BYTES
        assert left - size.num_bytes // size.num_blocks < size.num_bytes <= left
        assert gpu.taken == size.num_bytes + 50 * MIB
        gpu.worst = 0
        built.generate([[5] * 90] * 9, SamplingParams(max_tokens=4, ignore_eos=True))
        assert 0 < gpu.worst <= 200 * MIB - SPARE_BYTES
    assert gpu.taken == 30 * MIB


@pytest.mark.parametrize(
    ("taken", "changes", "message"),
    [
        (
            160,
            {},
            "holds 0 blocks.* raise kv_cache_bytes or memory_utilization .* lower max_model_len",
        ),
        (
            30,
            {"kv_cache_bytes": 55 * MIB},
            f"kv_cache_bytes={55 * MIB} .* {54 * MIB} bytes left of memory_uti",
        ),
    ],
)
def test_a_pool_that_does_not_fit_stops_the_start(
    taken: int, changes: dict[str, Any], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is asked for in bytes."""
    start_on(
        FakeGpu(400 * MIB, taken * MIB),
        monkeypatch,
        graph_bytes=[20 * MIB] * 2,
        step_bytes=MIB // 2,
    )
    with pytest.raises(ConfigError, match=message):
        Engine(config(folder, **changes))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc"
)
def test_what_steps_left_goes_back_to_the_system_when_the_engine_closes(folder: Path) -> None:
    """It stays with the process until then; model and pool go at once, without a collection."""
    built = Engine(EngineConfig(str(folder), kv_cache_bytes=1 << 22))
    runner = built._open_runner()
    assert isinstance(runner, ModelRunner)
    held = [weakref.ref(each) for each in (runner, runner.model, runner.cache)]
    del runner
    tensors = [torch.ones(2 * MIB) for _ in range(8)]
    del tensors
    before = resident_bytes()
    gc.disable()
    try:
        built.close()
        assert [each() for each in held] == [None, None, None]
    finally:
        gc.enable()
    assert before - resident_bytes() > 60 * MIB


#: A start in a process of its own; it prints the bytes that the start took and has not given back.
START = """
import gc, json, sys
import torch
from engine import Engine, EngineConfig
import engine.attention.cpu_backend, engine.run.forward.model_runner

def own_bytes():
    lines = open("/proc/self/status").read().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
config = EngineConfig(**json.loads(sys.argv[1]))
before = own_bytes()
with Engine(config) as engine:
    engine._open_runner().cache.pool.fill_(0)  # a page counts once it is written
    gc.collect()
    print(own_bytes() - before)
"""
#: What an engine takes without weights and pool: tokenizer, compiled kernels, oneDNN's code. 35 to 60 were measured.
ENGINE_BYTES = 60 * MIB


def write_large(folder: Path, *, is_quantized: bool) -> None:
    """Write a Qwen3 of 217 MiB in AWQ, or of 400 MiB in bfloat16."""
    hidden, inner, vocab = 1024, 4096, 4096
    config_values: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
        "hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab, "rms_norm_eps": 1e-6,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6,
        "num_hidden_layers": 24 if is_quantized else 12, "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def plain(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).bfloat16()

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int32)

    tensors = {
        "model.embed_tokens.weight": plain(vocab, hidden),
        "lm_head.weight": plain(vocab, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    linear = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    linear |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    linear["mlp.down_proj"] = (hidden, inner)
    norms = {"self_attn.q_norm": 128, "self_attn.k_norm": 128}
    norms |= {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    for layer in range(config_values["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, size in norms.items():
            tensors[f"{prefix}{name}.weight"] = torch.ones(size)
        for name, (rows, columns) in linear.items():
            if not is_quantized:
                tensors[f"{prefix}{name}.weight"] = plain(rows, columns)
                continue
            tensors[f"{prefix}{name}.qweight"] = words(columns, rows // 8)
            tensors[f"{prefix}{name}.qzeros"] = words(columns // 128, rows // 8)
            tensors[f"{prefix}{name}.scales"] = torch.full((columns // 128, rows), 0.001).half()
    if is_quantized:
        config_values["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_values))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    make_tokenizer().save_pretrained(folder)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux'")
@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_start_takes_what_doctor_says(
    is_quantized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 10 %, beside what any engine takes: nothing stays of what reading the weights took."""
    write_large(tmp_path, is_quantized=is_quantized)
    values = {"model": str(tmp_path), "dtype": "bfloat16", "kv_cache_bytes": 32 * MIB}
    monkeypatch.setattr(engine.run.check_up, "GIB", MIB)  # doctor's numbers to a hundredth of MiB
    (found,) = [each for each in check_up(EngineConfig(**values)) if each.subject == "memory"]
    numbers = re.match(r"weights ([\d.]+) GiB and a KV pool of ([\d.]+) GiB", found.text)
    assert numbers is not None
    counted = sum(map(float, numbers.groups())) * MIB

    command = [sys.executable, "-c", START, json.dumps(values)]
    taken = int(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)

    assert 0.9 * counted < taken - ENGINE_BYTES < 1.1 * counted


def test_a_length_that_the_pool_bounds_is_the_same_with_nearly_as_much_memory() -> None:
    assert [coarse_length(each) for each in (1, 15, 160, 37_449, 37_400, 32_768, 32_767)] == [
        *(1, 15, 160, 36_864, 36_864, 32_768, 30_720)
    ]
