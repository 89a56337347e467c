"""The reference: diffusers' schedulers, step by step. Needs the parity environment (`make parity`)."""

import numpy as np
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
)
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from tests.parity.scheduler_cases import SchedulerCase, draw_noise

__all__ = ["run_reference_scheduler"]

_CLASSES = {
    kind.__name__: kind
    for kind in (
        DDIMScheduler,
        DPMSolverMultistepScheduler,
        FlowMatchEulerDiscreteScheduler,
        FlowMatchHeunDiscreteScheduler,
    )
}


def run_reference_scheduler(case: SchedulerCase) -> dict[str, np.ndarray]:
    """The model's times and the noise levels of every evaluation, and the rows after each, (evaluations, ...).

    The model is tanh(rows) * (1 + time) / 2.
    """
    scheduler = _CLASSES[case.config["_class_name"]].from_config(case.config)
    options = {}
    if case.even_sigmas:
        options["sigmas"] = np.linspace(1.0, 1 / case.num_steps, case.num_steps)
    if case.config.get("use_dynamic_shifting"):
        options["mu"] = calculate_shift(
            case.num_tokens,
            *(case.config[f"{end}_image_seq_len"] for end in ("base", "max")),
            *(case.config[f"{end}_shift"] for end in ("base", "max")),
        )
    scheduler.set_timesteps(case.num_steps, **options)
    rows = torch.from_numpy(draw_noise())
    trajectory = []
    for timestep in scheduler.timesteps:
        time = timestep.to(torch.float32) / 1000
        rows = scheduler.step(torch.tanh(rows) * (1 + time) / 2, timestep, rows, return_dict=False)[0]
        trajectory.append(rows.numpy().copy())
    found = {
        "time": (scheduler.timesteps.to(torch.float64) / 1000).numpy().astype(np.float32),
        "rows": np.stack(trajectory),
    }
    if hasattr(scheduler, "sigmas"):
        return found | {"sigmas": scheduler.sigmas.numpy()}
    return found | {"alphas_cumprod": scheduler.alphas_cumprod[scheduler.timesteps].numpy()}
