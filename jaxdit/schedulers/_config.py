"""Schedulers from diffusers' `scheduler_config.json`. What would be sampled otherwise than there is refused by name."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from .._schedules import DiffusionSchedule, ResolutionShift, TimeShift, diffusion_schedule, shift_time
from ._methods import DPMSolver, Method, euler, heun
from ._scheduler import Scheduler
from ._times import (
    DiffusionTimes,
    FlowTimes,
    KarrasTimes,
    NoiseTimes,
    Spacing,
    even_steps,
    leading_steps,
    trailing_steps,
    without_last,
)

__all__ = ["scheduler_from_config"]

_SPACINGS: Mapping[str, Spacing] = MappingProxyType(
    {"linspace": even_steps, "leading": leading_steps, "trailing": trailing_steps}
)
_MULTISTEP_SPACINGS: Mapping[str, Spacing] = MappingProxyType(
    {
        "linspace": without_last(even_steps),
        "leading": without_last(leading_steps),
        "trailing": trailing_steps,
    }
)
# Of other schedulers, left in published configs.
_STRAY = frozenset({"skip_prk_steps"})
_ANY = None


class _Options:
    """A config whose options are checked as they are read.

    Args:
        config: as parsed.
        known: for every option of the class diffusers' default, and the values supported here (`_ANY` for all).
    """

    def __init__(self, config: Mapping[str, Any], known: Mapping[str, tuple[Any, Any]]) -> None:
        self._name = config["_class_name"]
        self._values = {name: config.get(name, default) for name, (default, _) in known.items()}
        for name, (_, supported) in known.items():
            if supported is not _ANY and self._values[name] not in supported:
                raise NotImplementedError(
                    f"scheduler_from_config: {self._name}'s {name} must be one of {', '.join(map(repr, supported))};"
                    f" got {name}={self._values[name]!r}. Other values are not supported yet."
                )
        for name, value in config.items():
            # An unknown option that is off changes nothing.
            if name.startswith("_") or name in known or name in _STRAY or not value:
                continue
            raise NotImplementedError(
                f"scheduler_from_config: {self._name} is known with {', '.join(sorted(known))}; got also"
                f" {name}={value!r:.40}. Remove it if it does not matter."
            )

    def __getattr__(self, name: str) -> Any:
        return self._values[name]


_OFF = (False, (False, None))
_EULER_OPTIONS = MappingProxyType(
    {
        "num_train_timesteps": (1000, _ANY),
        "shift": (1.0, _ANY),
        "use_dynamic_shifting": (False, _ANY),
        "base_shift": (0.5, _ANY),
        "max_shift": (1.15, _ANY),
        "base_image_seq_len": (256, _ANY),
        "max_image_seq_len": (4096, _ANY),
        "shift_terminal": (None, _ANY),
        "time_shift_type": ("exponential", ("exponential", "linear")),
        "invert_sigmas": _OFF,
        "use_karras_sigmas": _OFF,
        "use_exponential_sigmas": _OFF,
        "use_beta_sigmas": _OFF,
        "stochastic_sampling": _OFF,
    }
)
_HEUN_OPTIONS = MappingProxyType({name: _EULER_OPTIONS[name] for name in ("num_train_timesteps", "shift")})
_DIFFUSION_OPTIONS = MappingProxyType(
    {
        "num_train_timesteps": (1000, _ANY),
        "beta_start": (0.0001, _ANY),
        "beta_end": (0.02, _ANY),
        "beta_schedule": ("linear", ("linear", "scaled_linear", "squaredcos_cap_v2")),
        "trained_betas": (None, _ANY),
        "steps_offset": (0, _ANY),
        "rescale_betas_zero_snr": (False, _ANY),
        "thresholding": _OFF,
        "dynamic_thresholding_ratio": (0.995, _ANY),
        "sample_max_value": (1.0, _ANY),
    }
)
_DDIM_OPTIONS = MappingProxyType(
    {
        **_DIFFUSION_OPTIONS,
        "clip_sample": (True, (False,)),
        "clip_sample_range": (1.0, _ANY),
        "set_alpha_to_one": (True, _ANY),
        "prediction_type": ("epsilon", ("epsilon", "sample", "v_prediction")),
        "timestep_spacing": ("leading", tuple(_SPACINGS)),
    }
)
_DPM_OPTIONS = MappingProxyType(
    {
        **_DIFFUSION_OPTIONS,
        "solver_order": (2, (1, 2)),
        "prediction_type": ("epsilon", ("epsilon", "sample", "v_prediction", "flow_prediction")),
        "algorithm_type": ("dpmsolver++", ("dpmsolver++",)),
        "solver_type": ("midpoint", ("midpoint",)),
        "lower_order_final": (True, _ANY),
        "euler_at_final": (False, _ANY),
        "use_karras_sigmas": (False, _ANY),
        "use_exponential_sigmas": _OFF,
        "use_beta_sigmas": _OFF,
        "use_lu_lambdas": _OFF,
        "use_flow_sigmas": (False, _ANY),
        "flow_shift": (1.0, _ANY),
        "final_sigmas_type": ("zero", ("zero", "sigma_min")),
        "lambda_min_clipped": (-math.inf, (-math.inf,)),
        "variance_type": (None, _ANY),
        "timestep_spacing": ("linspace", tuple(_MULTISTEP_SPACINGS)),
        "use_dynamic_shifting": _OFF,
        "time_shift_type": ("exponential", _ANY),
    }
)


def scheduler_from_config(config: Mapping[str, Any] | str | Path, *, even_sigmas: bool = False) -> Scheduler:
    """The scheduler that samples as diffusers does with a config.

    Supported: FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler, DDIMScheduler (eta 0) and
    DPMSolverMultistepScheduler (dpmsolver++ of order 1 or 2).

    Args:
        config: parsed, or a `scheduler_config.json` or its folder.
        even_sigmas: for FlowMatchEulerDiscreteScheduler, whether the pipeline gives it sigmas evenly from 1 to
            1 / num_steps, as those of FLUX.1 do; by default it has its own.

    Returns:
        The scheduler. A model with a learned variance is to be cut to what it predicts (`split_learned_sigma`).

    Raises:
        ValueError: for something else than a config.
        NotImplementedError: for another class, or an option or value that is not supported.
    """
    if not isinstance(config, Mapping):
        path = Path(config)
        path = path / "scheduler_config.json" if path.is_dir() else path
        config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, Mapping) or "_class_name" not in config:
        raise ValueError(
            "scheduler_from_config: a scheduler's config has a _class_name; got none. Give diffusers'"
            " scheduler/scheduler_config.json."
        )
    name = config["_class_name"]
    if name not in _READERS:
        raise NotImplementedError(
            f"scheduler_from_config: the scheduler must be one of {', '.join(_READERS)}; got _class_name={name!r}."
            " Build a Scheduler from times and a method instead."
        )
    if even_sigmas and name != "FlowMatchEulerDiscreteScheduler":
        raise ValueError(
            f"scheduler_from_config: even_sigmas is for FlowMatchEulerDiscreteScheduler; got it with {name}. Leave it"
            " out."
        )
    known, read = _READERS[name]
    return read(_Options(config, known), even_sigmas)


def _flow_euler(options: Any, even_sigmas: bool) -> Scheduler:
    least = 1 / options.num_train_timesteps
    shift: float | TimeShift = options.shift
    if options.use_dynamic_shifting:
        shift = ResolutionShift(
            base_tokens=options.base_image_seq_len,
            max_tokens=options.max_image_seq_len,
            base_mu=options.base_shift,
            max_mu=options.max_shift,
            of_factor=options.time_shift_type == "linear",
        )
    else:
        # The scheduler takes its least time from a table that is shifted already.
        least = _shifted(least, options.shift)
    last = None if even_sigmas else least
    return Scheduler(FlowTimes(shift=shift, last=last, terminal=options.shift_terminal or None))


def _flow_heun(options: Any, _: bool) -> Scheduler:
    least = _shifted(1 / options.num_train_timesteps, options.shift)
    return Scheduler(FlowTimes(shift=options.shift, last=least), heun)


def _shifted(time: float, shift: float) -> float:
    return float(shift_time(np.array([time]), math.log(shift))[0])


def _ddim(options: Any, _: bool) -> Scheduler:
    times = DiffusionTimes(
        schedule=diffusion_schedule(_betas(options)),
        spacing=_SPACINGS[options.timestep_spacing],
        offset=options.steps_offset if options.timestep_spacing == "leading" else 0,
        ends_clean=options.set_alpha_to_one,
        fixed_stride=True,
    )
    return Scheduler(times, euler, options.prediction_type)


def _dpm_solver(options: Any, _: bool) -> Scheduler:
    method: Method = euler
    if options.solver_order == 2:
        method = DPMSolver(options.lower_order_final, options.euler_at_final)
    if options.use_flow_sigmas:
        return Scheduler(_dpm_flow_times(options), method, _dpm_prediction(options))
    schedule = diffusion_schedule(_betas(options))
    if options.rescale_betas_zero_snr:
        # As there: the multistep formula needs some signal.
        schedule = DiffusionSchedule(schedule.betas, np.append(schedule.alphas_cumprod[:-1], 2.0**-24))
    ends_clean = options.final_sigmas_type == "zero"
    times: NoiseTimes = DiffusionTimes(
        schedule=schedule,
        spacing=_MULTISTEP_SPACINGS[options.timestep_spacing],
        offset=options.steps_offset if options.timestep_spacing == "leading" else 0,
        ends_clean=ends_clean,
    )
    if options.use_karras_sigmas:
        if options.beta_schedule == "squaredcos_cap_v2":
            raise NotImplementedError(
                "scheduler_from_config: use_karras_sigmas goes with beta_schedule 'linear' or 'scaled_linear'; got"
                " beta_schedule='squaredcos_cap_v2'. Turn it off."
            )
        times = KarrasTimes(schedule=schedule, ends_clean=ends_clean)
    return Scheduler(times, method, _dpm_prediction(options))


def _dpm_flow_times(options: Any) -> FlowTimes:
    if options.final_sigmas_type != "zero" or options.use_karras_sigmas:
        raise NotImplementedError(
            "scheduler_from_config: use_flow_sigmas goes with final_sigmas_type 'zero' and without use_karras_sigmas;"
            f" got final_sigmas_type={options.final_sigmas_type!r}, use_karras_sigmas={options.use_karras_sigmas}."
        )
    total = options.num_train_timesteps
    return FlowTimes(shift=options.flow_shift, first=1 - 1 / total, whole_steps=total)


def _dpm_prediction(options: Any) -> str:
    if options.prediction_type != "flow_prediction":
        return options.prediction_type
    if not options.use_flow_sigmas:
        raise NotImplementedError(
            "scheduler_from_config: prediction_type 'flow_prediction' needs use_flow_sigmas; got"
            f" use_flow_sigmas={options.use_flow_sigmas}. Set it."
        )
    return "velocity"


def _betas(options: Any) -> np.ndarray:
    total, start, end = options.num_train_timesteps, options.beta_start, options.beta_end
    if options.trained_betas is not None:
        betas = np.asarray(options.trained_betas, np.float64)
    elif options.beta_schedule == "linear":
        betas = np.linspace(start, end, total)
    elif options.beta_schedule == "scaled_linear":
        betas = np.linspace(start**0.5, end**0.5, total) ** 2
    else:
        left = np.cos((np.arange(total + 1) / total + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.minimum(1 - left[1:] / left[:-1], 0.999)
    return _without_last_signal(betas) if options.rescale_betas_zero_snr else betas


def _without_last_signal(betas: np.ndarray) -> np.ndarray:
    """Betas whose last step leaves no signal: Lin et al., arXiv 2305.08891, algorithm 1."""
    signal = np.sqrt(np.cumprod(1 - betas))
    alphas = ((signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])) ** 2
    return 1 - np.append(alphas[:1], alphas[1:] / alphas[:-1])


_READERS: Mapping[str, tuple[Mapping[str, tuple[Any, Any]], Callable[[Any, bool], Scheduler]]] = (
    MappingProxyType(
        {
            "FlowMatchEulerDiscreteScheduler": (_EULER_OPTIONS, _flow_euler),
            "FlowMatchHeunDiscreteScheduler": (_HEUN_OPTIONS, _flow_heun),
            "DDIMScheduler": (_DDIM_OPTIONS, _ddim),
            "DPMSolverMultistepScheduler": (_DPM_OPTIONS, _dpm_solver),
        }
    )
)
