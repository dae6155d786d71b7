"""ModelRunner: owner of the model, the KV pool's tensors and the device they are on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.attention import AttentionBackend, load_backend
from engine.batch import ForwardBatch, SamplingBatch, StepBatch, to_device
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_cache import KVCache, block_bytes
from engine.layers.parallel import TensorParallel
from engine.layers.rotary import RotaryEmbedding
from engine.loader import load_weights
from engine.memory import default_cpu_kv_cache_bytes
from engine.model_config import DTYPES, ModelConfig
from engine.models.decoder import DecoderForCausalLM, DecoderParts
from engine.models.registry import decoder_flags
from engine.pending_tokens import DeviceTokens, PendingTokens
from engine.sampler import sample


@dataclass(frozen=True)
class PoolSize:
    """Blocks of the KV pool, their bytes on each rank, and the longest sequence model and pool allow."""

    num_blocks: int
    num_bytes: int
    max_model_len: int


class Runner(Protocol):
    """What an engine steps: a ModelRunner, a RankGroup, or what a test or benchmark puts in their place."""

    @property
    def pool_size(self) -> PoolSize:
        """What the runner has room for."""

    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        """Start the step, up to a token for each row that samples; steps run in the order of launches."""

    def close(self) -> None:
        """Free what the runner holds. A second call does nothing."""


class ModelRunner:
    """Loads the model, or one rank's share of it, sizes the pool, and runs one batch at a time.

    Raises ConfigError and its subclasses for whatever cannot be loaded or does not fit.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, folder: Path, tp: TensorParallel
    ) -> None:
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, model_config.dtype)
        self.backend: AttentionBackend = load_backend(config.attention_backend, self.device)
        self._config = config
        self._model_config = model_config
        self._tp = tp
        self.model = self._load_model(folder)
        self.pool_size = self._size_pool()
        self.cache = self._make_cache(self.pool_size.num_blocks)

    @torch.inference_mode()
    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        """Start the step on the device, up to a token for each row that samples. Rank 0 only.

        Everything is queued on the device's current stream; nothing here waits for it, and steps run in the
        order of their launches. On a CPU the step has run when this returns.
        """
        logits = self.forward(to_device(step, self.backend, self.device))
        return DeviceTokens(sample(logits, sampling))

    def follow(self, step: StepBatch) -> None:
        """Compute this rank's share of the step whose tokens rank 0 chooses."""
        self.forward(to_device(step, self.backend, self.device))

    def close(self) -> None:
        """Nothing to end: model and pool are freed with this object."""

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute the batch and store its keys and values; returns logits [samples, vocabulary] float32.

        On ranks other than 0 they are a part of the vocabulary's.
        """
        logits: Tensor = self.model(batch, self.cache)
        return logits

    def _load_model(self, folder: Path) -> DecoderForCausalLM:
        config = self._model_config
        limit = self._config.max_model_len or config.max_position_embeddings
        rotary = RotaryEmbedding(
            config.head_dim,
            min(limit, config.max_position_embeddings),
            config.rope_theta,
            dtype=self.dtype,
            device=self.device,
        )
        flags = decoder_flags(config.architecture)
        with torch.device("meta"):
            model = DecoderForCausalLM(
                DecoderParts(config, flags, self._tp, self.backend, self.dtype), rotary
            )
        load_weights(model, folder, self.device)
        return model.eval()

    @property
    def _num_kv_heads(self) -> int:
        return self._tp.share_or_copy(self._model_config.num_kv_heads, "KV heads").length

    def _block_bytes(self) -> int:
        model = self._model_config
        return block_bytes(
            model.num_layers, self._config.block_size, self._num_kv_heads, model.head_dim, self.dtype
        )

    def _make_cache(self, num_blocks: int) -> KVCache:
        model = self._model_config
        return KVCache(
            num_layers=model.num_layers,
            num_blocks=num_blocks,
            block_size=self._config.block_size,
            num_kv_heads=self._num_kv_heads,
            head_dim=model.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def _size_pool(self) -> PoolSize:
        """How many blocks fit, and how long a sequence may be. Raises ConfigError naming what to change."""
        cache_bytes = self._config.kv_cache_bytes
        if cache_bytes is None:
            on_gpu = self.device.type == "cuda"
            cache_bytes = self._free_gpu_bytes() if on_gpu else default_cpu_kv_cache_bytes(self._tp.size)
        num_blocks = self._tp.minimum(cache_bytes // self._block_bytes())
        max_model_len = fit_pool(num_blocks, self._config, self._model_config.max_position_embeddings)
        return PoolSize(num_blocks, num_blocks * self._block_bytes(), max_model_len)

    def _free_gpu_bytes(self) -> int:
        """What the largest batch, run once, leaves of the GPU memory this engine may take."""
        torch.cuda.reset_peak_memory_stats(self.device)
        block_size, num_tokens = self._config.block_size, self._config.max_num_batched_tokens
        num_blocks = -(-num_tokens // block_size)
        self.cache = self._make_cache(num_blocks)
        self._warm_up(num_tokens)
        scratch_bytes = self.cache.pool.nbytes
        del self.cache
        torch.cuda.empty_cache()
        peak_bytes = torch.cuda.max_memory_allocated(self.device) - scratch_bytes
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        used_by_others = total_bytes - free_bytes - torch.cuda.memory_reserved(self.device)
        return max(0, int(total_bytes * self._config.memory_utilization) - used_by_others - peak_bytes)

    def _warm_up(self, num_tokens: int) -> None:
        """Run one step of num_tokens tokens as equal sequences, as many as may run at once, all sampling."""
        num_seqs = min(self._config.max_num_seqs, num_tokens)
        block_size = self._config.block_size
        query_len = min(num_tokens // num_seqs, self._model_config.max_position_embeddings)
        lens = np.full(num_seqs, query_len, np.int64)
        num_blocks = len(self.cache.layers[0].keys)
        tables = np.arange(num_seqs * -(-query_len // block_size)).reshape(num_seqs, -1) % num_blocks
        tokens = np.arange(num_seqs * query_len)
        step = StepBatch(
            token_ids=np.zeros_like(tokens),
            positions=tokens % query_len,
            slot_mapping=tokens % (num_blocks * block_size),
            sample_rows=np.arange(num_seqs) * query_len,
            block_tables=tables.astype(np.int32),
            context_lens=lens,
            query_lens=lens,
        )
        if self._tp.rank == 0:
            self.launch(step, _nucleus_sampling(num_seqs)).wait()
        else:
            self.follow(step)


def _nucleus_sampling(num_rows: int) -> SamplingBatch:
    """Sampling values that take the sampler's longest way, for a warm-up."""
    half = np.full(num_rows, 0.5, np.float32)
    counter = np.zeros(num_rows, np.uint64)
    return SamplingBatch(
        temperature=half,
        top_p=half,
        top_k=np.zeros(num_rows, np.int64),
        min_p=half,
        seed=counter,
        sample_index=counter,
        position=counter,
        banned={},
    )


