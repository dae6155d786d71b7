"""Linear layers and embeddings of transformers' models: split over ranks by their own plans, and packed."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import UnsupportedModel
from engine.layers.embedding import look_up
from engine.layers.onednn import pack_weight
from engine.layers.parallel import Share, TensorParallel

WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce"})  # on every rank
GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
#: What oneDNN can compute of a product before it writes it, by oneDNN's names.
ACTIVATIONS: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
    ("gelu", "none"): F.gelu,
    ("gelu", "tanh"): partial(F.gelu, approximate="tanh"),
    ("relu", ""): F.relu,
}

LayerCall = tuple[nn.Module, tuple[Any, ...], Any]  # a module, its arguments, and its output


class PackedLinear(nn.Module):
    """y = x W^T + b with a weight as `pack_weight` lays it out. weight: [out, in]."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    #: What is applied to y: nothing, or a key of ACTIVATIONS if the weight is packed.
    activation = "none", ""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., in] -> [..., out]."""
        if not self.weight.is_mkldnn:
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, x.shape[-1])
        name, kind = self.activation
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.weight, self.bias, name, [], kind
        )
        return product.view(*x.shape[:-1], len(self.weight))


class ColumnShare(PackedLinear):
    """A linear layer whose output features are split over the ranks.

    gather: the ranks on which `forward` returns all features, "all" or, for an LM head, the "first"; None for no rank.
    """

    def __init__(
        self,
        whole: nn.Linear,
        share: Share,
        tp: TensorParallel,
        gather: Literal["all", "first"] | None,
    ) -> None:
        bias = None if whole.bias is None else _part(whole.bias, share, 0)
        super().__init__(_part(whole.weight, share, 0), bias)
        self.share = share
        self.tp = tp
        self.gather = gather

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., in] -> [..., this rank's out], or [..., out] where `gather` says so."""
        part = super().forward(x)
        share = self.share
        if self.gather == "all":
            # Each rank adds its features, with zeros in place of the others.
            return self.tp.all_reduce(
                F.pad(part, (share.start, share.total - share.start - share.length))
            )
        if self.gather == "first":
            padded = F.pad(part, (0, self.tp.padded_length(share.total) - share.length))
            return self.tp.gather(padded)[..., : share.total]
        return part


class RowShare(PackedLinear):
    """A linear layer whose input features are split over the ranks.

    Each rank multiplies its own features, and the products are summed over the ranks. Rank 0 adds the bias.
    """

    def __init__(self, whole: nn.Linear, share: Share, tp: TensorParallel, *, cuts: bool) -> None:
        """cuts: `forward` gets all input features and cuts this rank's out; otherwise it gets only this rank's."""
        super().__init__(_part(whole.weight, share, 1), whole.bias if tp.rank == 0 else None)
        self.share = share
        self.tp = tp
        self.cuts = cuts

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., this rank's in], or [..., in] with `cuts` -> [..., out]."""
        if self.cuts:
            x = x.narrow(-1, self.share.start, self.share.length)
        return self.tp.all_reduce(super().forward(x))


class EmbeddingShare(nn.Module):
    """An embedding whose rows are split over the ranks. A sum over the ranks adds the rows of other ranks."""

    def __init__(self, whole: nn.Embedding, share: Share, tp: TensorParallel) -> None:
        super().__init__()
        self.weight = _part(whole.weight, share, 0)
        self.share = share
        self.tp = tp

    def forward(self, token_ids: Tensor) -> Tensor:
        """Embed token_ids [...] int64 -> [..., hidden]."""
        return look_up(token_ids, self.weight, self.share, self.tp)


def pack_linears(model: nn.Module, called: Collection[nn.Module]) -> dict[nn.Module, PackedLinear]:
    """Lay out the weights of linear layers for fast products on this machine; return the new layer of each old one.

    called: the modules that a forward pass calls. Other layers stay as they are, as code may read their weights.
    """
    packed: dict[nn.Module, PackedLinear] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            module.weight = pack_weight(module.weight)
        elif type(module) is nn.Linear and module in called:
            weight = pack_weight(nn.Parameter(module.weight, requires_grad=False))
            packed[module] = PackedLinear(weight, module.bias)
            _replace(model, name, packed[module])
    return packed


