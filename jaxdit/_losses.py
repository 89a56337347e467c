"""Training losses on packed rows, as sums: the caller divides by the global sum of weights.

A mean per device would weigh devices alike although they hold different numbers of tokens. So every loss here
returns its weighted sum and the sum of its weights; the training step adds both over all devices and
micro-batches and divides once.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._schedules import DiffusionSchedule
from .models import rows_of_sequences, sums_of_sequences

__all__ = [
    "LossSums",
    "NoisedRows",
    "ddpm_loss",
    "ddpm_noised",
    "flow_matching_loss",
    "flow_noised",
    "flow_velocity",
    "split_learned_sigma",
]


class LossSums(NamedTuple):
    """Sums over the rows at hand, in float32 (per device inside shard_map).

    Attributes:
        total: weighted loss, summed over rows and channels.
        weight: weights, summed over rows and channels; global total / global weight is the mean loss.
        per_sequence: the part of `total` that each sequence contributes.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]
    per_sequence: Float[Array, " s"]


def _without_padding(x: Float[Array, "n c"], segment_ids: Int[Array, " n"]) -> Float[Array, "n c"]:
    """Float32 rows with zeros in padding: what lies there gets into neither loss nor gradient."""
    return jnp.where(segment_ids[:, None] > 0, x.astype(jnp.float32), 0.0)


def _weighted_sums(
    errors: Float[Array, "n c"],
    segment_ids: Int[Array, " n"],
    weights: Float[Array, " s"],
    row_weights: Float[Array, " n"] | None,
) -> LossSums:
    """Sums errors times the weight of their row; a padding row's error is finite and its weight 0."""
    weight_of_row = rows_of_sequences(weights.astype(jnp.float32)[:, None], segment_ids)[:, 0]
    if row_weights is not None:
        weight_of_row = weight_of_row * jnp.where(segment_ids > 0, row_weights.astype(jnp.float32), 0.0)
    loss_of_row = weight_of_row * jnp.sum(errors, axis=1)
    per_sequence = sums_of_sequences(loss_of_row[:, None], segment_ids, weights.shape[0])[:, 0]
    return LossSums(jnp.sum(loss_of_row), jnp.sum(weight_of_row) * errors.shape[1], per_sequence)


def _table_rows(
    table: np.ndarray, step: Int[Array, " s"], segment_ids: Int[Array, " n"]
) -> Float[Array, "n 1"]:
    """Value of a per-step table at the step of each row's sequence."""
    return rows_of_sequences(jnp.asarray(table, jnp.float32)[step][:, None], segment_ids)


def flow_noised(
    clean: Float[Array, "n c"],
    noise: Float[Array, "n c"],
    time: Float[Array, " s"],
    segment_ids: Int[Array, " n"],
) -> Float[Array, "n c"]:
    """Rows on the straight path from data (time 0) to noise (time 1): (1 - t) clean + t noise, in float32.

    Args:
        clean: data rows.
        noise: noise rows, see `token_noise`.
        time: time of each sequence.
        segment_ids: sequence of each row, 0 = padding.

    Returns:
        Input rows of the model.
    """
    time_rows = rows_of_sequences(time.astype(jnp.float32)[:, None], segment_ids)
    return (1 - time_rows) * clean.astype(jnp.float32) + time_rows * noise.astype(jnp.float32)


def flow_velocity(
    clean: Float[Array, "n c"],
    noised: Float[Array, "n c"],
    time: Float[Array, " s"],
    segment_ids: Int[Array, " n"],
    *,
    least_time: float = 0.0,
) -> Float[Array, "n c"]:
    """The velocity that a prediction of the clean rows stands for: (noised - clean) / time.

    Args:
        clean: rows that a model takes for the data behind `noised`.
        noised: the model's input, see `flow_noised`.
        time: time of each sequence.
        segment_ids: sequence of each row, 0 = padding.
        least_time: smaller times divide by this one. In training, where the true velocity is made in the same way, it
            bounds the weight of small times; a sampler, which never evaluates time 0, needs none.

    Returns:
        Velocities, float32; padding rows divide by 1.

    Reference: Li & He, arXiv 2511.13720, section 4.
    """
    time_rows = rows_of_sequences(jnp.maximum(time.astype(jnp.float32), least_time)[:, None], segment_ids)
    time_rows = jnp.where(segment_ids[:, None] > 0, time_rows, 1.0)
    return (noised.astype(jnp.float32) - clean.astype(jnp.float32)) / time_rows


