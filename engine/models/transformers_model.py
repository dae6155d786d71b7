"""transformers' own model of an architecture, with the paged attention in place of its own.

The model gets all tokens of a batch in one flat row. Only the attention function knows which tokens belong to one
sequence, so nothing else in the model may mix tokens: engine.run.forward.probe checks that.
"""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from engine.attention.base import ForwardBatch
from engine.attention.kv_cache import KVCache
from engine.attention.state_pool import StateShape
from engine.checkpoint.folder import list_weight_files
from engine.checkpoint.kv_scales import is_kv_scale
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.quantized import unpacked
from engine.checkpoint.weights import CheckpointTensor, open_tensors
from engine.errors import ConfigError, MissingWeights, UnsupportedModel, WeightMismatch, quoted
from engine.models.attention_calls import (
    NUM_RECORDED_TOKENS,
    PLACE,
    AttentionCall,
    PagedAttention,
    answer,
    chosen_by,
    describe_mask,
    features_of,
)
from engine.models.base import CausalModel, Kept, ModelPlace
from engine.models.linear_plan import pack_linears, split_by_plan
from engine.models.own_attention import put_in_place, reference_attention
from engine.models.own_positions import Recorded, find_positions, takes_positions, tell_positions
from engine.models.served import nearest

if TYPE_CHECKING:
    from engine.models.mixers import Mixers

PAGED = "tokenmill"  # our attention's name among transformers'
# The same for classes that need a mask: they get one that hides nothing.
UNMASKED = "tokenmill_unmasked"
RECORDED = "tokenmill_recorded"  # the same, with masks, which say how far a layer looks back
CACHES = ("past_key_values", "cache_params")  # the arguments by which models take a cache
# The oldest transformers served. Masks of older ones cannot be asked about positions beyond the tokens.
MIN_VERSION = 5
TRACED = torch.bfloat16  # a dtype in which all products work for tensors without values
TEXT_PART = "model.language_model."  # how the names of its tensors begin
MAX_NAMES = 8  # of tensors in an error


