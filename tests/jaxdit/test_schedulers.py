"""Samplers on a Gaussian, whose probability flow is known in closed form, and their tables."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdit import ResolutionShift, SquareRootShift, diffusion_schedule, linear_schedule
from jaxdit.models import rows_of_sequences
from jaxdit.schedulers import (
    DiffusionTimes,
    DPMSolver,
    FlowTimes,
    KarrasTimes,
    Scheduler,
    advance,
    classifier_free_guidance,
    euler,
    even_steps,
    heun,
    initial_state,
    integrate,
    leading_steps,
    scheduler_from_config,
    trailing_steps,
    without_last,
)

IDS = np.array([1, 2, 0, 2, 1], np.int32)
TOKENS = np.array([2, 300], np.int32)
MEAN, STD = 1.5, 0.4  # of the data
SHIFT = ResolutionShift(base_mu=0.1)
PREDICTION_OF = {  # from data D and noise E, at s D + d E
    "velocity": lambda data, noise, s, d: noise - data,
    "epsilon": lambda data, noise, s, d: noise,
    "sample": lambda data, noise, s, d: data,
    "v_prediction": lambda data, noise, s, d: s * noise - d * data,
}


def noise_rows():
    return np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


@partial(jax.jit, static_argnames="prediction")
def evaluate(state, levels, coefficients, prediction):
    """One evaluation with a perfect model of N(MEAN, STD^2); `levels` are each sequence's signal and deviation."""
    ids = jnp.asarray(IDS)
    s, d = jnp.split(rows_of_sequences(levels, ids), 2, axis=1)
    variance = jnp.where(ids[:, None] > 0, (s * STD) ** 2 + d**2, 1.0)
    noise = d * (state.rows - s * MEAN) / variance
    data = MEAN + s * STD**2 * (state.rows - s * MEAN) / variance
    return advance(state, PREDICTION_OF[prediction](data, noise, s, d), coefficients, ids)


def error(scheduler, num_steps):
    """Largest distance to where the flow takes the noise: it keeps (x - mean) / std of the rows' Gaussian."""
    noise = noise_rows()
    table, levels = scheduler.table(num_steps, TOKENS), scheduler.times.levels(num_steps, TOKENS)
    state = initial_state(jnp.asarray(noise))
    for time, coefficients in zip(table.time, table.coefficients, strict=True):
        nearest = np.abs(levels.time - time).argmin(axis=0)
        asked = [np.float32(x[nearest, [0, 1]]) for x in (levels.signal, levels.deviation)]
        state = evaluate(state, np.stack(asked, axis=1), coefficients, prediction=scheduler.prediction)
    assert state.rows.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(state.rows)[IDS == 0], noise[IDS == 0])
    real, of_row = IDS > 0, IDS[IDS > 0] - 1
    first = [x[0, of_row][:, None] for x in (levels.signal, levels.deviation)]
    last = [x[-1, of_row][:, None] for x in (levels.next_signal, levels.next_deviation)]

    def spread(s, d):
        return np.sqrt((s * STD) ** 2 + d**2)

    exact = last[0] * MEAN + spread(*last) * (noise[real] - first[0] * MEAN) / spread(*first)
    return np.abs(np.asarray(state.rows)[real] - exact).max()


def orders(scheduler, steps):
    errors = np.array([error(scheduler, n) for n in steps])
    return errors, np.log2(errors[:-1] / errors[1:])


@pytest.mark.parametrize("prediction", ["velocity", "sample", "epsilon", "v_prediction"])
@pytest.mark.parametrize(("method", "order"), [(euler, 1), (heun, 2)])
def test_flow_samplers_converge_at_their_order(method, order, prediction):
    first = 0.99 if prediction == "epsilon" else 1.0  # pure noise predicted says nothing of the data
    errors, rates = orders(Scheduler(FlowTimes(shift=SHIFT, first=first), method, prediction), (16, 32, 64))
    assert np.all(np.abs(rates - order) < 0.35), (errors, rates)
    assert errors[-1] < 0.05 / 4 ** (order - 1)


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_ddim_converges_at_first_order(prediction):
    schedule = linear_schedule(4000)
    scheduler = Scheduler(DiffusionTimes(schedule=schedule, spacing=trailing_steps), euler, prediction)
    errors, rates = orders(scheduler, (25, 50, 100))
    assert np.all(np.abs(rates - 1) < 0.3), (errors, rates)
    assert errors[-1] < 0.04


