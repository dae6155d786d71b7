"""ModelRunner: owner of the model, the KV pool's tensors and the device they are on."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention import AttentionBackend, load_backend
from engine.batch import ForwardBatch, SamplingBatch
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
from engine.sampler import sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolSize:
    """Blocks of the KV pool, and the longest sequence that the model and the pool allow."""

    num_blocks: int
    max_model_len: int


class ModelRunner:
    """Loads the model, sizes the pool, and runs one batch at a time.

    Raises ConfigError and its subclasses for whatever cannot be loaded or does not fit.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path) -> None:
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, model_config.dtype)
        self.backend: AttentionBackend = load_backend(config.attention_backend, self.device)
        self._config = config
        self._model_config = model_config
        self._tp = TensorParallel(size=config.tensor_parallel_size)
        self.model = self._load_model(folder)
        self.pool_size = self._size_pool()
        self.cache = self._make_cache(self.pool_size.num_blocks)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, sampling: SamplingBatch) -> NDArray[np.int64]:
        """Compute the batch and choose a token for each row that samples: [samples] int64."""
        logits = self.forward(batch)
        return sample(logits, sampling)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute the batch and store its keys and values; returns logits [samples, vocabulary] float32."""
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

    def _block_bytes(self) -> int:
        model = self._model_config
        num_kv_heads = self._tp.share(model.num_kv_heads, "KV heads")
        return block_bytes(
            model.num_layers, self._config.block_size, num_kv_heads, model.head_dim, self.dtype
        )

    def _make_cache(self, num_blocks: int) -> KVCache:
        model = self._model_config
        return KVCache(
            num_layers=model.num_layers,
            num_blocks=num_blocks,
            block_size=self._config.block_size,
            num_kv_heads=self._tp.share(model.num_kv_heads, "KV heads"),
            head_dim=model.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def _size_pool(self) -> PoolSize:
        """How many blocks fit, and how long a sequence may be. Raises ConfigError naming what to change."""
        cache_bytes = self._config.kv_cache_bytes
        if cache_bytes is None:
            on_gpu = self.device.type == "cuda"
            cache_bytes = self._free_gpu_bytes() if on_gpu else default_cpu_kv_cache_bytes()
        num_blocks = cache_bytes // self._block_bytes()
        size = fit_pool(num_blocks, self._config, self._model_config.max_position_embeddings)
        logger.info(
            "KV pool: %d blocks of %d tokens, %.2f GiB; sequences of up to %d tokens",
            num_blocks, self._config.block_size, num_blocks * self._block_bytes() / 2**30, size.max_model_len,
        )  # fmt: skip
        return size

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
        tokens = torch.arange(num_seqs * query_len, device=self.device)
        batch = ForwardBatch(
            token_ids=torch.zeros_like(tokens),
            positions=tokens % query_len,
            slot_mapping=tokens % (num_blocks * block_size),
            sample_rows=torch.arange(num_seqs, device=self.device) * query_len,
            attention=self.backend.build_metadata(tables.astype(np.int32), lens, lens),
        )
        half = np.full(num_seqs, 0.5, np.float32)
        counter = np.zeros(num_seqs, np.uint64)
        sampling = SamplingBatch(
            temperature=half,
            top_p=half,
            top_k=np.zeros(num_seqs, np.int64),
            min_p=half,
            seed=counter,
            sample_index=counter,
            position=counter,
            banned={},
        )
        self.run(batch, sampling)


def fit_pool(num_blocks: int, config: EngineConfig, model_len: int) -> PoolSize:
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
    return PoolSize(num_blocks, wanted or min(model_len, pool_tokens))


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
