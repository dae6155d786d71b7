"""Estimates what a run takes on an H200, from the bytes, products and launches of each step.

    python -m ops.bench.gpu.estimate
    python -m ops.bench.gpu.estimate --prefill-share 0.6    # if prefill attention were so near to its floor

The engine's scheduler makes the steps, with no model behind it. The device's figures were measured once
(RESULTS.md, "On an H200"). One of them, the time that a layer takes beside its bytes, is fitted to the reference run.
So an estimate says what a change is worth, and not how fast another device is.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.attention.features import AttentionFeatures
from engine.attention.shared_tiles import Prompts, choose_tile_limits, cut_queries
from engine.sampling.sampling_params import SamplingParams
from engine.schedule.block_manager import BlockManager
from engine.schedule.scheduled_batch import ScheduledBatch
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Sequence as Row
from ops.bench.make import SHAPES, Shape, tensor_sizes
from ops.bench.report import print_table

BANDWIDTH = 4.27e12
"""Bytes a second, measured by a large copy."""

FLOPS = 775e12
"""Operations a second, measured by a large product."""

DECODE_SHARE = 0.93
"""Share of the bandwidth at which decode attention reads."""

PREFILL_SHARE = 0.4
"""Share of the operations a second that prefill attention reaches: 31 to 47 % were measured."""

PRODUCT_SHARE = 0.8
"""Share of the operations a second that products of thousands of rows are taken to reach."""

EAGER_LAYER_S = 13.3e-3 / 28
"""Seconds in which the host launches a layer without graphs: a step of 28 layers took 13.3 ms."""

GRAPH_LAYER_S = 55e-6
"""Seconds that a layer in a graph takes beside its bytes, fitted to the 23,769 tokens a second of the reference run."""

MIXED_GRAPH_TOKENS = 2048
"""The largest step with prompts that graphs replay."""

BLOCK = 16

PROCESSORS = 132
"""Multiprocessors of an H200."""

TILE = 64
"""Queries of a tile of prefill attention, and tokens of a tile of keys. Attention multiplies whole tiles."""


@dataclass(frozen=True)
class Model:
    """Sizes of a model in bfloat16.

    num_experts, num_active, expert_size: of a layer; an expert has three matrices of hidden_size x expert_size.
    num_state_layers: layers that keep a state of state_bytes for each sequence, and no keys and values.
    """

    name: str
    shape: Shape
    num_experts: int = 0
    num_active: int = 0
    expert_size: int = 0
    num_state_layers: int = 0
    state_bytes: int = 0

    @property
    def dense_weights(self) -> int:
        """Return how many weights every token reads. Embeddings are tied with the head."""
        shape = self.shape
        if self.num_experts:
            shape = replace(shape, intermediate_size=0)
        return sum(size[0] * size[1] for _, size in tensor_sizes(shape) if len(size) == 2)

    @property
    def weights_of_expert(self) -> int:
        """Return the weights of one expert of one layer."""
        return 3 * self.shape.hidden_size * self.expert_size

    def weights_read(self, num_tokens: int) -> float:
        """Return how many weights a step reads whose tokens choose their experts at random."""
        missed = (1 - self.num_active / self.num_experts) ** num_tokens if self.num_experts else 1.0
        num_read = self.num_experts * (1 - missed)
        return self.dense_weights + self.shape.num_layers * num_read * self.weights_of_expert

    def weights_of_token(self) -> int:
        """Return how many weights one token is multiplied with, but for the head."""
        head = self.shape.vocab_size * self.shape.hidden_size
        experts = self.shape.num_layers * self.num_active * self.weights_of_expert
        return self.dense_weights - head + experts

    def kv_bytes(self, num_tokens: float, itemsize: float) -> float:
        """Return the bytes of the keys and values of tokens."""
        num_layers = self.shape.num_layers - self.num_state_layers
        return (
            2 * num_layers * self.shape.num_kv_heads * self.shape.head_dim * itemsize * num_tokens
        )


@dataclass(frozen=True)
class Rows:
    """Rows of one kind.

    shared: tokens that all prompts begin with. prompt, answer: the least and the most tokens of a row's own.
    """

    name: str
    num_rows: int
    shared: int
    prompt: tuple[int, int]
    answer: tuple[int, int]

    def lengths(self) -> list[tuple[int, int]]:
        """Return the tokens of each row's own prompt and of its answer."""
        rng = random.Random(0)
        return [
            (rng.randint(*self.prompt), rng.randint(*self.answer)) for _ in range(self.num_rows)
        ]


@dataclass(frozen=True)
class Engine:
    """What an engine can do.

    has_graphs: whether steps of decodes are replayed.
    has_mixed_graphs: whether steps with prompts are replayed.
    reads_prefix_once: whether rows that decode behind common tokens read these once for all.
    shares_tiles: whether prompts behind common tokens share tiles of queries.
    kv_itemsize: bytes of a key's number.
    prefill_share: the share of the operations a second that prefill attention reaches.
    """

    name: str
    has_graphs: bool = True
    has_mixed_graphs: bool = True
    reads_prefix_once: bool = False
    shares_tiles: bool = False
    kv_itemsize: int = 2
    prefill_share: float = PREFILL_SHARE


