"""Samplers here, on the cases of `scheduler_cases`, against what diffusers gave."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxdit.schedulers import advance, initial_state, scheduler_from_config
from tests.parity.scheduler_cases import SchedulerCase, draw_noise

__all__ = ["SCHEDULER_BOUNDS", "scheduler_errors"]

# Of times and noise levels, within [0, 1], and of rows relative to the largest. The reference makes its tables in
# float32: of levels, 1,000 factors multiplied up are 2.1e-6 off there, of flow times two roundings.
SCHEDULER_BOUNDS = {"time": 2e-7, "levels": 2.5e-6, "rows": 1e-5}

# The case's sequence is the second of two, and its rows lie apart.
_IDS = np.array([2, 0, 2, 1, 2], np.int32)
_MINE = np.flatnonzero(_IDS == 2)


@jax.jit
def _evaluate(state, time, coefficients):
    prediction = jnp.tanh(state.rows) * (1 + time[_IDS - 1][:, None]) / 2
    return advance(state, prediction, coefficients, jnp.asarray(_IDS))


def scheduler_errors(case: SchedulerCase, reference: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest errors: of times and noise levels (absolute, both are within [0, 1]), and of rows, relative."""
    scheduler = scheduler_from_config(case.config, even_sigmas=case.even_sigmas)
    tokens = np.array([64, case.num_tokens], np.int32)
    table = scheduler.table(case.num_steps, tokens)
    noise = np.ones((len(_IDS), 4), np.float32)
    noise[_MINE] = draw_noise()
    state, trajectory = initial_state(jnp.asarray(noise)), []
    for time, coefficients in zip(table.time, table.coefficients, strict=True):
        state = _evaluate(state, time, coefficients)
        trajectory.append(np.asarray(state.rows)[_MINE])
    scale = np.abs(reference["rows"]).max(axis=(1, 2), keepdims=True)
    return {
        "time": float(np.abs(table.time[:, 1] - reference["time"]).max()),
        "levels": _level_error(scheduler.times.levels(case.num_steps, tokens), reference),
        "rows": float((np.abs(np.stack(trajectory) - reference["rows"]) / scale).max()),
    }


def _level_error(levels, reference: dict[str, np.ndarray]) -> float:
    """Of deviations (flows) or signal and deviation (diffusions) at every level."""
    signal, deviation = levels.signal[:, 1], levels.deviation[:, 1]
    if "alphas_cumprod" in reference:
        alphas = reference["alphas_cumprod"].astype(np.float64)
        return _largest(signal - alphas**0.5, deviation - (1 - alphas) ** 0.5)
    sigmas = reference["sigmas"].astype(np.float64)
    if len(sigmas) == 2 * len(signal):  # Heun's are there twice but for the ends
        sigmas = np.append(sigmas[:1], sigmas[1::2])
    ours = np.append(deviation, levels.next_deviation[-1, 1])
    if np.allclose(signal + deviation, 1):
        return _largest(ours - sigmas)
    signals = np.append(signal, levels.next_signal[-1, 1])
    theirs = 1 / np.sqrt(1 + sigmas**2)
    return _largest(signals - theirs, ours - sigmas * theirs)


def _largest(*differences: np.ndarray) -> float:
    return float(max(np.abs(x).max() for x in differences))
