"""EngineConfig: everything an engine is started with, and the identity of the model that it names."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from engine.checkpoint.fingerprint import ModelIdentity, read_identity, tensor_names
from engine.checkpoint.folder import resolve_model
from engine.checkpoint.heads import read_classes
from engine.checkpoint.kv_scales import find_kv_scales
from engine.checkpoint.model_config import ModelConfig, longrope_length, read_model_config
from engine.checkpoint.pooling import MODES, read_pooling
from engine.errors import ConfigError
from engine.run.dtype import served_dtype
from engine.text.chat_templates import read_clock, read_template

KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
KERNEL_CHECKS = ("warn", "refuse", "off")
MODEL_PATHS = ("auto", "native", "transformers")
QUANTIZATIONS = (None, "int8")
# The scales of an FP8 cache are measured on these, or on fewer if these do not fit.
NUM_MEASURED_TOKENS = 512


@dataclass(frozen=True)
class EngineConfig:
    """How to start an engine. Reads no environment; a bad value raises ConfigError and names itself.

    model: a folder in Hugging Face layout, or a hub id.
    dtype: "auto" (the checkpoint's own; but on a CPU float32, unless the checkpoint's is bfloat16 and the processor
        multiplies bfloat16), "float32", "bfloat16" or "float16".
    device: "auto" (cuda if there is a GPU, else cpu) or a torch device string.
    max_model_len: tokens of prompt and completion together. A sequence that reaches it ends with "length". None
        takes the model's limit. If the KV pool holds less, None takes what the pool holds, rounded down to its
        four highest binary digits.
    max_num_seqs: sequences that run at once. None takes 1,024 on a GPU with 70 GiB or more, and 256 elsewhere, but at
        most half of max_num_batched_tokens.
    max_num_batched_tokens: tokens computed in one step, decodes and prefill chunks together.
    block_size: tokens per KV block.
    kv_cache_bytes: K and V of all layers, per rank. None takes, on a GPU, what a warm-up leaves free; on a CPU
        the smaller of 4 GiB and a quarter of the memory still allowed. More than is free is refused. A model that
        keeps states has them beside the stated bytes; with None they take up to half of the bytes. They are the
        states of max_num_seqs sequences and as many snapshots, or of as many as fit.
    kv_cache_dtype: "auto" (the model's) or "fp8_e4m3": keys and values of 8 bits take half of bfloat16's memory
        and reading time, and change answers. Scales are the checkpoint's own, if it has any. Missing ones are
        measured at start, for each head, on a few hundred tokens, with room for numbers eight times as large.
        Numbers beyond the range are clipped. Backends: triton, torch.
    memory_utilization: share of the GPU's memory that may be in use while the engine runs: weights, KV pool,
        graphs, the largest step, and what other processes hold. Ignored on a CPU.
    tensor_parallel_size: processes ("ranks") that share each layer, one GPU each; with 1 the caller's process
        is the only one. On a CPU they divide torch's threads. It must divide the attention heads and the MLP
        features, and divide the KV heads or be a multiple of them.
    attention_backend: "auto" (on a GPU triton if it is installed; on a CPU cpu if numba is installed and the
        dtype is float32 or bfloat16; else torch), "cpu", "torch", "triton" or "flash_attn" (on a GPU, with the
        package flash-attn, half precision and a block_size that is a multiple of 256).
    model_path: "native" (the engine's own decoder), "transformers" (transformers' model of the architecture
        with the engine's attention), or "auto": native if the engine has what the checkpoint needs.
    quantization: "int8" quantizes the weights of linear layers by output channel when they are loaded, and
        their activations by token: faster on a CPU with VNNI or AMX, less exact. None computes in the dtype.
        Not built for GPUs, tensor parallelism, mixtures of experts and models through transformers.
    enforce_eager: run decode steps without CUDA graphs. On a GPU these are captured at start if the backend can
        be recorded (triton, flash_attn); a CPU has none.
    async_scheduling: schedule a step while the one before runs; None does so on GPUs. On a CPU without
        tensor parallelism nothing is gained: the model runs in the caller's thread.
    seed: starts the generator that draws a seed for each request without one.
    chat_template: the name of one of the model's chat templates; None takes the default one, or the only one.
    deterministic: a request's completions and log probabilities have the same bits whatever else is computed
        with it, before it and after it: other requests, their order, chunks, preemption, cached prefixes. A
        request without a seed draws one from its prompt and `seed`. Slower. Only on CPUs, for native models with
        attention_backend="cpu", alone or on two ranks; else NotDeterministic is raised. The bits are those of
        one kind of processor, one version of torch, one number of threads and one tensor_parallel_size.
    adapt_cpu_threads: on a CPU use fewer threads while other processes use the processors. This sets torch's
        number of threads for the whole process. Ignored with tensor parallelism.
    kernel_check: before the first start of this build on a GPU, each kernel that the model needs is compared with
        plain torch. This takes as long as compiling the kernels. If one is wrong, "warn" logs it and computes with
        attention_backend "torch", and "refuse" raises KernelCheckFailed. "off" compares nothing. Models through
        transformers are compared with transformers' own code at each start instead.
    pooling: how embeddings are made of hidden states, by sentence-transformers' names ("lasttoken", "mean",
        ...). None goes by the checkpoint's modules.json; without that file there are no embeddings.
    adapters: a folder with a sub-folder for each LoRA adapter, as PEFT saves it. Requests name an adapter by
        its sub-folder, also one that was added after the start. Not built for models through transformers and
        with deterministic.
    max_adapters: how many adapters are in memory at a time. Those that no request uses make room for others.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    kv_cache_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1
    attention_backend: str = "auto"
    model_path: str = "auto"
    quantization: str | None = None
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    seed: int = 0
    chat_template: str | None = None
    deterministic: bool = False
    adapt_cpu_threads: bool = False
    kernel_check: str = "warn"
    pooling: str | None = None
    adapters: str | None = None
    max_adapters: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a folder or a hub id, got {self.model!r}")
        for name in (
            "max_num_batched_tokens",
            "block_size",
            "tensor_parallel_size",
            "max_adapters",
        ):
            _check_positive(name, getattr(self, name))
        for name in ("max_model_len", "max_num_seqs", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.model_path not in MODEL_PATHS:
            raise ConfigError(
                f"model_path={self.model_path!r} must be 'auto', 'native' or 'transformers'"
            )
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(
                f"quantization={self.quantization!r} is not known: use 'int8' or leave it unset"
            )
        if self.quantization is not None and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"quantization={self.quantization!r} is not built for tensor_parallel_size="
                f"{self.tensor_parallel_size}; leave one of them out"
            )
        if self.kernel_check not in KERNEL_CHECKS:
            raise ConfigError(
                f"kernel_check={self.kernel_check!r} must be 'warn', 'refuse' or 'off'"
            )
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} must be 'auto' or 'fp8_e4m3'"
            )
        if self.max_model_len == 1:
            raise ConfigError("max_model_len=1 leaves no room for a new token; give at least 2")
        template = self.chat_template
        if template is not None and (not isinstance(template, str) or not template):
            raise ConfigError(
                f"chat_template must be the name of a template or None, got {template!r}"
            )
        if self.pooling is not None and self.pooling not in MODES:
            raise ConfigError(
                f"pooling={self.pooling!r} is not known: use one of {', '.join(MODES)}, or None"
            )
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError(f"seed must be an integer, got {self.seed!r}")
        if self.async_scheduling is not None and not isinstance(self.async_scheduling, bool):
            raise ConfigError(
                f"async_scheduling must be true, false or None, got {self.async_scheduling!r}"
            )
        if not isinstance(self.deterministic, bool):
            raise ConfigError(f"deterministic must be true or false, got {self.deterministic!r}")
        if self.deterministic and self.adapt_cpu_threads:
            raise ConfigError(
                "adapt_cpu_threads=True changes the number of threads, by which sums may be divided, and "
                "deterministic=True keeps it; leave one of them out"
            )
        if self.deterministic and self.adapters is not None:
            raise ConfigError(
                f"adapters={self.adapters!r} cannot be used with deterministic=True: rows of one adapter are "
                "multiplied together, and their sums may depend on how many there are; leave one of them out"
            )
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(
                f"memory_utilization must be above 0 and at most 1, got {self.memory_utilization!r}"
            )
        if self.max_num_batched_tokens == 1:
            raise ConfigError(
                "max_num_batched_tokens=1 leaves no room for a prompt; give at least 2"
            )
        if self.max_num_seqs is not None and self.max_num_batched_tokens <= self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must exceed "
                f"max_num_seqs={self.max_num_seqs}: each running sequence needs one token a step, "
                "and a new one at least one more"
            )

    @property
    def num_seqs(self) -> int:
        """max_num_seqs, or what None takes on this device. Without max_num_seqs it loads torch."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs

        from engine.run.device import default_num_seqs

        return min(default_num_seqs(self.device), self.max_num_batched_tokens // 2)


def may_read_pictures(config: EngineConfig) -> bool:
    """Whether pictures can be read with all that the configuration asks for."""
    is_plain = config.quantization is None and not config.deterministic
    return is_plain and config.tensor_parallel_size == 1 and config.model_path != "native"


def model_identity(config: EngineConfig) -> ModelIdentity:
    """Return the identity of the model that an engine of this configuration serves.

    Loads torch only if the model reads more than text, or its dtype depends on a GPU. The identity leaves out device,
    attention backend, tensor parallelism and whether quantized weights stay packed: they change only the order of
    sums, and what is rounded.
    Raises ModelNotFound, MissingWeights or another ConfigError for a model that no engine could load.
    """
    folder = resolve_model(config.model)
    model = read_model_config(folder)
    identity = read_identity(
        folder, ", ".join(_modes(config, folder, model)), config.chat_template, config.pooling
    )
    with suppress(ConfigError):  # a missing template: the engine reports it
        identity = replace(
            identity, clock_formats=read_clock(read_template(folder, config.chat_template))
        )
    classes = read_classes(model)
    if classes is not None:
        return replace(identity, classes=classes.labels)
    pooling = read_pooling(folder, model, config.pooling)
    if pooling is None:
        return identity
    size = pooling.size(model.hidden_size)
    return replace(identity, embedding_size=size, embedding_prompts=tuple(sorted(pooling.prompts)))


def _modes(config: EngineConfig, folder: Path, model: ModelConfig) -> Iterator[str]:
    """Name, in words, the settings that change answers. All answers of a run must come from the same settings."""
    yield served_dtype(config.dtype, model.dtype, config.device).name
    longest = min(
        config.max_model_len or model.max_position_embeddings, model.max_position_embeddings
    )
    if config.quantization is not None:
        yield f"{config.quantization} weights"
    if config.kv_cache_dtype != "auto":
        yield f"{config.kv_cache_dtype} KV cache"
        if find_kv_scales(tensor_names(folder), model):
            yield "scales of the checkpoint"
        measured = min(longest, config.max_num_batched_tokens)
        if measured < NUM_MEASURED_TOKENS:
            yield f"scales of {measured} tokens"
    original = longrope_length(model)
    if original is not None and longest <= original < model.max_position_embeddings:
        yield "rotary factors of short sequences"
    if config.deterministic:
        yield "deterministic" if config.seed == 0 else f"deterministic with seed {config.seed}"


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")
