"""Which samplers are compared with diffusers': configs of published models, and of every option that is supported."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["SCHEDULER_CASES", "SchedulerCase", "draw_noise"]


@dataclass(frozen=True, slots=True)
class SchedulerCase:
    """A scheduler's config and how it is used.

    Attributes:
        name: of the case.
        config: as `scheduler_config.json` has it.
        num_steps: steps to take.
        even_sigmas: whether the pipeline gives sigmas evenly from 1 to 1 / num_steps, as FLUX.1's.
        num_tokens: image tokens, for shifts by size.
    """

    name: str
    config: dict[str, Any] = field(hash=False)
    num_steps: int
    even_sigmas: bool = False
    num_tokens: int = 1024


def _config(name: str, **options: Any) -> dict[str, Any]:
    return {"_class_name": name, "_diffusers_version": "0.32.0", "num_train_timesteps": 1000, **options}


def _euler(**options: Any) -> dict[str, Any]:
    return _config("FlowMatchEulerDiscreteScheduler", **options)


def _ddim(**options: Any) -> dict[str, Any]:
    return _config("DDIMScheduler", **{"clip_sample": False, **options})


def _dpm(**options: Any) -> dict[str, Any]:
    return _config("DPMSolverMultistepScheduler", **options)


_FLUX = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
_DIT = {
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "trained_betas": None,
    "set_alpha_to_one": True,
    "steps_offset": 0,
    "prediction_type": "epsilon",
}
_PIXART = {
    "algorithm_type": "dpmsolver++",
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "dynamic_thresholding_ratio": 0.995,
    "euler_at_final": False,
    "lambda_min_clipped": float("-inf"),
    "lower_order_final": True,
    "prediction_type": "epsilon",
    "sample_max_value": 1.0,
    "solver_order": 2,
    "solver_type": "midpoint",
    "steps_offset": 0,
    "thresholding": False,
    "timestep_spacing": "linspace",
    "trained_betas": None,
    "use_karras_sigmas": False,
    "variance_type": None,
}
_SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
_ZERO_SNR = {
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
    "prediction_type": "v_prediction",
}
_FLOW_DPM = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}

SCHEDULER_CASES = (
    SchedulerCase("flux_dev", _euler(**_FLUX), 28, even_sigmas=True),
    SchedulerCase("flux_dev_large", _euler(**_FLUX), 5, even_sigmas=True, num_tokens=16384),
    SchedulerCase("flux_schnell", _euler(shift=1.0), 4, even_sigmas=True),
    SchedulerCase("flux_one_step", _euler(shift=1.0), 1, even_sigmas=True),
    SchedulerCase("sd3", _euler(shift=3.0), 28),
    SchedulerCase("sd3_dynamic", _euler(**_FLUX), 10),
    SchedulerCase("flow_linear", _euler(**_FLUX | {"time_shift_type": "linear"}), 10, even_sigmas=True),
    SchedulerCase("flow_terminal", _euler(**_FLUX, shift_terminal=0.1), 12, even_sigmas=True),
    SchedulerCase("heun", _config("FlowMatchHeunDiscreteScheduler", shift=3.0), 10),
    SchedulerCase("heun_one_step", _config("FlowMatchHeunDiscreteScheduler"), 1),
    SchedulerCase("dit", _ddim(**_DIT), 50),
    SchedulerCase("dit_uneven", _ddim(**_DIT), 28),
    SchedulerCase("ddim_offset", _ddim(**_SD, set_alpha_to_one=False, steps_offset=1), 20),
    SchedulerCase("ddim_trailing", _ddim(timestep_spacing="trailing"), 30),
    SchedulerCase("ddim_linspace", _ddim(timestep_spacing="linspace", prediction_type="sample"), 12),
    SchedulerCase("ddim_zero_snr", _ddim(**_SD, **_ZERO_SNR), 20),
    SchedulerCase(
        "ddim_cosine", _ddim(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction"), 20
    ),
    SchedulerCase("ddim_betas", _ddim(trained_betas=np.linspace(1e-4, 0.03, 1000).tolist()), 10),
    SchedulerCase("pixart", _dpm(**_PIXART), 20),
    SchedulerCase("pixart_few", _dpm(**_PIXART), 8),
    SchedulerCase("dpm_first_order", _dpm(solver_order=1), 10),
    SchedulerCase("dpm_second_order_end", _dpm(lower_order_final=False, final_sigmas_type="sigma_min"), 10),
    SchedulerCase("dpm_euler_at_final", _dpm(euler_at_final=True, final_sigmas_type="sigma_min"), 20),
    SchedulerCase("dpm_sigma_min", _dpm(final_sigmas_type="sigma_min"), 12),
    SchedulerCase("dpm_leading", _dpm(timestep_spacing="leading", steps_offset=1), 20),
    SchedulerCase("dpm_trailing", _dpm(timestep_spacing="trailing", prediction_type="sample"), 20),
    SchedulerCase("dpm_karras", _dpm(**_SD, use_karras_sigmas=True), 20),
    SchedulerCase("dpm_zero_snr", _dpm(**_SD, **_ZERO_SNR), 20),
    SchedulerCase("dpm_cosine", _dpm(beta_schedule="squaredcos_cap_v2"), 20),
    SchedulerCase("dpm_flow", _dpm(**_FLOW_DPM, flow_shift=3.0), 20),
    SchedulerCase("dpm_flow_few", _dpm(**_FLOW_DPM), 7),
)


def draw_noise() -> np.ndarray:
    """The rows that every case starts from, (rows, channels)."""
    return np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
