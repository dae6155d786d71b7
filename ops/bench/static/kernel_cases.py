"""Which Triton kernels there are, what is asked of each, and the sizes they are compiled for.

A new kernel is a line of KERNELS; where no model of MODELS launches it, an entry of CASES too.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.attention.base import ForwardBatch
from engine.attention.kv_cache import FP8, KVCache
from engine.attention.prefix_groups import PrefixTensors
from engine.attention.state_pool import StatePool, state_parts
from engine.attention.triton_backend import PACKED, TritonBackend
from engine.checkpoint.model_config import read_model_config
from engine.checkpoint.packed_form import PackedForm
from engine.kernels.attention.kv_store import store_kv
from engine.kernels.products import packed_product
from engine.kernels.upload import upload
from engine.layers.grouped_linear import ExpertGroups, PackedGroupedLinear
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.lora_tables import Linear, LowRankTables
from engine.layers.packed import PackedLayout, PackedProduct
from engine.layers.parallel import Share, TensorParallel
from engine.layers.rotary import RotaryEmbedding
from engine.layers.weighted_module import WeightedModule
from engine.models.decoder import DecoderForCausalLM, DecoderParts
from engine.models.decoder_config import read_decoder_config
from engine.models.registry import decoder_flags
from engine.run.forward.rows import StaticRows
from engine.run.forward.runner import Sampled
from engine.run.forward.warm_up import make_step, with_edits
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows
from engine.sampling.sampling_rows import SamplingRows
from engine.schedule.step_batch import StepBatch

PROCESSORS = 132  # of an H200
BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
META = torch.device("meta")


@dataclass(frozen=True)
class Kernel:
    """What is asked of a kernel, whatever its sizes; float32, which is for accuracy, is asked for no more
    than not to spill.

    launches: how often it is launched, and for what, as the table of RESULTS.md says it.
    variants: at most so many are compiled for one layer, whatever its steps are.
    of_layer: constants that tell a model's layers from each other.
    warps: at least so many share a multiprocessor, which has room for 64; loads hide behind each other's. fp8_warps: if
    it reads FP8 numbers; as many unless given.
    product: its matrix instructions, of a warp ("mma") or of a warp group ("wgmma") in some variant.
    wide: at least this share of the bytes its instructions load is loaded by 16 at a time.
    buffers: of each tensor that its loops copy to shared memory, at least so many.
    keeps_float16: it multiplies FP8 numbers in float16, as a GPU makes two float16 numbers of them by one instruction.
    Any other type takes a slow instruction more for each number.
    """

    launches: str
    variants: int = 1
    of_layer: tuple[str, ...] = ()
    warps: int = 32
    fp8_warps: int | None = None
    product: str | None = None
    wide: float = 0.75
    buffers: int = 0
    keeps_float16: bool = False


KERNELS = {
    "decode_kernel": Kernel(
        launches="1 a layer",
        variants=4,
        of_layer=("WINDOW",),
        warps=16,
        fp8_warps=12,
        product="mma",
        buffers=2,
        wide=0.65,
        keeps_float16=True,
    ),
    "prefix_kernel": Kernel(
        launches="1 a layer, behind a common prefix",
        warps=8,
        product="wgmma",
        buffers=2,
        wide=0.7,
        keeps_float16=True,
    ),
    "prefill_kernel": Kernel(
        launches="1 a layer, with prompts",
        of_layer=("WINDOW",),
        warps=8,
        product="wgmma",
        buffers=2,
        wide=0.7,
    ),
    "shared_prefill_kernel": Kernel(
        launches="1 a layer in place of `prefill`, where prompts share tiles",
        warps=8,
        product="wgmma",
        buffers=2,
        wide=0.7,
    ),
    "store_kernel": Kernel(launches="1 a layer of transformers' models"),
    "rms_norm_kernel": Kernel(launches="2 a layer, 1 a step", variants=2),
    # a half of each head at a time; slots of 8 bytes
    "norm_rotate_store_kernel": Kernel(launches="1 a layer", warps=16, wide=0.35),
    "gate_and_mul_kernel": Kernel(launches="1 a layer"),
    "grouped_product_kernel": Kernel(
        launches="2 a layer of experts",
        variants=2,
        of_layer=("IN", "OUT"),
        warps=8,
        product="wgmma",
    ),
    "packed_product_kernel": Kernel(
        launches="1 a packed matrix", variants=3, warps=8, product="mma", wide=0.3
    ),
    "grouped_packed_product_kernel": Kernel(
        launches="2 a layer of packed experts",
        variants=3,
        of_layer=("IN", "OUT"),
        warps=8,
        product="mma",
        wide=0.3,
    ),
    # the rows of one adapter are few, and lie apart
    "narrow_kernel": Kernel(
        launches="1 a matrix with adapters",
        variants=2,
        of_layer=("IN",),
        warps=8,
        product="mma",
        wide=0.0,
    ),
    "widen_kernel": Kernel(
        launches="1 a matrix with adapters",
        variants=2,
        of_layer=("BLOCKS",),
        warps=8,
        product="mma",
        wide=0.0,
    ),
    "convolve_kernel": Kernel(launches="1 a delta net", warps=28, wide=0.25),
    # it holds a state; beside it are single numbers
    "correct_kernel": Kernel(launches="1 a delta net", warps=16, wide=0.5),
    "solve_kernel": Kernel(
        launches="1 a delta net, with prompts", warps=8, product="mma", wide=0.5
    ),
    "chunk_kernel": Kernel(launches="2 a delta net, with prompts", warps=8, product="mma"),
    # gates of 16 bits beside what was found, in float32
    "gate_kernel": Kernel(launches="1 a delta net, with prompts", wide=0.5),
    # a row of scores is shorter than a warp's wide load
    "choose_kernel": Kernel(launches="1 a layer of experts", wide=0.0),
    "group_kernel": Kernel(launches="1 a layer of experts; 1 a step with adapters", wide=0.0),
    "advance_kernel": Kernel(launches="1 a step", wide=0.0),  # a number or two of each row
    # numbers that lie apart
    "write_rows_kernel": Kernel(launches="1 a step whose rows change", wide=0.0),
    # a number of each row
    "fill_pending_kernel": Kernel(launches="1 a step, with prompts", wide=0.0),
    "tile_maxima_kernel": Kernel(launches="1 a step", of_layer=("SPARE",)),
    # of words and logits that lie apart
    "edit_kernel": Kernel(
        launches="1 a step that changes logits", of_layer=("ADDS",), warps=16, wide=0.0
    ),
    # edited logits are in float32; a row for each program; loads come ahead of their use
    "choose_token_kernel": Kernel(launches="1 a step", of_layer=("SPARE",), warps=16),
    # a program also loads single numbers: a token, its row and its logit
    "score_kernel": Kernel(launches="1 a piece of scored rows", wide=0.7),
}


@dataclass(frozen=True)
class Case:
    """Sizes in which kernels are used. launch: launches all of them for so many rows, over meta tensors."""

    name: str
    launch: Callable[[int], None]


def common(
    hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> dict[str, Any]:
    """What every config.json has; two layers, since of some models every other one has a window."""
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab, "num_hidden_layers": 2,
        "max_position_embeddings": MAX_MODEL_LEN, "rms_norm_eps": 1e-6,
    }  # fmt: skip


#: Rows of Llama-3-8B's queries, keys and values.
LLAMA_HEADS = {"q": 4096, "k": 1024, "v": 1024}

#: Architecture, and what config.json says of the shipped checkpoint.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B": ("Qwen3ForCausalLM", common(1024, 3072, 16, 8, 128, 151_936)),
    "Qwen3-8B": ("Qwen3ForCausalLM", common(4096, 12_288, 32, 8, 128, 151_936)),
    "Llama-3-8B": ("LlamaForCausalLM", common(4096, 14_336, 32, 8, 128, 128_256)),
    "Gemma-2-9B": (
        "Gemma2ForCausalLM",
        {**common(3584, 14_336, 16, 8, 256, 256_000), "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "gpt-oss-20b": (
        "GptOssForCausalLM",
        {**common(2880, 2880, 64, 8, 64, 201_088), "num_local_experts": 32},
    ),
    "Qwen3.5-9B": (
        "Qwen3_5ForCausalLM",
        {**common(4096, 12_288, 16, 4, 256, 248_320), "full_attention_interval": 2},
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeForCausalLM",
        {**common(2048, 6144, 32, 4, 128, 151_936), "norm_topk_prob": True},
    ),
}


def model_case(name: str, dtype: torch.dtype = torch.bfloat16, *, fp8: bool = False) -> Case:
    """A decode step of so many rows, and a prefill. fp8: of the KV cache."""
    label = f"{'FP8 KV cache, ' if fp8 else ''}{name}, {str(dtype).removeprefix('torch.')}"
    return Case(label, partial(take_steps, name, dtype, fp8))


@cache
def meta_model(
    name: str, dtype: torch.dtype, fp8: bool
) -> tuple[DecoderForCausalLM, TritonBackend, KVCache]:
    """The model as it is on an H200, with weights that have no values."""
    architecture, values = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(
            json.dumps({"architectures": [architecture], **values})
        )
        model_config = read_model_config(Path(folder))
    config = read_decoder_config(model_config, decoder_flags(architecture))
    backend = TritonBackend(torch.device("cpu"))
    backend._num_processors = PROCESSORS
    with META:
        rotaries = [
            RotaryEmbedding(rope, MAX_MODEL_LEN, dtype=dtype, device=META) for rope in config.ropes
        ]
        model = DecoderForCausalLM(DecoderParts(config, TensorParallel(), backend, dtype), rotaries)
        for module in model.modules():
            if isinstance(module, WeightedModule):
                module.finish_loading()
    layers = model.attention_layers
    scales = (
        [2 * (torch.empty(layer.num_kv_heads, device=META),) for layer in layers] if fp8 else None
    )
    cache = KVCache(
        layers,
        num_blocks=4,
        block_size=BLOCK_SIZE,
        dtype=FP8 if fp8 else dtype,
        device=META,
        scales=scales,
    )
    cache.states = StatePool(model.states, 4, META)
    backend.share_prefixes(layers, FP8 if fp8 else dtype, BLOCK_SIZE)
    assert backend.prefix_limits is not None
    backend.prefix_limits = replace(backend.prefix_limits, least_spared_bytes=1)
    assert backend.tile_limits is not None
    backend.tile_limits = replace(backend.tile_limits, least_spared_share=-np.inf)
    return model, backend, cache


@torch.inference_mode()
def take_steps(name: str, dtype: torch.dtype, fp8: bool, num_rows: int) -> None:
    """Take the steps of `batches` with their sampling, sample from edited logits, and score tokens."""
    model, backend, cache = meta_model(name, dtype, fp8)
    columns = sampling_batch(num_rows).columns()
    on_device = upload(list(columns.values()), META)
    rows = SamplingRows(**dict(zip(columns, on_device, strict=True)))
    for batch in batches(backend, num_rows):
        backend.sample(model.logits(model.hidden_states(batch, cache)), rows)
    logits = model.logits(torch.empty((num_rows, model.hidden_size), dtype=dtype, device=META))
    for edited in with_edits(sampling_batch(num_rows), model.vocab_size):
        assert edited.edits is not None
        backend.sample(backend.edit(logits, edited.edits, None), rows)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=META)
    row_of_token = torch.empty_like(token_ids)
    backend.score(logits, token_ids, row_of_token)


def sampling_batch(num_rows: int) -> SamplingBatch:
    """Of any values: a row's kind is no variant."""
    return SamplingBatch(neutral_rows(num_rows), np.zeros(num_rows, np.uint64))