# Levels even in log(signal / deviation) from 1 / 150 to 150, where the method's steps are of one size.
@pytest.mark.parametrize(("method", "order"), [(DPMSolver(False), 2), (euler, 1)])
def test_multistep_solver_converges_at_second_order(method, order):
    class EvenRatios:
        def levels(self, num_steps, num_tokens):
            half = np.linspace(-5, 5, num_steps + 1)
            alphas = np.repeat(1 / (1 + np.exp(-2 * half))[:, None], len(num_tokens), axis=1)
            signal, deviation = np.sqrt(alphas), np.sqrt(1 - alphas)
            return (
                FlowTimes()
                .levels(num_steps, num_tokens)
                ._replace(
                    signal=signal[:-1],
                    deviation=deviation[:-1],
                    next_signal=signal[1:],
                    next_deviation=deviation[1:],
                )
            )

    errors, rates = orders(Scheduler(EvenRatios(), method, "epsilon"), (40, 80, 160))
    assert np.all(np.abs(rates - order) < 0.35), (errors, rates)


@pytest.mark.parametrize(
    "times",
    [
        FlowTimes(shift=3.0, first=0.999),
        DiffusionTimes(schedule=linear_schedule(), spacing=without_last(even_steps)),
        KarrasTimes(schedule=linear_schedule()),
    ],
    ids=["flow", "diffusion", "karras"],
)
def test_the_multistep_solver_is_better_than_first_order(times):
    prediction = "velocity" if isinstance(times, FlowTimes) else "epsilon"
    first, second = (error(Scheduler(times, method, prediction), 20) for method in (euler, DPMSolver()))
    assert second < 0.5 * first


def test_heun_asks_once_at_the_last_step():
    table = Scheduler(FlowTimes(), heun).table(3, TOKENS)
    np.testing.assert_allclose(table.time[:, 0], [1, 2 / 3, 2 / 3, 1 / 3, 1 / 3], rtol=1e-6)
    assert table.step.tolist() == [0, 0, 1, 1, 2]
    last, one = (Scheduler(FlowTimes(), method).table(1, TOKENS).coefficients for method in (heun, euler))
    np.testing.assert_array_equal(last[:, :, 0], one[:, :, 0])


def test_heun_by_hand():
    def velocity(rows, time):
        return rows * time[0]

    table = Scheduler(FlowTimes(), heun).table(2, np.array([4]))
    x = integrate(velocity, jnp.asarray([[2.0]]), table, jnp.ones(1, jnp.int32))
    predicted = 2 - 0.5 * 2 * 1
    corrected = 2 - 0.5 * (2 * 1 + predicted * 0.5) / 2
    np.testing.assert_allclose(x, [[corrected - 0.5 * corrected * 0.5]], rtol=1e-6)


def test_ddim_by_hand():
    schedule = linear_schedule()
    times = DiffusionTimes(schedule=schedule, spacing=lambda total, num: np.array([600, 200]))
    table = Scheduler(times, euler, "epsilon").table(2, np.zeros(4, np.int32))
    np.testing.assert_allclose(table.time, [[0.6] * 4, [0.2] * 4], rtol=1e-6)
    rows = integrate(lambda rows, time: 0.1 * rows, jnp.asarray([[1.0]]), table, jnp.ones(1, jnp.int32))
    x, a = 1.0, schedule.alphas_cumprod
    for now, then in ((a[600], a[200]), (a[200], 1.0)):
        clean = (x - math.sqrt(1 - now) * 0.1 * x) / math.sqrt(now)
        x = math.sqrt(then) * clean + math.sqrt(1 - then) * 0.1 * x
    np.testing.assert_allclose(rows, [[x]], rtol=1e-5)


def test_one_compiled_evaluation_serves_all_methods_steps_and_sizes():
    step = jax.jit(lambda state, coefficients: advance(state, state.rows, coefficients, jnp.asarray(IDS)))
    times = FlowTimes(shift=SHIFT)
    for method, num_steps in ((heun, 1), (heun, 4), (DPMSolver(), 4)):
        table = Scheduler(times, method).table(num_steps, TOKENS)
        state = initial_state(jnp.asarray(noise_rows()))
        for coefficients in table.coefficients:
            state = step(state, coefficients)
    assert step._cache_size() == 1
    whole = jax.jit(lambda x, table: integrate(lambda x, time: x, x, table, jnp.asarray(IDS)))
    np.testing.assert_allclose(state.rows, whole(noise_rows(), table), rtol=1e-5)