def flow_matching_loss(
    prediction: Float[Array, "n c"],
    velocity: Float[Array, "n c"],
    segment_ids: Int[Array, " n"],
    weights: Float[Array, " s"],
    row_weights: Float[Array, " n"] | None = None,
) -> LossSums:
    """Squared error of the predicted velocity, weighted and summed.

    Args:
        prediction: the model's velocity for `flow_noised` rows.
        velocity: the true one, noise - clean; for a model that predicts the data, `flow_velocity` of the clean rows.
        segment_ids: sequence of each row, 0 = padding.
        weights: loss weight of each sequence; 0 for one that does not count.
        row_weights: loss weight of each row besides; None for 1.

    Returns:
        Sums; not normalised.

    Reference: Lipman et al., arXiv 2210.02747; Esser et al., arXiv 2403.03206, section 2.
    """
    prediction, velocity = (_without_padding(x, segment_ids) for x in (prediction, velocity))
    errors = jnp.square(prediction - velocity)
    return _weighted_sums(errors, segment_ids, weights, row_weights)


class NoisedRows(NamedTuple):
    """Rows of a discrete diffusion at the step of their sequence, with what they were made of."""

    clean: Float[Array, "n c"]
    noise: Float[Array, "n c"]
    noised: Float[Array, "n c"]
    step: Int[Array, " s"]


def ddpm_noised(
    clean: Float[Array, "n c"],
    noise: Float[Array, "n c"],
    step: Int[Array, " s"],
    segment_ids: Int[Array, " n"],
    *,
    schedule: DiffusionSchedule,
) -> NoisedRows:
    """Rows after `step` steps of the diffusion: sqrt(a) clean + sqrt(1 - a) noise, in float32.

    Args:
        clean: data rows.
        noise: noise rows, see `token_noise`.
        step: step of each sequence, see `diffusion_steps`; the model's time is step / schedule.num_steps.
        segment_ids: sequence of each row, 0 = padding.
        schedule: the diffusion.

    Returns:
        The rows; `noised` is the model's input.
    """
    clean, noise = clean.astype(jnp.float32), noise.astype(jnp.float32)
    signal = _table_rows(np.sqrt(schedule.alphas_cumprod), step, segment_ids)
    deviation = _table_rows(np.sqrt(1 - schedule.alphas_cumprod), step, segment_ids)
    return NoisedRows(clean, noise, signal * clean + deviation * noise, step)


class SigmaPrediction(NamedTuple):
    """A prediction with learned variance, cut in two."""

    noise: Float[Array, "n c"]
    variance: Float[Array, "n c"]


