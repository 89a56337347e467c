"""One-sided kernels in the simulator: against XLA's collectives and the whole sequence, with its race detector on."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel import (
    MosaicPuts,
    SimulatedPuts,
    one_sided_all_to_all,
    one_sided_ring_attention,
    ulysses_attention,
    zero_copy_options,
)
from parallel import _one_sided_order as order
from parallel import _one_sided_simulated as simulated
from tests.parallel.sequence_cases import BLOCK, Case, check, mesh_of

LATE, EAGER = (SimulatedPuts(BLOCK, eager=eager, detect_races=True) for eager in (False, True))
BOTH = pytest.mark.parametrize("puts", [LATE, EAGER], ids=["late", "eager"])
RACE = "RACE DETECTED"
ROWS = P(None, "x")


def no_races(capfd: Any) -> bool:
    return RACE not in capfd.readouterr().out


def value_and_pullback(exchange: Any, mesh: Any, spec: P, x: Any, w: Any) -> tuple[Any, Any]:
    mapped = jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    @jax.jit
    def run(x, w):
        out, pullback = jax.vjp(mapped, x)
        return out, pullback(w)[0]

    return jax.block_until_ready(run(x, w))


def check_exchange(puts: SimulatedPuts, mesh: Any, axis_name: Any, dtype: Any = jnp.float32) -> None:
    """As XLA's, there and back, to the bit."""
    axes = {"axis_name": axis_name, "split_axis": 2, "concat_axis": 1}
    size, spec = mesh.size, P(None, mesh.axis_names)
    degree = int(np.prod([mesh.shape[axis] for axis in np.atleast_1d(axis_name)]))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 3 * size, 2 * degree, 5)), dtype)
    w = jnp.asarray(rng.standard_normal((2, 3 * degree * size, 2, 5)), dtype)
    one_sided = value_and_pullback(partial(one_sided_all_to_all, **axes, puts=puts), mesh, spec, x, w)
    by_xla = value_and_pullback(partial(lax.all_to_all, **axes, tiled=True), mesh, spec, x, w)
    for a, b in zip(one_sided, by_xla, strict=True):
        assert a.dtype == dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@BOTH
def test_exchange_is_that_of_xla(puts, capfd):
    check_exchange(puts, mesh_of(x=4), "x")
    assert no_races(capfd)


def test_exchange_has_a_second_derivative():
    exchange = partial(one_sided_all_to_all, axis_name="x", split_axis=2, concat_axis=1, puts=LATE)
    mapped = jax.shard_map(exchange, mesh=mesh_of(x=2), in_specs=ROWS, out_specs=ROWS, check_vma=False)
    gradient = jax.grad(lambda x: (mapped(x) ** 3).sum())
    x = jnp.arange(8.0).reshape(1, 4, 2)
    second = jax.jit(jax.grad(lambda x: (gradient(x) ** 2).sum()))(x)
    np.testing.assert_array_equal(second, 36 * x**3)


@pytest.mark.full
@BOTH
@pytest.mark.parametrize(
    ("axes", "axis_name"),
    [
        ({"x": 2}, "x"),
        ({"x": 3}, "x"),
        ({"x": 8}, "x"),
        ({"y": 2, "x": 4}, "x"),
        ({"y": 4, "x": 2}, "y"),
        ({"y": 2, "x": 2}, ("y", "x")),
    ],
    ids=["2", "3", "8", "inner of 2 x 4", "outer of 4 x 2", "two axes as one"],
)
def test_exchange_over_every_mesh(puts, axes, axis_name, capfd):
    check_exchange(puts, mesh_of(**axes), axis_name, jnp.bfloat16)
    assert no_races(capfd)


@pytest.mark.full
def test_ulysses_attention_by_puts(monkeypatch, capfd):
    """Every all-to-all of the library's own Ulysses attention, of its gradient too, may be by puts."""
    moved = []

    def by_puts(x, axis_name, *, split_axis, concat_axis, tiled):
        assert tiled
        moved.append(x.shape)
        axes = {"split_axis": split_axis, "concat_axis": concat_axis}
        return one_sided_all_to_all(x, axis_name=axis_name, **axes, puts=LATE)

    monkeypatch.setattr(lax, "all_to_all", by_puts)
    case = Case(segments=3, causal=True, text=5, kv_heads=2)
    check(partial(ulysses_attention, axis_name="x"), mesh_of(x=4), "x", case)
    assert moved
    assert no_races(capfd)


def ring(puts: SimulatedPuts) -> Any:
    def attention(q, k, v, *, segment_ids, causal, text, block_attention):
        assert segment_ids is None
        assert text is None
        assert not causal
        return one_sided_ring_attention(q, k, v, axis_name="x", puts=puts, block_attention=block_attention)

    return attention


