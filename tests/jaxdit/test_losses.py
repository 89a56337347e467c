"""Losses as sums over packed rows, against loops over sequences in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdit import (
    DiffusionSchedule,
    ResolutionShift,
    SquareRootShift,
    ddpm_loss,
    ddpm_noised,
    diffusion_steps,
    flow_matching_loss,
    flow_noised,
    flow_velocity,
    linear_schedule,
    logit_normal_time,
    shift_time,
    split_learned_sigma,
)

TOLERANCE = 1e-5
CHANNELS, PIXELS = 3, 4
C = CHANNELS * PIXELS
IDS = np.array([2, 2, 0, 1, 3, 2, 0, 3], np.int32)
WEIGHTS = np.array([1.0, 0.5, 2.0], np.float32)


def arrays(*sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=size).astype(np.float32) for size in sizes]


def poisoned(x):
    return jnp.asarray(np.where(IDS[:, None] > 0, x, np.nan))


def test_flow_loss_is_the_weighted_sum_and_padding_does_not_count():
    clean, noise, prediction = arrays(*[(8, C)] * 3)
    row_weights = np.linspace(0.5, 2, 8).astype(np.float32)
    expected, weight = np.zeros(3), 0.0
    for i, s in enumerate(IDS):
        if s:
            w = float(WEIGHTS[s - 1]) * float(row_weights[i])
            error = prediction[i].astype(np.float64) - (noise[i].astype(np.float64) - clean[i])
            expected[s - 1] += w * np.sum(error**2)
            weight += w * C
    args = (
        poisoned(noise - clean),
        jnp.asarray(IDS),
        jnp.asarray(WEIGHTS),
        jnp.asarray(row_weights),
    )
    sums = jax.jit(flow_matching_loss)(jnp.asarray(prediction), *args)
    np.testing.assert_allclose(sums.total, expected.sum(), rtol=TOLERANCE)
    np.testing.assert_allclose(sums.weight, weight, rtol=TOLERANCE)
    np.testing.assert_allclose(sums.per_sequence, expected, rtol=TOLERANCE)
    grad = jax.jit(jax.grad(lambda p: flow_matching_loss(p, *args).total))(jnp.asarray(prediction))
    assert not np.any(np.asarray(grad)[IDS == 0])
    w_rows = np.where(IDS > 0, WEIGHTS[IDS - 1] * row_weights, 0)
    np.testing.assert_allclose(
        grad, 2 * w_rows[:, None] * (prediction - (noise - clean)), rtol=1e-4, atol=1e-5
    )


def test_flow_loss_in_parts_adds_up_to_the_whole():
    velocity, prediction = arrays(*[(8, C)] * 2)

    def sums(rows):
        parts = (jnp.asarray(x[rows]) for x in (prediction, velocity, IDS))
        return flow_matching_loss(*parts, jnp.asarray(WEIGHTS))

    whole, first, second = sums(slice(0, 8)), sums(slice(0, 3)), sums(slice(3, 8))
    for a, b, c in zip(whole, first, second, strict=True):
        np.testing.assert_allclose(a, b + c, rtol=TOLERANCE)


def test_loss_is_float32_for_bfloat16_predictions():
    velocity, prediction = (jnp.asarray(x) for x in arrays(*[(8, C)] * 2))
    sums = flow_matching_loss(
        prediction.astype(jnp.bfloat16), velocity, jnp.asarray(IDS), jnp.asarray(WEIGHTS)
    )
    assert {x.dtype for x in sums} == {jnp.dtype("float32")}


def test_flow_path_goes_from_data_to_noise():
    clean, noise = (jnp.asarray(x) for x in arrays((8, C), (8, C)))
    ids = jnp.asarray(IDS)
    time = np.array([0.0, 1.0, 0.25], np.float32)
    mixed = np.asarray(flow_noised(clean, noise, jnp.asarray(time), ids))
    np.testing.assert_array_equal(mixed[IDS == 1], clean[IDS == 1])
    np.testing.assert_array_equal(mixed[IDS == 2], noise[IDS == 2])
    np.testing.assert_allclose(mixed[IDS == 3], 0.75 * clean[IDS == 3] + 0.25 * noise[IDS == 3], rtol=1e-6)


class Original:
    """The published hybrid loss on one sequence in float64; steps of posterior and bound written out."""

    def __init__(self):
        self.beta = np.linspace(1e-4, 0.02, 1000)
        self.alpha_bar = np.cumprod(1 - self.beta)

    def posterior(self, k, clean, noised):
        before = self.alpha_bar[k - 1] if k else 1.0
        a = self.beta[k] * np.sqrt(before) / (1 - self.alpha_bar[k])
        b = (1 - before) * np.sqrt(1 - self.beta[k]) / (1 - self.alpha_bar[k])
        j = max(k, 1)  # log variance of step 0 is clipped to that of step 1
        variance = self.beta[j] * (1 - self.alpha_bar[j - 1]) / (1 - self.alpha_bar[j])
        return a * clean + b * noised, np.log(variance)

    def losses(self, k, clean, noise, eps, v):
        """(squared error, bound in bits) per element."""
        noised = np.sqrt(self.alpha_bar[k]) * clean + np.sqrt(1 - self.alpha_bar[k]) * noise
        mean, log_var = self.posterior(k, clean, noised)
        guess = (noised - np.sqrt(1 - self.alpha_bar[k]) * eps) / np.sqrt(self.alpha_bar[k])
        model_mean, _ = self.posterior(k, guess, noised)
        fraction = (v + 1) / 2
        model_log_var = fraction * np.log(self.beta[k]) + (1 - fraction) * log_var
        if k == 0:
            bits = -self.log_bin(clean, model_mean, np.exp(0.5 * model_log_var)) / np.log(2)
        else:
            ratio = np.exp(log_var - model_log_var)
            bits = 0.5 * (
                model_log_var - log_var + ratio - 1 + (mean - model_mean) ** 2 / np.exp(model_log_var)
            )
            bits = bits / np.log(2)
        return (noise - eps) ** 2, bits

    def log_bin(self, x, mean, std):
        def cdf(z):
            return 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))

        plus, minus = cdf((x + 1 / 255 - mean) / std), cdf((x - 1 / 255 - mean) / std)
        inside = np.log(np.maximum(plus - minus, 1e-12))
        low, high = np.log(np.maximum(plus, 1e-12)), np.log(np.maximum(1 - minus, 1e-12))
        return np.where(x < -0.999, low, np.where(x > 0.999, high, inside))


STEPS = np.array([500, 0, 999])


def ddpm_case():
    noise, prediction = arrays((8, C), (8, 2 * C))
    clean = np.clip(arrays((8, C), seed=1)[0], -1, 1)  # both open end bins occur
    near = noise.reshape(8, PIXELS, CHANNELS) + 0.1 * prediction.reshape(8, PIXELS, 2, CHANNELS)[:, :, 0]
    prediction.reshape(8, PIXELS, 2, CHANNELS)[:, :, 0] = near
    return clean, noise, prediction


def test_ddpm_loss_equals_the_published_one():
    clean, noise, prediction = ddpm_case()
    original, expected = Original(), np.zeros(3)
    halves = prediction.astype(np.float64).reshape(8, PIXELS, 2, CHANNELS)
    for i, s in enumerate(IDS):
        if s:
            eps, v = halves[i, :, 0].reshape(C), halves[i, :, 1].reshape(C)
            error, bits = original.losses(
                STEPS[s - 1], clean[i].astype(float), noise[i].astype(float), eps, v
            )
            expected[s - 1] += WEIGHTS[s - 1] * np.sum(error + bits)
    schedule, ids = linear_schedule(), jnp.asarray(IDS)
    step = jnp.asarray(STEPS, jnp.int32)

    @jax.jit
    def loss(prediction):
        rows = ddpm_noised(poisoned(clean), poisoned(noise), step, ids, schedule=schedule)
        return ddpm_loss(prediction, rows, ids, jnp.asarray(WEIGHTS), schedule=schedule, channels=CHANNELS)

    sums = loss(jnp.asarray(prediction))
    # The bound's mean is a difference of nearly equal terms in float32; 4e-6 measured.
    np.testing.assert_allclose(sums.per_sequence, expected, rtol=TOLERANCE)
    np.testing.assert_allclose(sums.weight, np.sum(WEIGHTS[IDS[IDS > 0] - 1]) * C)


def test_the_bound_trains_the_variance_only():
    clean, noise, prediction = (jnp.asarray(x) for x in ddpm_case())
    schedule, ids, step = linear_schedule(), jnp.asarray(IDS), jnp.asarray([500, 300, 999], jnp.int32)
    rows = ddpm_noised(clean, noise, step, ids, schedule=schedule)

    def loss(prediction, row_weights=None):
        return ddpm_loss(
            prediction, rows, ids, jnp.ones(3), row_weights, schedule=schedule, channels=CHANNELS
        ).total

    np.testing.assert_allclose(loss(prediction, jnp.full(8, 3.0)), 3 * loss(prediction), rtol=TOLERANCE)
    grad = split_learned_sigma(jax.jit(jax.grad(loss))(prediction), CHANNELS)
    eps = split_learned_sigma(prediction, CHANNELS).noise
    valid = IDS[:, None] > 0
    np.testing.assert_allclose(grad.noise, np.where(valid, 2 * (eps - noise), 0), rtol=1e-5, atol=1e-6)
    assert np.all(np.asarray(grad.variance)[IDS > 0] != 0)
    assert not np.any(np.asarray(grad.variance)[IDS == 0])


def test_prediction_is_cut_per_pixel():
    row = np.arange(12, dtype=np.float32)[None]
    cut = split_learned_sigma(jnp.asarray(row), 3)
    np.testing.assert_array_equal(cut.noise, [[0, 1, 2, 6, 7, 8]])
    np.testing.assert_array_equal(cut.variance, [[3, 4, 5, 9, 10, 11]])
    for channels in (0, 4, 5):
        with pytest.raises(
            ValueError, match=rf"2 \* channels values per pixel; got .*\(1, 12\), channels={channels}"
        ):
            split_learned_sigma(jnp.asarray(row), channels)


def test_linear_schedule_is_the_published_one():
    schedule = linear_schedule()
    assert isinstance(schedule, DiffusionSchedule)
    assert (schedule.num_steps, schedule.betas[0], schedule.betas[-1]) == (1000, 1e-4, 0.02)
    np.testing.assert_allclose(schedule.alphas_cumprod[-1], 4.0358e-5, rtol=1e-4)
    assert schedule.posterior_variance[0] == 0
    assert linear_schedule(250).betas[-1] == 0.08
    assert linear_schedule(21).betas.max() < 1
    with pytest.raises(ValueError, match=r"at least 21, .*; got num_steps=20"):
        linear_schedule(20)


def test_steps_cover_the_schedule_evenly():
    uniform = jnp.asarray((np.arange(5000) + 0.5) / 5000, jnp.float32)
    np.testing.assert_array_equal(np.bincount(diffusion_steps(uniform, 1000)), np.full(1000, 5))
    assert int(diffusion_steps(jnp.asarray([1 - 2.0**-24]), 1000)[0]) == 999


def test_logit_normal_times_have_the_logit_normal_distribution():
    uniform = jnp.asarray((np.arange(10_000) + 0.5) / 10_000, jnp.float32)
    times = np.asarray(logit_normal_time(uniform, mean=0.5, std=0.7), np.float64)
    logits = np.log(times / (1 - times))
    np.testing.assert_allclose([logits.mean(), logits.std()], [0.5, 0.7], rtol=2e-3)
    assert np.all(np.diff(times) > 0)
    with pytest.raises(ValueError, match="std must be positive; got std=0"):
        logit_normal_time(uniform, std=0.0)


def test_shift_is_the_published_formula_and_keeps_the_ends():
    time = np.linspace(0, 1, 11)
    for mu in (0.0, 0.5, 1.15):
        with np.errstate(divide="ignore"):
            expected = math.exp(mu) / (math.exp(mu) + 1 / time - 1)
        np.testing.assert_allclose(shift_time(jnp.asarray(time, jnp.float32), mu), expected, rtol=1e-6)
    a = 3.0
    constant = a * time / (1 + (a - 1) * time)
    np.testing.assert_allclose(shift_time(jnp.asarray(time, jnp.float32), math.log(a)), constant, rtol=1e-6)


def test_square_root_shift_keeps_the_noise_of_an_averaged_patch():
    shift = SquareRootShift(base_tokens=4, base_factor=3.0)
    factors = np.exp(shift.mu(jnp.asarray([4, 16, 1, 0])))
    np.testing.assert_allclose(factors, [3.0, 6.0, 1.5, 1.0], rtol=1e-6)
    # Noise over signal, t / (1 - t), is scaled by the factor at any time.
    time = shift_time(jnp.asarray([0.1, 0.5, 0.9]), shift.mu(jnp.full(3, 16)))
    np.testing.assert_allclose(time / (1 - time), 6.0 * np.array([1 / 9, 1, 9]), rtol=1e-5)
    with pytest.raises(ValueError, match=r"must be positive; got base_tokens=4, base_factor=0"):
        SquareRootShift(base_tokens=4, base_factor=0)


def test_velocity_of_a_prediction_of_the_data():
    rng = np.random.default_rng(0)
    clean, noise = (jnp.asarray(rng.normal(size=(6, 3)), jnp.float32) for _ in range(2))
    ids, time = jnp.asarray([1, 2, 0, 2, 3, 0]), jnp.asarray([0.5, 1.0, 0.01])
    noised = flow_noised(clean, noise, time, ids)
    real = np.flatnonzero(ids)
    velocity = np.asarray(flow_velocity(clean, noised, time, ids))
    np.testing.assert_allclose(velocity[real], (noise - clean)[real], rtol=1e-4, atol=1e-4)
    bounded = np.asarray(flow_velocity(clean, noised, time, ids, least_time=0.05))
    np.testing.assert_allclose(bounded[4], (noised - clean)[4] / 0.05, rtol=1e-5)
    np.testing.assert_array_equal(bounded[:4], velocity[:4])
    assert np.isfinite(velocity).all()


def test_resolution_shift_is_flux_line():
    # From diffusers' FLUX.1 pipeline, calculate_shift(n, 256, 4096, 0.5, 1.15).
    expected = [0.5, 0.63, 1.15, 1.9801041666666666]
    np.testing.assert_allclose(
        ResolutionShift().mu(jnp.asarray([256, 1024, 4096, 9000])), expected, rtol=1e-6
    )
    with pytest.raises(ValueError, match="must differ; got base_tokens=256, max_tokens=256"):
        ResolutionShift(max_tokens=256)
