"""A paged-KV continuous-batching engine for decoder language models.

    from engine import Engine, EngineConfig, SamplingParams

    with Engine(EngineConfig(model="path-or-hub-id")) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=64, temperature=0.0))

Importing this package, its configuration, parameters, results and errors loads no torch; the first use of
`Engine` does.
"""

from typing import TYPE_CHECKING

from engine.checkpoint.adapter_folder import AdapterFolder as AdapterFolder
from engine.checkpoint.fingerprint import ModelIdentity as ModelIdentity
from engine.errors import *  # noqa: F403 - every name of it is public
from engine.models.served import model_table as model_table
from engine.run.check_up import check_up as check_up
from engine.run.config import EngineConfig as EngineConfig
from engine.run.config import model_identity as model_identity
from engine.run.describe import describe_model as describe_model
from engine.run.observation import Observation as Observation
from engine.sampling.request_kinds import ClassParams as ClassParams
from engine.sampling.request_kinds import PoolingParams as PoolingParams
from engine.sampling.request_kinds import RequestParams as RequestParams
from engine.sampling.request_kinds import ScoringParams as ScoringParams
from engine.sampling.request_kinds import request_params as request_params
from engine.sampling.sampling_params import SamplingParams as SamplingParams
from engine.sampling.structured_params import StructuredOutputsParams as StructuredOutputsParams
from engine.sampling.structured_params import json_schema_of as json_schema_of
from engine.schedule.outputs import Completion as Completion
from engine.schedule.outputs import EngineStats as EngineStats
from engine.schedule.outputs import LogLikelihood as LogLikelihood
from engine.schedule.outputs import Logprob as Logprob
from engine.schedule.outputs import PartialText as PartialText
from engine.schedule.outputs import RequestProgress as RequestProgress
from engine.schedule.prepared_prompt import PreparedPrompt as PreparedPrompt

if TYPE_CHECKING:
    from engine.engine import Engine as Engine


def __getattr__(name: str) -> object:
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
