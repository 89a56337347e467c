"""Samplers on a Gaussian, whose probability flow is known in closed form, and their time tables."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdit import (
    classifier_free_guidance,
    ddim_sample,
    euler_sample,
    flow_sigmas,
    heun_sample,
    linear_schedule,
    shift_time,
    spaced_steps,
)
from jaxdit.models import rows_of_sequences

IDS = np.array([1, 2, 0, 2, 1], np.int32)
MEAN, STD = 1.5, 0.4  # of the data
SHIFTS = np.array([0.0, 0.8], np.float32)


def noise_rows():
    return np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


def flow_velocity(rows, time):
    """E[noise - data | x_t] where x_t = (1 - t) data + t noise and data is N(MEAN, STD^2)."""
    t = rows_of_sequences(time[:, None], jnp.asarray(IDS))
    variance = (1 - t) ** 2 * STD**2 + t**2
    gain = (t - (1 - t) * STD**2) / variance
    return gain * (rows - (1 - t) * MEAN) - MEAN


def flow_error(sample, num_steps):
    """Largest distance to the exact solution MEAN + STD * noise."""
    noise = noise_rows()
    sigmas = flow_sigmas(num_steps, jnp.asarray(SHIFTS))
    rows = jax.jit(lambda x, s: sample(flow_velocity, x, s, jnp.asarray(IDS)))(jnp.asarray(noise), sigmas)
    assert rows.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(rows)[IDS == 0], noise[IDS == 0])
    return np.abs(np.asarray(rows) - (MEAN + STD * noise))[IDS > 0].max()


@pytest.mark.parametrize(("sample", "order"), [(euler_sample, 1), (heun_sample, 2)])
def test_flow_samplers_converge_to_the_exact_solution_at_their_order(sample, order):
    errors = [flow_error(sample, n) for n in (16, 32, 64)]
    rates = np.log2(errors[:-1]) - np.log2(errors[1:])
    assert np.all(np.abs(rates - order) < 0.35), (errors, rates)
    assert errors[-1] < 0.05 / 4 ** (order - 1)


def test_heun_evaluates_once_at_the_last_step():
    times = []

    def velocity(rows, time):
        jax.debug.callback(lambda t: times.append(float(t[0])), time, ordered=True)
        return jnp.zeros_like(rows)

    sigmas = jnp.asarray([[1.0], [0.6], [0.2], [0.0]])
    rows = jnp.zeros((2, 1))
    jax.block_until_ready(heun_sample(velocity, rows, sigmas, jnp.ones(2, jnp.int32)))
    jax.effects_barrier()
    np.testing.assert_allclose(times, [1.0, 0.6, 0.6, 0.2, 0.2])


def test_heun_step_by_hand():
    def velocity(rows, time):
        return rows * time[0]

    sigmas = jnp.asarray([[1.0], [0.5], [0.0]])
    x = heun_sample(velocity, jnp.asarray([[2.0]]), sigmas, jnp.ones(1, jnp.int32))
    predicted = 2 - 0.5 * 2 * 1
    corrected = 2 - 0.5 * (2 * 1 + predicted * 0.5) / 2
    np.testing.assert_allclose(x, [[corrected - 0.5 * corrected * 0.5]], rtol=1e-6)


def test_sequences_sampled_together_equal_each_by_itself():
    noise, sigmas = jnp.asarray(noise_rows()), flow_sigmas(8, jnp.asarray(SHIFTS))
    together = euler_sample(flow_velocity, noise, sigmas, jnp.asarray(IDS))
    for s in range(2):
        column = jnp.stack([sigmas[:, s]] * 2, axis=1)
        alone = euler_sample(flow_velocity, noise, column, jnp.asarray(IDS))
        np.testing.assert_allclose(together[s + 1 == IDS], alone[s + 1 == IDS], rtol=1e-6)


def noise_prediction(schedule):
    """E[noise | x_k] for the same Gaussian data under a discrete diffusion."""

    def denoise(rows, time):
        step = jnp.round(time[0] * schedule.num_steps).astype(jnp.int32)
        a = jnp.asarray(schedule.alphas_cumprod, jnp.float32)[step]
        return jnp.sqrt(1 - a) * (rows - jnp.sqrt(a) * MEAN) / (a * STD**2 + 1 - a)

    return denoise


def test_ddim_converges_to_the_exact_solution():
    schedule, noise = linear_schedule(), noise_rows()
    a = schedule.alphas_cumprod[-1]
    # The flow keeps (x - mean) / std; at the last step mean and std are those of the noised data.
    exact = MEAN + STD * (noise - math.sqrt(a) * MEAN) / math.sqrt(a * STD**2 + 1 - a)
    errors = []
    for kept in (25, 50, 100):
        rows = ddim_sample(
            noise_prediction(schedule), jnp.asarray(noise), spaced_steps(1000, kept),
            schedule=schedule, num_sequences=2,
        )  # fmt: skip
        errors.append(np.abs(np.asarray(rows) - exact).max())
    assert errors[0] > 1.5 * errors[1] > 2.25 * errors[2]
    assert errors[2] < 0.04


def test_ddim_step_by_hand():
    schedule = linear_schedule()

    def denoise(rows, time):
        assert time.shape == (4,)
        return 0.1 * rows

    rows = ddim_sample(
        denoise, jnp.asarray([[1.0]]), np.array([600, 200]), schedule=schedule, num_sequences=4
    )
    x, a = 1.0, schedule.alphas_cumprod
    for now, then in ((a[600], a[200]), (a[200], 1.0)):
        clean = (x - math.sqrt(1 - now) * 0.1 * x) / math.sqrt(now)
        x = math.sqrt(then) * clean + math.sqrt(1 - then) * 0.1 * x
    np.testing.assert_allclose(rows, [[x]], rtol=1e-5)


def test_guidance_extrapolates_and_scale_one_skips_the_unconditional_branch():
    def conditional(rows, time):
        return rows + time[0]

    def unconditional(rows, time):
        return 0.5 * rows

    rows, time = jnp.asarray([[2.0]]), jnp.asarray([0.5])
    guided = classifier_free_guidance(conditional, unconditional, 3.0)(rows, time)
    np.testing.assert_allclose(guided, [[1 + 3 * (2.5 - 1)]])
    np.testing.assert_allclose(classifier_free_guidance(conditional, unconditional, 0.0)(rows, time), [[1.0]])
    assert classifier_free_guidance(conditional, unconditional, 1.0) is conditional


# Made with diffusers 0.42's FlowMatchEulerDiscreteScheduler, six steps: dynamic shift with mu = 0.63 (FLUX.1 at
# 1024 tokens), and a constant shift of 3 (SD3) with the scheduler's own end point.
def test_time_tables_equal_the_published_scheduler():
    flux = [1.0, 0.90373558, 0.7897048, 0.65248942, 0.48421842, 0.27300331, 0.0]
    static = [1.0, 0.92334253, 0.81892335, 0.66832668, 0.43222508, 0.00892857, 0.0]
    np.testing.assert_allclose(flow_sigmas(6, jnp.asarray([0.63]))[:, 0], flux, rtol=1e-6)
    mu = math.log(3.0)
    last = float(shift_time(jnp.float32(0.001), mu))
    np.testing.assert_allclose(flow_sigmas(6, jnp.asarray([mu]), last=last)[:, 0], static, rtol=1e-5)


def test_time_tables_fall_from_one_to_zero():
    for n in (1, 2, 28):
        sigmas = np.asarray(flow_sigmas(n, jnp.asarray([0.0, 1.15])))
        assert sigmas.shape == (n + 1, 2)
        assert np.all(sigmas[0] == 1)
        assert np.all(sigmas[-1] == 0)
        assert np.all(np.diff(sigmas, axis=0) < 0)


def test_spaced_steps_keep_both_ends():
    np.testing.assert_array_equal(spaced_steps(1000, 4), [999, 666, 333, 0])
    np.testing.assert_array_equal(spaced_steps(5, 5), [4, 3, 2, 1, 0])
    np.testing.assert_array_equal(spaced_steps(1000, 1), [999])
    assert spaced_steps(1000, 250).dtype == np.int32
    for bad in (0, 6):
        with pytest.raises(ValueError, match=f"num_kept must be in 1 .. num_steps; got num_kept={bad}"):
            spaced_steps(5, bad)


def test_bad_tables_are_refused():
    rows, ids = jnp.zeros((1, 1)), jnp.ones(1, jnp.int32)
    for sample, name in ((euler_sample, "euler_sample"), (heun_sample, "heun_sample")):
        with pytest.raises(ValueError, match=rf"{name}: sigmas need at least two times, .*shape \(1, 1\)"):
            sample(lambda x, t: x, rows, jnp.ones((1, 1)), ids)
    with pytest.raises(ValueError, match="num_steps must be at least 1; got num_steps=0"):
        flow_sigmas(0, jnp.zeros(1))
    for last in (0.0, 1.5):
        with pytest.raises(ValueError, match=rf"last must be in \(0, 1\]; got last={last}"):
            flow_sigmas(2, jnp.zeros(1), last=last)
    schedule = linear_schedule(50)
    for steps in ([], [50, 1], [3, 3], [1, 2], [1, -1]):
        with pytest.raises(ValueError, match=r"steps must fall within 0 .. 49; got steps of shape"):
            ddim_sample(lambda x, t: x, rows, np.array(steps, np.int32), schedule=schedule, num_sequences=1)
