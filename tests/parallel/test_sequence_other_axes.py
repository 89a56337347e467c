"""Sequence-parallel attention beside mesh axes that are not manual in `shard_map`: explicit ones, automatic ones."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from parallel import JointOutput, ReplicatedText
from tests.parallel.test_sequence_bad_input import CALLS, every


def beside_an_axis(attention, kind, specs):
    """Trace it over manual axes x and y beside one of a kind, z, over which some of the arguments are divided."""
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), (AxisType.Auto, AxisType.Auto, kind))
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


@every
def test_automatic_axes_may_divide_rows(attention):
    heads, batch = P(None, None, "z"), P("z")
    specs = dict.fromkeys(ROWS_OF, heads) | dict.fromkeys(IDS_OF, batch)
    found = beside_an_axis(attention, AxisType.Auto, specs)
    assert (found.out.shape, found.text.shape) == ((2, 16, 4, 8), (2, 6, 4, 8))
