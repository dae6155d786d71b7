"""transformers' own model of an architecture, with the paged attention in place of its own.

It is called with one flat row of tokens, so tokens may meet only in its attention function, which knows the
batch and the cache: engine.run.forward.probe checks that.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from engine.attention.base import ForwardBatch
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import KVCache
from engine.attention.state_pool import StateShape
from engine.checkpoint.folder import list_weight_files
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.quantized import unpacked
from engine.checkpoint.text_part import PREFIXES, text_name, text_tensors
from engine.checkpoint.weights import CheckpointTensor, open_tensors
from engine.errors import ConfigError, MissingWeights, UnsupportedModel, WeightMismatch
from engine.models.attention_calls import (
    NUM_RECORDED_TOKENS,
    PLACE,
    AttentionCall,
    PagedAttention,
    answer,
    describe_mask,
    features_of,
)
from engine.models.base import CausalModel, ModelPlace
from engine.models.linear_plan import pack_linears, split_by_plan
from engine.models.own_positions import counting_modules, tell_positions
from engine.models.served import nearest

if TYPE_CHECKING:
    from engine.models.mixers import Mixers

PAGED = "tokenmill"  # our attention's name among transformers'
RECORDED = "tokenmill_recorded"  # the same, with masks, which say how far a layer looks back
TRACED = torch.bfloat16  # in which all products are known for tensors without values
CACHES = ("past_key_values", "cache_params")  # how a model's argument for its cache is named
OWN = "eager"  # transformers' plainest
MIN_VERSION = 5  # of transformers; masks of older ones say nothing of positions that are not there
MAX_ERROR_CHARS, MAX_NAMES = 500, 8  # of transformers' own words in our errors


class TransformersModel(CausalModel):
    """A causal model of transformers over flat batches and the paged cache."""

    probe_lengths = (150, 40)  # some architectures compress what lies 128 tokens back
    may_wait = True

    def __init__(
        self, model: Any, body: nn.Module, attention: PagedAttention, mixers: "Mixers | None", hidden_size: int
    ) -> None:
        """Keep the model, and the body that makes hidden states and gives back `inputs_embeds` unchanged."""
        super().__init__()
        self.model, self.hidden_size = model, hidden_size
        self.vocab_size = model.config.vocab_size
        self._body = [body]  # in a list, so that its weights are not counted twice
        self._attention, self._mixers = attention, mixers
        self.attention_layers = attention.features
        self.states = () if mixers is None else mixers.states

    def hidden_states(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Return the body's output for all rows."""
        self._attention.begin(batch, cache)
        states = {} if self._mixers is None else self._mixers.begin(batch.states, cache.states)
        ids, positions = batch.token_ids[None], batch.positions[None]
        output = self._body[0](input_ids=ids, position_ids=positions, use_cache=False, **states)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the model's LM head, scales and caps to hidden states."""
        logits: Tensor = self.model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def reference_logits(self, token_ids: Tensor) -> Tensor:
        """Compute logits by transformers alone, with its own attention and without a cache."""
        self._attention.end()
        if self._mixers is not None:
            self._mixers.end()
        with _attending(self.model, OWN):
            logits: Tensor = self.model(input_ids=token_ids[None], use_cache=False).logits[0]
        return logits.float()


def load_transformers_model(config: ModelConfig, folder: Path, place: ModelPlace) -> CausalModel:
    """Build the model, or one rank's share of it, by transformers' loader.

    Weights pass through the host's memory: each rank reads all of them and keeps its share.
    """
    name = config.architecture
    try:
        model = _read(config, folder, place.dtype)
        _refuse_moving_rotary(model, place.max_positions)
        if place.tp.size > 1:
            split_by_plan(model, place.tp)
        model.requires_grad_(False).eval().to(place.device)
        return _with_paged_attention(config, model, place)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name} does not run through transformers: {error}; {nearest(name)}") from error


def check_known(architecture: str) -> None:
    """Raise UnsupportedModel for a name that transformers does not know."""
    import transformers

    if not hasattr(transformers, architecture):
        raise UnsupportedModel(
            f"{architecture} is no model of transformers {transformers.__version__}; {nearest(architecture)}"
        )


