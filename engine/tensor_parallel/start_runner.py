"""What an engine steps: the model in this process, or ranks that share it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from engine.checkpoint.model_config import ModelConfig
from engine.layers.parallel import TensorParallel
from engine.run.config import EngineConfig
from engine.run.forward.model_runner import ModelRunner
from engine.run.forward.runner import Runner
from engine.tensor_parallel.rank_group import RankGroup

logger = logging.getLogger(__name__)


StartRunner = Callable[[EngineConfig, ModelConfig, Path], Runner]


def start_own_runner(config: EngineConfig, model: ModelConfig, folder: Path) -> Runner:
    """Load the model here, or start ranks that share it."""
    runner: Runner
    if config.tensor_parallel_size == 1:
        runner = ModelRunner(config, model, folder, TensorParallel())
    else:
        runner = RankGroup(config, model, folder)
    size = runner.pool_size
    logger.info(
        "KV pool: %d blocks of %d tokens, %.2f GiB on each rank; sequences of up to %d tokens",
        size.num_blocks, config.block_size, size.num_bytes / 2**30, size.max_model_len,
    )  # fmt: skip
    return runner