class TransformersModel(CausalModel):
    """A causal model of transformers over flat batches and the paged cache."""

    may_wait = True

    def __init__(
        self,
        model: Any,
        body: "Body",
        attention: PagedAttention,
        mixers: "Mixers | None",
        first_position: int,
    ) -> None:
        """attention: answers the model's attention calls. mixers: None for a model without states.

        first_position: the position of a sequence's first token.
        """
        super().__init__()
        self.model = model
        self.hidden_size = body.hidden_size
        self._first_position = first_position
        self.vocab_size = model.config.get_text_config(decoder=True).vocab_size
        self._body = body
        self.attention = attention
        self._mixers = mixers
        self.attention_layers = attention.features
        self.layer_numbers = attention.layer_numbers
        if mixers is not None:
            self.states = mixers.states
            self.index_keys = mixers.index_keys
        # Long enough that an indexer leaves tokens out. Some architectures compress tokens from the 128th on.
        num_chosen = getattr(model.config.get_text_config(decoder=True), "index_topk", None) or 0
        self.probe_lengths = (max(150, num_chosen + 100), 40)

    def hidden_states(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Return the body's output for all rows."""
        self.attention.begin(batch, cache)
        ids = batch.token_ids[None]
        positions = batch.positions[None] + self._first_position
        arguments = {"position_ids": positions} if self._body.takes_positions else {}
        if batch.pictures is not None:
            arguments |= batch.pictures.arguments
            if batch.pictures.positions is not None:
                arguments["position_ids"] = batch.pictures.positions
        states = {} if self._mixers is None else self._mixers.begin(batch, cache)
        output = self._body.compute(input_ids=ids, use_cache=False, **arguments, **states)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    @property
    def body(self) -> nn.Module:
        """The part that makes hidden states."""
        return self._body.module

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the model's LM head, scales and caps to hidden states."""
        logits: Tensor = self._body.logits_of(hidden[None])[0]
        return logits

    def reference_logits(self, token_ids: Tensor, **inputs: Any) -> Tensor:
        """Compute logits by transformers alone, with its own attention and without a cache.

        inputs: the pictures' arguments.
        """
        self.attention.end()
        if self._mixers is not None:
            self._mixers.end()
        with _attending(self.model, reference_attention(self.model)), _problems_named():
            logits: Tensor = self.model(
                input_ids=token_ids[None], use_cache=False, **inputs
            ).logits[0]
        return logits.float()


def no_mask(*, device: torch.device | str = "cpu", **_: Any) -> Tensor:
    """Make a mask that hides nothing, for code that needs a mask."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


class Body:
    """The part of a model that makes hidden states. The rest of the model makes logits of them."""

    def __init__(self, model: Any, body: nn.Module, output: Any) -> None:
        """output: what the body returned in an earlier pass; it shows the type and the hidden size."""
        self._model = model
        self.module = body
        self.compute = body.forward
        self._output_type = type(output)
        self.hidden_size: int = output.last_hidden_state.shape[-1]
        self.takes_positions = takes_positions(body)
        # Hidden states for the body to return instead of computing them.
        self._given: Tensor | None = None
        body.forward = self._forward

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Turn hidden states, [1, rows, hidden], into logits, [1, rows, vocabulary], without running the body."""
        self._given = hidden
        try:
            logits: Tensor = self._model(inputs_embeds=hidden, use_cache=False).logits
        finally:
            self._given = None
        return logits

    def _forward(self, *args: Any, **options: Any) -> Any:
        if self._given is not None:
            return self._output_type(last_hidden_state=self._given)
        return self.compute(*args, **options)


def load_transformers_model(config: ModelConfig, folder: Path, place: ModelPlace) -> CausalModel:
    """Build the model, or one rank's share of it, by transformers' loader.

    Weights pass through the host's memory: each rank reads all of them and keeps its share.
    """
    name = config.whole or config.architecture
    kind = class_of(name)
    try:
        model = _read(kind, config, folder, place.dtype)
        _drop_other_parts(model, keeps_images=config.reads_pictures)
        refuse_moving_rotary(model, place.max_positions)
        if place.tp.size > 1:
            split_by_plan(model, place.tp)
        model.requires_grad_(False).eval().to(place.device)
        put_in_place(model)
        return _with_paged_attention(config, model, place)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"{name} does not run through transformers: {error}; {nearest(name)}"
        ) from error


def class_of(architecture: str) -> Any:
    """Return transformers' class of this name. Raises UnsupportedModel if none is, or it does not generate text."""
    import transformers

    kind = getattr(transformers, architecture, None)
    parents = kind.__mro__ if isinstance(kind, type) else ()
    if not {transformers.PreTrainedModel, transformers.GenerationMixin} <= {*parents}:
        raise UnsupportedModel(
            f"{architecture} is no model of transformers {transformers.__version__} that generates text; "
            f"{nearest(architecture)}"
        )
    return kind


@torch.inference_mode()
def kept_by(config: ModelConfig, folder: Path, dtype: torch.dtype) -> Kept | None:
    """Find what a model keeps of a sequence from config.json alone; None if that is not possible without weights.

    Raises UnsupportedModel if config.json is about another model.
    """
    from engine.models.mixers import StateCache

    kind = class_of(config.whole or config.architecture)
    values = _values_for(kind, folder)
    _register()
    try:
        with _quiet_transformers(), torch.device("meta"):
            model: Any = kind._from_config(values, dtype=TRACED)
            _drop_other_parts(model)
            put_in_place(model)
            cache = StateCache()
            argument = _name_of_cache(model)
            calls = _record(
                model, torch.device("meta"), more={argument: cache} if argument else {}
            ).calls
            layers = [features_of(call, config.max_position_embeddings) for call in calls]
            return Kept(
                layers,
                _in_dtype(cache.shapes(), dtype),
                _in_dtype(cache.index_keys.values(), dtype),
            )
    except Exception:  # noqa: BLE001 - a model's code may raise anything for tensors without values
        return None


