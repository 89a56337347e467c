"""Sampling: schedulers (`jaxdit.schedulers`) and step caching."""

from ..schedulers import DiffusionTimes as DiffusionTimes
from ..schedulers import DPMSolver as DPMSolver
from ..schedulers import FlowTimes as FlowTimes
from ..schedulers import KarrasTimes as KarrasTimes
from ..schedulers import SamplerState as SamplerState
from ..schedulers import SamplingTable as SamplingTable
from ..schedulers import Scheduler as Scheduler
from ..schedulers import advance as advance
from ..schedulers import classifier_free_guidance as classifier_free_guidance
from ..schedulers import euler as euler
from ..schedulers import heun as heun
from ..schedulers import initial_state as initial_state
from ..schedulers import integrate as integrate
from ..schedulers import scheduler_from_config as scheduler_from_config
from ._step_cache import CacheError as CacheError
from ._step_cache import CacheState as CacheState
from ._step_cache import StagedModel as StagedModel
from ._step_cache import StepCache as StepCache
from ._step_cache import cache_error as cache_error
from ._step_cache import cached_call as cached_call
from ._step_cache import initial_cache as initial_cache

__all__ = [
    "CacheError",
    "CacheState",
    "DPMSolver",
    "DiffusionTimes",
    "FlowTimes",
    "KarrasTimes",
    "SamplerState",
    "SamplingTable",
    "Scheduler",
    "StagedModel",
    "StepCache",
    "advance",
    "cache_error",
    "cached_call",
    "classifier_free_guidance",
    "euler",
    "heun",
    "initial_cache",
    "initial_state",
    "integrate",
    "scheduler_from_config",
]
