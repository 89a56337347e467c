"""Samplers on packed rows: Euler and Heun for flows, DDIM for noise prediction, classifier-free guidance.

A sampler is given `denoise(rows, time) -> prediction`, times per sequence, and the segment ids that tie rows
to sequences. Each is one `lax.scan` with one copy of the model in it, and works under jit and in shard_map.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._schedules import DiffusionSchedule
from .models import rows_of_sequences

__all__ = ["Denoise", "classifier_free_guidance", "ddim_sample", "euler_sample", "heun_sample"]

Denoise = Callable[[Any, Any], Any]
"""`denoise(rows (n, c) float32, time (S,) float32) -> prediction (n, c)`."""


def classifier_free_guidance(conditional: Denoise, unconditional: Denoise, scale: float) -> Denoise:
    """Guides by unconditional + scale * (conditional - unconditional).

    Two functions rather than one doubled batch: the unconditional branch has no caption, so its rows, plan
    and attention differ. With scale 1 the unconditional branch is not run at all.

    Args:
        conditional: denoises with the condition.
        unconditional: denoises the same rows without.
        scale: 1 for none, more for stronger.

    Returns:
        The guided function.

    Reference: Ho & Salimans, arXiv 2207.12598.
    """
    if scale == 1:
        return conditional

    def guided(rows: Array, time: Array) -> Array:
        without = unconditional(rows, time).astype(jnp.float32)
        return without + scale * (conditional(rows, time).astype(jnp.float32) - without)

    return guided


def _check_sigmas(name: str, sigmas: Array) -> None:
    if sigmas.shape[0] < 2:
        raise ValueError(
            f"{name}: sigmas need at least two times, start and end; got sigmas of shape {sigmas.shape}. "
            "Make them with flow_sigmas."
        )


def _rows(per_sequence: Float[Array, " s"], segment_ids: Int[Array, " n"]) -> Float[Array, "n 1"]:
    return rows_of_sequences(per_sequence[:, None], segment_ids)


def euler_sample(
    denoise: Denoise,
    noise: Float[Array, "n c"],
    sigmas: Float[Array, "times s"],
    segment_ids: Int[Array, " n"],
) -> Float[Array, "n c"]:
    """Integrates dx/dt = velocity along `sigmas` by Euler steps; first order, one evaluation a step.

    Args:
        denoise: predicts the velocity, noise - data.
        noise: rows at time sigmas[0].
        sigmas: times, falling down each sequence's column, see `flow_sigmas`.
        segment_ids: sequence of each row, 0 = padding; padding rows stay as they are.

    Returns:
        Float32 rows at time sigmas[-1].

    Raises:
        ValueError: if there is no step to take.
    """
    _check_sigmas("euler_sample", sigmas)

    def step(x: Array, times: tuple[Array, Array]) -> tuple[Array, None]:
        now, then = times
        return x + _rows(then - now, segment_ids) * denoise(x, now).astype(jnp.float32), None

    return jax.lax.scan(step, noise.astype(jnp.float32), (sigmas[:-1], sigmas[1:]))[0]


def heun_sample(
    denoise: Denoise,
    noise: Float[Array, "n c"],
    sigmas: Float[Array, "times s"],
    segment_ids: Int[Array, " n"],
) -> Float[Array, "n c"]:
    """Integrates dx/dt = velocity along `sigmas` by Heun steps; second order, two evaluations a step.

    The last step is an Euler step: the model is not asked at time 0, which training never shows it. Predictor
    and corrector alternate in one scan, so the program holds one copy of the model.

    Args:
        denoise: predicts the velocity, noise - data.
        noise: rows at time sigmas[0].
        sigmas: times, falling down each sequence's column, see `flow_sigmas`.
        segment_ids: sequence of each row, 0 = padding; padding rows stay as they are.

    Returns:
        Float32 rows at time sigmas[-1].

    Raises:
        ValueError: if there is no step to take.

    Reference: Karras et al., arXiv 2206.00364, algorithm 1, on flow time.
    """
    _check_sigmas("heun_sample", sigmas)

    # Evaluation 2i predicts: x_{i+1} = x_i + h v. Evaluation 2i + 1 corrects: x_{i+1} = x_i + h (v + v') / 2.
    def evaluate(state: Any, inputs: Any) -> tuple[Any, None]:
        x, start, slope = state
        time, change, is_corrector = inputs
        velocity = denoise(x, time).astype(jnp.float32)
        start = jnp.where(is_corrector, start, x)
        mean = jnp.where(is_corrector, (slope + velocity) / 2, velocity)
        return (start + _rows(change, segment_ids) * mean, start, velocity), None

    changes = sigmas[1:] - sigmas[:-1]
    evaluations = (
        jnp.concatenate([sigmas[:1], jnp.repeat(sigmas[1:-1], 2, axis=0)]),
        jnp.repeat(changes, 2, axis=0)[:-1],
        jnp.arange(2 * changes.shape[0] - 1) % 2 == 1,
    )
    x = noise.astype(jnp.float32)
    return jax.lax.scan(evaluate, (x, x, jnp.zeros_like(x)), evaluations)[0][0]


def ddim_sample(
    denoise: Denoise,
    noise: Float[Array, "n c"],
    steps: Int[np.ndarray, " k"],
    *,
    schedule: DiffusionSchedule,
    num_sequences: int,
) -> Float[Array, "n c"]:
    """Samples a noise-predicting model deterministically (eta 0) along a subset of its steps.

    Args:
        denoise: predicts the noise; a DiT's variance is cut off by `split_learned_sigma`.
        noise: standard normal rows.
        steps: falling steps to visit, see `spaced_steps`.
        schedule: the diffusion the model was trained on.
        num_sequences: S, the length of the time vector that `denoise` is given.

    Returns:
        Float32 rows of data.

    Raises:
        ValueError: if the steps do not fall or are not the schedule's.

    Reference: Song et al., arXiv 2010.02502, equation 12 with sigma 0.
    """
    steps = np.asarray(steps)
    if len(steps) == 0 or np.any(np.diff(steps) >= 0) or steps[0] >= schedule.num_steps or steps[-1] < 0:
        raise ValueError(
            f"ddim_sample: steps must fall within 0 .. {schedule.num_steps - 1}; got steps of shape "
            f"{steps.shape}. Make them with spaced_steps."
        )
    after = schedule.alphas_cumprod[steps]
    before = np.append(after[1:], 1.0)

    def step(x: Array, inputs: Any) -> tuple[Array, None]:
        time, signal, deviation, next_signal, next_deviation = inputs
        predicted = denoise(x, jnp.full((num_sequences,), time)).astype(jnp.float32)
        clean = (x - deviation * predicted) / signal
        return next_signal * clean + next_deviation * predicted, None

    tables = (steps / schedule.num_steps, after**0.5, (1 - after) ** 0.5, before**0.5, (1 - before) ** 0.5)
    inputs = tuple(jnp.asarray(table, jnp.float32) for table in tables)
    return jax.lax.scan(step, noise.astype(jnp.float32), inputs)[0]