def fuse_linears(
    calls: Iterable[LayerCall], packed: Mapping[nn.Module, PackedLinear]
) -> list[tuple[nn.Module, str]]:
    """Let oneDNN compute an activation, or the sum before a norm, together with the matrix product before it.

    calls: all module calls of a forward pass before layers were packed. packed: the packed layer of each linear layer.
    Returns each changed module with the name of its new attribute, so that the change can be undone.
    """
    changed: list[tuple[nn.Module, str]] = []
    makers = {id(output): packed[module] for module, _, output in calls if module in packed}
    for module, args, output in calls:
        maker = makers.get(id(args[0])) if len(args) == 1 else None
        layers: list[Any] = [
            child for child in module.children() if not isinstance(child, nn.Dropout)
        ]
        if maker is not None and maker.weight.is_mkldnn and not layers:
            for names, compute in ACTIVATIONS.items():
                if _gives(compute, args, output):
                    maker.activation = names
                    module.forward = nn.Identity().forward
                    changed.append((maker, "activation"))
                    changed.append((module, "forward"))
            continue
        ends_in_norm = [type(layer) for layer in layers] == [PackedLinear, nn.LayerNorm]
        if ends_in_norm and layers[0].weight.is_mkldnn:
            fused = partial(_norm_of_sum, *layers)
            if _gives(fused, args, output):
                module.forward = fused
                changed.append((module, "forward"))
    return changed


def _norm_of_sum(
    product: PackedLinear, norm: Callable[[Tensor], Tensor], x: Tensor, other: Tensor
) -> Tensor:
    """Return norm(product(x) + other). oneDNN adds `other` as it computes the product."""
    rows = x.flatten(0, -2)
    other_rows = other.flatten(0, -2)
    total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
        rows, other_rows, product.weight, product.bias, "add"
    )
    return norm(total.view(other.shape))


def _gives(compute: Callable[..., Tensor], args: tuple[Any, ...], output: Any) -> bool:
    try:
        return torch.allclose(compute(*args), output, atol=1e-5)
    except (AttributeError, RuntimeError, TypeError):  # the module takes or gives something else
        return False


def split_by_plan(model: Any, tp: TensorParallel) -> None:
    """Keep this rank's share of each module that transformers' plan for the model splits.

    Raises UnsupportedModel if there is no plan or it names an unknown kind of split, and ConfigError if a size cannot
    be split over the ranks.
    """
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    if "rowwise" not in plan.values() and "rowwise_split_input" not in plan.values():
        raise UnsupportedModel(
            f"tensor_parallel_size={tp.size}: transformers has no plan for splitting {type(model).__name__}; "
            "set tensor_parallel_size=1"
        )
    head = model.get_output_embeddings()
    names = [name for name, _ in model.named_modules()] + [
        name for name, _ in model.named_parameters()
    ]
    for name in names:
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None and style not in WHOLE:
            parent, _, last = name.rpartition(".")
            module = getattr(model.get_submodule(parent), last)
            _replace(model, name, _split(module, style, name, tp, is_head=module is head))


def _split(
    module: nn.Module, style: str, name: str, tp: TensorParallel, *, is_head: bool
) -> nn.Module:
    """Return this rank's share of a module, as the plan's style says."""
    if isinstance(module, nn.Embedding) and style == "embedding_rowwise":
        if type(module) is not nn.Embedding:
            return module  # it does more than look up: whole on every rank
        return EmbeddingShare(module, tp.share_padded(module.num_embeddings), tp)
    if type(module) is nn.Linear:
        if style in GATHERED and is_head:
            return ColumnShare(module, tp.share_padded(module.out_features), tp, "first")
        if style == "colwise" or style in GATHERED:
            share = tp.share(module.out_features, f"features of {name}")
            return ColumnShare(module, share, tp, "all" if style in GATHERED else None)
        if style in ("rowwise", "rowwise_split_input"):
            share = tp.share(module.in_features, f"input features of {name}")
            return RowShare(module, share, tp, cuts=style == "rowwise_split_input")
    raise UnsupportedModel(
        f"tensor_parallel_size={tp.size}: transformers' plan splits {name} ({type(module).__name__}) as "
        f"{style!r}, which is not built; set tensor_parallel_size=1"
    )


def _part(weight: Tensor, share: Share, dim: int) -> nn.Parameter:
    part = weight.detach().narrow(dim, share.start, share.length).clone()
    return nn.Parameter(part, requires_grad=False)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
