"""A paged-KV continuous-batching engine for decoder language models.

    from engine import Engine, EngineConfig, SamplingParams

    with Engine(EngineConfig(model="path-or-hub-id")) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=64, temperature=0.0))

Importing this package, its configuration, parameters, results and errors loads no torch; the first use of
`Engine` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.checkpoint.fingerprint import ModelIdentity
from engine.errors import (
    AttentionRefused,
    ConfigError,
    DamagedWeights,
    DuplicateRequest,
    EngineBusy,
    EngineClosed,
    EngineError,
    GrammarFailed,
    InvalidPrompt,
    InvalidRequest,
    InvalidSampling,
    MissingWeights,
    ModelNotFound,
    NotDeterministic,
    NoToken,
    OutOfBlocks,
    PromptTooLong,
    RankFailed,
    ScoringFailed,
    SequenceFailed,
    StepFailed,
    UnsupportedModel,
    UnsupportedTask,
    WeightMismatch,
)
from engine.models.served import model_table
from engine.run.check_up import check_up
from engine.run.config import EngineConfig, model_identity
from engine.run.observation import Observation
from engine.sampling.request_kinds import PoolingParams, RequestParams, ScoringParams, request_params
from engine.sampling.sampling_params import SamplingParams
from engine.sampling.structured_params import StructuredOutputsParams
from engine.schedule.outputs import Completion, EngineStats, LogLikelihood, Logprob, RequestProgress
from engine.schedule.prepared_prompt import PreparedPrompt

if TYPE_CHECKING:
    from engine.engine import Engine

__all__ = [
    "AttentionRefused",
    "Completion",
    "ConfigError",
    "DamagedWeights",
    "DuplicateRequest",
    "Engine",
    "EngineBusy",
    "EngineClosed",
    "EngineConfig",
    "EngineError",
    "EngineStats",
    "GrammarFailed",
    "InvalidPrompt",
    "InvalidRequest",
    "InvalidSampling",
    "LogLikelihood",
    "Logprob",
    "MissingWeights",
    "ModelIdentity",
    "ModelNotFound",
    "NoToken",
    "NotDeterministic",
    "Observation",
    "OutOfBlocks",
    "PoolingParams",
    "PreparedPrompt",
    "PromptTooLong",
    "RankFailed",
    "RequestParams",
    "RequestProgress",
    "SamplingParams",
    "ScoringFailed",
    "ScoringParams",
    "SequenceFailed",
    "StepFailed",
    "StructuredOutputsParams",
    "UnsupportedModel",
    "UnsupportedTask",
    "WeightMismatch",
    "check_up",
    "model_identity",
    "model_table",
    "request_params",
]


def __getattr__(name: str) -> object:
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