def _in_dtype(traced: Iterable[StateShape], dtype: torch.dtype) -> list[StateShape]:
    return [
        state._replace(dtype=dtype if state.dtype == TRACED else state.dtype) for state in traced
    ]


def _read(kind: Any, config: ModelConfig, folder: Path, dtype: torch.dtype) -> Any:
    """Read transformers' model with all weights, on the CPU. Raises UnsupportedModel or another ConfigError."""
    import transformers

    list_weight_files(folder)
    if int(transformers.__version__.partition(".")[0]) < MIN_VERSION:
        raise UnsupportedModel(
            f"version {MIN_VERSION} or later of transformers is needed, found {transformers.__version__}"
        )
    _register()
    try:
        with _quiet_transformers():
            path, more = _source(kind, config, folder, dtype)
            options = {
                "dtype": dtype,
                "attn_implementation": "eager",
                "local_files_only": True,
                "trust_remote_code": False,
                "use_safetensors": True,
                "ignore_mismatched_sizes": True,  # they are reported, and refused below
                "output_loading_info": True,
                **more,
            }
            try:
                model, report = kind.from_pretrained(path, **options)
            except ImportError:  # a part for images or sound needs a package
                model, report = _read_text(path, options)
    except ConfigError:  # from reading quantized weights
        raise
    except SafetensorError as error:
        raise MissingWeights(
            f"{folder} holds no complete safetensors files ({error}); fetch it again"
        ) from error
    except Exception as error:  # transformers may raise anything for damaged files
        problem = f"transformers {transformers.__version__} cannot load it: {quoted(error)}"
        raise UnsupportedModel(problem) from error
    _check_filled(folder, report)
    _attend_by(model, PAGED)
    return model