def split_learned_sigma(prediction: Float[Array, "n c2"], channels: int) -> SigmaPrediction:
    """Cuts rows that hold per pixel `channels` noise values and then as many variance values.

    Args:
        prediction: output of a DiT with `learn_sigma`.
        channels: channels of a pixel.

    Returns:
        Both halves, each in the layout of the input rows.

    Raises:
        ValueError: if a row is not made of such pixels.
    """
    if channels < 1 or prediction.shape[1] % (2 * channels):
        raise ValueError(
            "split_learned_sigma: a row must hold 2 * channels values per pixel; got prediction of shape "
            f"{prediction.shape}, channels={channels}. Pass the channels of the image, not of the patch."
        )
    pixels = prediction.reshape(prediction.shape[0], -1, 2, channels)
    shape = (prediction.shape[0], prediction.shape[1] // 2)
    return SigmaPrediction(pixels[:, :, 0].reshape(shape), pixels[:, :, 1].reshape(shape))


def ddpm_loss(
    prediction: Float[Array, "n c2"],
    rows: NoisedRows,
    segment_ids: Int[Array, " n"],
    weights: Float[Array, " s"],
    row_weights: Float[Array, " n"] | None = None,
    *,
    schedule: DiffusionSchedule,
    channels: int,
) -> LossSums:
    """Hybrid loss of a model that predicts noise and variance, weighted and summed.

    Squared error of the noise, plus T / 1000 times the variational bound's term of that step in bits. The
    variance is e^(f log beta + (1 - f) log beta~) with f = (v + 1) / 2. The bound trains the variance only:
    the mean in it has no gradient.

    Args:
        prediction: the model's output, see `split_learned_sigma`.
        rows: what the model was given, and what it was made of.
        segment_ids: sequence of each row, 0 = padding.
        weights: loss weight of each sequence.
        row_weights: loss weight of each row besides; None for 1.
        schedule: the diffusion.
        channels: channels of a pixel.

    Returns:
        Sums; not normalised.

    Raises:
        ValueError: if the prediction's rows do not hold noise and variance.

    Reference: Nichol & Dhariwal, arXiv 2102.09672, equations 13-16.
    """
    noise, variance = split_learned_sigma(_without_padding(prediction, segment_ids), channels)
    clean, added, noised = (_without_padding(x, segment_ids) for x in rows[:3])
    rows = NoisedRows(clean, added, noised, rows.step)
    bound = _bound_terms(jax.lax.stop_gradient(noise), variance, rows, segment_ids, schedule)
    errors = jnp.square(noise - rows.noise) + schedule.num_steps / 1000 * bound
    return _weighted_sums(errors, segment_ids, weights, row_weights)


def _bound_terms(
    noise: Array, variance: Array, rows: NoisedRows, segment_ids: Array, schedule: DiffusionSchedule
) -> Float[Array, "n c"]:
    """L_k of the bound per element, in bits: a KL of Gaussians, at step 0 the decoder's -log p."""

    def at_step(table: np.ndarray) -> Array:
        return _table_rows(table, rows.step, segment_ids)

    before, after = schedule.alphas_cumprod_before, schedule.alphas_cumprod
    # Variance 0 at step 0 has no logarithm; the original takes step 1's there.
    log_posterior = np.log(np.append(schedule.posterior_variance[1], schedule.posterior_variance[1:]))
    on_clean = at_step(schedule.betas * np.sqrt(before) / (1 - after))
    on_noised = at_step((1 - before) * np.sqrt(1 - schedule.betas) / (1 - after))
    clean = at_step(np.sqrt(1 / after)) * rows.noised - at_step(np.sqrt(1 / after - 1)) * noise
    true_mean = on_clean * rows.clean + on_noised * rows.noised
    mean = on_clean * clean + on_noised * rows.noised

    low, fraction = at_step(log_posterior), (variance + 1) / 2
    log_variance = fraction * at_step(np.log(schedule.betas)) + (1 - fraction) * low
    kl = log_variance - low + jnp.exp(low - log_variance) - 1
    kl = 0.5 * (kl + jnp.square(true_mean - mean) * jnp.exp(-log_variance))
    nll = -_log_likelihood_of_bin(rows.clean, mean, jnp.exp(-0.5 * log_variance))
    first = rows_of_sequences((rows.step == 0).astype(jnp.float32)[:, None], segment_ids) > 0
    return jnp.where(first, nll, kl) / math.log(2)


def _log_likelihood_of_bin(x: Array, mean: Array, inverse_std: Array) -> Array:
    """log of a Gaussian's mass on the 1/255-wide bin around x in [-1, 1], the end bins open."""

    def cdf(z: Array) -> Array:  # the original's tanh form of the normal distribution function
        return 0.5 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

    above, below = cdf(inverse_std * (x - mean + 1 / 255)), cdf(inverse_std * (x - mean - 1 / 255))
    mass = jnp.where(x < -0.999, above, jnp.where(x > 0.999, 1 - below, above - below))
    return jnp.log(jnp.maximum(mass, 1e-12))
