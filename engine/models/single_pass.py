"""Models that read each text in one pass, several texts at a time: transformers' encoders, and heads that classify.

If a class attends through transformers' attention interface, the texts of a step follow each other in one row, and
each text attends only to itself. Otherwise texts are padded, and computed together with texts of similar lengths. The
runner compares both ways with texts that are computed alone.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.cpu_backend import MAX_HEAD_DIM, CpuBackend
from engine.checkpoint.folder import list_weight_files
from engine.checkpoint.heads import CLASSIFIES
from engine.errors import UnsupportedModel, quoted
from engine.models.attention_calls import FAR, PLACE, AttentionCall, answer
from engine.models.linear_plan import LayerCall, PackedLinear, fuse_linears, pack_linears
from engine.models.transformers_model import _check_filled, _quiet_transformers

if TYPE_CHECKING:
    from engine.cpu_kernels.prefill_attention import PrefillTasks

PACKED = "tokenmill_packed"  # our attention's name among transformers'
RULES = "tokenmill_rules"  # the same, with masks that know their rule
NUM_RECORDED_TOKENS = 8
MAX_PADDED = 1.15  # the most rows that are computed for each row of text
# The most bytes of a tensor on a CPU: malloc fetches those over 32 MiB anew, a page at a time.
MAX_BYTES = 25 << 20
NUM_LOOKED_UP = 256  # tokens about which a rule is asked at once: it makes int64 of each pair
UNUSED = ("pooler.", "prediction", "lm_head", "cls.")  # parts that no embedding needs

#: From indices of batch, head, query and key to whether that query sees that key.
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def single_pass_class(architecture: str) -> Any:
    """Return transformers' class for an architecture. Raises UnsupportedModel if transformers has no such class."""
    import transformers

    kind: Any = getattr(transformers, architecture, None)
    if kind is None or architecture.startswith("Auto"):
        raise UnsupportedModel(
            f"{architecture} is no model of transformers {transformers.__version__}"
        )
    if not architecture.endswith((CLASSIFIES, "Model")):
        kind = transformers.AutoModel  # loads a language model without its head
    return kind


def load_single_pass(
    architecture: str, folder: Path, device: torch.device, dtype: torch.dtype
) -> "SinglePass":
    """Read transformers' model. Raises UnsupportedModel, MissingWeights or WeightMismatch."""
    import transformers
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    list_weight_files(folder)
    for name in (PACKED, RULES):
        ALL_ATTENTION_FUNCTIONS.register(name, answer)
    ALL_MASK_ATTENTION_FUNCTIONS.register(RULES, _keep_rule)
    classifies = architecture.endswith(CLASSIFIES)
    kind = single_pass_class(architecture)
    try:
        with _quiet_transformers():
            model, report = kind.from_pretrained(
                str(folder),
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are reported, and refused below
                output_loading_info=True,
            )
    except Exception as error:  # transformers may raise anything for damaged files
        problem = (
            f"transformers {transformers.__version__} cannot load {architecture}: {quoted(error)}"
        )
        raise UnsupportedModel(problem) from error
    missing = [
        name
        for name in report["missing_keys"]
        if classifies or not any(part in name for part in UNUSED)
    ]
    _check_filled(folder, {**report, "missing_keys": missing, "unexpected_keys": []})
    model.requires_grad_(False).eval().to(device)
    return SinglePass(model, classifies=classifies)


