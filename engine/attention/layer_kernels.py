"""The fused kernels that layers may use in place of plain torch."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.kernels.adapter_tables import LayerTable, SortedRows


@dataclass(frozen=True)
class ExpertKernels:
    """Kernels for a mixture of experts: one launch for each step, and no wait for the device.

    choose(scores, num_chosen, normalised=) -> as choose_experts of engine/layers/moe.py.
    group(chosen, num_experts) -> the fields of ExpertGroups, in their order.
    product(x, weight, bias or None, ends) -> the experts' linear layers over rows sorted by expert.
    clamped_swiglu_and_mul(gate_up, alpha, limit) -> as ClampedSwigluAndMul.
    """

    choose: Callable[..., tuple[Tensor, Tensor]]
    group: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
    product: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
    clamped_swiglu_and_mul: Callable[[Tensor, float, float], Tensor]


@dataclass(frozen=True)
class PackedKernels:
    """Products with weights that stay in 4 or 8 bits.

    block(kind, group) -> the number of columns that the kernel unpacks together; None if it does not serve such a
    weight. kind: as engine.checkpoint.packed_form.PackedForm has it.  group: the columns that share a scale.
    lay_out(words, scales, zeros) -> the same three as the kernel reads them. words: [out, in / w, 4] uint8, a word
    holds the codes of w adjacent columns, see engine.layers.packed.  scales, zeros: [out, groups].
    product(x, words, scales, zeros, bias or None, out_features, block, kind) -> x W^T + b.
    grouped_product(x, words, scales, zeros, bias or None, ends, out_features, block, kind) -> the same for rows sorted
    by expert, with the tensors of all experts stacked. ends: as in ExpertGroups. None where a backend multiplies with
    one expert after another.
    """

    block: Callable[[str, int], int | None]
    lay_out: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    product: Callable[..., Tensor]
    grouped_product: Callable[..., Tensor] | None = None


@dataclass(frozen=True)
class LayerKernels:
    """Fused kernels for layers that take several passes over memory in plain torch.

    add_rms_norm(x, residual, weight, eps) -> (norm of x + residual, x + residual).
    norm_rotate_and_store(query, key, value, (cosines, sines), norms or None, eps, cache, slot_mapping) -> queries: the
    step from the merged projection to attention. Heads of queries and keys are normalised (norms: two weights
    [head_dim]), then rotated; numbers beyond the width of cosines and sines are not rotated. Keys and values go to
    their slots of the cache. Slot -1 marks padding, which is not stored. The queries are contiguous.
    silu_and_mul(gate_up) -> silu(gate) * up.
    rms_norm(x, weight, eps) -> norm of x.  gelu_and_mul(gate_up) -> gelu(gate) * up, gelu by tanh.
    experts: None where a backend has no such kernels.
    quantize_rows(x) -> as engine.layers.int8 has it; None where a backend has no such kernel.
    sigmoid_and_mul(x, gate) -> x * sigmoid(gate), [rows, dim] each.
    packed: None where a backend unpacks quantized weights when they are loaded.
    delta_net(x, memory, parts, weights, heads) -> as `mix` of engine.layers.gated_delta_net.
    add_low_rank(y, x, sorted_rows, table) -> None; adds what each row's adapter adds to y = layer(x), in place, see
    engine.kernels.adapter_tables. None where adapters multiply one by one.
    Shapes are those of the layers: RMSNorm, RotaryEmbedding and GatedActivation.
    """

    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    norm_rotate_and_store: Callable[..., Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    gelu_and_mul: Callable[[Tensor], Tensor]
    experts: ExpertKernels | None = None
    quantize_rows: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    sigmoid_and_mul: Callable[[Tensor, Tensor], Tensor] | None = None
    delta_net: Callable[..., Tensor] | None = None
    packed: PackedKernels | None = None
    add_low_rank: Callable[[Tensor, Tensor, SortedRows, LayerTable], None] | None = None