def test_the_memory_of_a_one_step_method_is_the_predicted_data():
    table = Scheduler(FlowTimes(), euler, "sample").table(2, TOKENS)
    ones = jnp.ones((5, 3))
    state = advance(initial_state(ones), 7 * ones, jnp.asarray(table.coefficients[0]), jnp.asarray(IDS))
    np.testing.assert_array_equal(state.memory, np.where(IDS[:, None] > 0, 7.0, 0.0) + np.zeros((5, 3)))
    np.testing.assert_allclose(state.rows[IDS > 0], 4.0)


def test_a_sequence_does_not_depend_on_the_others():
    table = Scheduler(FlowTimes(shift=SHIFT), DPMSolver()).table(8, TOKENS)
    sample = jax.jit(lambda x, table: integrate(lambda x, time: jnp.tanh(x), x, table, jnp.asarray(IDS)))
    together = np.asarray(sample(noise_rows(), table))
    for s in range(2):
        poisoned = table.coefficients.copy()
        poisoned[:, 1 - s] = np.nan
        alone = np.asarray(sample(noise_rows(), table._replace(coefficients=poisoned)))
        np.testing.assert_array_equal(together[s + 1 == IDS], alone[s + 1 == IDS])
        assert np.all(np.isnan(alone[2 - s == IDS]))


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


@pytest.mark.parametrize("shift", [1.0, 3.0, SHIFT, SquareRootShift(), ResolutionShift(of_factor=True)])
def test_flow_times_fall_from_one_to_zero(shift):
    for n in (1, 2, 28):
        levels = FlowTimes(shift=shift).levels(n, np.array([0, 16, 100_000], np.int32))
        times = np.concatenate([levels.deviation, levels.next_deviation[-1:]])
        assert times.shape == (n + 1, 3)
        assert np.all(times[0] == 1)
        assert np.all(times[-1] == 0)
        assert np.all(np.diff(times, axis=0) < 0)
        np.testing.assert_array_equal(levels.next_deviation[:-1], levels.deviation[1:])


def test_spacings():
    assert even_steps(1000, 4).tolist() == [999, 666, 333, 0]
    assert even_steps(5, 5).tolist() == [4, 3, 2, 1, 0]
    assert even_steps(1000, 1).tolist() == [999]
    assert leading_steps(1000, 3).tolist() == [666, 333, 0]
    assert trailing_steps(1000, 3).tolist() == [999, 666, 332]
    assert without_last(leading_steps)(1000, 3).tolist() == [750, 500, 250]
    for spacing in (even_steps, leading_steps, trailing_steps):
        for bad in (0, 6):
            with pytest.raises(ValueError, match=rf"num_steps must be in 1 .. 5, .* num_steps={bad}"):
                spacing(5, bad)


def test_bad_times_are_refused():
    for bad in ({"first": 0.0}, {"first": 1.1}, {"first": 0.5, "last": 0.6}, {"last": 0.0}):
        with pytest.raises(ValueError, match="0 < last <= first <= 1; got first="):
            FlowTimes(**bad)
    with pytest.raises(ValueError, match="shift must be positive; got shift=0"):
        FlowTimes(shift=0)
    for bad in (0.0, 1.0):
        with pytest.raises(ValueError, match=rf"terminal must be in \(0, 1\); got terminal={bad}"):
            FlowTimes(terminal=bad)
    with pytest.raises(ValueError, match="terminal needs at least 2 steps"):
        FlowTimes(terminal=0.1).levels(1, TOKENS)
    falling = FlowTimes(shift=ResolutionShift(max_mu=-1.0, of_factor=True))
    falling.levels(2, np.array([1535]))
    with pytest.raises(ValueError, match=r"shift must be positive and finite; .* at 1536 tokens"):
        falling.levels(2, np.array([4, 1536]))
    schedule = linear_schedule(50)
    for times in (FlowTimes(), DiffusionTimes(schedule=schedule), KarrasTimes(schedule=schedule)):
        with pytest.raises(ValueError, match="num_steps must be at least 1; got num_steps=0"):
            times.levels(0, TOKENS)
    for steps in ([50, 1], [3, 3], [1, 2], [1, -1]):
        times = DiffusionTimes(schedule=schedule, spacing=lambda total, num, steps=steps: np.array(steps))
        with pytest.raises(ValueError, match=r"steps must fall within 0 .. 49; got 2 from"):
            times.levels(2, TOKENS)
    with pytest.raises(ValueError, match="got 50 from 50 to 1 with offset=1"):
        DiffusionTimes(schedule=schedule, offset=1).levels(50, TOKENS)