@torch.inference_mode()
def kept_by(
    config: ModelConfig, folder: Path, dtype: torch.dtype
) -> tuple[Sequence[AttentionFeatures], Sequence[StateShape]] | None:
    """Find what a model keeps of a sequence by config.json alone: keys and values, states. None if it needs weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine.models.mixers import StateCache

    _register()
    cache = StateCache()
    try:
        with _quiet_transformers(), torch.device("meta"):
            values: Any = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            values = values.get_text_config(decoder=True) if config.is_text_part else values
            loader: Any = AutoModelForCausalLM
            model = loader.from_config(values, dtype=TRACED, attn_implementation=PAGED)
            argument = _name_of_cache(model)
            calls, _, _ = _record(model, torch.device("meta"), **({argument: cache} if argument else {}))
            shapes = [each._replace(dtype=dtype if each.dtype == TRACED else each.dtype) for each in cache.shapes()]
            return [features_of(call, config.max_position_embeddings) for call in calls], shapes
    except Exception:  # noqa: BLE001 - whatever a model makes of tensors without values
        return None


def _read(config: ModelConfig, folder: Path, dtype: torch.dtype) -> Any:
    """Read transformers' model with all weights, on the CPU. Raises the ConfigError that fits."""
    import transformers

    list_weight_files(folder)
    if int(transformers.__version__.partition(".")[0]) < MIN_VERSION:
        raise UnsupportedModel(f"that takes version {MIN_VERSION} or later, here is {transformers.__version__}")
    _register()
    try:
        with _quiet_transformers():
            loader, path, more = _source(config, folder, dtype)
            model, report = loader.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=PAGED,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are reported, and refused below
                output_loading_info=True,
                **more,
            )
    except ConfigError:  # of quantized weights
        raise
    except SafetensorError as error:
        raise MissingWeights(f"{folder} holds no complete safetensors files ({error}); fetch it again") from error
    except Exception as error:  # whatever transformers makes of what is in the files
        if error.args == (PAGED,):  # a KeyError of a class that knows attentions by name
            raise UnsupportedModel("its attention is its own, and no other can take the place of it") from error
        words = " ".join(str(error).split())
        problem = f"transformers {transformers.__version__} cannot load it: {type(error).__name__}: {words}"
        raise UnsupportedModel(problem[:MAX_ERROR_CHARS]) from error
    if type(model).__name__ != config.architecture:
        raise UnsupportedModel(
            f"config.json names {config.architecture}, transformers makes a {type(model).__name__} of it"
        )
    _check_filled(folder, report)
    return model


def _register() -> None:
    """Make our attention known to transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in (PAGED, RECORDED):
        ALL_ATTENTION_FUNCTIONS.register(name, answer)
    ALL_MASK_ATTENTION_FUNCTIONS.register(RECORDED, describe_mask)


def _source(config: ModelConfig, folder: Path, dtype: torch.dtype) -> tuple[Any, str | None, dict[str, Any]]:
    """Return the loader to ask, with path and options. Quantized weights are unpacked for it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    if config.quantization is None and not config.is_text_part:
        return loader, str(folder), {}
    values: Any = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if config.is_text_part:
        values = values.get_text_config(decoder=True)
        values.tie_word_embeddings = config.values["tie_word_embeddings"]
    if config.quantization is None:
        mapping = {f"^{re.escape(old)}": new for old, new in PREFIXES.items()}
        return loader, str(folder), {"config": values, "key_mapping": mapping}
    if hasattr(values, "quantization_config"):
        del values.quantization_config  # or it would unpack them itself, with packages that are not here
    with torch.device("meta"):
        loader = type(loader.from_config(values))  # which takes weights in place of a path
    with open_tensors(list_weight_files(folder)) as stored:
        tensors = unpacked(stored, config.quantization)
        named = text_tensors(tensors) if config.is_text_part else tensors
        state = {
            name: tensor.whole() if type(tensor) is CheckpointTensor else tensor.whole().to(dtype)
            for name, tensor in named.items()
        }
    return loader, None, {"config": values, "state_dict": state}


def _check_filled(folder: Path, report: dict[str, Any]) -> None:
    """Raise MissingWeights or WeightMismatch unless each tensor had its place, and each place its tensor."""
    unexpected = [name for name in report["unexpected_keys"] if text_name(name) is not None]
    for kind, problem, names in (
        (MissingWeights, "lacks tensors that the model needs", report["missing_keys"]),
        (WeightMismatch, "holds tensors of another shape than config.json says", report["mismatched_keys"]),
        (WeightMismatch, "holds tensors for which this model has no place", unexpected),
    ):
        if names:
            listed = ", ".join(sorted(map(str, names))[:MAX_NAMES])
            raise kind(f"{folder} {problem}: {listed}{', ...' if len(names) > MAX_NAMES else ''}; fetch it again")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bar and its report of a checkpoint: faults are raised."""
    from transformers.utils import logging

    hf_logging: Any = logging
    had_bar, verbosity = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if had_bar:
            hf_logging.enable_progress_bar()


@contextmanager
def _attending(model: Any, name: str) -> Iterator[None]:
    """Use another attention within the block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _refuse_moving_rotary(model: nn.Module, max_positions: int) -> None:
    """Raise UnsupportedModel if a longer sequence in a step changes another's rotation (longrope)."""
    for module in model.modules():
        parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        for each in (parameters, *parameters.values()):
            if isinstance(each, dict) and each.get("rope_type") == "longrope":
                most = each["original_max_position_embeddings"]
                if max_positions > most:
                    raise UnsupportedModel(
                        f"max_model_len={max_positions}: in {type(model).__name__} a sequence of more than "
                        f"{most} tokens changes the rotary frequencies (longrope) of all others in its step; "
                        f"set max_model_len={most} or lower"
                    )


