"""Sampling on a mesh: one picture or clip on all devices, or many of any mixture of sizes at once."""

from ._backbone import Backbone as Backbone
from ._buckets import CanvasBuckets as CanvasBuckets
from ._buckets import SizeBuckets as SizeBuckets
from ._denoiser import Conditions as Conditions
from ._denoiser import Denoiser as Denoiser
from ._denoiser import DenoiserRows as DenoiserRows
from ._denoiser import LabelDenoiser as LabelDenoiser
from ._denoiser import TextDenoiser as TextDenoiser
from ._engine import CancelledError as CancelledError
from ._engine import Engine as Engine
from ._engine import Progress as Progress
from ._pipeline import Pipeline as Pipeline
from ._plan import SequenceChooser as SequenceChooser
from ._plan import fastest_plan as fastest_plan
from ._request import NonFiniteError as NonFiniteError
from ._request import Request as Request
from ._request import Sample as Sample
from ._request import check_request as check_request
from ._request import with_defaults as with_defaults
from ._step_cache import CacheError as CacheError
from ._step_cache import CacheState as CacheState
from ._step_cache import StagedModel as StagedModel
from ._step_cache import StepCache as StepCache
from ._step_cache import cache_error as cache_error
from ._step_cache import cached_call as cached_call
from ._step_cache import initial_cache as initial_cache
from ._weights import ShardedModule as ShardedModule

__all__ = [
    "Backbone",
    "CacheError",
    "CacheState",
    "CancelledError",
    "CanvasBuckets",
    "Conditions",
    "Denoiser",
    "DenoiserRows",
    "Engine",
    "LabelDenoiser",
    "NonFiniteError",
    "Pipeline",
    "Progress",
    "Request",
    "Sample",
    "SequenceChooser",
    "ShardedModule",
    "SizeBuckets",
    "StagedModel",
    "StepCache",
    "TextDenoiser",
    "cache_error",
    "cached_call",
    "check_request",
    "fastest_plan",
    "initial_cache",
    "with_defaults",
]
