"""Randomness depends on (key, step, sequence, token) and on nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdit import sequence_times, token_noise

KEY = jax.random.key(7)
LENGTHS = (40, 1, 300, 75)
CHANNELS = 5


def rows():
    ids = np.concatenate([np.full(n, s + 1) for s, n in enumerate(LENGTHS)])
    return ids.astype(np.int32), np.concatenate([np.arange(n) for n in LENGTHS]).astype(np.int32)


@jax.jit
def draw(ids, tokens, step=3):
    return token_noise(step, ids, tokens, CHANNELS, key=KEY)


def test_noise_is_bit_identical_wherever_a_token_lies():
    ids, tokens = rows()
    noise = np.asarray(draw(ids, tokens))
    order = np.random.default_rng(0).permutation(len(ids))
    np.testing.assert_array_equal(draw(ids[order], tokens[order]), noise[order])
    for device in np.array_split(order, 7):  # other shapes: other programs
        padded = np.concatenate([ids[device], np.zeros(3, np.int32)])
        index = np.concatenate([tokens[device], np.arange(3, dtype=np.int32)])
        part = np.asarray(draw(padded, index))
        np.testing.assert_array_equal(part[:-3], noise[device])
        assert not np.any(part[-3:])


def test_noise_is_standard_normal_and_tokens_are_independent():
    n = 20_000
    noise = np.asarray(draw(np.full(n, 2, np.int32), np.arange(n, dtype=np.int32)))
    assert noise.dtype == np.float32
    sigma = 1 / np.sqrt(noise.size)
    assert abs(noise.mean()) < 4 * sigma
    assert abs((noise**2).mean() - 1) < 4 * np.sqrt(2) * sigma
    assert abs((noise**4).mean() - 3) < 4 * np.sqrt(96) * sigma
    correlation = np.corrcoef(np.concatenate([noise[:-1], noise[1:]], axis=1).T) - np.eye(2 * CHANNELS)
    assert np.abs(correlation).max() < 5 / np.sqrt(n)
    assert len(np.unique(noise)) > 0.99 * noise.size


def test_every_part_of_the_name_of_a_draw_matters():
    ids, tokens = np.array([1, 2, 1], np.int32), np.array([2, 1, 1], np.int32)
    draws = [*np.asarray(draw(ids, tokens)), *np.asarray(draw(ids, tokens, 4))]
    draws.append(
        np.asarray(token_noise(3, jnp.asarray(ids), jnp.asarray(tokens), CHANNELS, key=jax.random.key(8)))[0]
    )
    assert len({tuple(d) for d in draws}) == len(draws)


def test_times_belong_to_sequences():
    ids = np.arange(50, dtype=np.int32)
    times = np.asarray(sequence_times(3, jnp.asarray(ids), key=KEY))
    order = np.random.default_rng(0).permutation(50)
    np.testing.assert_array_equal(sequence_times(3, jnp.asarray(ids[order]), key=KEY), times[order])
    traced_step = jax.jit(lambda step: sequence_times(step, jnp.asarray(ids), key=KEY))(jnp.int32(3))
    np.testing.assert_array_equal(traced_step, times)
    assert np.all(times != np.asarray(sequence_times(4, jnp.asarray(ids), key=KEY)))


def test_times_are_uniform_and_never_reach_the_ends():
    times = np.asarray(sequence_times(0, jnp.arange(20_000), key=KEY))
    assert times.min() > 0
    assert times.max() < 1
    assert np.abs(np.sort(times) - (np.arange(20_000) + 0.5) / 20_000).max() < 1.63 / np.sqrt(
        20_000
    )  # 1 % level


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"key must be threefry, .* got key impl rbg"):
        sequence_times(0, jnp.arange(2), key=jax.random.key(0, impl="rbg"))
