"""Diffusion transformers for mixed data: losses, times, noise, and packages for all else."""

from ._hosts import on_host as on_host
from ._losses import LossSums as LossSums
from ._losses import NoisedRows as NoisedRows
from ._losses import ddpm_loss as ddpm_loss
from ._losses import ddpm_noised as ddpm_noised
from ._losses import flow_matching_loss as flow_matching_loss
from ._losses import flow_noised as flow_noised
from ._losses import flow_velocity as flow_velocity
from ._losses import split_learned_sigma as split_learned_sigma
from ._random import sequence_times as sequence_times
from ._random import token_noise as token_noise
from ._schedules import DiffusionSchedule as DiffusionSchedule
from ._schedules import ResolutionShift as ResolutionShift
from ._schedules import SquareRootShift as SquareRootShift
from ._schedules import TimeShift as TimeShift
from ._schedules import diffusion_schedule as diffusion_schedule
from ._schedules import diffusion_steps as diffusion_steps
from ._schedules import linear_schedule as linear_schedule
from ._schedules import logit_normal_time as logit_normal_time
from ._schedules import shift_time as shift_time

__all__ = [
    "DiffusionSchedule",
    "LossSums",
    "NoisedRows",
    "ResolutionShift",
    "SquareRootShift",
    "TimeShift",
    "ddpm_loss",
    "ddpm_noised",
    "diffusion_schedule",
    "diffusion_steps",
    "flow_matching_loss",
    "flow_noised",
    "flow_velocity",
    "linear_schedule",
    "logit_normal_time",
    "on_host",
    "sequence_times",
    "shift_time",
    "split_learned_sigma",
    "token_noise",
]