@dataclass
class Estimate:
    """What the steps of a run add up to. eager_steps: those that no graph replays."""

    seconds: float = 0.0
    steps: int = 0
    eager_steps: int = 0
    generated: int = 0


def steps_of(rows: Rows, max_num_seqs: int, pool_tokens: int) -> Iterator[ScheduledBatch]:
    """Yield the steps of a run, as the engine's scheduler makes them."""
    rng = random.Random(1)
    lengths = rows.lengths()
    longest = rows.shared + max(prompt + answer for prompt, answer in lengths)
    scheduler = Scheduler(
        BlockManager(pool_tokens // BLOCK, BLOCK),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=longest,
    )
    shared = [rng.randrange(10_000) for _ in range(rows.shared)]
    for number, (prompt, answer) in enumerate(lengths):
        token_ids = shared + [rng.randrange(10_000) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        scheduler.add(
            Row(str(number), token_ids, sampling, stop_token_ids=frozenset(), follows_text=True)
        )
    while scheduler.running or scheduler.num_waiting:
        batch = scheduler.schedule()
        yield batch
        scheduler.advance(batch)
        scheduler.receive(np.zeros(len(batch.sampling), np.int64))


def estimate(
    model: Model, rows: Rows, engines: Sequence[Engine], max_num_seqs: int = 256
) -> list[Estimate]:
    """Return what a run of rows takes with each engine. The steps are the same for all engines."""
    totals = [Estimate() for _ in engines]
    for batch in steps_of(rows, max_num_seqs, pool_tokens=1 << 20):
        num_prompt_tokens = batch.num_tokens - batch.num_decode_tokens
        for engine, total in zip(engines, totals, strict=True):
            is_replayed = engine.has_graphs and num_prompt_tokens == 0
            if engine.has_mixed_graphs and num_prompt_tokens:
                is_replayed = batch.num_tokens <= MIXED_GRAPH_TOKENS
            total.seconds += _step_s(model, rows, engine, batch, is_replayed=is_replayed)
            total.steps += 1
            total.eager_steps += not is_replayed
            total.generated += len(batch.sampling)
    return totals


def _step_s(
    model: Model, rows: Rows, engine: Engine, batch: ScheduledBatch, *, is_replayed: bool
) -> float:
    """Return the seconds of one step: those of the device, or of the host that launches it if that is slower."""
    decode_lengths = [seq.num_tokens for seq in batch.decodes]
    tokens_read = float(sum(decode_lengths))
    if engine.reads_prefix_once and len(decode_lengths) > 1:
        tokens_read -= rows.shared * (len(decode_lengths) - 1)
    read_bytes = model.kv_bytes(tokens_read, engine.kv_itemsize)
    read_bytes += 2 * len(batch.seqs) * model.num_state_layers * model.state_bytes
    attention_s = read_bytes / (BANDWIDTH * DECODE_SHARE)

    pairs = prefill_pairs(model, engine, batch)
    num_layers = model.shape.num_layers - model.num_state_layers
    flops_of_pair = 4 * num_layers * model.shape.num_heads * model.shape.head_dim
    attention_s += flops_of_pair * pairs / (FLOPS * engine.prefill_share)

    head = model.shape.vocab_size * model.shape.hidden_size
    flops = 2 * (batch.num_tokens * model.weights_of_token() + len(batch.sampling) * head)
    products_s = max(
        2 * model.weights_read(batch.num_tokens) / BANDWIDTH, flops / (FLOPS * PRODUCT_SHARE)
    )
    device_s = attention_s + products_s + model.shape.num_layers * GRAPH_LAYER_S
    if is_replayed:
        return device_s
    return max(device_s, model.shape.num_layers * EAGER_LAYER_S)


def prefill_pairs(model: Model, engine: Engine, batch: ScheduledBatch) -> float:
    """Return how many queries are multiplied with how many keys in the prompts of a step, in whole tiles."""
    prompts = [
        (seq, num_new)
        for seq, num_new in zip(batch.prefills, batch.prefill_lens, strict=True)
        if num_new > 1
    ]
    if not prompts:
        return 0.0
    query_lens = np.array([num_new for _, num_new in prompts])
    lens_before = np.array([seq.num_computed_tokens for seq, _ in prompts])
    starts = np.cumsum(query_lens) - query_lens
    step_prompts = Prompts(starts, query_lens, lens_before + query_lens)
    tiles = cut_queries(query_lens, TILE)
    shape = model.shape
    layer = AttentionFeatures(shape.num_heads, shape.num_kv_heads, shape.head_dim, scale=1.0)
    limits = choose_tile_limits(
        [layer], BLOCK, query_tile=TILE, key_tile=TILE, num_processors=PROCESSORS
    )
    assert limits is not None
    num_keys = limits.count_keys(step_prompts, tiles)
    if engine.shares_tiles:
        width = max(len(seq.block_table) for seq, _ in prompts)
        tables = np.zeros((len(prompts), width), np.int32)
        for table, (seq, _) in zip(tables, prompts, strict=True):
            table[: len(seq.block_table)] = seq.block_table
        shared = limits.share(step_prompts, tiles, tables)
        if shared is not None:
            num_keys = shared.count_keys(TILE)
    return TILE * float(num_keys.sum())


QWEN3_8B = Shape(4096, 36, 32, 8, 128, 12_288, 151_936, 40_960, 1e6)
QWEN3_30B = Shape(2048, 48, 32, 4, 128, 6144, 151_936, 40_960, 1e6)
QWEN3_5 = Shape(4096, 32, 16, 4, 256, 12_288, 248_320, 40_960, 1e6)
MODELS = (
    Model("Qwen3-0.6B", SHAPES["q06b"]),
    Model("Qwen3-8B", QWEN3_8B),
    Model("Qwen3-30B-A3B", QWEN3_30B, num_experts=128, num_active=8, expert_size=768),
    # Three of four layers keep a state: 32 heads of 128 x 128 numbers in float32.
    Model("Qwen3.5, 9B", QWEN3_5, num_state_layers=24, state_bytes=32 * 128 * 128 * 4),
)

ROWS = (
    Rows("256 sequences, 100 to 1,024 in and out", 256, 0, (100, 1024), (100, 1024)),
    Rows("2,000 rows behind 896 tokens, answers of 1 to 4", 2000, 896, (20, 80), (1, 4)),
    Rows("2,000 rows behind 896 tokens, answers of 8 to 32", 2000, 896, (20, 80), (8, 32)),
    Rows("2,000 prompts of 300 to 500, answers of 4 to 16", 2000, 0, (300, 500), (4, 16)),
    Rows("256 rows behind 2,048 tokens, answers of 256", 256, 2048, (20, 80), (256, 256)),
    Rows("64 prompts of 8,192, answers of 16", 64, 0, (8192, 8192), (16, 16)),
)

EAGER_PROMPTS = Engine("steps with prompts eager", has_mixed_graphs=False)
READS_PREFIX_ONCE = Engine("and a common prefix read once by decodes", reads_prefix_once=True)
SHARES_TILES = Engine("and by prompts", reads_prefix_once=True, shares_tiles=True)
ENGINES = (
    EAGER_PROMPTS,
    Engine("in graphs"),
    READS_PREFIX_ONCE,
    SHARES_TILES,
    replace(SHARES_TILES, name="and FP8 keys and values", kv_itemsize=1),
)


#: Sequences at once, and rows enough to fill the largest batch.
BATCHES = (256, 512, 1024)
MANY_ROWS = (
    Rows("1,500 rows, 100 to 1,024 in and out", 1500, 0, (100, 1024), (100, 1024)),
    Rows("2,000 rows of 50 to 200, answers of 100 to 300", 2000, 0, (50, 200), (100, 300)),
    Rows("2,000 rows behind 896 tokens, answers of 8 to 32", 2000, 896, (20, 80), (8, 32)),
)


def engines_of(model: Model, prefill_share: float) -> list[Engine]:
    """Return the engines of the first table. Before, steps of models that keep states had no graphs at all."""
    before, *others = (replace(engine, prefill_share=prefill_share) for engine in ENGINES)
    return [replace(before, has_graphs=not model.num_state_layers), *others]


def main() -> None:
    """Print two tables for each model: one for what the engine can do, and one for the sequences at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--prefill-share", type=float, default=PREFILL_SHARE, help="what prefill attention reaches"
    )
    options = parser.parse_args()
    for model in MODELS:
        engines = engines_of(model, options.prefill_share)
        lines = []
        for rows in ROWS:
            estimates = estimate(model, rows, engines)
            before = estimates[0]
            share = f"{before.eager_steps / before.steps:.0%}"
            seconds = [f"{made.seconds:.2f}" for made in estimates]
            lines.append((rows.name, str(before.steps), share, *seconds))
        print(f"\n{model.name}, estimated seconds on an H200")
        heads = ("rows", "steps", "eager before", *(engine.name for engine in engines))
        print_table(heads, lines)

        lines = []
        for rows in MANY_ROWS:
            estimates = [estimate(model, rows, engines[3:4], batch)[0] for batch in BATCHES]
            lines.append((rows.name, *(f"{made.seconds:.2f}" for made in estimates)))
        print(f"\n{model.name}, estimated seconds by sequences at once")
        print_table(("rows", *map(str, BATCHES)), lines)


if __name__ == "__main__":
    main()