@torch.inference_mode()
def _with_paged_attention(config: ModelConfig, model: Any, place: ModelPlace) -> TransformersModel:
    """Find the layers' attention by a forward pass, and take its place."""
    with counting_modules(model, NUM_RECORDED_TOKENS) as counting:
        calls, called, bodies = _record(model, place.device)
    mixers = _find_mixers(model, place)
    if mixers is None and len(calls) < config.num_layers:
        raise UnsupportedModel(
            f"{len(calls)} of its {config.num_layers} layers attend through transformers' attention "
            "interface, the others have an attention of their own, or keep a state outside transformers' cache"
        )
    if not bodies:
        raise UnsupportedModel("no part of it gives hidden states apart from its LM head")
    body, output = bodies[-1]  # the outermost ends last
    if calls and "position_ids" not in inspect.signature(body.forward).parameters:
        raise UnsupportedModel(f"{type(body).__name__} takes no position_ids: it counts tokens by itself")
    attention = PagedAttention(calls, place.backend, place.max_positions, place.dtype)
    for module in counting & {call.module for call in calls}:
        tell_positions(module, lambda: attention.positions)
    pack_linears(model, called)
    compute, output_type = body.forward, type(output)

    def forward(*args: Any, inputs_embeds: Tensor | None = None, **options: Any) -> Any:
        if inputs_embeds is not None:
            return output_type(last_hidden_state=inputs_embeds)
        return compute(*args, **options)

    body.forward = forward
    if model(inputs_embeds=output.last_hidden_state, use_cache=False).logits is None:
        raise UnsupportedModel("it makes no logits of hidden states alone")
    return TransformersModel(model, body, attention, mixers, output.last_hidden_state.shape[-1])


def _name_of_cache(model: Any) -> str | None:
    return next((name for name in CACHES if name in inspect.signature(model.forward).parameters), None)


def _find_mixers(model: Any, place: ModelPlace) -> "Mixers | None":
    """Find the layers with a state of their own by a forward pass with a cache for them, and wrap them."""
    from engine.models.mixers import Mixers, StateCache

    argument = _name_of_cache(model)
    cache = StateCache()
    try:
        with cache.recording(model):
            _record(model, place.device, **({} if argument is None else {argument: cache}))
    except UnsupportedModel:  # a model that takes no such cache
        if cache.mixers:
            raise
        return None
    if argument is None or not cache.mixers:
        return None
    if place.tp.size > 1:
        raise UnsupportedModel(
            f"tensor_parallel_size={place.tp.size}: it keeps states beside the KV cache, which no rank divides; "
            "set tensor_parallel_size=1"
        )
    return Mixers(cache, argument)


def _record(
    model: Any, device: torch.device, **options: Any
) -> tuple[list[AttentionCall], set[nn.Module], list[tuple[nn.Module, Any]]]:
    """Run the model once without attention; return its attention calls, called modules, and hidden states of these.

    options: of its forward pass.
    """
    calls: list[AttentionCall] = []
    called: set[nn.Module] = set()
    bodies: list[tuple[nn.Module, Any]] = []

    def record(call: AttentionCall) -> Tensor:
        calls.append(call)
        _, heads, tokens, _ = call.query.shape
        return call.value.new_zeros(1, tokens, heads, call.value.shape[-1])

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        called.add(module)
        if hasattr(output, "last_hidden_state"):
            bodies.append((module, output))

    hooks = [module.register_forward_hook(keep) for module in model.modules()]
    for module in model.modules():
        module.__dict__[PLACE] = record
    tokens = torch.arange(1, NUM_RECORDED_TOKENS + 1, device=device)[None]
    try:
        with _attending(model, PAGED if tokens.is_meta else RECORDED):  # masks are made of values
            model(input_ids=tokens, use_cache=False, **options)
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever the model makes of another attention
        problem = f"its forward pass raises {type(error).__name__}: {error}"
        raise UnsupportedModel(problem[:MAX_ERROR_CHARS]) from error
    finally:
        for hook in hooks:
            hook.remove()
        for module in model.modules():
            module.__dict__.pop(PLACE, None)  # a forward pass may have brought new ones
    return calls, called, bodies