def _read_text(path: str | None, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Read only the text part, by its own class.

    This is called while an ImportError is handled. If the text part has no class, that error is raised again.
    """
    from transformers import AutoModelForCausalLM

    values = options["config"].get_text_config(decoder=True)
    kind: Any = AutoModelForCausalLM._model_mapping.get(type(values), None)
    if kind is None:
        raise  # the ImportError that the caller handles
    options |= {"config": values, "key_mapping": {f"^{TEXT_PART}": "model."}}
    model, report = kind.from_pretrained(path, **options)
    of_text = tuple(f"model.{name}." for name, _ in model.base_model.named_children())
    report["unexpected_keys"] = [
        name for name in report["unexpected_keys"] if name.startswith(of_text)
    ]
    return model, report


def _register() -> None:
    """Make our attention known to transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in (PAGED, UNMASKED, RECORDED):
        ALL_ATTENTION_FUNCTIONS.register(name, answer)
    ALL_MASK_ATTENTION_FUNCTIONS.register(RECORDED, describe_mask)
    ALL_MASK_ATTENTION_FUNCTIONS.register(UNMASKED, no_mask)


def _values_for(kind: Any, folder: Path) -> Any:
    """Return config.json as a class of transformers takes it. Raises UnsupportedModel if it is for another class."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    try:
        values: Any = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        text = values.get_text_config(decoder=True)
    except Exception as error:  # transformers may raise anything for a damaged file
        problem = f"transformers cannot read config.json of this {kind.__name__}: {quoted(error)}"
        raise UnsupportedModel(problem) from error
    known: Any = (AutoModelForCausalLM._model_mapping, AutoModelForMultimodalLM._model_mapping)
    if isinstance(values, kind.config_class) or any(
        mapping.get(type(values), None) is kind for mapping in known
    ):
        return values
    if isinstance(text, kind.config_class):
        # The file describes a multimodal model, and `kind` is the class of its text part.
        return text
    expected = kind.config_class.__name__
    held = type(values).__name__
    raise UnsupportedModel(f"{kind.__name__} takes a {expected}, config.json is a {held}")


def _source(
    kind: Any, config: ModelConfig, folder: Path, dtype: torch.dtype
) -> tuple[str | None, dict[str, Any]]:
    """Return the path and the options for from_pretrained.

    For quantized weights the path is None, and the options hold the unpacked weights.
    """
    values = _values_for(kind, folder)
    if config.quantization is None:
        return str(folder), {"config": values}
    if hasattr(values, "quantization_config"):
        # With this attribute transformers would unpack the weights itself, by packages that are not installed.
        del values.quantization_config
    state = {}
    with open_tensors(list_weight_files(folder)) as stored:
        for name, tensor in unpacked(stored, config.quantization).items():
            is_plain = type(tensor) is CheckpointTensor
            state[name] = tensor.whole() if is_plain else tensor.whole().to(dtype)
    return None, {"config": values, "state_dict": state}


def _check_filled(folder: Path, report: dict[str, Any]) -> None:
    """Raise MissingWeights or WeightMismatch unless the files hold exactly the tensors that the model has.

    The files may also hold scales of a KV cache. report: transformers' report of loading.
    """
    unexpected = [name for name in report["unexpected_keys"] if not is_kv_scale(name)]
    for kind, problem, names in (
        (MissingWeights, "lacks tensors that the model needs", report["missing_keys"]),
        (
            WeightMismatch,
            "holds tensors of another shape than config.json says",
            report["mismatched_keys"],
        ),
        (WeightMismatch, "holds tensors for which this model has no place", unexpected),
    ):
        if names:
            listed = ", ".join(sorted(map(str, names))[:MAX_NAMES])
            raise kind(
                f"{folder} {problem}: {listed}{', ...' if len(names) > MAX_NAMES else ''}; fetch it again"
            )


def _drop_other_parts(model: Any, *, keeps_images: bool = False) -> None:
    """Free the parts of the model for sound, and those for images unless keeps_images."""
    for name, module in _other_parts(model):
        if keeps_images and "audio" not in type(module.config).__name__.lower():
            continue
        parent, _, last = name.rpartition(".")
        absent: Any = nn.Module()
        # The model still reads these two attributes.
        absent.device = module.device
        absent.dtype = module.dtype
        setattr(model.get_submodule(parent), last, absent)


def _other_parts(model: Any) -> list[tuple[str, Any]]:
    """List the parts of the model for images or sound, each with its name."""
    from transformers import PreTrainedModel

    about_text = {type(model.config), type(model.config.get_text_config(decoder=True))}
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and type(module.config) not in about_text
    ]


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bar and its report of a checkpoint, whose faults are raised as errors here."""
    from transformers.utils import logging

    hf_logging: Any = logging
    had_bar = hf_logging.is_progress_bar_enabled()
    verbosity = hf_logging.get_verbosity()
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
    _attend_by(model, name)
    try:
        yield
    finally:
        _attend_by(model, before)


def _attend_by(model: Any, name: str) -> None:
    """Make the text part use the attention of this name; parts for images or sound use transformers' own."""
    with _quiet_transformers():
        model.set_attn_implementation(name)
    if model.config._attn_implementation != name:  # a class without the interface
        model.config._attn_implementation = UNMASKED if name == PAGED else name
    for _, part in _other_parts(model):
        part.config._attn_implementation = "sdpa" if part._supports_sdpa else "eager"


@contextmanager
def _problems_named() -> Iterator[None]:
    """Turn whatever a forward pass raises into an UnsupportedModel."""
    try:
        yield
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(f"its forward pass raises {quoted(error)}") from error


def refuse_moving_rotary(model: nn.Module, max_positions: int) -> None:
    """Raise UnsupportedModel if a long sequence would change the rotation of others in its step (longrope)."""
    for module in model.modules():
        parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        for rope in (parameters, *parameters.values()):
            if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
                most = rope["original_max_position_embeddings"]
                if max_positions > most:
                    raise UnsupportedModel(
                        f"max_model_len={max_positions}: in {type(model).__name__} a sequence of more than "
                        f"{most} tokens changes the rotary frequencies (longrope) of all others in its step; "
                        f"set max_model_len={most} or lower"
                    )


@torch.inference_mode()
def _with_paged_attention(config: ModelConfig, model: Any, place: ModelPlace) -> TransformersModel:
    """Find the layers' attention by a forward pass, and put the paged attention in its place."""
    recorded = _record(model, place.device)
    passes_choice = any(chosen_by(call) is not None for call in recorded.calls)
    if passes_choice:
        _attend_by(model, UNMASKED)  # the attention needs no mask, but the indexer does
    mixers = _find_mixers(model, place)
    if mixers is None and len(recorded.calls) < config.num_layers:
        raise UnsupportedModel(
            f"{len(recorded.calls)} of its {config.num_layers} layers attend through transformers' attention "
            "interface, the others have an attention of their own, or keep a state outside transformers' cache"
        )
    if not recorded.bodies:
        raise UnsupportedModel("no part of it gives hidden states apart from its LM head")
    body, output = recorded.bodies[-1]  # the outermost ends last
    record_body = partial(_record, body, place.device)
    first, counting_modules = find_positions(body, recorded, place.max_positions, record_body)
    chosen = None
    if mixers is not None and mixers.index_keys and not passes_choice:
        chosen = mixers.chosen
    attention = PagedAttention(
        recorded.calls, place.backend, place.max_positions, place.dtype, chosen
    )
    for module in counting_modules:
        tell_positions(module, lambda: attention.positions)
    pack_linears(model, recorded.called)
    wrapped = Body(model, body, output)
    if wrapped.logits_of(output.last_hidden_state) is None:
        raise UnsupportedModel("it makes no logits of hidden states alone")
    return TransformersModel(model, wrapped, attention, mixers, first)


def _name_of_cache(model: Any) -> str | None:
    return next(
        (name for name in CACHES if name in inspect.signature(model.forward).parameters), None
    )


def _find_mixers(model: Any, place: ModelPlace) -> "Mixers | None":
    """Find and wrap the layers that keep a state of their own, by a forward pass with a cache for such states."""
    from engine.models.mixers import Mixers, StateCache

    argument = _name_of_cache(model)
    cache = StateCache()
    try:
        with cache.recording(model):
            _record(model, place.device, more={} if argument is None else {argument: cache})
    except UnsupportedModel:  # a model that takes no such cache
        if cache.mixers or cache.indexers:
            raise
        return None
    if argument is None or not (cache.mixers or cache.indexers):
        return None
    if place.tp.size > 1:
        raise UnsupportedModel(
            f"tensor_parallel_size={place.tp.size}: it keeps states besides keys and values, "
            "and states cannot be split over ranks; set tensor_parallel_size=1"
        )
    return Mixers(cache, argument)


def _record(
    part: Any, device: torch.device, first: int | None = None, more: dict[str, Any] | None = None
) -> Recorded:
    """Run the model, or a part of it, once without attention.

    first: the position of the first token; None gives the model no positions.  more: further arguments.
    """
    recorded = Recorded()

    def record(call: AttentionCall) -> Tensor:
        recorded.calls.append(call)
        _, heads, tokens, _ = call.query.shape
        return call.value.new_zeros(1, tokens, heads, call.value.shape[-1])

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        recorded.called.add(module)
        if hasattr(output, "last_hidden_state"):
            recorded.bodies.append((module, output))

    hooks = [module.register_forward_hook(keep) for module in part.modules()]
    for module in part.modules():
        module.__dict__[PLACE] = record
    arguments = dict(more or {})
    tokens = torch.arange(1, NUM_RECORDED_TOKENS + 1, device=device)[None]
    if first is not None:
        arguments["position_ids"] = tokens - 1 + first
    # A padding token shows whether positions leave padding out.
    tokens[0, 1] = getattr(part.config.get_text_config(decoder=True), "pad_token_id", None) or 0
    try:
        with _attending(part, UNMASKED if tokens.is_meta else RECORDED), _problems_named():
            # Masks have values, so tokens without values get none.
            part(input_ids=tokens, use_cache=False, **arguments)
    finally:
        for hook in hooks:
            hook.remove()
        for module in part.modules():
            # A module that the forward pass has added has no function.
            module.__dict__.pop(PLACE, None)
    return recorded
