"""SinglePassRunner: computes whole texts, step by step, with no KV cache."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.checkpoint.adapter_folder import Adapter
from engine.checkpoint.heads import read_classes
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.pooling import read_pooling
from engine.errors import AdapterRefused, ConfigError, UnsupportedModel, quoted
from engine.models.single_pass import load_single_pass
from engine.models.transformers_model import refuse_moving_rotary
from engine.run.config import EngineConfig
from engine.run.cpu_threads import CpuThreads
from engine.run.device import numbered, on_device, resolve_device
from engine.run.dtype import served_dtype
from engine.run.forward.probe import TOLERANCE
from engine.run.forward.runner import PendingTokens, PoolSize
from engine.run.forward.transfers import pool
from engine.sampling.sampling_batch import SamplingBatch
from engine.schedule.step_batch import StepBatch

PROBE_LENGTHS = (150, 40, 37, 8, 7, 3)  # some of them are padded together


class ComputedTexts(PendingTokens):
    """The vectors of a step's texts, which are computed already."""

    def __init__(self, num_samples: int, vectors: Tensor | None) -> None:
        self._num_samples = num_samples
        self.pooled = None if vectors is None else vectors.float().cpu().numpy()

    def wait(self) -> NDArray[np.int64]:
        """Return zeros in place of tokens: texts give none, but the stepper's control step expects one."""
        return np.zeros(self._num_samples, np.int64)


class SinglePassRunner:
    """Loads a model that reads texts in one pass, and runs a step's texts at a time.

    Raises ConfigError and its subclasses for whatever cannot be loaded.
    """

    backend_name = "torch"
    has_graphs = False

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path) -> None:
        refuse_options(config, model_config.architecture)
        self.device = numbered(resolve_device(config.device))
        self.dtype: torch.dtype = getattr(
            torch, served_dtype(config.dtype, model_config.dtype, config.device).name
        )
        classes = read_classes(model_config)
        pooling = read_pooling(folder, model_config, config.pooling) if classes is None else None
        self._modes = () if pooling is None else pooling.modes
        self._cpu_threads = (
            CpuThreads() if self.device.type == "cpu" and config.adapt_cpu_threads else None
        )
        with on_device(self.device):
            self.model = load_single_pass(
                model_config.architecture, folder, self.device, self.dtype
            )
            longest = min(
                self.model.max_positions or model_config.max_position_embeddings,
                config.max_num_batched_tokens,
            )
            if config.max_model_len is not None and config.max_model_len > longest:
                raise ConfigError(
                    f"max_model_len={config.max_model_len} is more than the {longest} tokens that this model has "
                    "positions for, or max_num_batched_tokens allows: texts are computed whole"
                )
            longest = config.max_model_len or longest
            refuse_moving_rotary(self.model.model, longest)
            self._probe(model_config, longest, 0 if classes is None else len(classes.labels))
        num_blocks = config.num_seqs * -(-longest // config.block_size)
        self.pool_size = PoolSize(num_blocks, 0, longest)

    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        """Compute the step's texts, each whole."""
        if not len(step.pooled_rows):
            return ComputedTexts(len(step.sample_rows), None)
        if self._cpu_threads is not None:
            self._cpu_threads.adapt()
        with on_device(self.device):
            token_ids = torch.from_numpy(step.token_ids).to(self.device)
            ends = np.cumsum(step.query_lens)[:-1].tolist()
            computed = self.model(torch.tensor_split(token_ids, ends))
            if self.model.classifies:
                return ComputedTexts(len(step.sample_rows), computed)
            rows = torch.from_numpy(step.pooled_rows).to(self.device)
            vectors = pool(
                computed[rows], step.pooled_counts, step.positions[step.pooled_rows], self._modes
            )
            return ComputedTexts(len(step.sample_rows), vectors)

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        """Raise AdapterRefused: an engine of such a model starts without adapters."""
        raise AdapterRefused(adapter.name, "a model that reads texts in one pass has none")

    def close(self) -> None:
        """Nothing is held beside the model, which is freed with this object."""

    def _probe(self, model: ModelConfig, longest: int, num_labels: int) -> None:
        """Compare texts in one step with each alone; pad if they differ. Raises UnsupportedModel or ConfigError."""
        vocab_size = model.vocab_size
        # multiples of a prime spread over the vocabulary; each text is rolled further, so that no two are alike
        numbers = torch.arange(max(PROBE_LENGTHS), device=self.device)
        token_ids = 1 + (numbers * 7919) % (vocab_size - 1)
        texts = [
            token_ids[: min(length, longest)].roll(index)
            for index, length in enumerate(PROBE_LENGTHS)
        ]
        if self.model.has_types:
            # a token of a pair's second text is given as its id plus vocab_size
            texts = [
                torch.cat((text[: len(text) // 2], text[len(text) // 2 :] + vocab_size))
                for text in texts
            ]
        try:
            alone = [self.model.alone(text) for text in texts]
            if num_labels and alone[0].shape[-1] != num_labels:
                raise ConfigError(
                    f"config.json names {num_labels} labels, the head has {alone[0].shape[-1]}"
                )
            self.model.fuse()
            if self.model.is_packed and self._mixes(texts, alone):
                self.model.pad()  # from now on is_packed is False
            if not self.model.is_packed and self._mixes(texts, alone):
                raise UnsupportedModel(
                    "it mixes the texts of one batch: one computed alone has other states"
                )
        except ConfigError as error:
            raise type(error)(f"{model.architecture} is not served: {error}") from error
        except Exception as error:  # whatever the model makes of these texts
            problem = f"its forward pass raises {quoted(error)}"
            raise UnsupportedModel(f"{model.architecture} is not served: {problem}") from error

    def _mixes(self, texts: Sequence[Tensor], alone: Sequence[Tensor]) -> bool:
        """Return whether texts in one step have other states than each has alone."""
        lengths = [len(states) for states in alone]
        together = torch.tensor_split(self.model(texts), np.cumsum(lengths)[:-1].tolist())
        return any(
            self._differ(one.float(), other.float())
            for one, other in zip(alone, together, strict=True)
        )

    def _differ(self, expected: Tensor, actual: Tensor) -> bool:
        if not bool(expected.isfinite().all()):
            return False
        size = expected.square().mean().sqrt().clamp_min(1e-3)
        return not bool((actual - expected).square().mean().sqrt() <= TOLERANCE[self.dtype] * size)


def refuse_options(config: EngineConfig, name: str) -> None:
    """Raise ConfigError for what is not built for a model that reads texts in one pass."""
    for option, default in (
        ("tensor_parallel_size", 1),
        ("quantization", None),
        ("kv_cache_dtype", "auto"),
        ("deterministic", False),
    ):
        if getattr(config, option) != default:
            setting = f"{option}={getattr(config, option)!r}"
            raise ConfigError(
                f"{setting} is not built for {name}, which reads texts in one pass; leave it out"
            )
