"""Samplers' schedules and steps: noise levels, methods, and one update that serves them all."""

from ._config import scheduler_from_config as scheduler_from_config
from ._methods import PREDICTIONS as PREDICTIONS
from ._methods import DPMSolver as DPMSolver
from ._methods import LinearForm as LinearForm
from ._methods import Method as Method
from ._methods import SamplingTable as SamplingTable
from ._methods import euler as euler
from ._methods import heun as heun
from ._scheduler import Denoise as Denoise
from ._scheduler import SamplerState as SamplerState
from ._scheduler import Scheduler as Scheduler
from ._scheduler import advance as advance
from ._scheduler import classifier_free_guidance as classifier_free_guidance
from ._scheduler import initial_state as initial_state
from ._scheduler import integrate as integrate
from ._times import DiffusionTimes as DiffusionTimes
from ._times import FlowTimes as FlowTimes
from ._times import KarrasTimes as KarrasTimes
from ._times import NoiseLevels as NoiseLevels
from ._times import NoiseTimes as NoiseTimes
from ._times import Spacing as Spacing
from ._times import even_steps as even_steps
from ._times import leading_steps as leading_steps
from ._times import trailing_steps as trailing_steps
from ._times import without_last as without_last

__all__ = [
    "PREDICTIONS",
    "DPMSolver",
    "Denoise",
    "DiffusionTimes",
    "FlowTimes",
    "KarrasTimes",
    "LinearForm",
    "Method",
    "NoiseLevels",
    "NoiseTimes",
    "SamplerState",
    "SamplingTable",
    "Scheduler",
    "Spacing",
    "advance",
    "classifier_free_guidance",
    "euler",
    "even_steps",
    "heun",
    "initial_state",
    "integrate",
    "leading_steps",
    "scheduler_from_config",
    "trailing_steps",
    "without_last",
]