def test_models_that_cannot_be_asked_are_refused():
    with pytest.raises(ValueError, match=r"prediction must be one of velocity, .* got prediction='noise'"):
        Scheduler(FlowTimes(), euler, "noise")
    with pytest.raises(ValueError, match=r"heun: .* got levels of a diffusion"):
        Scheduler(DiffusionTimes(schedule=linear_schedule()), heun, "epsilon").table(3, TOKENS)
    silent = DiffusionTimes(schedule=diffusion_schedule(np.append(np.linspace(0.01, 0.5, 9), 1.0)))
    for method in (euler, DPMSolver()):
        Scheduler(silent, method, "v_prediction").table(3, TOKENS)
        with pytest.raises(ValueError, match=r"rows of pure noise, .* predicts epsilon"):
            Scheduler(silent, method, "epsilon").table(3, TOKENS)


FLUX = {"_class_name": "FlowMatchEulerDiscreteScheduler", "_diffusers_version": "0.30", "shift": 3.0}


def test_configs_are_read_from_folders(tmp_path):
    (tmp_path / "scheduler_config.json").write_text('{"_class_name": "DDIMScheduler", "clip_sample": false}')
    for path in (tmp_path, str(tmp_path / "scheduler_config.json")):
        assert scheduler_from_config(path).prediction == "epsilon"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"_class_name": "PNDMScheduler"},
            "must be one of FlowMatchEulerDiscreteScheduler, .* got _class_name='PNDMScheduler'",
        ),
        (FLUX | {"use_karras_sigmas": True}, "use_karras_sigmas must be one of False, None; got .*=True"),
        (FLUX | {"time_shift_type": "cubic"}, "must be one of 'exponential', 'linear'; got .*'cubic'"),
        (FLUX | {"new_option": 1}, "is known with base_image_seq_len, .* got also new_option=1"),
        ({"_class_name": "DDIMScheduler"}, "clip_sample must be one of False; got clip_sample=True"),
        (
            {"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver++"},
            "algorithm_type must be one of 'dpmsolver\\+\\+'; got algorithm_type='sde-dpmsolver\\+\\+'",
        ),
        (
            {"_class_name": "DPMSolverMultistepScheduler", "solver_order": 3},
            "solver_order must be one of 1, 2",
        ),
        (
            {"_class_name": "DPMSolverMultistepScheduler", "prediction_type": "flow_prediction"},
            "needs use_flow_sigmas; got use_flow_sigmas=False",
        ),
        (
            {
                "_class_name": "DPMSolverMultistepScheduler",
                "use_flow_sigmas": True,
                "final_sigmas_type": "sigma_min",
            },
            "goes with final_sigmas_type 'zero'",
        ),
        (
            {
                "_class_name": "DPMSolverMultistepScheduler",
                "use_karras_sigmas": True,
                "beta_schedule": "squaredcos_cap_v2",
            },
            "use_karras_sigmas goes with beta_schedule",
        ),
    ],
)
def test_configs_that_would_sample_otherwise_are_refused(config, message):
    with pytest.raises(NotImplementedError, match=message):
        scheduler_from_config(config)


def test_what_is_no_config_is_refused():
    scheduler_from_config(FLUX | {"unknown": False, "skip_prk_steps": True}, even_sigmas=True)
    with pytest.raises(ValueError, match="a scheduler's config has a _class_name"):
        scheduler_from_config({"shift": 3.0})
    with pytest.raises(
        ValueError, match="even_sigmas is for FlowMatchEulerDiscreteScheduler; got it with DDIM"
    ):
        scheduler_from_config({"_class_name": "DDIMScheduler", "clip_sample": False}, even_sigmas=True)
