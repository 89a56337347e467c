"""Fully sharded layers against a plain loop over whole parameters, values and gradients."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel import REPLICA_AXIS, SHARD_AXIS, data_mesh, gather_leaf, shard_axis, sharded_layer_scan
from tests.oracles import close

F32 = 1e-5
WIDTH, HIDDEN, ROWS = 8, 16, 4
# Stacked axes: the last of w, the middle of u; b is replicated.
AXES = {"w": 2, "u": 1, "b": -1}


@pytest.mark.parametrize(
    ("shape", "degree", "stacked", "axis"),
    [
        ((1024, 512), 8, False, 0),
        ((512, 1024), 8, False, 0),  # the first, however small
        ((1023, 1000), 8, False, 1),  # that is divided
        ((1001, 1023), 8, False, None),
        ((1024,), 8, False, 0),
        ((1023,), 1023, False, None),  # small
        ((24, 64, 16), 8, True, 1),
        ((4096, 24, 16), 8, True, None),  # layers do not count as size, and are never sharded
        ((4096, 60, 18), 8, True, None),
        ((1024, 1024), 1, False, None),
        ((), 8, False, None),
    ],
)
def test_shard_axis(shape, degree, stacked, axis):
    assert shard_axis(shape, degree, stacked=stacked) == axis


def draw(num_layers, num_devices):
    rng = np.random.default_rng(0)
    shapes = {"w": (WIDTH, HIDDEN), "u": (HIDDEN, WIDTH), "b": (HIDDEN,)}
    params = {k: rng.standard_normal((num_layers, *s)).astype(np.float32) * 0.3 for k, s in shapes.items()}
    x = rng.standard_normal((num_devices, ROWS, WIDTH)).astype(np.float32)
    cond = rng.standard_normal((num_devices, WIDTH)).astype(np.float32)
    ids = rng.integers(0, 3, (num_devices, ROWS)).astype(np.int32)
    return params, x, cond, ids


def layer(ids, params, carry, consts):
    hidden = jnp.tanh(carry["x"] @ params["w"] + params["b"][None])
    out = jnp.where((ids > 0)[:, None], hidden @ params["u"], 0.0)
    return {"x": carry["x"] + out * consts["cond"][None], "total": carry["total"] + jnp.sum(out**2)}


def loss_by_loop(params, x, cond, ids):
    """Of all devices, one after another, layer by layer."""
    total = 0.0
    for d in range(len(x)):
        carry = {"x": x[d], "total": jnp.zeros(())}
        for i in range(len(params["b"])):
            carry = layer(ids[d], jax.tree.map(lambda p, i=i: p[i], params), carry, {"cond": cond[d]})
        total = total + jnp.sum(jnp.sin(carry["x"])) + carry["total"]
    return total


def sharded_program(mesh, *, replica_axis=None):
    """(loss, gradients of params, x and cond), parameters sharded over `shard`, rows over both axes."""
    specs = {k: P() if axis < 0 else P(*[None] * axis, SHARD_AXIS) for k, axis in AXES.items()}
    scan = sharded_layer_scan(AXES, axis_name=SHARD_AXIS, replica_axis=replica_axis)
    both = (REPLICA_AXIS, SHARD_AXIS)

    def device(params, x, cond, ids):
        def loss(params, x, cond):
            carry = {"x": x[0], "total": jnp.zeros(())}
            carry = scan(partial(layer, ids[0]), params, carry, {"cond": cond[0], "nothing": None})
            return jnp.sum(jnp.sin(carry["x"])) + carry["total"]

        value, (d_params, d_x, d_cond) = jax.value_and_grad(loss, (0, 1, 2))(params, x, cond)
        of_shards = () if replica_axis else REPLICA_AXIS
        d_params = {k: lax.psum(g, of_shards if AXES[k] >= 0 else both) for k, g in d_params.items()}
        return lax.psum(value, both), d_params, d_x, d_cond

    return jax.jit(
        jax.shard_map(
            device,
            mesh=mesh,
            in_specs=(specs, P(both), P(both), P(both)),
            out_specs=(P(), specs, P(both), P(both)),
            check_vma=False,
        )
    )


@pytest.mark.parametrize(
    ("num_devices", "shards", "num_layers", "replica_axis"),
    [
        (1, 1, 3, None),
        (2, 2, 3, None),
        (4, 4, 1, None),
        (8, 8, 2, None),
        (8, 4, 3, None),
        (8, 4, 3, REPLICA_AXIS),
        (4, 2, 1, REPLICA_AXIS),
    ],
)
def test_values_and_gradients_are_those_of_a_plain_loop(num_devices, shards, num_layers, replica_axis):
    inputs = draw(num_layers, num_devices)
    mesh = data_mesh(jax.devices()[:num_devices], shards=shards)
    value, *gradients = sharded_program(mesh, replica_axis=replica_axis)(*inputs)
    expected = jax.jit(jax.value_and_grad(loss_by_loop, (0, 1, 2)))(*inputs)
    close(value, expected[0], F32)
    for actual, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected[1]), strict=True):
        assert actual.dtype == jnp.float32
        close(actual, wanted, F32)
    shard = gradients[0]["w"].addressable_shards[0].data.shape
    assert shard == (num_layers, WIDTH, HIDDEN // shards)


def test_communication_of_a_layer():
    """Sharded leaves are gathered in both passes and scattered in one; replicated leaves never."""
    text = sharded_program(data_mesh(shards=8)).lower(*draw(3, 8)).as_text()
    # Twice w and u: before the loop and inside it. The backward loop starts from the last layer, which is at hand.
    assert len(re.findall("stablehlo.all_gather", text)) == 2 * 2 + 2
    # In the loop the layer before's, after it the first's.
    assert len(re.findall("stablehlo.reduce_scatter", text)) == 2 * 2
    # Loss, and gradients over replicas (w, u) or over all (b).
    assert len(re.findall("stablehlo.all_reduce", text)) == 4


def test_bfloat16_travels_and_float32_adds_up():
    """A gradient of 256 on one device and 1 on each other: bfloat16 sums would lose the ones."""
    mesh = data_mesh(shards=8)
    scan = sharded_layer_scan({"w": 1}, axis_name=SHARD_AXIS, dtype=jnp.bfloat16)
    seen = []

    def fn(params, carry, consts):
        seen.append(params["w"].dtype)
        return carry + jnp.sum(params["w"].astype(jnp.float32) * consts)

    def device(params, consts):
        return jax.value_and_grad(lambda p: scan(fn, p, jnp.zeros(()), consts[0]))(params)

    specs = {"w": P(None, SHARD_AXIS)}
    f = jax.shard_map(
        device, mesh=mesh, in_specs=(specs, P(SHARD_AXIS)), out_specs=(P(), specs), check_vma=False
    )
    consts = np.ones((8, 16), np.float32)
    consts[3] = 256
    params = {"w": np.ones((2, 16), np.float32)}
    _, gradient = jax.jit(f)(params, consts)
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(gradient["w"], np.full((2, 16), 263, np.float32))
    text = jax.jit(f).lower(params, consts).as_text()
    assert re.search(r"all_gather.*bf16", text)
    assert not re.search(r"all_gather.*f32", text)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("travel", [None, jnp.bfloat16])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_gather_leaf(dtype, travel, axis):
    mesh = data_mesh(jax.devices()[:4])
    spec = P() if axis is None else P(*[None] * axis, SHARD_AXIS)

    def device(x, w):
        y, vjp = jax.vjp(lambda x: gather_leaf(x, axis, SHARD_AXIS, travel), x)
        gradient = vjp(w[0].astype(y.dtype))[0]
        return y, gradient[None] if axis is None else gradient

    out = P(SHARD_AXIS) if axis is None else spec
    f = jax.shard_map(
        device, mesh=mesh, in_specs=(spec, P(SHARD_AXIS)), out_specs=(P(), out), check_vma=False
    )
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-9, 9, (8, 4)), dtype)
    w = rng.integers(-9, 9, (4, 8, 4)).astype(np.float32)
    y, gradient = jax.jit(f)(x, w)
    np.testing.assert_array_equal(y, x)
    assert y.dtype == (dtype if travel is None or axis is None else travel)
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(gradient.astype(np.float32), w if axis is None else w.sum(0))
