"""Every error the engine raises on purpose. Callers decide by type, never by message text.

EngineError
├── ConfigError              the engine cannot start as configured
│   ├── ModelNotFound        no such folder or hub id
│   ├── UnsupportedModel     the checkpoint needs something that is not built
│   ├── MissingWeights       a file or a tensor of the checkpoint is not there
│   ├── WeightMismatch       a tensor is there and does not fit the model
│   ├── DamagedWeights       numbers of a quantized tensor that none can have
│   ├── AttentionRefused     the attention backend cannot compute a layer of this model
│   └── NotDeterministic     deterministic=True with what may give other bits in another batch
├── InvalidRequest           this request cannot run; the others are not affected
│   ├── InvalidSampling      a sampling name or value
│   ├── InvalidPrompt        not text, not token ids, empty, or outside the vocabulary
│   ├── PromptTooLong        longer than the model or than the whole KV pool
│   └── DuplicateRequest     the id is already in use
├── EngineClosed             a call after close()
├── EngineBusy               generate() while other requests are unfinished
├── StepFailed               steps raise whatever is in them; their sequences wait again
├── SequenceFailed           the error of a completion: a step raised with this request and not without it
├── NoToken                  a sequence's logits leave no token to choose: fails its request
├── GrammarFailed            a sequence's grammar leaves no token to choose: fails its request
├── RankFailed               a tensor-parallel rank died or raised; the engine is down
├── CollectiveFailed         inside a rank: another one has left a sum or a gather
├── OutOfBlocks              a block was asked for and none is free: a bug in the scheduler
└── BlockAccountingError     free and held blocks disagree: a bug in the block manager

Each keeps all its arguments in `args`, so it pickles across processes.
"""


class EngineError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(EngineError):
    """Raised at start: a value, or two of them together, cannot work. Names the value to change."""


class ModelNotFound(ConfigError):
    """Raised when the model is neither a local folder with a config.json nor a hub id that can be fetched."""


class UnsupportedModel(ConfigError):
    """Raised when config.json asks for an architecture or a feature that is not built."""


class MissingWeights(ConfigError):
    """Raised when a weights file or a tensor the model needs is not in the checkpoint."""


class WeightMismatch(ConfigError):
    """Raised when a tensor of the checkpoint has another shape or name than the model expects."""


class DamagedWeights(ConfigError):
    """Raised when scales or indices of a quantized weight are what none can have. Names the tensor."""


class AttentionRefused(ConfigError):
    """Raised when the attention backend cannot compute a layer of this model, and another might."""


class NotDeterministic(ConfigError):
    """Raised when `deterministic=True` asks for what is not known to give the same bits in every batch."""


class InvalidRequest(EngineError):
    """Base of the errors that fail one request and leave all others alone."""


class InvalidSampling(InvalidRequest):
    """Raised for an unknown, unbuilt or impossible sampling parameter: (problem, the value as it is shown).

    problem: names the parameter and what it may be; no part of a value, so that a log may hold it.
    """

    def __init__(self, problem: str, got: str | None = None) -> None:
        super().__init__(problem, got)
        self.problem, self.got = problem, got

    def __str__(self) -> str:
        return self.problem if self.got is None else f"{self.problem}, got {self.got}"


class InvalidPrompt(InvalidRequest):
    """Raised when a prompt is empty, of a wrong type, or holds a token id outside the vocabulary."""


class UnsupportedTask(InvalidRequest):
    """Raised for a request that the checkpoint has no part for: an LM head to generate and to score, a
    pooling configuration to embed."""


class PromptTooLong(InvalidRequest):
    """Raised when a prompt leaves no room for one new token in the model's length or the KV pool."""


class DuplicateRequest(InvalidRequest):
    """Raised when a request id is added while a request of that id is unfinished."""


class EngineClosed(EngineError):
    """Raised by every call on an engine after `close()`."""


class EngineBusy(EngineError):
    """Raised by `generate()` and `loglikelihood()` when requests added with `add()` are unfinished.

    They would swallow theirs.
    """


class StepFailed(EngineError):
    """Raised by `step()` when no single sequence is to blame; the original error is its `__cause__`.

    Memory ran out, the device is lost, or steps go on raising whatever is in them. No block leaks and no
    half-computed block can be hit: every running sequence is waiting again and recomputes. The caller may
    call `step()` again, abort some requests, or stop.
    """


class SequenceFailed(EngineError):
    """Never raised: the `error` of a completion whose request made a step raise: (what it raised)."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause

    def __str__(self) -> str:
        return (
            f"the engine cannot go on with this request, and can with others: {type(self.cause).__name__}: "
            f"{str(self.cause)[:200]}; change its prompt or its sampling values, and report the error"
        )


class ScoringFailed(EngineError):
    """Raised by `loglikelihood()` for a pair that the engine cannot go on with: (its place, the reason)."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(place, reason)
        self.place, self.reason = place, reason

    def __str__(self) -> str:
        return f"pair {self.place} has no log-likelihood: {self.reason}"


class NoToken(EngineError):
    """Raised for a sequence whose logits are NaN or infinite, or whose every token is banned so early."""


class GrammarFailed(EngineError):
    """Raised for a sequence whose structured_outputs cannot be followed further: (the reason)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"its structured_outputs cannot be followed further: {self.reason}"


class RankFailed(EngineError):
    """Raised when a rank of a tensor-parallel engine died, raised, or no longer answers.

    All its ranks have ended by then. Every later step raises it again: close the engine, make a new one.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank, self.reason = rank, reason

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.reason}; its engine is down, close it and make a new one"


class CollectiveFailed(EngineError):
    """Raised in a rank whose sum or gather broke off, most often because another rank died in it."""


class OutOfBlocks(EngineError):
    """Raised when a block is taken from an empty pool: the scheduler must look before it takes."""


class BlockAccountingError(EngineError):
    """Raised by `BlockManager.check_accounting()` with the counts that disagree."""
