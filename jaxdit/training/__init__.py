"""The training step: balanced, packed, with parameters replicated or fully sharded."""

from .._schedules import TimeShift as TimeShift
from .._sharding import STACKS as STACKS
from .._sharding import bytes_per_device as bytes_per_device
from .._sharding import merged as merged
from .._sharding import module_params as module_params
from .._sharding import param_shardings as param_shardings
from .._sharding import param_specs as param_specs
from .._sharding import shard_axes as shard_axes
from ._objectives import Context as Context
from ._objectives import DiffusionLoss as DiffusionLoss
from ._objectives import FlowMatching as FlowMatching
from ._objectives import Objective as Objective
from ._objectives import SamplerSettings as SamplerSettings
from ._objectives import TextToImage as TextToImage
from ._rows import HomeRows as HomeRows
from ._rows import TokenRows as TokenRows
from ._step import DeviceModel as DeviceModel
from ._step import StepInputs as StepInputs
from ._step import StepMetrics as StepMetrics
from ._step import TrainProgram as TrainProgram
from ._step import TrainState as TrainState
from ._step import input_specs as input_specs
from ._step import make_eval_step as make_eval_step
from ._step import make_train_step as make_train_step

__all__ = [
    "STACKS",
    "Context",
    "DeviceModel",
    "DiffusionLoss",
    "FlowMatching",
    "HomeRows",
    "Objective",
    "SamplerSettings",
    "StepInputs",
    "StepMetrics",
    "TextToImage",
    "TimeShift",
    "TokenRows",
    "TrainProgram",
    "TrainState",
    "bytes_per_device",
    "input_specs",
    "make_eval_step",
    "make_train_step",
    "merged",
    "module_params",
    "param_shardings",
    "param_specs",
    "shard_axes",
]
