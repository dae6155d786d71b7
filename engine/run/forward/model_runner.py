"""ModelRunner: owns the model, the KV pool's tensors and their device."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.attention import load_backend
from engine.attention.base import CapturableBackend, ForwardBatch, KernelBackend
from engine.attention.kv_cache import (
    FP8,
    FP8_LIMIT,
    KVCache,
    Scales,
    block_bytes,
    choose_scales,
    largest_magnitudes,
)
from engine.attention.state_pool import StatePool, state_bytes
from engine.checkpoint.adapter_folder import Adapter
from engine.checkpoint.kv_scales import KVScale, read_kv_scales, scheme_problem
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.pooling import read_pooling
from engine.errors import AttentionRefused, CaptureFailed, ConfigError, UnsupportedModel
from engine.kernels.upload import upload
from engine.layers.parallel import TensorParallel
from engine.models.base import CausalModel, ModelPlace
from engine.models.load import load_model
from engine.models.served import nearest
from engine.models.transformers_model import TransformersModel
from engine.run.config import NUM_MEASURED_TOKENS, EngineConfig
from engine.run.cpu_threads import CpuThreads
from engine.run.device import SPARE_BYTES, GpuMemory, numbered, on_device, resolve_device
from engine.run.dtype import served_dtype
from engine.run.forward.decode_graphs import (
    Capture,
    CudaCapture,
    DecodeGraphs,
    capture_on_all_ranks,
)
from engine.run.forward.loaded_adapters import LoadedAdapters
from engine.run.forward.memory import (
    PoolSizes,
    adapter_bytes,
    allowed_bytes,
    check_pool_bytes,
    default_cpu_kv_cache_bytes,
    divide_pool,
    fit_pool,
    give_back_memory,
    keep_freed_memory,
)
from engine.run.forward.mixed_graphs import CapturePieces, CudaPieces, MixedGraphs, step_sizes
from engine.run.forward.pictures.probe import probe_pictures
from engine.run.forward.pictures.reader import PictureReader
from engine.run.forward.pictures.tower import Tower
from engine.run.forward.probe import NUM_PLACES, Probe, differ
from engine.run.forward.row_logprobs import StepLogprobs
from engine.run.forward.rows import StaticRows
from engine.run.forward.runner import PendingTokens, PoolSize, Sampled, StateRows
from engine.run.forward.transfers import DeviceTokens, pool, to_device, with_blocks
from engine.run.forward.warm_up import make_step, nucleus_sampling, warm_up_steps, with_edits
from engine.sampling.logit_edits import LogitEdits
from engine.sampling.sampling_batch import SamplingBatch
from engine.sampling.sampling_rows import SamplingRows
from engine.schedule.sequence import NO_ADAPTER
from engine.schedule.step_batch import StepBatch

NUM_COMPARED_TOKENS = 40  # of a step from graphs and the same step without
#: The log warns if measured numbers are more than this many times as large as a checkpoint's scale allows. Somewhat
#: larger ones are usual, as the scale was measured on other tokens.
LARGEST_EXCESS = 2.0

logger = logging.getLogger(__name__)


class ModelRunner:
    """Loads the model, or one rank's share of it, sizes the pool, and runs one batch at a time.

    Raises ConfigError and its subclasses for whatever cannot be loaded or does not fit.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, folder: Path, tp: TensorParallel
    ) -> None:
        self.device = numbered(resolve_device(config.device))
        served = served_dtype(config.dtype, model_config.dtype, config.device)
        if served.reason and tp.rank == 0:
            logger.warning("%s", served.reason)
        self.dtype: torch.dtype = getattr(torch, served.name)
        self.backend: KernelBackend = load_backend(
            config.attention_backend, self.device, self.dtype, config.kv_cache_dtype,
            block_size=config.block_size, deterministic=config.deterministic,
        )  # fmt: skip
        self._config = config
        self._model_config = model_config
        self._tp = tp
        pooling = read_pooling(folder, model_config, config.pooling)
        self._pooling_modes = () if pooling is None else pooling.modes
        self._sampled: Sampled | None = None  # by the step launched last
        self._kv_scales: list[Scales] | None = None  # of each layer, if the cache holds FP8
        self._memory = gpu_memory(self.device)
        self._graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        self._graphs_failed = False
        self._cpu_threads: CpuThreads | None = None
        self._tower: Tower | None = None
        if self.device.type == "cpu":
            keep_freed_memory()
            if config.adapt_cpu_threads and tp.size == 1:
                self._cpu_threads = CpuThreads()
        try:
            with on_device(self.device):
                self.model = self._load(folder)
                if self.device.type == "cpu":
                    give_back_memory()  # what reading weights took, which is then free for the pool
                self._adapters = LoadedAdapters(
                    self.model,
                    config.max_adapters if config.adapters else 0,
                    self.backend.layer_kernels,
                    self.device,
                    self.dtype,
                )
                self._probe()
                if config.kv_cache_dtype != "auto":
                    self._kv_scales = self._find_kv_scales(folder)
                    self._probe()  # once more, now over an FP8 cache
                if isinstance(self.backend, CapturableBackend):
                    self.backend.share_prefixes(
                        self.model.attention_layers, self._kv_dtype, config.block_size
                    )
                self._allocate()
            self.backend_name = self.backend.name
            self.has_graphs = self._graphs is not None
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the GPU's memory ran out at start ({error}); free what else is on it, or lower "
                "memory_utilization, max_num_batched_tokens or max_num_seqs"
            ) from error

    @torch.inference_mode()
    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        """Start the step on the device; it ends with a token for each row that samples, which rank 0 chooses.

        Nothing waits for the device; steps run in the order of their launches, so a step can read the tokens of the one
        before. On a CPU the step has run when this returns. Any thread may call this, one at a time.
        """
        if self._cpu_threads is not None:
            self._cpu_threads.adapt()
        with on_device(self.device), self._keeping_states(step):
            return self._launch(step, sampling)

    @contextmanager
    def _keeping_states(self, step: StepBatch) -> Iterator[None]:
        """Put back the states of a repeatable step if it raises within the block."""
        states = self.cache.states
        if states is None or not len(step.kept_states):
            yield
            return
        (rows,) = upload([step.kept_states], self.device)
        values = states.read(rows)
        try:
            yield
        except Exception:
            states.write(rows, values)
            raise

    def _launch(self, step: StepBatch, sampling: SamplingBatch) -> DeviceTokens:
        if len(step.copy_from):
            self.cache.copy(*upload([step.copy_from, step.copy_to], self.device))
        if self._graphs is not None and self._graphs.fits(step):
            return self._launch_recorded(self._graphs, step, sampling)
        if not step.gives_tokens_alone:
            return self._launch_with_more(step, sampling)
        batch, rows = self._to_device(step, sampling)
        self._sampled = self._choose(self.forward(batch), rows, sampling)
        return DeviceTokens(self._sampled)

    def _launch_recorded(
        self, graphs: DecodeGraphs, step: StepBatch, sampling: SamplingBatch
    ) -> DeviceTokens:
        """Replay a step's graph, then compute its log probabilities if any are wanted."""
        if not step.wants_logprobs:
            self._sampled = graphs.run(step, sampling, self._sampled)
            return DeviceTokens(self._sampled)
        wanted = self._step_logprobs(step)
        self._sampled = graphs.run(step, sampling, self._sampled, wanted.keep)
        no_hidden = torch.empty((0, self.model.hidden_size), dtype=self.dtype, device=self.device)
        logprobs = wanted.compute(self._sampled.token_ids, no_hidden)
        return DeviceTokens(self._sampled, logprobs)

    def _step_logprobs(self, step: StepBatch) -> StepLogprobs:
        return StepLogprobs(
            step, self.model, self._tp, self.backend, self.device, by_row=self._config.deterministic
        )

    def _to_device(
        self, step: StepBatch, sampling: SamplingBatch | None = None
    ) -> tuple[ForwardBatch, SamplingRows | None]:
        batch, rows = to_device(step, self.backend, self._sampled, sampling)
        if len(step.adapters):
            batch = replace(batch, adapters=self._adapters.rows(step))
        if step.pictures is None:
            return batch, rows
        assert self._tower is not None, "without one there are no pictures"
        pictures = self._tower.rows(step.pictures, batch.token_ids)
        blocks = step.pictures.blocks
        if len(blocks):
            pictures = replace(pictures, attention=with_blocks(step, blocks, self.backend))
        return replace(batch, pictures=pictures), rows

    def read_pictures(self, reader: PictureReader) -> Tower:
        """Take this reader's pictures from now on. Raises UnsupportedModel if they cannot be computed.

        Call it before the first step.
        """
        if not isinstance(self.model, TransformersModel):
            raise UnsupportedModel("its text part alone is computed")
        with on_device(self.device):
            self._tower = Tower(self.model, reader.placeholder_id, self.device, self.dtype)
            reader.names = self._tower.names
            reader.positions = self._tower.positions
            probe_pictures(
                reader,
                self._tower,
                self.logits,
                most=self._config.max_num_batched_tokens - self._config.num_seqs,
                num_places=self.pool_size.max_model_len,
                block_size=self._config.block_size,
                dtype=self._kv_dtype,
            )
        return self._tower

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        """Load an adapter, or this rank's share of it. Raises AdapterRefused."""
        with on_device(self.device):
            self._adapters.load(number, adapter)

    def close(self) -> None:
        """Free the graphs once all steps have run; model and pool are freed with this object.

        Call it before the process group ends: NCCL waits for graphs that hold its communicators.
        """
        if self._graphs is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._graphs = None
            self._mixed_graphs = None

    @torch.inference_mode()
    def logits(self, step: StepBatch) -> Tensor:
        """Have the kernels compiled; return the logits of the rows that sample, as `forward` does."""
        batch, _ = self._to_device(step)
        # ranks exchange sums in each forward pass, so all must run it equally often, whatever they find compiled
        return self.backend.prepare(
            self.dtype, lambda: self.forward(batch), repeats=self._tp.size == 1
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute the batch, store keys and values; return logits [samples, vocabulary], on rank 0."""
        return self.model.logits(self._states_of(batch.sample_rows, batch))

    def _states_of(self, rows: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute the batch; return the hidden states of `rows`, [rows] int64."""
        if self._mixed_graphs is not None and self._mixed_graphs.fits(batch):
            return self._mixed_graphs.run(batch)[rows]
        return self.model.states_of(rows, batch, self.cache)

    def _choose(
        self, logits: Tensor, rows: SamplingRows | None, sampling: SamplingBatch
    ) -> Sampled:
        assert rows is not None, "they come with the step"
        edits = sampling.ready_edits()
        last = self._sampled
        if edits is not None and last is not None:
            edits = edits.placed(edits.rows, last.places[edits.pending[:, 1]])
        token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        before = None if last is None else last.token_ids
        choose(logits, rows, edits, before, token_ids, self.backend, self._tp)
        return Sampled(token_ids, np.arange(len(token_ids)))

    def _launch_with_more(self, step: StepBatch, sampling: SamplingBatch) -> DeviceTokens:
        """Start a step that gives more than tokens: log probabilities, pooled hidden states."""
        batch, values = self._to_device(step, sampling)
        wanted = self._step_logprobs(step)
        (pooled_rows,) = upload([step.pooled_rows], self.device)
        rows = [batch.sample_rows, wanted.scored_rows, pooled_rows]
        hidden = self._states_of(torch.cat(rows), batch)
        ends = np.cumsum([len(row_ids) for row_ids in rows])[:-1].tolist()
        sampling_states, scored, pooled = torch.tensor_split(hidden, ends)
        logits = self.model.logits(sampling_states)
        wanted.keep(logits, np.arange(len(logits)))
        self._sampled = self._choose(logits, values, sampling)
        logprobs = wanted.compute(self._sampled.token_ids, scored) if step.wants_logprobs else None
        if not len(pooled_rows):
            return DeviceTokens(self._sampled, logprobs)
        positions = step.positions[step.pooled_rows]
        vectors = pool(pooled, step.pooled_counts, positions, self._pooling_modes)
        return DeviceTokens(self._sampled, logprobs, vectors)

    def _load(self, folder: Path) -> CausalModel:
        """Load the model for the backend; load it for torch if "auto" has chosen a backend that cannot serve it."""
        try:
            return self._load_for_backend(folder)
        except AttentionRefused as error:
            is_bound = self._config.attention_backend != "auto" or self._config.deterministic
            if is_bound or self.backend.name == "torch":
                raise
            logger.warning("attention_backend='auto' takes 'torch', which is slower: %s", error)
        self.backend = load_backend("torch", self.device, self.dtype)
        return self._load_for_backend(folder)

    def _load_for_backend(self, folder: Path) -> CausalModel:
        return load_model(
            self._model_config,
            folder,
            ModelPlace(self._tp, self.backend, self.device, self.dtype, self._longest),
            model_path=self._config.model_path,
            quantization=self._config.quantization,
            embeds=bool(self._pooling_modes),
            deterministic=self._config.deterministic,
        )

    @property
    def _longest(self) -> int:
        """Return the most tokens that a sequence may have, before the pool limits it."""
        model_len = self._model_config.max_position_embeddings
        return min(self._config.max_model_len or model_len, model_len)

    @property
    def _kv_dtype(self) -> torch.dtype:
        return self.dtype if self._kv_scales is None else FP8

    def _make_cache(self, num_blocks: int, num_states: int = 1) -> KVCache:
        """Make a cache of num_blocks blocks, with num_states states if the model keeps any."""
        cache = KVCache(
            self.model.attention_layers,
            num_blocks=num_blocks,
            block_size=self._config.block_size,
            dtype=self._kv_dtype,
            device=self.device,
            scales=self._kv_scales,
        )
        if self.model.states:
            cache.states = StatePool(self.model.states, num_states, self.device)
        if self.model.index_keys:
            num_slots = num_blocks * self._config.block_size
            cache.index = StatePool(self.model.index_keys, num_slots, self.device)
        return cache

    def _find_kv_scales(self, folder: Path) -> list[Scales]:
        """Return the scales of the cache's layers: the checkpoint's, or measured ones. Raises ConfigError."""
        problem = scheme_problem(self._model_config)
        if problem is not None and self._tp.rank == 0:
            logger.warning(
                "the FP8 KV cache takes no scales from the checkpoint, whose config.json has a %s; all are measured",
                problem,
            )
        stored = read_kv_scales(folder, self._model_config)
        if stored and self._tp.rank == 0:
            logger.info("the FP8 KV cache takes %d scales from the checkpoint", len(stored))
        measured = self._measure_magnitudes()
        scales: list[Scales] = []
        excess = 0.0
        for layer, (largest_keys, largest_values) in zip(
            self.model.layer_numbers, measured, strict=True
        ):
            key_scales = self._choose_scales(stored.get((layer, "k")), largest_keys)
            value_scales = self._choose_scales(stored.get((layer, "v")), largest_values)
            scales.append((key_scales, value_scales))
            excess_of_keys = (largest_keys / (key_scales * FP8_LIMIT)).max().item()
            excess_of_values = (largest_values / (value_scales * FP8_LIMIT)).max().item()
            excess = max(excess, excess_of_keys, excess_of_values)
        # each rank knows its own heads, and rank 0 alone logs warnings
        fits_everywhere = self._tp.minimum(int(excess <= LARGEST_EXCESS))
        if not fits_everywhere:
            logger.warning(
                "keys or values are more than %g times as large as the checkpoint's scales of the KV cache allow, and "
                "are clipped; if answers are poor, leave kv_cache_dtype out",
                LARGEST_EXCESS,
            )
        return scales

    def _choose_scales(self, stored: KVScale | None, largest: Tensor) -> Tensor:
        """Return the scales of this rank's KV heads, [kv_heads] float32. Raises WeightMismatch.

        stored: the checkpoint's for all heads; None if it has none. largest: as largest_magnitudes returns it for this
        rank's heads.
        """
        if stored is None:
            return choose_scales(largest)
        num_kv_heads = len(largest) * self._tp.size
        if self._model_config.num_kv_heads < self._tp.size:
            num_kv_heads = self._model_config.num_kv_heads  # several ranks hold the same head
        heads = self._tp.share_or_copy(num_kv_heads, "KV heads")
        of_all_heads = stored.of_heads(num_kv_heads)
        return of_all_heads[heads.start : heads.start + heads.length].to(self.device).contiguous()

    @torch.inference_mode()
    def _measure_magnitudes(self) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's largest_magnitudes, of its keys and of its values. Raises ConfigError.

        They are those of some tokens, the same on every rank.
        """
        num_tokens = min(NUM_MEASURED_TOKENS, self._longest, self._config.max_num_batched_tokens)
        num_blocks = -(-num_tokens // self._config.block_size)
        self.cache = self._make_cache(num_blocks)
        step = make_step([num_tokens], [num_tokens], self._config.block_size, num_blocks)
        # multiples of a prime spread over the vocabulary
        token_ids = (
            np.arange(1, num_tokens + 1, dtype=np.int64) * 7919 % self._model_config.vocab_size
        )
        self.logits(replace(step, token_ids=token_ids))
        largest = [
            (largest_magnitudes(layer.keys), largest_magnitudes(layer.values))
            for layer in self.cache.layers
        ]
        del self.cache
        return largest

    @torch.inference_mode()
    def _probe(self) -> None:
        """Raise UnsupportedModel if the model fails the probe, ConfigError if only an FP8 cache makes it fail."""
        lengths = [min(length, self._longest) for length in self.model.probe_lengths]
        probe = Probe(self._model_config.vocab_size, self._config.block_size, lengths)
        self.cache = self._make_cache(probe.num_blocks, NUM_PLACES)
        try:
            problem = probe.find(self.logits, self._kv_dtype, reference=self.model.reference_logits)
        except UnsupportedModel as error:
            problem = f"does not run through transformers: {error}"
        except Exception as error:
            if not self.model.may_wait or isinstance(error, (ConfigError, torch.OutOfMemoryError)):
                raise
            problem = (
                f"does not run through transformers: it raises {type(error).__name__}: {error}"
            )
        del self.cache
        if not problem or self._tp.rank != 0:  # other ranks hold only a part of the logits
            return
        name = self._model_config.architecture
        if self._kv_scales is not None:
            raise ConfigError(
                f"kv_cache_dtype={self._config.kv_cache_dtype!r} cannot be used: over such a cache, and not "
                f"over one of its own dtype, {name} {problem}; leave it out"
            )
        raise UnsupportedModel(f"{name} {problem}; {nearest(name)}")

    def _allocate(self) -> None:
        """Size the pool, make it, and capture the graphs that read it. Raises ConfigError."""
        config = self._config
        num_ranks = self._tp.size
        for_adapters = adapter_bytes(config, self.dtype.itemsize)
        if self._memory is not None:
            most = max(0, self._measure_room(self._memory) - for_adapters)
            default = most
            owner = f"memory_utilization={config.memory_utilization} of the GPU"
        else:
            most = max(0, allowed_bytes() // num_ranks - for_adapters)
            default = min(most, default_cpu_kv_cache_bytes(num_ranks))
            owner = "the memory this process may still take"
        if for_adapters:
            owner += (
                f" beside {for_adapters / 2**30:.2f} GiB for max_adapters={config.max_adapters}"
            )
        check_pool_bytes(config, most, owner)
        model = self.model
        size = block_bytes(
            model.attention_layers, config.block_size, self._kv_dtype, model.index_keys
        )
        sizes = PoolSizes(size, state_bytes(model.states))
        num_blocks, states = divide_pool(sizes, config, most, default, self._longest)
        num_blocks = self._tp.minimum(num_blocks)
        if states is not None:
            states = StateRows(*map(self._tp.minimum, states))
        max_model_len = fit_pool(num_blocks, config, self._model_config.max_position_embeddings)
        self.pool_size = PoolSize(num_blocks, num_blocks * size, max_model_len, states)
        if states is not None:
            logger.info("beside the KV pool %s, of %.1f MiB each", states, sizes.state / 2**20)
        self.cache = self._make_cache(num_blocks, sum(states or ()))
        self._graphs = self._capture_graphs(max_model_len)
        if self._graphs is not None:
            logger.info("decode steps run from CUDA graphs")
            self._mixed_graphs = self._capture_mixed_graphs()

    def _measure_room(self, memory: GpuMemory) -> int:
        """Run the largest steps and capture the graphs, over a small pool; return the bytes left for the real one."""
        num_blocks = -(-self._config.max_num_batched_tokens // self._config.block_size)
        self.cache = self._make_cache(num_blocks)
        scratch_bytes = self.cache.num_bytes
        step_bytes = memory.peak_bytes(lambda: self.warm_up(num_blocks))
        before = memory.used_bytes()
        graphs = self._capture_graphs(self._longest), self._capture_mixed_graphs()
        graph_bytes = memory.used_bytes() - before
        # Their memory counts as taken all the same: graphs over the real pool take as much.
        del graphs
        taken = memory.used_bytes() + step_bytes + graph_bytes + SPARE_BYTES - scratch_bytes
        del self.cache
        return int(memory.total_bytes * self._config.memory_utilization) - taken

    def warm_up(self, num_blocks: int) -> None:
        """Run the largest steps of each kind over the pool's first num_blocks blocks, overwriting them."""
        steps = warm_up_steps(self._config, self._longest, num_blocks)
        if self._adapters.tables is not None:
            # the three largest steps again: rows without an adapter compile the kernels as those with one do
            steps += [
                replace(step, adapters=np.full(len(step.query_lens), NO_ADAPTER))
                for step in steps[:3]
            ]
        for step in steps:
            self.launch(step, nucleus_sampling(len(step.sample_rows))).wait()
        sampling = nucleus_sampling(len(steps[0].sample_rows))  # of max_num_seqs rows
        for edited in with_edits(sampling, self._model_config.vocab_size):
            self.launch(steps[0], edited).wait()

    @torch.inference_mode()
    def _capture_graphs(self, max_model_len: int) -> DecodeGraphs | None:
        """Capture decode steps over the pool as it is now; None if steps run without graphs."""
        # no closure over self, which the graphs would keep alive
        model = self.model
        cache = self.cache
        backend = self.backend
        tp = self._tp
        tables = self._adapters.tables
        capture = choose_capture(self._config, self.backend, self.device, may_wait=model.may_wait)
        if capture is None or self._graphs_failed or model.index_keys:
            return None
        if model.states and not model.can_record_states:
            return None
        assert isinstance(backend, CapturableBackend)

        def choose_of_hidden(
            hidden: Tensor,
            rows: SamplingRows,
            edits: LogitEdits | None,
            tokens: Tensor,
            keep: Callable[[Tensor], None] | None,
        ) -> None:
            logits = model.logits(hidden)
            if keep is not None:
                keep(logits)
            # pending tokens are read from the rows that the chosen tokens are then written to
            choose(logits, rows, edits, tokens, tokens, backend, tp)

        try:
            return DecodeGraphs(
                lambda batch: model.hidden_states(batch, cache),
                choose_of_hidden,
                backend,
                capture_on_all_ranks(capture, tp),
                StaticRows(
                    self._config.num_seqs,
                    -(-max_model_len // self._config.block_size),
                    self._config.block_size,
                    self.device,
                    backend.write_rows,
                    backend.prefix_limits,
                    has_states=bool(model.states),
                    no_adapter=0 if tables is None else tables.none,
                ),
                max_model_len,
                tables,
            )
        except CaptureFailed as error:
            logger.warning(
                "decode steps run without CUDA graphs, as this model's cannot be recorded: %s",
                error,
            )
            self._graphs_failed = True
            return None

    @torch.inference_mode()
    def _capture_mixed_graphs(self) -> MixedGraphs | None:
        """Capture the pieces of steps with prompts, over the pool as it is now; None if they run without graphs."""
        model = self.model
        cache = self.cache
        backend = self.backend
        capture = choose_piece_capture(self._config, backend, self.device)
        if capture is None or model.may_wait or model.index_keys:
            return None
        if model.states and not model.can_record_states:
            return None
        assert isinstance(backend, CapturableBackend)
        sizes = step_sizes(self._config.max_num_batched_tokens)
        try:
            graphs = MixedGraphs(
                lambda batch: model.hidden_states(batch, cache),
                backend,
                capture_on_all_ranks(capture, self._tp),
                sizes,
                self.device,
                self._adapters.tables,
            )
            problem = self._problem_of(graphs)
        except CaptureFailed as error:
            problem = str(error)
        except RuntimeError as error:
            # other ranks wait in the replay that has failed here, so this one must end
            if self._tp.size > 1 or isinstance(error, torch.OutOfMemoryError):
                raise
            problem = str(error)
        if problem is None:
            return graphs
        logger.warning("steps with prompts run without CUDA graphs: %s", problem)
        return None

    def _problem_of(self, graphs: MixedGraphs) -> str | None:
        """Compare a prompt's hidden states with and without the graphs; return None if they are alike.

        Where steps may have adapters, the pieces of those are replayed too, for rows that have none.
        """
        block_size = self._config.block_size
        num_tokens = min(NUM_COMPARED_TOKENS, self._longest, self._config.max_num_batched_tokens)
        num_blocks = -(-num_tokens // block_size)
        step = make_step([num_tokens], [num_tokens], block_size, num_blocks)
        token_ids = np.arange(num_tokens, dtype=np.int64) % self._model_config.vocab_size
        compared = [replace(step, token_ids=token_ids)]
        if self._adapters.tables is not None:
            compared.append(replace(compared[0], adapters=np.array([NO_ADAPTER])))
        # all are computed, whatever the first gives: ranks exchange sums, so each must compute as many
        differences = [self._changes_states(graphs, prompt) for prompt in compared]
        is_alike = self._tp.minimum(int(not any(differences)))
        return None if is_alike else "they give other hidden states"

    def _changes_states(self, graphs: MixedGraphs, prompt: StepBatch) -> bool:
        """Return whether a step gives other hidden states with the graphs than without them."""
        batch, _ = self._to_device(prompt)
        replayed = graphs.run(batch).clone()
        expected = self.model.hidden_states(batch, self.cache)
        return differ(expected, replayed, self._kv_dtype)


def choose(
    logits: Tensor,
    rows: SamplingRows,
    edits: LogitEdits | None,
    sampled: Tensor | None,
    chosen: Tensor,
    backend: KernelBackend,
    tp: TensorParallel,
) -> None:
    """Write a token for each row of logits to `chosen`, [rows] int64, on every rank.

    Only rank 0 has the logits of the whole vocabulary; there the edits change them. sampled: [any] int64, holds the
    edits' pending tokens; it may be `chosen`.
    """
    if tp.rank == 0:
        if edits is not None:
            logits = backend.edit(logits, edits, sampled)
        backend.sample(logits, rows, chosen)
    tp.broadcast(chosen)


def choose_capture(
    config: EngineConfig, backend: KernelBackend, device: torch.device, *, may_wait: bool = False
) -> Capture | None:
    """Return how to capture decode steps; None on a CPU, with enforce_eager, or if the backend cannot."""
    if config.enforce_eager or device.type != "cuda" or not isinstance(backend, CapturableBackend):
        return None
    return CudaCapture(device, may_wait=may_wait)


def choose_piece_capture(
    config: EngineConfig, backend: KernelBackend, device: torch.device
) -> CapturePieces | None:
    """Return how to capture the pieces of steps with prompts; None where decode steps are not captured either."""
    if choose_capture(config, backend, device) is None:
        return None
    return CudaPieces(device)


def gpu_memory(device: torch.device) -> GpuMemory | None:
    """Return the device's memory, to be measured; None on a CPU, where nothing is measured."""
    return GpuMemory(device) if device.type == "cuda" else None