def batches(backend: TritonBackend, num_rows: int) -> Iterator[ForwardBatch]:
    """Decode steps of num_rows sequences, then prompts of num_rows + 1 tokens.

    Decodes come recorded over static buffers and not, with prefixes in common and without. One prompt comes beside a
    decode, and two share tiles.
    """

    def make(step: StepBatch, attention: Any) -> ForwardBatch:
        tokens = torch.zeros(len(step.token_ids), dtype=torch.int64, device=META)
        return ForwardBatch(
            tokens, tokens, tokens, tokens, attention, state_parts(step.state_parts, META)
        )

    length = 1000 + num_rows
    num_blocks = num_rows * -(-length // BLOCK_SIZE)
    alone = make_step([1] * num_rows, [length] * num_rows, BLOCK_SIZE, num_blocks)
    sharing = replace(alone, block_tables=np.zeros_like(alone.block_tables))
    ints = torch.zeros(num_rows, dtype=torch.int32, device=META)
    tables = torch.zeros((num_rows, MAX_MODEL_LEN // BLOCK_SIZE), dtype=torch.int32, device=META)
    assert backend.prefix_limits is not None
    prefixes = PrefixTensors(*upload(backend.prefix_limits.arrange([], num_rows), META))
    for recorded in (None, prefixes):
        yield make(
            alone, backend.decode_metadata(ints, ints, tables, MAX_MODEL_LEN, ints, recorded)
        )
    mixed = make_step([num_rows + 1, 1], [num_rows + 1, MAX_MODEL_LEN], BLOCK_SIZE, 4)
    prompts = make_step([num_rows + 1] * 2, [length + 1] * 2, BLOCK_SIZE, num_blocks)
    sharing_prompts = replace(prompts, block_tables=np.zeros_like(prompts.block_tables))
    for step in (alone, sharing, mixed, sharing_prompts):
        metadata, _ = backend.build_metadata(step.block_tables, step.context_lens, step.query_lens)
        yield make(step, metadata)


def store_alone(num_rows: int) -> None:
    """Where transformers' model has rotated the keys: 8 heads of 128."""
    keys = torch.empty((num_rows, 8, 128), dtype=torch.bfloat16, device=META)
    pool = torch.empty((4, BLOCK_SIZE, 8, 128), dtype=torch.bfloat16, device=META)
    store_kv(keys, keys, (pool, pool, None), torch.zeros(num_rows, dtype=torch.int64, device=META))


def advance_alone(num_rows: int) -> None:
    """The rows of a recorded step, as they lie in an engine."""
    static = StaticRows(
        max(num_rows, 256), MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE, META, lambda *_: None
    )
    TritonBackend(torch.device("cpu")).advance(static.state.first(num_rows))


def fill_alone(num_rows: int) -> None:
    """So many rows whose tokens the step before has chosen."""
    numbers = torch.zeros(num_rows, dtype=torch.int64, device=META)
    TritonBackend(torch.device("cpu")).fill_pending(numbers, numbers, numbers, numbers)


def write_alone(num_rows: int) -> None:
    """So many rows that join with a block each, then a new block of each, in an engine."""
    capacity, backend = max(num_rows, 256), TritonBackend(torch.device("cpu"))
    static = StaticRows(capacity, MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE, META, backend.write_rows)
    for length in (BLOCK_SIZE, BLOCK_SIZE + 1):
        step = make_step([1] * num_rows, [length] * num_rows, BLOCK_SIZE, 4)
        seqs = np.arange(num_rows)
        step = replace(step, slots=seqs, generations=seqs)
        sampled = Sampled(static.state.next_token_ids[:num_rows], seqs)
        static.write(step, sampling_batch(num_rows), sampled)


def multiply_packed(kind: str, group: int, dtype: torch.dtype, num_rows: int) -> None:
    """Llama-3-8B's down_proj with packed weights."""
    out_features, in_features = 4096, 14_336
    block = packed_product.block(kind, group)
    assert block is not None
    with META:
        has_wide_scales = dtype == torch.float32 or kind in ("nf4", "bnb_fp4")
        scale_dtype = torch.float32 if has_wide_scales else torch.float16
        form = PackedForm(kind, group, scale_dtype)
        product = PackedProduct(form, in_features, out_features, PACKED, block)
        product.finish_loading()
        product(torch.empty(num_rows, in_features, dtype=dtype), None)


def multiply_packed_experts(kind: str, group: int, num_rows: int) -> None:
    """The products of gpt-oss-20b's experts with packed weights, for rows that go to four experts each."""
    num_experts, hidden, columns = 32, 2880, 2880
    block = packed_product.block(kind, group)
    assert block is not None
    layout = PackedLayout(PackedForm(kind, group, torch.bfloat16), block)
    rows = 4 * num_rows
    with META:
        ends = torch.empty(num_experts, dtype=torch.int32)
        places = torch.empty(rows, dtype=torch.int64)
        groups = ExpertGroups(places, places, ends)
        for in_features, out_features in ((hidden, 2 * columns), (columns, hidden)):
            layer = PackedGroupedLinear(layout, num_experts, in_features, out_features, PACKED)
            layer.finish_loading()
            layer(torch.empty(rows, in_features, dtype=torch.bfloat16), None, groups)


def packed_case(kind: str, group: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    """A product with packed weights, of which `group` columns share a scale."""
    label = f"packed {kind}, groups of {group}, {str(dtype).removeprefix('torch.')}"
    return Case(label, partial(multiply_packed, kind, group, dtype))


def add_adapters(num_rows: int) -> None:
    """What sixteen adapters add to two of Llama-3-8B's layers."""
    kernels = TritonBackend(torch.device("cpu")).layer_kernels
    assert kernels is not None
    with META:
        rows = {name: Share(0, length, length) for name, length in LLAMA_HEADS.items()}
        layers: list[Linear] = [
            ColumnParallelLinear(4096, rows, bias=False, dtype=torch.bfloat16),
            RowParallelLinear(14_336, 4096, TensorParallel(), bias=False, dtype=torch.bfloat16),
        ]
        sorted_rows = LowRankTables(layers, 16, kernels, META).sort(
            torch.empty(num_rows, dtype=torch.int64)
        )
        for layer in layers:
            x = torch.empty(num_rows, layer.in_features, dtype=torch.bfloat16)
            y = torch.empty(num_rows, layer.out_features, dtype=torch.bfloat16)
            sorted_rows.add_to(y, layer, x)


CASES = (
    *(model_case(name) for name in MODELS),
    model_case("Qwen3-0.6B", torch.float32),
    model_case("Qwen3-0.6B", torch.float16),
    model_case("Qwen3-0.6B", fp8=True),
    model_case("gpt-oss-20b", fp8=True),
    model_case("Gemma-2-9B", fp8=True),
    packed_case("int4", 128),
    packed_case("int4", 128, torch.float16),
    packed_case("int4", 128, torch.float32),
    packed_case("int8", 128),
    packed_case("fp8", 128),
    packed_case("nf4", 64),
    packed_case("nf4", 64, torch.float16),
    packed_case("nf4", 64, torch.float32),
    packed_case("bnb_fp4", 64),
    Case("packed experts, fp4", partial(multiply_packed_experts, "fp4", 32)),
    Case("packed experts, int4, groups of 64", partial(multiply_packed_experts, "int4", 64)),
    Case("packed experts, nf4, groups of 64", partial(multiply_packed_experts, "nf4", 64)),
    Case("adapters, Llama-3-8B", add_adapters),
    Case("storing alone, bfloat16", store_alone),
    Case("advancing the rows of a step", advance_alone),
    Case("writing rows and blocks before a step", write_alone),
    Case("filling in tokens of the step before", fill_alone),
)
