"""Every error the engine raises on purpose. Each keeps its arguments in `args`, so that it can be pickled."""

MAX_QUOTED_CHARS = 400  # how much our errors quote of another package's


def quoted(error: BaseException) -> str:
    """Return the type and message of another package's error, on one line and cut short."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_QUOTED_CHARS]


class EngineError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(EngineError):
    """The engine cannot start as configured. Names the value to change."""


class ModelNotFound(ConfigError):
    """The model is neither a local folder with a config.json nor a hub id that can be fetched."""


class UnsupportedModel(ConfigError):
    """config.json asks for an architecture or a feature that is not built."""


class MissingWeights(ConfigError):
    """A weights file or a tensor the model needs is not in the checkpoint."""


class WeightMismatch(ConfigError):
    """A tensor of the checkpoint has another shape or name than the model expects."""


class DamagedWeights(ConfigError):
    """A quantized weight has impossible scales or indices. Names the tensor."""


class AttentionRefused(ConfigError):
    """The attention backend cannot compute a layer of this model, and another might."""


class KernelDiffers(ConfigError):
    """A GPU kernel's result is not what plain torch computes from the same inputs."""


class KernelCheckFailed(ConfigError):
    """A GPU kernel does not work on this machine, and `kernel_check="refuse"` asks for all of them."""


class NotDeterministic(ConfigError):
    """`deterministic=True` is asked for, and this model or machine is not known to give equal bits in every batch."""


class InvalidRequest(EngineError):
    """Base of the errors that fail one request and leave all others alone."""


class InvalidSampling(InvalidRequest):
    """An unknown, unbuilt or impossible sampling parameter: (problem, the value as it is shown).

    problem: names the parameter and its range. It quotes nothing of the value, so it may be logged.
    """

    def __init__(self, problem: str, got: str | None = None) -> None:
        super().__init__(problem, got)
        self.problem = problem
        self.got = got

    def __str__(self) -> str:
        return self.problem if self.got is None else f"{self.problem}, got {self.got}"


class InvalidPrompt(InvalidRequest):
    """A prompt is empty, of a wrong type, or holds a token id outside the vocabulary."""


class UnknownAdapter(InvalidRequest):
    """A request names an adapter that the engine does not have."""


class AdapterGone(UnknownAdapter):
    """A request names an adapter and the fingerprint of its files, and no files have that fingerprint now."""


class AdapterRefused(InvalidRequest):
    """An adapter is damaged, of another model, or of a kind that is not built: (its name, the problem)."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name = name
        self.problem = problem

    def __str__(self) -> str:
        return f"adapter {self.name!r} cannot be used: {self.problem}"


class UnsupportedTask(InvalidRequest):
    """The checkpoint lacks the part for this task: an LM head to generate and score, a pooling to embed."""


class NoLmHead(UnsupportedTask):
    """The checkpoint has no LM head, and the task needs one."""

    def __init__(self) -> None:
        super().__init__(
            "this checkpoint has no LM head: it embeds or classifies, it cannot generate or score"
        )


class PromptTooLong(InvalidRequest):
    """A prompt leaves no room for one new token in the model's length or the KV pool."""


class DuplicateRequest(InvalidRequest):
    """An unfinished request has that id."""


class EngineClosed(EngineError):
    """A call on an engine after `close()`."""


class EngineBusy(EngineError):
    """`generate()` or the like was called while requests from `add()` run: it would swallow their completions."""


class StepFailed(EngineError):
    """Raised by `step()` when no single sequence is to blame; the original error is its `__cause__`.

    Memory ran out, the device is lost, or all steps raise. Every running sequence is put back to wait, and will be
    recomputed. The caller may call `step()` again, abort some requests, or stop.
    """


class SequenceFailed(EngineError):
    """The wording of `error` in a completion whose request made a step raise: (the original error).

    It is never raised.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause

    def __str__(self) -> str:
        if isinstance(self.cause, InvalidRequest):
            return str(self.cause)
        return (
            f"the engine cannot go on with this request, and can with others: {type(self.cause).__name__}: "
            f"{str(self.cause)[:200]}; change its prompt or its sampling values, and report the error"
        )


class ScoringFailed(EngineError):
    """`loglikelihood()` cannot score a pair: (the pair's index, the reason)."""

    def __str__(self) -> str:
        return f"pair {self.args[0]} has no log-likelihood: {self.args[1]}"


class NoToken(EngineError):
    """A sequence's logits are NaN or infinite, or every token is banned. Its request fails."""


class GrammarFailed(EngineError):
    """A sequence's structured_outputs cannot be followed further: (the reason). Its request fails."""

    def __str__(self) -> str:
        return f"its structured_outputs cannot be followed further: {self.args[0]}"


class RankFailed(EngineError):
    """A rank of a tensor-parallel engine died, raised, or no longer answers: (rank, reason).

    All ranks have ended by then. Every later step raises it again: close the engine, make a new one.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.reason}; its engine is down, close it and make a new one"


class CollectiveFailed(EngineError):
    """Inside a rank: a sum or gather broke off, most often because another rank died in it."""


class CaptureFailed(EngineError):
    """Inside a start: this rank, or another one, cannot record steps as CUDA graphs: (the reason).

    All ranks then go on without these graphs.
    """


class OutOfBlocks(EngineError):
    """A block was taken from an empty pool: a bug in the scheduler."""