def fit_pool(num_blocks: int, config: EngineConfig, model_len: int) -> int:
    """Settle max_model_len against the model and the pool. Raises ConfigError."""
    pool_tokens = num_blocks * config.block_size
    wanted = config.max_model_len
    if wanted is not None and wanted > model_len:
        raise ConfigError(f"max_model_len={wanted} is more than the model's {model_len} positions; lower it")
    if pool_tokens < 2 or (wanted is not None and wanted > pool_tokens):
        raise ConfigError(
            f"the KV pool holds {num_blocks} blocks, {pool_tokens} tokens, too few for one sequence of "
            f"{wanted or 'any'} tokens; raise kv_cache_bytes (or free memory) or lower max_model_len"
        )
    return wanted or min(model_len, pool_tokens)


def resolve_device(name: str) -> torch.device:
    """Turn "auto" or a device string into a device. Raises ConfigError if it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is no torch device; use 'auto', 'cpu' or 'cuda'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={name!r}, but torch finds no CUDA device here; use 'cpu' or fix the driver"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported; use 'auto', 'cpu' or 'cuda'")
    return device


def resolve_dtype(name: str, checkpoint_dtype: str) -> torch.dtype:
    """Turn "auto" or a dtype name into a dtype. Raises ConfigError for one that is not supported."""
    chosen = checkpoint_dtype if name == "auto" else name
    if chosen not in DTYPES:
        raise ConfigError(
            f"dtype={name!r} gives {chosen!r}; supported are 'auto', {', '.join(map(repr, DTYPES))}"
        )
    dtype = getattr(torch, chosen)
    assert isinstance(dtype, torch.dtype)
    return dtype