class SinglePass:
    """Computes the hidden states of texts or, if the model classifies, a number for each class.

    A text is its token ids. In a pair, the ids of the second text's tokens have the vocabulary's size added.
    max_positions: the most tokens of a text; None if the model has no table of positions.
    """

    def __init__(self, model: Any, *, classifies: bool) -> None:
        self.model = model
        self.classifies = classifies
        self._vocab_size = model.config.vocab_size
        self._pad = model.config.pad_token_id
        arguments = inspect.signature(model.forward).parameters
        #: Whether the tokens of a second text have a type of their own. GPT-2 takes such types but has only one.
        self.has_types = (
            "token_type_ids" in arguments and getattr(model.config, "type_vocab_size", 0) > 1
        )
        self.max_positions: int | None = None
        self._body = model
        self._known: Tensor | None = None  # padded hidden states for the body to return
        self._first_position = 0
        widths = [
            module.out_features for module in model.modules() if isinstance(module, nn.Linear)
        ]
        self._most_tokens = MAX_BYTES // (max(widths, default=1) * model.dtype.itemsize)
        self._look_at_positions()
        self._attention: PackedAttention | None = None
        self._layers: tuple[list[LayerCall], dict[nn.Module, PackedLinear]] = [], {}
        self._fused: list[tuple[nn.Module, str]] = []
        with suppress(UnsupportedModel):
            self._attention = self._pack()
        if self._attention is None:
            self.pad()

    @property
    def is_packed(self) -> bool:
        """Whether the texts of a step are computed as one row, without padding."""
        return self._attention is not None

    def fuse(self) -> None:
        """From now on, compute activations and sums together with the matrix products before them."""
        self._fused = fuse_linears(*self._layers)
        self._layers = ([], {})

    def pad(self) -> None:
        """Compute texts in padded batches from now on, by transformers' own code."""
        self._attention = None
        for module, name in self._fused:
            module.__dict__.pop(name, None)
        with suppress(ValueError):  # a class without "sdpa" keeps "eager"
            self._attend_by("eager")
            self._attend_by("sdpa")

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Tensor]) -> Tensor:
        """Compute texts, each [tokens] int64; return hidden states, [all tokens, hidden], or [texts, classes]."""
        if self._attention is None:
            return self._in_groups(texts, lambda group: self._padded([texts[i] for i in group]))
        lengths = [len(text) for text in texts]
        most_tokens = self._most_tokens if texts[0].device.type == "cpu" else sum(lengths)
        parts = _parts(lengths, most_tokens)
        hidden = torch.cat(
            [self._packed(texts[begin:end], self._attention) for begin, end in parts]
        )
        if not self.classifies:
            return hidden
        states = torch.tensor_split(hidden, list(accumulate(lengths))[:-1])
        return self._in_groups(
            texts,
            lambda group: self._classify([texts[i] for i in group], [states[i] for i in group]),
        )

    def _packed(self, texts: Sequence[Tensor], attention: "PackedAttention") -> Tensor:
        """Compute texts as one row: states [tokens, hidden]."""
        num_tokens = sum(map(len, texts))
        # Rounded up: for each new number of rows oneDNN takes a millisecond to make code, and keeps half a MB of it.
        padding = texts[0].new_zeros(-num_tokens % (8 if num_tokens <= 512 else 64))
        row = torch.cat([*texts, padding])
        attention.begin([len(text) for text in (*texts, padding) if len(text)])
        positions = [torch.arange(len(text), device=row.device) for text in texts] + [padding]
        shifted = torch.cat(positions)[None] + self._first_position
        hidden: Tensor = self._body(
            position_ids=shifted, **self._inputs(row[None])
        ).last_hidden_state[0]
        return hidden[:num_tokens]

    @torch.inference_mode()
    def alone(self, text: Tensor) -> Tensor:
        """Compute one text by transformers' own code, to compare other ways with it."""
        before = self.model.config._attn_implementation
        with suppress(ValueError):
            self._attend_by("eager")
        try:
            return self._padded([text])
        finally:
            self._attend_by(before)

    def _in_groups(self, texts: Sequence[Tensor], compute: Callable[[list[int]], Tensor]) -> Tensor:
        """Compute texts of similar lengths together; return the results in the order of the texts.

        compute: takes the indices of a group's texts.
        """
        by_text: list[Tensor] = [torch.empty(0)] * len(texts)
        groups: Iterable[list[int]]
        if self.classifies and self._pad is None:
            # Each text goes alone: the head takes the last token before the padding, and there is no padding token.
            groups = ([place] for place in range(len(texts)))
        else:
            groups = _of_like_lengths([len(text) for text in texts])
        for group in groups:
            computed = compute(group)
            sizes = [1 if self.classifies else len(texts[place]) for place in group]
            ends = list(accumulate(sizes))[:-1]
            for place, states in zip(group, torch.tensor_split(computed, ends), strict=True):
                by_text[place] = states
        return torch.cat(by_text)

    def _padded(self, texts: Sequence[Tensor]) -> Tensor:
        """Compute texts in one padded batch; return hidden states without those of padding, or logits."""
        row, mask = _pad(texts, self._pad or 0)
        output = self.model(attention_mask=mask, **self._inputs(row))
        if self.classifies:
            logits: Tensor = output.logits
            return logits
        states: Tensor = output.last_hidden_state
        return states[mask.bool()]

    def _inputs(self, ids: Tensor) -> dict[str, Tensor]:
        if not self.has_types:
            return {"input_ids": ids % self._vocab_size}
        return {"input_ids": ids % self._vocab_size, "token_type_ids": ids // self._vocab_size}

    def _classify(self, texts: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
        """Compute the head alone, from hidden states that are known already."""
        row, mask = _pad(texts, self._pad or 0)
        self._known = nn.utils.rnn.pad_sequence(list(states), batch_first=True)
        try:
            logits: Tensor = self.model(attention_mask=mask, **self._inputs(row)).logits
            return logits
        finally:
            self._known = None

    def _attend_by(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    def _look_at_positions(self) -> None:
        """Find the table of positions, and the place in it of a text's first token."""
        # None of these tokens is the padding token, which a model may leave out of its count.
        first_token = (self._pad or 0) + 1
        tokens = torch.arange(NUM_RECORDED_TOKENS, device=self.model.device)[None] + first_token
        seen: list[tuple[nn.Embedding, Tensor]] = []
        tables = [module for module in self.model.modules() if isinstance(module, nn.Embedding)]
        hooks = [
            table.register_forward_pre_hook(lambda table, args: seen.append((table, args[0])))
            for table in tables
        ]
        try:
            self.model(input_ids=tokens % self._vocab_size)
        except Exception as error:  # a model's code may raise anything
            raise UnsupportedModel(f"its forward pass raises {quoted(error)}") from error
        finally:
            for hook in hooks:
                hook.remove()
        count = torch.arange(NUM_RECORDED_TOKENS, device=tokens.device)
        for table, ids in seen:
            positions = ids.flatten()
            if (
                positions.shape == count.shape
                and table.num_embeddings != self._vocab_size
                and (positions == positions[0] + count).all()
            ):
                self._first_position = int(positions[0])
                self.max_positions = table.num_embeddings - self._first_position

    def _pack(self) -> "PackedAttention":
        """Put our attention in place of the model's. Raises UnsupportedModel if that is not possible."""
        calls: list[AttentionCall] = []
        bodies: list[tuple[nn.Module, Any]] = []
        layer_calls: list[LayerCall] = []

        def record(call: AttentionCall) -> Tensor:
            calls.append(call)
            return call.value.transpose(1, 2).repeat_interleave(
                call.query.shape[1] // call.value.shape[1], dim=2
            )

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            layer_calls.append((module, args, output))
            if getattr(output, "last_hidden_state", None) is not None:
                bodies.append((module, output))

        hooks = [module.register_forward_hook(keep) for module in self.model.modules()]
        for module in self.model.modules():
            module.__dict__[PLACE] = record
        tokens = torch.arange(1, NUM_RECORDED_TOKENS + 1, device=self.model.device)[None]
        try:
            self._attend_by(RULES)
            self.model(**self._inputs(tokens))
        except Exception as error:  # a model's code may raise anything with another attention
            raise UnsupportedModel(f"it cannot run with another attention: {error}") from error
        finally:
            for hook in hooks:
                hook.remove()
            for module in self.model.modules():
                module.__dict__.pop(PLACE, None)
        if len(calls) < self.model.config.num_hidden_layers or not bodies:
            raise UnsupportedModel(
                "not all of its layers attend through transformers' attention interface"
            )
        self._body, whole = bodies[-1]  # the outermost ends last
        if "position_ids" not in inspect.signature(self._body.forward).parameters:
            raise UnsupportedModel("it counts positions by itself")
        attention = PackedAttention(calls)
        self._attend_by(PACKED)
        packed = pack_linears(self.model, {module for module, _, _ in layer_calls})
        self._layers = (layer_calls, packed)
        if self.classifies:
            # Known states replace the innermost module that returns the body's states: poolers run after it.
            states = whole.last_hidden_state
            same_states = (
                (module, output)
                for module, output in bodies
                if torch.equal(output.last_hidden_state, states)
            )
            innermost = next(same_states, None)
            if innermost is None:
                raise UnsupportedModel("its states are not finite")
            self._replace(*innermost)
        return attention

    def _replace(self, body: Any, output: Any) -> None:
        """While `_known` holds hidden states, make the body return them instead of computing.

        output: what the body returned in an earlier pass.
        """
        compute = body.forward
        kind = type(output)
        has_pooler = getattr(output, "pooler_output", None) is not None

        def forward(*args: Any, **options: Any) -> Any:
            if self._known is not None:
                pooled = {"pooler_output": body.pooler(self._known)} if has_pooler else {}
                return kind(last_hidden_state=self._known, **pooled)
            return compute(*args, **options)

        body.forward = forward


class PackedAttention:
    """Answers a model's attention calls over one row of texts, by a compiled kernel or, text by text, by torch."""

    def __init__(self, calls: Sequence[AttentionCall]) -> None:
        """calls: the recorded attention calls. Raises UnsupportedModel if the attention of one is not built."""
        self._lengths: list[int] = []
        self._rules = {call.module: _rule_of(call) for call in calls}
        self._sights: dict[Rule | None, Sight] = {}
        # The kernel's tasks and block tables, by two numbers: the query heads that share a KV head, and the tokens
        # after itself that each token sees.
        self._tasks: dict[tuple[int, int], tuple[PrefillTasks, Tensor]] = {}
        for module in self._rules:
            module.__dict__[PLACE] = self

    def begin(self, lengths: Sequence[int]) -> None:
        """Attend over texts of these lengths from now on."""
        self._lengths = list(lengths)
        self._tasks.clear()

    def __call__(self, call: AttentionCall) -> Tensor:
        sight = self._sight(self._rules[call.module], call.query.device)
        if sight.reach is not None and _has_kernel(call):
            return self._by_kernel(call, *sight.reach)
        parts = []
        for start, end in pairwise(accumulate(self._lengths, initial=0)):
            query, key, value = (
                tensor[:, :, start:end] for tensor in (call.query, call.key, call.value)
            )
            mask = None if sight.mask is None else sight.mask[..., : end - start, : end - start]
            attended = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                scale=call.scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            parts.append(attended)
        return torch.cat(parts, dim=2).transpose(1, 2).contiguous()

    def _sight(self, rule: Rule | None, device: torch.device) -> "Sight":
        longest = max(self._lengths)
        sight = self._sights.get(rule)
        if sight is None or sight.length < longest:
            length = -(-longest // NUM_LOOKED_UP) * NUM_LOOKED_UP
            sight = Sight.of(rule, length, device)
            self._sights[rule] = sight
        return sight

    def _by_kernel(self, call: AttentionCall, before: int, after: int) -> Tensor:
        from engine.cpu_kernels import prefill_attention as kernel  # numba is optional

        query, key, value = (
            tensor[0].transpose(0, 1).contiguous() for tensor in (call.query, call.key, call.value)
        )
        kind = query.shape[1] // key.shape[1], after
        if kind not in self._tasks:
            lengths = np.array(self._lengths)
            starts = lengths.cumsum() - lengths
            none = np.zeros_like(lengths)
            tasks = kernel.tasks_of_sequences(
                starts, lengths, lengths, np.arange(len(lengths)), none, kind[0], reach=after
            )
            tables = starts[:, None] + np.arange(lengths.max())  # a block holds one token
            self._tasks[kind] = tasks, torch.from_numpy(tables.astype(np.int32))
        tasks, block_tables = self._tasks[kind]
        out = torch.empty_like(query)
        scale = query.shape[-1] ** -0.5 if call.scaling is None else float(call.scaling)
        kernel.prefill_attention(
            query,
            key[:, None],
            value[:, None],
            block_tables,
            tasks,
            out,
            scale=scale,
            window=before + 1 + after,
        )
        return out[None]


@dataclass(frozen=True)
class Sight:
    """Which tokens see which, in texts of up to `length` tokens.

    mask: [1, 1, length, length]; None if all tokens see all others.
    reach: the number of tokens that each token sees before itself, and the number after; None if tokens differ in that.
    """

    length: int
    mask: Tensor | None
    reach: tuple[int, int] | None

    @classmethod
    def of(cls, rule: Rule | None, length: int, device: torch.device) -> "Sight":
        """Ask the rule about each pair of tokens of a text of this length. A rule of None lets all see all."""
        if rule is None:
            return cls(sys.maxsize, None, (FAR, FAR))
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
        places = torch.arange(length, device=device)
        seen = torch.empty(1, 1, length, length, dtype=torch.bool, device=device)
        for part in torch.split(places, NUM_LOOKED_UP):
            seen[:, :, part] = rule(zero, zero, part.view(1, 1, -1, 1), places.view(1, 1, 1, -1))

        # In a band the first token sees itself and `after` others, the last one itself and `before` others.
        after = int(seen[0, 0, 0].sum()) - 1
        before = int(seen[0, 0, -1].sum()) - 1
        band = torch.ones_like(seen[0, 0]).tril_(after).triu_(-before)
        reach = (before, after) if torch.equal(seen[0, 0], band) else None
        mask = None if bool(seen.all()) else seen
        return cls(length, mask, reach)


@functools.cache
def _kernel_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    return CpuBackend.problem(device, dtype)


def _has_kernel(call: AttentionCall) -> bool:
    """Return whether a compiled kernel can answer this call, in place of torch."""
    head_dim = call.query.shape[-1]
    return (
        head_dim <= MAX_HEAD_DIM
        and head_dim % 2 == 0
        and head_dim == call.value.shape[-1]
        and _kernel_problem(call.query.device, call.query.dtype) is None
    )


def _keep_rule(
    *, q_length: int, kv_length: int, mask_function: Rule, device: Any = "cpu", **_: Any
) -> Tensor:
    """Make a mask that carries its mask function as the attribute `rule`, for `_rule_of` to find."""
    mask = torch.ones(1, 1, int(q_length), int(kv_length), dtype=torch.bool, device=device)
    mask.rule = mask_function  # type: ignore[attr-defined]  # it travels through the model's code
    return mask


def _rule_of(call: AttentionCall) -> Rule | None:
    """Return the rule that says which tokens see which; None if all see all. Raises UnsupportedModel."""
    if call.options.get("softcap") is not None or call.options.get("s_aux") is not None:
        raise UnsupportedModel("its attention has soft caps or sinks")
    if call.mask is None:
        if call.options.get("is_causal", getattr(call.module, "is_causal", False)):
            raise UnsupportedModel("its attention is causal without a mask")
        return None
    rule: Rule | None = getattr(call.mask, "rule", None)
    if rule is None:
        raise UnsupportedModel("it makes an attention mask or bias of its own")
    return rule


def _pad(texts: Sequence[Tensor], pad: int) -> tuple[Tensor, Tensor]:
    """Return texts with padding behind them, [texts, tokens], and a mask of what is text, int64."""
    row = nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=pad)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return row, mask


def _parts(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Divide texts, in order, into parts of up to `most` tokens; yield each part's begin and end."""
    begin = num_tokens = 0
    for place, length in enumerate(lengths):
        if place > begin and num_tokens + length > most:
            yield begin, place
            begin = place
            num_tokens = 0
        num_tokens += length
    yield begin, len(lengths)


def _of_like_lengths(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Divide the indices of texts into groups of similar lengths, which need little padding; short texts come first."""
    group: list[int] = []
    num_tokens = 0
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[place]  # the longest so far
        num_padded = length * (len(group) + 1)
        if group and num_padded > MAX_PADDED * (num_tokens + length):
            yield group
            group = []
            num_tokens = 0
        group.append(place)
        num_tokens += length
    if group:
        yield group