def test_ring_is_attention_to_the_whole_sequence(capfd):
    """Value and gradient; late, since that is the harder order for a ring."""
    check(ring(LATE), mesh_of(x=4), "x", Case(kv_heads=2))
    assert no_races(capfd)


@pytest.mark.full
@BOTH
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_rings_of_all_sizes(puts, size, capfd):
    check(ring(puts), mesh_of(x=size), "x", Case(q_loc=2, k_loc=5))
    assert no_races(capfd)


def test_without_semaphores_for_room_there_are_races(monkeypatch, capfd):
    """The detector sees what the order prevents: keys overwritten while they are attended to."""
    monkeypatch.setattr(simulated, "needs_room", lambda step: False)
    monkeypatch.setattr(simulated, "gives_room", lambda step, size: False)
    q = np.random.default_rng(0).standard_normal((1, 8, 1, 4)).astype(np.float32)
    attend = partial(one_sided_ring_attention, axis_name="x", puts=LATE)
    mapped = jax.shard_map(attend, mesh=mesh_of(x=4), in_specs=ROWS, out_specs=ROWS, check_vma=False)
    jax.block_until_ready(jax.jit(mapped)(q, q, q))
    assert not no_races(capfd)


@pytest.mark.parametrize("size", range(2, 10))
def test_order_of_a_ring(size):
    """What is waited for is signalled, as often; no slot is overwritten in the step in which it is read."""
    puts = [step for step in range(size) if order.puts_keys(step, size)]
    assert len(puts) == size - 1
    waits = [step for step in puts if order.needs_room(step)]
    assert [step + 1 for step in range(size) if order.gives_room(step, size)] == waits
    for step in puts:
        # The next device may still be in the step before, and reads there what this put would overwrite.
        same = order.slot_at_hand(step - 1) == order.slot_of_arrival(step) if step else False
        assert same == order.needs_room(step)
        assert order.slot_at_hand(step) != order.slot_of_arrival(step)
        assert order.slot_at_hand(step + 1) == order.slot_of_arrival(step)


def in_map(function: Any, x: Any) -> Any:
    return jax.eval_shape(
        jax.shard_map(function, mesh=mesh_of(x=4), in_specs=ROWS, out_specs=ROWS, check_vma=False), x
    )


def test_bad_input():
    x = jnp.ones((1, 8, 8, 4))
    exchange = partial(one_sided_all_to_all, axis_name="x", puts=LATE)
    in_map(partial(exchange, split_axis=3, concat_axis=1), x)  # the last good one
    with pytest.raises(ValueError, match=r"devices divide the axis to split; got 2 of \(1, 2, 8, 4\) over 4"):
        in_map(partial(exchange, split_axis=1, concat_axis=2), x)
    for split_axis in (4, -1):
        with pytest.raises(ValueError, match=rf"split_axis is an axis of x.*got split_axis={split_axis} for"):
            in_map(partial(exchange, split_axis=split_axis, concat_axis=1), x)
    with pytest.raises(ValueError, match=r"one_sided_ring_attention: axis_name is a manual axis.*got 'z'"):
        in_map(lambda x: one_sided_ring_attention(x, x, x, axis_name="z", puts=LATE), x)


def test_gpu_kernels_say_what_they_do_not_do():
    for rows, dim, dtype in ((65, 64, jnp.bfloat16), (64, 96, jnp.bfloat16), (64, 64, jnp.float32)):
        q, kv = jnp.ones((1, rows, 1, dim), dtype), jnp.ones((2, 1, 64, 1, dim), dtype)
        with pytest.raises(NotImplementedError, match=r"MosaicPuts: rows are bfloat16.*Use ring_attention"):
            MosaicPuts().ring(q, kv, "x", 1.0)


def test_second_derivatives_of_the_ring_are_refused():
    x = jnp.ones((1, 8, 1, 4))

    def attend(x):
        return one_sided_ring_attention(x, x, x, axis_name="x", puts=LATE, block_attention=BLOCK)

    def gradient(x):
        return jax.grad(lambda x: in_mesh(x).sum())(x)

    in_mesh = jax.shard_map(attend, mesh=mesh_of(x=4), in_specs=ROWS, out_specs=ROWS, check_vma=False)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.eval_shape(jax.grad(lambda x: gradient(x).sum()), x)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_copy_options_are_known_and_do_nothing_on_a_cpu(symmetric):
    options = zero_copy_options(symmetric=symmetric)
    x = np.arange(8.0, dtype=np.float32)
    send = jax.shard_map(lambda x: lax.psum(x, "x"), mesh=mesh_of(x=4), in_specs=P("x"), out_specs=P())
    plain, optioned = (jax.jit(send, compiler_options=o)(x) for o in (None, options))
    np.testing.assert_array_equal(plain, optioned)
