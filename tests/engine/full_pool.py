"""Fill an engine's KV pool with the longest prompts it takes, all at once; print what memory that took.

A process of its own, because peak RSS is the process's. Arguments: folder, kv_cache_bytes. A second line is
of a pool of twice these bytes, to see that the measurement notices.
"""

import json
import random
import sys
from pathlib import Path

import torch

import engine.run.forward.model_runner
from engine import Engine, EngineConfig, SamplingParams
from engine.checkpoint.model_config import read_model_config
from engine.run.forward.memory import cpu_allowance_bytes


def peak_rss_bytes() -> int:
    """VmHWM, see proc(5)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def fill(config: EngineConfig) -> dict[str, int]:
    """Run one more prompt than fits, each as long as a sequence may be."""
    with Engine(config) as built:
        runner = built._open_runner()
        assert isinstance(runner, engine.run.forward.model_runner.ModelRunner)
        model_len, num_blocks = built.max_model_len, built.stats().num_blocks
        rng = random.Random(0)
        for i in range(num_blocks * config.block_size // model_len + 1):
            prompt = [rng.randrange(3, 500) for _ in range(model_len - 5)]
            built.add(str(i), prompt, SamplingParams(max_tokens=5, ignore_eos=True, seed=i, top_p=0.9))
        fewest_free = num_blocks
        while built.has_unfinished:
            built.step()
            fewest_free = min(fewest_free, built.stats().free_blocks)
        model = read_model_config(Path(config.model))
        return {
            "peak_rss": peak_rss_bytes(),
            "weights": sum(p.numel() * p.element_size() for p in runner.model.parameters()),
            "allowance": cpu_allowance_bytes(config, model, num_blocks, model_len),
            "max_running": built.stats().max_running,
            "fewest_free_blocks": fewest_free,
        }


def main(folder: str, kv_cache_bytes: int) -> None:
    torch.set_num_threads(1)
    config = EngineConfig(folder, kv_cache_bytes=kv_cache_bytes, max_num_seqs=24, max_num_batched_tokens=512)
    print(json.dumps(fill(config)))
    block_bytes = engine.run.forward.model_runner.block_bytes
    engine.run.forward.model_runner.block_bytes = lambda *args: block_bytes(*args) // 2  # type: ignore[assignment]
    print(json.dumps(fill(config)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
