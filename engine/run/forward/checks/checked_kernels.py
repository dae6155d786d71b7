"""Compares the GPU kernels that a model uses with plain torch, one by one, on the model's own shapes.

A small model is built with random weights and one layer of each kind that the checkpoint has. It takes a few steps,
decodes also as a graph has them, and each launch of a kernel is compared with its reference on the same inputs.

A kernel that faults ends its process, so a child does this: `python -m engine.run.forward.checks.checked_kernels`. It
prints each kernel's name before it launches it, so that its parent knows which one was the last.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.attention.adapter_rows import AdapterGroup, GroupedRows
from engine.attention.base import AttentionMetadata, Lens
from engine.attention.decode_state import DecodeState, RowMemory, RowWrites
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import FP8, KVCache, LayerKVCache
from engine.attention.layer_kernels import ExpertKernels, LayerKernels
from engine.attention.prefix_groups import PrefixTensors
from engine.attention.state_pool import StatePool
from engine.attention.torch_backend import TorchBackend
from engine.attention.triton_backend import TritonBackend, TritonMetadata
from engine.checkpoint.bitsandbytes import KINDS
from engine.checkpoint.model_config import ModelConfig, read_model_config
from engine.checkpoint.packed_form import PackedForm
from engine.checkpoint.quantization import USUAL_BLOCK, Scheme
from engine.errors import AttentionRefused
from engine.kernels.upload import Arrays
from engine.layers.gated_delta_net import mix
from engine.layers.grouped_linear import ExpertGroups, PackedGroupedLinear
from engine.layers.linear import ReplicatedLinear
from engine.layers.lora import Block, LowRank
from engine.layers.lora_tables import Linear, LowRankTables, block_rows
from engine.layers.moe import ExpertMLPs, choose_experts
from engine.layers.packed import PackedProduct, layout_of
from engine.layers.parallel import TensorParallel
from engine.layers.rotary import RotaryEmbedding
from engine.layers.stream import ClampedSwigluAndMul, GatedActivation
from engine.layers.weighted_module import WeightedModule
from engine.models.decoder import DecoderForCausalLM, DecoderParts
from engine.models.decoder_config import DecoderConfig, LayerConfig
from engine.models.load import choose_path
from engine.run.forward.adapter_loader import adapted_layers
from engine.run.forward.checks.comparison import KernelComparison
from engine.run.forward.checks.every_edit import every_edit
from engine.run.forward.checks.kernel_check import CheckedModel
from engine.run.forward.checks.plain_kernels import (
    plain_add_rms_norm,
    plain_advance,
    plain_group,
    plain_grouped_packed_product,
    plain_grouped_product,
    plain_norm_rotate_and_store,
    plain_packed_product,
    plain_rms_norm,
    plain_write_rows,
)
from engine.run.forward.checks.recorded_steps import begin_steps, recorded_batch
from engine.run.forward.transfers import to_device
from engine.run.forward.warm_up import make_step, nucleus_sampling, with_edits
from engine.schedule.step_batch import StepBatch

FP8_TOLERANCE = 0.15  # of keys and values of 8 bits, and of attention over them
#: Of log probabilities. They are computed in float32, whatever the model's dtype.
SCORE_TOLERANCE = 1e-5
VOCABULARY = 1024  # of the small model; the sampler's kernels have the checkpoint's own
QUERY_LENS = ((70, 17, 130), (1, 1, 1), (1, 40, 1))  # of the sequences in each step
SHARING_LENS = ((1, 1, 1), (5, 2, 3))  # of the sequences in each step behind a common prefix
WINDOW = 50
NUM_SAMPLED = 3
ADAPTER_RANKS = (8, 16, 5)
ADAPTER_ROWS = (3, 40, 1030)  # each meets another tile
PACKED_ROWS = (1, 17, 130)  # of products: each meets another tile
NO_NAN = 0xBF  # of e4m3: the bits that it may have


class CheckedBackend(TritonBackend):
    """The Triton backend with each launch compared."""

    def __init__(self, device: torch.device, comparison: KernelComparison) -> None:
        super().__init__(device)
        self._comparison = comparison
        self._plain = TorchBackend(device)
        assert self.layer_kernels is not None
        self.layer_kernels = checked_layer_kernels(self.layer_kernels, comparison)

    def share_all_prefixes(self, layers: Sequence[AttentionFeatures], block_size: int) -> None:
        """Have each prefix that several of a step's sequences share read only once, however short it is."""
        self.share_prefixes(layers, torch.float32, block_size)
        if self.prefix_limits is not None:
            self.prefix_limits = replace(self.prefix_limits, least_spared_bytes=0)
        if self.tile_limits is not None:
            self.tile_limits = replace(self.tile_limits, least_spared_share=float("-inf"))

    def build_metadata(
        self,
        block_tables: NDArray[np.int32],
        context_lens: Lens,
        query_lens: Lens,
        beside: Arrays = (),
    ) -> tuple[AttentionMetadata, list[Tensor]]:
        self._plain_metadata, _ = self._plain.build_metadata(block_tables, context_lens, query_lens)
        return super().build_metadata(block_tables, context_lens, query_lens, beside)

    def decode_metadata(
        self,
        rows: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        max_context_len: int,
        order: Tensor | None,
        prefixes: PrefixTensors | None = None,
    ) -> AttentionMetadata:
        """Build the metadata of a recorded step. The values that it has now are those to compare with."""
        contexts = context_lens.cpu().numpy().astype(np.int64)
        self._plain_metadata, _ = self._plain.build_metadata(
            block_tables.cpu().numpy(), contexts, np.ones_like(contexts)
        )
        return super().decode_metadata(
            rows, context_lens, block_tables, max_context_len, order, prefixes
        )

    def forward(
        self,
        query: Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        features: AttentionFeatures,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        def reference(query: Tensor, *arguments: Any) -> Tensor:
            return self._plain.forward(query, cache, self._plain_metadata, features, sinks, slopes)

        assert isinstance(metadata, TritonMetadata)
        name = "attention"
        if features.sees_all and metadata.decode.prefixes is not None:
            name = "attention to a common prefix"
        if features.sees_all and metadata.shared is not None:
            name = "attention of prompts behind a common prefix"
        out: Tensor = self._comparison.run(
            name,
            super().forward,
            reference,
            (query, cache, metadata, features, sinks, slopes),
            tolerance=FP8_TOLERANCE if cache.keys.dtype == FP8 else None,
        )
        return out

    def write_rows(self, memory: RowMemory, writes: RowWrites, sampled: Tensor | None) -> None:
        self._comparison.run(
            "writing rows of a recorded step",
            super().write_rows,
            plain_write_rows,
            (memory, writes, sampled),
            changed=list(memory),
            tolerance=0.0,
        )

    def advance(self, state: DecodeState) -> None:
        inputs = [state.token_ids, state.positions, state.slot_mapping, state.context_lens]
        self._comparison.run(
            "inputs of a recorded step",
            super().advance,
            plain_advance,
            (state,),
            changed=[*inputs, state.sampling.position, state.next_positions],
            tolerance=0.0,
        )

    def check_sampler(self, vocab_size: int, dtype: torch.dtype) -> None:
        """Draw from random logits [rows, vocab_size]. The tokens must be those of plain torch."""
        step = make_step([1] * NUM_SAMPLED, [2] * NUM_SAMPLED, 16, NUM_SAMPLED)
        _, rows = to_device(step, self, None, nucleus_sampling(NUM_SAMPLED))
        assert rows is not None
        self._comparison.run(
            "sampler",
            super().sample,
            self._plain.sample,
            (self._random_logits(vocab_size, dtype), rows),
            tolerance=0.0,
        )

    def check_edits(self, vocab_size: int, dtype: torch.dtype) -> None:
        """Edit random logits [rows, vocab_size]: once in place, and once by all kinds of edits.

        The bits must be those of plain torch.
        """
        in_place = with_edits(nucleus_sampling(NUM_SAMPLED), vocab_size)[0].edits
        edits, tokens = every_edit(np.arange(0, NUM_SAMPLED, 2), vocab_size)
        sampled = torch.from_numpy(tokens).to(self._device)
        for arguments in ((in_place, None), (edits, sampled)):
            logits = self._random_logits(vocab_size, dtype)
            self._comparison.run(
                "edits of logits",
                super().edit,
                self._plain.edit,
                (logits, *arguments),
                changed=[logits],
                tolerance=0.0,
            )

    def check_scores(self, vocab_size: int, dtype: torch.dtype) -> None:
        """Score tokens of random logits: the first and the last of the vocabulary, and two of one row."""
        last = vocab_size - 1
        self._comparison.run(
            "scores of tokens",
            super().score,
            self._plain.score,
            (
                self._random_logits(vocab_size, dtype),
                torch.tensor([0, last, last // 2, last], device=self._device),
                torch.tensor([0, 1, 1, 2], device=self._device),
            ),
            tolerance=SCORE_TOLERANCE,
        )

    def _random_logits(self, vocab_size: int, dtype: torch.dtype) -> Tensor:
        """Draw logits of NUM_SAMPLED rows."""
        generator = torch.Generator().manual_seed(0)
        logits = 4 * torch.randn(NUM_SAMPLED, vocab_size, generator=generator)
        return logits.to(self._device, dtype)

    def check_pending_tokens(self) -> None:
        """Put tokens of the step before into a step."""
        sampled = torch.arange(5, 15, device=self._device)
        sampled[3] = -1
        places = torch.tensor([2, 3, 9], device=self._device)
        rows = torch.tensor([4, 0, 7], device=self._device)
        token_ids = torch.zeros(8, dtype=torch.int64, device=self._device)
        self._comparison.run(
            "tokens of the step before",
            super().fill_pending,
            self._plain.fill_pending,
            (token_ids, rows, sampled, places),
            changed=[token_ids],
        )

    def check_packed(self, form: PackedForm, layer: ReplicatedLinear, dtype: torch.dtype) -> None:
        """Multiply with random packed weights of a layer's shape."""
        assert self.layer_kernels is not None
        assert self.layer_kernels.packed is not None
        kernels = self.layer_kernels.packed
        in_features = layer.in_features
        out_features = layer.out_features
        layout = layout_of(form, in_features, kernels)
        if layout is None:
            return  # such a weight is unpacked
        product = PackedProduct(layout.form, in_features, out_features, kernels, layout.block)
        generator = torch.Generator().manual_seed(0)
        _fill_randomly(product, form.kind, generator)
        product.finish_loading()
        product.to(self._device)
        for num_rows in PACKED_ROWS:
            x = torch.randn(num_rows, in_features, generator=generator)
            product(x.to(self._device, dtype), None)

    def check_packed_experts(
        self, form: PackedForm, experts: ExpertMLPs, dtype: torch.dtype
    ) -> None:
        """Multiply rows of several experts with random packed weights of the experts' shapes."""
        assert self.layer_kernels is not None
        assert self.layer_kernels.packed is not None
        kernels = self.layer_kernels.packed
        num_experts = experts.experts.num_experts
        hidden = experts.hidden_size
        columns = experts.columns.length
        generator = torch.Generator().manual_seed(0)
        for in_features, out_features in ((hidden, 2 * columns), (columns, hidden)):
            layout = layout_of(form, in_features, kernels)
            if layout is None:
                continue  # such weights are unpacked
            product = PackedGroupedLinear(layout, num_experts, in_features, out_features, kernels)
            _fill_randomly(product, form.kind, generator)
            product.finish_loading()
            product.to(self._device)
            for num_rows in PACKED_ROWS:
                chosen = torch.randint(0, num_experts, (num_rows, 1), generator=generator)
                groups = ExpertGroups.of(chosen.to(self._device), num_experts)
                x = torch.randn(num_rows, in_features, generator=generator)
                product(x.to(self._device, dtype), None, groups)

    def check_adapters(self, model: DecoderForCausalLM, dtype: torch.dtype) -> None:
        """Add random adapters' products to random rows of a layer of each shape."""
        assert self.layer_kernels is not None
        layers = adapted_layers(model).values()
        by_shape = {(layer.in_features, layer.out_features): layer for layer in layers}
        generator = torch.Generator().manual_seed(0)
        for layer in by_shape.values():
            tables = LowRankTables([layer], len(ADAPTER_RANKS), self.layer_kernels, self._device)
            products = [
                _random_low_rank(layer, rank, generator, self._device, dtype)
                for rank in ADAPTER_RANKS
            ]
            for number, product in enumerate(products):
                tables.put(number, {layer: product})
            for num_rows in ADAPTER_ROWS:
                numbers = torch.randint(0, len(products) + 1, (num_rows,), generator=generator)
                groups = [
                    AdapterGroup(
                        {layer: product}, (numbers == i).nonzero().flatten().to(self._device)
                    )
                    for i, product in enumerate(products)
                ]
                x = torch.randn(num_rows, layer.in_features, generator=generator)
                y = torch.randn(num_rows, layer.out_features, generator=generator)
                x = x.to(self._device, dtype)
                y = y.to(self._device, dtype)
                self._comparison.run(
                    "products of adapters",
                    tables.sort(numbers.to(self._device)).add_to,
                    GroupedRows(tuple(groups)).add_to,
                    (y, layer, x),
                    changed=[y],
                )


def _random_low_rank(
    layer: Linear, rank: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> LowRank:
    """Draw an adapter's product at random, with a block for each part that is stacked in the layer."""

    def draw(num_rows: int, num_columns: int) -> Tensor:
        numbers = torch.randn(num_rows, num_columns, generator=generator)
        return numbers.div_(num_columns**0.5).to(device, dtype)

    lengths = block_rows(layer)
    blocks = []
    first_row = 0
    for i, length in enumerate(lengths):
        rows = slice(first_row, first_row + length)
        ranks = slice(i * rank, (i + 1) * rank)
        scale = 2.0
        blocks.append(Block(rows, ranks, draw(length, rank), scale))
        first_row += length
    return LowRank(draw(rank * len(lengths), layer.in_features), tuple(blocks))


def _fill_randomly(
    product: PackedProduct | PackedGroupedLinear, kind: str, generator: torch.Generator
) -> None:
    """Fill a product with random packed weights, before they are laid out."""
    product.words.random_(0, 256, generator=generator)
    if kind == "fp8":
        product.words.bitwise_and_(NO_NAN)
    product.zeros.random_(0, 16 if kind == "int4" else 256, generator=generator)
    if kind == "fp4":  # the kernel relies on MXFP4's scales, which are powers of two
        product.scales.uniform_(-7, -5, generator=generator).floor_().exp2_()
    else:
        product.scales.uniform_(0.01, 0.02, generator=generator)


def checked_layer_kernels(kernels: LayerKernels, comparison: KernelComparison) -> LayerKernels:
    """Return the kernels with each launch compared."""
    experts = kernels.experts
    packed = kernels.packed
    assert experts is not None
    assert packed is not None
    assert packed.grouped_product is not None

    def compared(
        name: str, kernel: Callable[..., Any], reference: Callable[..., Any]
    ) -> Callable[..., Any]:
        return lambda *arguments: comparison.run(name, kernel, reference, arguments)

    def norm_rotate_and_store(*arguments: Any) -> Tensor:
        cache: LayerKVCache = arguments[6]  # as in plain_norm_rotate_and_store
        queries: Tensor = comparison.run(
            "rotation and storing",
            kernels.norm_rotate_and_store,
            plain_norm_rotate_and_store,
            arguments,
            changed=[cache.keys, cache.values],
            tolerance=FP8_TOLERANCE if cache.keys.dtype == FP8 else None,
        )
        return queries

    def delta_net(*arguments: Any) -> Tensor:
        assert kernels.delta_net is not None
        memory: Sequence[Tensor] = arguments[1]  # as in `mix`
        mixed: Tensor = comparison.run(
            "delta net", kernels.delta_net, mix, arguments, changed=list(memory)
        )
        return mixed

    def choose(scores: Tensor, num_chosen: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
        def by_kernel(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            weights, chosen = experts.choose(scores, num_chosen, normalised=normalised)
            return weights, scores.gather(1, chosen), chosen

        def by_torch(scores: Tensor) -> tuple[Tensor, Tensor]:
            weights, chosen = choose_experts(scores, num_chosen, normalised=normalised)
            # without `chosen`, which is not compared: of equal scores either may be chosen
            return weights, scores.gather(1, chosen)

        weights, _, chosen = comparison.run("choice of experts", by_kernel, by_torch, (scores,))
        return weights, chosen

    return replace(
        kernels,
        add_rms_norm=compared("norm of a sum", kernels.add_rms_norm, plain_add_rms_norm),
        rms_norm=compared("norm", kernels.rms_norm, plain_rms_norm),
        norm_rotate_and_store=norm_rotate_and_store,
        silu_and_mul=compared("SiLU", kernels.silu_and_mul, GatedActivation("silu")),
        gelu_and_mul=compared("GELU", kernels.gelu_and_mul, GatedActivation("gelu_pytorch_tanh")),
        experts=ExpertKernels(
            choose=choose,
            group=compared("grouping by expert", experts.group, plain_group),
            product=compared("products of experts", experts.product, plain_grouped_product),
            clamped_swiglu_and_mul=compared(
                "clamped SwiGLU",
                experts.clamped_swiglu_and_mul,
                lambda gate_up, alpha, limit: ClampedSwigluAndMul(alpha, limit)(gate_up),
            ),
        ),
        delta_net=None if kernels.delta_net is None else delta_net,
        packed=replace(
            packed,
            product=compared("products with packed weights", packed.product, plain_packed_product),
            grouped_product=compared(
                "products of experts with packed weights",
                packed.grouped_product,
                plain_grouped_packed_product,
            ),
        ),
    )


@torch.inference_mode()
def check_kernels(model: CheckedModel, announce: Callable[[str], object]) -> None:
    """Launch the kernels of a native model, and compare them.

    announce: is told each kernel's name before a launch. Raises KernelDiffers, or what a launch raises.
    """
    device = torch.device(model.device)
    dtype = getattr(torch, model.dtype)
    config = read_model_config(Path(model.folder))
    decoder = choose_path(config, "native").decoder
    assert decoder is not None, "a native model has one"

    backend = CheckedBackend(device, KernelComparison(announce, device, dtype))
    backend.check_pending_tokens()
    begin_steps(backend, model.block_size, device)
    backend.check_sampler(config.vocab_size, dtype)
    backend.check_edits(config.vocab_size, dtype)
    backend.check_scores(config.vocab_size, dtype)

    tp = TensorParallel(0, model.tensor_parallel_size)
    small = _one_layer_of_each_kind(decoder)
    try:
        built = _random_model(small, DecoderParts(small, tp, backend, dtype), device)
    except AttentionRefused:
        return  # the engine takes another backend
    for form, layer in _packed_layers(config, built):
        backend.check_packed(form, layer, dtype)
    for form, experts in _packed_experts(config, built):
        backend.check_packed_experts(form, experts, dtype)
    if model.has_adapters:
        backend.check_adapters(built, dtype)
    backend.share_all_prefixes(built.attention_layers, model.block_size)
    steps = _make_steps(model.block_size)
    num_blocks = 1 + int(max(step.block_tables.max() for step in steps))
    is_fp8 = model.kv_cache_dtype != "auto"
    cache = KVCache(
        built.attention_layers,
        num_blocks=num_blocks,
        block_size=model.block_size,
        dtype=FP8 if is_fp8 else dtype,
        device=device,
        scales=[_fp8_scales(layer, device) for layer in built.attention_layers] if is_fp8 else None,
    )
    if built.states:
        cache.states = StatePool(built.states, len(QUERY_LENS[0]), device)
    for step in steps:
        batch, _ = to_device(step, backend, None, None)
        built.hidden_states(batch, cache)
        if (step.query_lens == 1).all():
            recorded = recorded_batch(
                step, backend, model.block_size, device, has_states=bool(built.states)
            )
            built.hidden_states(recorded, cache)


def _packed_layers(
    config: ModelConfig, model: nn.Module
) -> Iterator[tuple[PackedForm, ReplicatedLinear]]:
    """Yield the forms in which the checkpoint's weights stay packed, with a layer of each shape."""
    if config.quantization is None:
        return
    layers = [layer for layer in model.modules() if isinstance(layer, ReplicatedLinear)]
    by_shape = {(layer.in_features, layer.out_features): layer for layer in layers}
    for scheme in config.quantization.schemes:
        if scheme.layout == "mxfp4":
            continue  # only experts have it
        for layer in by_shape.values():
            yield _random_form(scheme, layer.in_features), layer


def _packed_experts(
    config: ModelConfig, model: nn.Module
) -> Iterator[tuple[PackedForm, ExpertMLPs]]:
    """Yield the forms in which experts' weights stay packed, with a layer's experts."""
    experts = next((module for module in model.modules() if isinstance(module, ExpertMLPs)), None)
    if config.quantization is None or experts is None:
        return
    for scheme in config.quantization.schemes:
        yield _random_form(scheme, experts.hidden_size), experts


def _random_form(scheme: Scheme, columns: int) -> PackedForm:
    """Return the form of a scheme's weights with this many columns; their scales have the usual dtype."""
    if scheme.layout == "mxfp4":
        return PackedForm("fp4", scheme.block[1], torch.bfloat16)
    if scheme.layout == "bitsandbytes4":
        kind = KINDS[f"{scheme.kind}{scheme.bits}"]
        return PackedForm(kind, gcd(columns, USUAL_BLOCK), torch.float32)
    kind = "fp8" if scheme.kind == "float" else f"int{scheme.bits}"
    scale_dtype = torch.float32 if scheme.layout == "bitsandbytes8" else torch.float16
    return PackedForm(kind, scheme.block[1], scale_dtype)


def _one_layer_of_each_kind(decoder: DecoderConfig) -> DecoderConfig:
    """Return the decoder with fewer layers, a small vocabulary, and windows that the steps go beyond."""
    kinds: list[LayerConfig] = []
    for layer in decoder.layers:
        kind = layer if layer.window is None else replace(layer, window=min(WINDOW, layer.window))
        if kind not in kinds:
            kinds.append(kind)
    sizes = replace(decoder.sizes, vocab_size=VOCABULARY)
    return replace(decoder, layers=tuple(kinds), sizes=sizes)


def _random_model(
    config: DecoderConfig, parts: DecoderParts, device: torch.device
) -> DecoderForCausalLM:
    """Build a model with random weights whose activations stay near 1."""
    torch.manual_seed(0)
    num_positions = sum(map(sum, QUERY_LENS))
    rotation_dtype = torch.float32 if config.flags.float32_rotation else parts.dtype
    with device:
        rotaries = [
            RotaryEmbedding(rope, num_positions, dtype=rotation_dtype, device=device)
            for rope in config.ropes
        ]
        model = DecoderForCausalLM(parts, rotaries)
    model.tie_weights()
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.normal_(1.0, 0.1)
        else:
            weight.normal_(0.0, weight.shape[-1] ** -0.5)
    for module in model.modules():
        if isinstance(module, WeightedModule):
            module.finish_loading()
    return model.eval()


def _fp8_scales(layer: AttentionFeatures, device: torch.device) -> tuple[Tensor, Tensor]:
    ones = torch.ones(layer.num_kv_heads, device=device)
    return 2.0**-4 * ones, 2.0**-4 * ones


def _make_steps(block_size: int) -> list[StepBatch]:
    """Make steps of three sequences: prefills, decodes, both at once, then both kinds behind a common prefix."""
    num_seqs = len(QUERY_LENS[0])
    longest = sum(max(lens) for lens in QUERY_LENS)
    width = max(2, -(-longest // block_size))
    tables = np.arange(num_seqs * width, dtype=np.int32).reshape(num_seqs, width)
    contexts = np.zeros(num_seqs, np.int64)
    steps = []
    for lens in QUERY_LENS:
        contexts = contexts + np.array(lens, np.int64)
        steps.append(_step_over(tables, list(lens), contexts.tolist(), block_size))

    num_shared = max(1, int(contexts.max()) // block_size)
    behind_prefix = tables.copy()
    behind_prefix[:, :num_shared] = tables[contexts.argmax(), :num_shared]
    for lens in SHARING_LENS:
        own_tokens = [num_shared * block_size + length for length in lens]
        steps.append(_step_over(behind_prefix, list(lens), own_tokens, block_size))
    return steps


def _step_over(
    tables: NDArray[np.int32], query_lens: list[int], contexts: list[int], block_size: int
) -> StepBatch:
    """Make a step of sequences with these block tables; each has a state of its own."""
    num_seqs = len(tables)
    step = make_step(query_lens, contexts, block_size, tables.size)
    seqs = np.repeat(np.arange(num_seqs), query_lens)
    blocks = tables[seqs, step.positions // block_size].astype(np.int64)
    parts = step.state_parts.copy()
    # column 2 is the state that is read, -1 for none, and column 3 the state that is written
    parts[:, 2] = np.where(parts[:, 2] >= 0, np.arange(num_seqs), -1)
    parts[:, 3] = np.arange(num_seqs)
    return replace(
        step,
        # multiples of a prime spread over the vocabulary
        token_ids=np.arange(len(step.positions), dtype=np.int64) * 7919 % VOCABULARY,
        slot_mapping=blocks * block_size + step.positions % block_size,
        block_tables=tables,
        state_parts=parts,
    )


def main() -> None:
    """Check the kernels of the model that the only argument describes, as CheckedModel's JSON."""
    (described,) = sys.argv[1:]

    def announce(name: str) -> None:
        print(name, flush=True)

    check_kernels(CheckedModel(**json.loads(described)), announce)


if __name__ == "__main__":
    main()
