"""Sequence-parallel attention beside mesh axes that are not manual in `shard_map`: explicit ones, automatic ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from parallel import JointOutput, ReplicatedText
from tests.parallel.test_sequence_bad_input import CALLS, every


def beside_an_axis(attention, kind, specs, size=2):
    """Trace it over manual axes x and y beside one of a kind, z, over which some of the arguments are divided."""
    kinds = (AxisType.Auto, AxisType.Auto, kind)
    mesh = jax.make_mesh((2, 2, size), ("x", "y", "z"), kinds, devices=jax.devices()[: 4 * size])
    options = dict(zip(CALLS[attention], ("x", "y", ()), strict=False))

    def argument(name, shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, specs.get(name, P())))

    def per_device(q, k, v, q_ids, kv_ids, text):
        return attention(q, k, v, segment_ids=(q_ids, kv_ids), text=text, **options)

    mapped = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=P(),
        out_specs=JointOutput(P(None, ("x", "y")), P()),
        axis_names={"x", "y"},
        check_vma=False,
    )
    rows = [argument(name, (2, 4, 4, 8)) for name in "qkv"]
    ids = [argument(f"segment_ids of {name}", (2, 4), jnp.int32) for name in "qk"]
    text = [argument(f"the text's {name}", (2, 6, 4, 8)) for name in "qkv"]
    text_ids = argument("segment_ids of the text", (2, 6), jnp.int32)
    return jax.eval_shape(jax.jit(mapped), *rows, *ids, ReplicatedText(*text, text_ids))


ROWS_OF = ("q", "k", "v", "the text's q", "the text's k", "the text's v")
IDS_OF = ("segment_ids of q", "segment_ids of k", "segment_ids of the text")


@every
@pytest.mark.parametrize("what", [*ROWS_OF, *IDS_OF])
def test_rows_divided_over_an_explicit_axis_that_is_not_manual(attention, what):
    spec = P("z") if what in IDS_OF else P(None, None, "z")
    message = rf"{what} is divided by shard_map alone; got .*explicit mesh axis 'z'. Make that manual: .* axis_names"
    with pytest.raises(ValueError, match=f"^{attention.__name__}: {message}"):
        beside_an_axis(attention, AxisType.Explicit, {what: spec})


@every
def test_any_dimension_over_an_explicit_axis(attention):
    beside_an_axis(attention, AxisType.Explicit, {})
    for spec in (P("z"), P(None, "z"), P(None, None, None, "z")):
        with pytest.raises(ValueError, match=f"^{attention.__name__}: q is divided by shard_map alone"):
            beside_an_axis(attention, AxisType.Explicit, {"q": spec})


@pytest.mark.parametrize(
    "spec",
    [
        P(None, ("z",), None, "w"),
        *(pytest.param(x, marks=pytest.mark.full) for x in (P("z"), P(None, "z"), P(None, None, "z"))),
    ],
    ids=str,
)
@every
def test_explicit_axes_of_size_one_divide_nothing(attention, spec):
    """Value and gradient are those beside arrays that name no such axis; types name it as before."""
    kinds = (AxisType.Auto,) * 2 + (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2, 1, 1), ("x", "y", "z", "w"), kinds, devices=jax.devices()[:4])
    axes = dict(zip(CALLS[attention], ("x", "y", ()), strict=False))
    rows = P(None, ("x", "y")[: len(axes)])

    def per_device(q, k, v):
        out = attention(q, k, v, **axes)
        across = attention(q, k, v, keys_replicated=True, **axes)
        assert jax.typeof(out) == jax.typeof(across) == jax.typeof(q)
        return out

    mapped = jax.shard_map(
        per_device, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"x", "y"}, check_vma=False
    )
    qkv = np.random.default_rng(0).standard_normal((3, 2, 16, 4, 8)).astype(np.float32)

    @jax.jit
    def run(q, k, v):
        out, pullback = jax.vjp(mapped, q, k, v)
        return out, pullback(out)

    found, wanted = (run(*(jax.device_put(x, NamedSharding(mesh, of)) for x in qkv)) for of in (spec, P()))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    np.testing.assert_allclose(found[0], jax.nn.dot_product_attention(*qkv), atol=1e-5)


@every
def test_explicit_axes_of_size_one_on_text_and_ids(attention):
    """Traced only."""
    heads, batch = P(None, None, "z"), P("z")
    specs = dict.fromkeys(ROWS_OF, heads) | dict.fromkeys(IDS_OF, batch)
    found = beside_an_axis(attention, AxisType.Explicit, specs, size=1)
    assert (found.out.shape, found.text.shape) == ((2, 16, 4, 8), (2, 6, 4, 8))


@every
def test_automatic_axes_may_divide_rows(attention):
    heads, batch = P(None, None, "z"), P("z")
    specs = dict.fromkeys(ROWS_OF, heads) | dict.fromkeys(IDS_OF, batch)
    found = beside_an_axis(attention, AxisType.Auto, specs)
    assert (found.out.shape, found.text.shape) == ((2, 16, 4, 8), (2, 6, 4, 8))
