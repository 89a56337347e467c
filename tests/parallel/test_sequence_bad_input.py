"""What the sequence-parallel attentions refuse, when they are traced: each the same of all four."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallel import ReplicatedText, ring_attention, torus_attention, ulysses_attention, usp_attention
from tests.parallel.sequence_cases import mesh_of

# As users call them: without the run-time type checker of the tests.
RING, ULYSSES, USP, TORUS = map(
    inspect.unwrap, (ring_attention, ulysses_attention, usp_attention, torus_attention)
)
# With the arguments that name axes.
CALLS = {
    RING: ("axis_name",),
    ULYSSES: ("axis_name",),
    USP: ("ulysses_axis", "ring_axis"),
    TORUS: ("machine_axis", "ulysses_axis", "ring_axis"),
}
every = pytest.mark.parametrize("attention", CALLS, ids=lambda x: x.__name__)


def in_map(attention, *args, manual=("x", "y"), axes=("x", "y", ()), **options):
    """Trace it over a mesh of axes x and y of two devices, with those names of axes in order."""
    options |= dict(zip(CALLS[attention], axes, strict=False))

    def per_device(*args):
        found = attention(*args, **options)
        return found.out if hasattr(found, "out") else found

    mapped = jax.shard_map(
        per_device,
        mesh=mesh_of(x=2, y=2),
        in_specs=P(),
        out_specs=P(None, manual),
        axis_names=set(manual),
        check_vma=False,
    )
    return jax.eval_shape(mapped, *args)


def rows(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


Q = rows(2, 4, 4, 8)
IDS = np.ones((2, 4), np.int32)


def text_of(*shape, **options):
    return ReplicatedText(*(np.ones(shape, np.float32),) * 3, **options)


@every
def test_the_last_good_ones(attention):
    in_map(attention, Q, Q, Q)
    in_map(
        attention,
        Q,
        rows(2, 1, 2, 8),
        rows(2, 1, 2, 8),
        text=text_of(2, 0, 4, 8)._replace(
            k=np.ones((2, 0, 2, 8), np.float32), v=np.ones((2, 0, 2, 8), np.float32)
        ),
    )
    in_map(
        attention,
        Q,
        Q,
        Q,
        segment_ids=IDS,
        text=text_of(2, 3, 4, 8, segment_ids=IDS[:, :3]),
        scale=np.float64(2),
    )
    in_map(attention, Q, Q, Q, axes=((), (), ()))


@every
@pytest.mark.parametrize(
    ("message", "args", "options"),
    [
        (
            r"one batch and head_dim, and v.*got \(2, 4, 4, 8\), \(2, 4, 4, 8\) and \(2, 4, 4, 4\)",
            (Q, Q, rows(2, 4, 4, 4)),
            {},
        ),
        (r"one batch and head_dim.*\(1, 4, 4, 8\)", (Q, rows(1, 4, 4, 8), rows(1, 4, 4, 8)), {}),
        (r"\(batch, length, heads, head_dim\).*\(2, 4, 4\)", (Q, Q, rows(2, 4, 4)), {}),
        (r"heads of keys divide.*got q=4, k=3 heads", (Q, rows(2, 4, 3, 8), rows(2, 4, 3, 8)), {}),
        (r"no axis of size 0; got \(2, 0, 4, 8\)", (rows(2, 0, 4, 8), Q, Q), {}),
        (r"no axis of size 0; .* and \(2, 0, 4, 8\)", (Q, rows(2, 0, 4, 8), rows(2, 0, 4, 8)), {}),
        (r"no axis of size 0; got \(2, 4, 0, 8\)", (rows(2, 4, 0, 8), Q, Q), {}),
        (r"no axis of size 0; .* and \(2, 4, 0, 8\)", (Q, rows(2, 4, 0, 8), rows(2, 4, 0, 8)), {}),
        (r"no axis of size 0; got \(0, 4, 4, 8\)", (rows(0, 4, 4, 8),) * 3, {}),
        (r"no axis of size 0; got \(2, 4, 4, 0\)", (rows(2, 4, 4, 0),) * 3, {}),
        (
            r"segment_ids of k are.*got \(2, 4\) for rows \(2, 8",
            (Q, rows(2, 8, 4, 8), rows(2, 8, 4, 8)),
            {"segment_ids": IDS},
        ),
        (r"segment_ids of q are.*got \(4,\)", (Q, Q, Q), {"segment_ids": IDS[0]}),
        (r"segment_ids is one array, or a pair.*got 3 arrays", (Q, Q, Q), {"segment_ids": (IDS,) * 3}),
        (
            r"text has batch.*got float32\[2, 3, 4, 8\] beside",
            (rows(2, 4, 2, 8),) * 3,
            {"text": text_of(2, 3, 4, 8)},
        ),
        (
            r"text has batch.*got float32\[2, 3, 4, 8\] beside bfloat16",
            (rows(2, 4, 4, 8, dtype=jnp.bfloat16),) * 3,
            {"text": text_of(2, 3, 4, 8)},
        ),
        (
            r"the text's q and k have one length",
            (Q, Q, Q),
            {"text": text_of(2, 3, 4, 8)._replace(q=np.ones((2, 2, 4, 8), np.float32))},
        ),
        (r"text beside rows with segment_ids", (Q, Q, Q), {"segment_ids": IDS, "text": text_of(2, 3, 4, 8)}),
        (
            r"segment_ids of the text are.*got \(2, 4\) for rows \(2, 3",
            (Q, Q, Q),
            {"text": text_of(2, 3, 4, 8, segment_ids=IDS)},
        ),
        (
            r"segment_ids of q fit in int32; got int64 with larger ones. Number segments from 1",
            (Q, Q, Q),
            {"segment_ids": IDS + np.int64(1 << 32)},
        ),
        (
            r"segment_ids of the text fit in int32",
            (Q, Q, Q),
            {"text": text_of(2, 4, 4, 8, segment_ids=IDS - np.int64(1 << 32))},
        ),
        (r"scale is finite; got scale=nan. Leave it out", (Q, Q, Q), {"scale": np.nan}),
        (r"scale is finite; got scale=-inf", (Q, Q, Q), {"scale": np.float32(-np.inf)}),
        (r"scale is 0 or of a size that float32 holds.*got scale=1e\+300", (Q, Q, Q), {"scale": 1e300}),
        (r"scale is 0 or .* 1.2e-38 to 3.4e\+38; got scale=-1e-39", (Q, Q, Q), {"scale": np.float64(-1e-39)}),
        (r"scale is 0 or .*got scale=a number of more than 128 bits", (Q, Q, Q), {"scale": -(10**5000)}),
        (r"replicated keys.*got causal=True", (Q, Q, Q), {"keys_replicated": True, "causal": True}),
        (r"replicated keys.*text=yes", (Q, Q, Q), {"keys_replicated": True, "text": text_of(2, 3, 4, 8)}),
    ],
)
def test_shapes(attention, message, args, options):
    with pytest.raises(ValueError, match=f"^{attention.__name__}: .*{message}"):
        in_map(attention, *args, **options)


@every
def test_float64_is_not_taken_for_float32(attention):
    with jax.enable_x64(True), pytest.raises(TypeError, match="float32 at most; got float64"):
        in_map(attention, *(np.ones((2, 4, 4, 8)),) * 3)


@every
@pytest.mark.parametrize(
    "dtype",
    [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu, jnp.float4_e2m1fn],
    ids=lambda x: x.__name__,
)
def test_floats_that_would_round_results_away(attention, dtype):
    small = rows(2, 4, 4, 8, dtype=dtype)
    with pytest.raises(
        TypeError, match=f"^{attention.__name__}: q, k and v have 16 bits.*got {dtype.__name__}"
    ):
        in_map(attention, small, small, small)


@every
@pytest.mark.parametrize("scale", [0, 2**-126, -3e38, np.finfo(np.float32).max])
def test_the_last_good_scales(attention, scale):
    in_map(attention, Q, Q, Q, scale=scale)


@every
@pytest.mark.parametrize(
    ("message", "args", "options"),
    [
        (r"floating point, of one dtype; got int32", (rows(2, 4, 4, 8, dtype=jnp.int32), Q, Q), {}),
        (r"got float32, float32 and bfloat16", (Q, Q, rows(2, 4, 4, 8, dtype=jnp.bfloat16)), {}),
        (
            r"the text's q, k and v are floating point",
            (Q, Q, Q),
            {"text": ReplicatedText(*(np.ones((2, 3, 4, 8), np.int32),) * 3)},
        ),
        (
            r"segment_ids of q are signed integers; got uint32",
            (Q, Q, Q),
            {"segment_ids": IDS.astype(np.uint32)},
        ),
        (
            r"segment_ids of q are signed integers; got bfloat16",
            (Q, Q, Q),
            {"segment_ids": IDS.astype(jnp.bfloat16)},
        ),
        (
            r"text is a ReplicatedText\(q, k, v\); got a tuple",
            (Q, Q, Q),
            {"text": tuple(text_of(2, 3, 4, 8))},
        ),
        (r"scale is a number; got a str", (Q, Q, Q), {"scale": "one"}),
        (r"scale is a number; got a str", (Q, Q, Q), {"scale": "2"}),
        (r"scale is a number; got a bool True", (Q, Q, Q), {"scale": True}),
        (r"scale is a number; got a ndarray", (Q, Q, Q), {"scale": np.ones(1)}),
        (r"causal is True or False, .*; got str", (Q, Q, Q), {"causal": "no"}),
        (r"causal is True or False, .*; got NoneType", (Q, Q, Q), {"causal": None}),
        (r"causal is True or False, .*; got int 2. Give a bool", (Q, Q, Q), {"causal": 2}),
        (r"causal is .*; got int a number of more than 128 bits", (Q, Q, Q), {"causal": 10**5000}),
        (r"keys_replicated is True or False, .*; got str", (Q, Q, Q), {"keys_replicated": "no"}),
        (r"q is an array; got NoneType. Give \(batch, length", (None, Q, Q), {}),
        (r"v is an array; got NoneType", (Q, Q, None), {}),
        (r"segment_ids of q is an array; got str. Give int32", (Q, Q, Q), {"segment_ids": ("none", IDS)}),
        (r"segment_ids of k is an array; got list", (Q, Q, Q), {"segment_ids": (None, IDS.tolist())}),
        (r"or a tuple \(query ids, key ids\); got a list", (Q, Q, Q), {"segment_ids": [IDS, IDS]}),
        (r"or a tuple \(query ids, key ids\); got a str", (Q, Q, Q), {"segment_ids": "ids"}),
        (
            r"the text's q is an array; got NoneType",
            (Q, Q, Q),
            {"text": text_of(2, 3, 4, 8)._replace(q=None)},
        ),
        (
            r"segment_ids of the text is an array; got list",
            (Q, Q, Q),
            {"text": text_of(2, 4, 4, 8)._replace(segment_ids=IDS.tolist())},
        ),
        (
            r"block_attention is an object with forward and backward.*got a function",
            (Q, Q, Q),
            {"block_attention": text_of},
        ),
        (r"block_attention is an object .*got a type", (Q, Q, Q), {"block_attention": str}),
    ],
)
def test_dtypes_and_kinds(attention, message, args, options):
    with pytest.raises(TypeError, match=f"^{attention.__name__}: .*{message}"):
        in_map(attention, *args, **options)


@every
def test_a_traced_scale(attention):
    options = dict(zip(CALLS[attention], ("x", "y", ()), strict=False))
    mapped = jax.shard_map(
        lambda q: attention(q, q, q, scale=q[0, 0, 0, 0], **options),
        mesh=mesh_of(x=2, y=2),
        in_specs=P(),
        out_specs=P(None, ("x", "y")),
        check_vma=False,
    )
    with pytest.raises(TypeError, match=f"^{attention.__name__}: scale is a static number; got a traced one"):
        jax.eval_shape(mapped, Q)


@every
def test_strings_for_rows(attention):
    rows, options = jnp.ones(Q.shape), dict.fromkeys(CALLS[attention], ())
    with pytest.raises(TypeError, match=f"^{attention.__name__}: q is an array; got str"):
        attention("q", rows, rows, **options)
    with pytest.raises(TypeError, match=f"^{attention.__name__}: k is an array of numbers; got <U1"):
        attention(rows, np.array("k"), rows, **options)


@every
@pytest.mark.parametrize("name", ["causal", "keys_replicated"])
def test_a_traced_flag(attention, name):
    def per_call(flag, q):
        return in_map(attention, q, q, q, **{name: flag})

    with pytest.raises(TypeError, match=f"^{attention.__name__}: {name} is True or False.*a traced one"):
        jax.eval_shape(per_call, jnp.array(True), Q)


@every
def test_ids_of_64_bits(attention):
    """On the device their values are not known: 2 ** 32 + 1 would be 1."""
    with jax.enable_x64(True):
        in_map(attention, Q, Q, Q, segment_ids=IDS.astype(np.int64))
        with pytest.raises(TypeError, match=r"segment_ids of q have at most 32 bits; got int64.*use int32"):
            in_map(attention, Q, Q, Q, segment_ids=jnp.asarray(IDS, jnp.int64))


@pytest.mark.parametrize("attention", [ULYSSES, USP], ids=lambda x: x.__name__)
@pytest.mark.parametrize("replicated", [False, True])
def test_head_groups(attention, replicated):
    call = partial(in_map, attention, Q, Q, Q, keys_replicated=replicated, axes=("x", ()))
    call(head_groups=np.int64(2))
    if replicated:  # nothing is exchanged: one attention serves self- and cross-attention
        call(head_groups=8)
    else:
        few = "head_groups is 1 to the key heads of a device; got head_groups=3, 2 .*Use fewer groups"
        with pytest.raises(ValueError, match=f"^{attention.__name__}: {few}"):
            call(head_groups=3)
    for groups, error, message in (
        (0, ValueError, "is at least 1; got head_groups=0. 1 exchanges all heads at once"),
        (-1, ValueError, "is at least 1; got head_groups=-1"),
        (True, TypeError, "is an integer; got bool True"),
        (2.0, TypeError, "is an integer; got float 2.0"),
        ("2", TypeError, "is an integer; got str"),
        (None, TypeError, "is an integer; got NoneType"),
    ):
        with pytest.raises(error, match=f"^{attention.__name__}: head_groups {message}"):
            call(head_groups=groups)


@every
def test_axes_that_are_not_manual(attention):
    for place, argument in enumerate(CALLS[attention]):
        name = f"^{attention.__name__}: {argument}"
        axes = [(), (), ()]
        axes[place] = "z"
        missing = (
            rf"{name} is a manual axis.*got 'z', with mesh axes \('x', 'y'\), of them manual \('x', 'y'\)"
        )
        with pytest.raises(ValueError, match=missing):
            in_map(attention, Q, Q, Q, axes=axes)
        axes[place] = "y"
        with pytest.raises(ValueError, match=rf"{name} .*got 'y', .* of them manual \('x',\)"):
            in_map(attention, Q, Q, Q, axes=axes, manual=("x",))
        axes[place] = None
        with pytest.raises(
            ValueError, match=rf"{name} .*got None, .*manual \('x', 'y'\). Give \(\) for none"
        ):
            in_map(attention, Q, Q, Q, axes=axes)
        axes[place] = ["x"]
        with pytest.raises(TypeError, match=rf"{name} is a name or a tuple of names; got a list"):
            in_map(attention, Q, Q, Q, axes=axes)
        for nested in ((("x", "y"),), ((),)):
            axes[place] = nested
            with pytest.raises(TypeError, match=rf"{name} .*; got a tuple inside a tuple. Use a flat tuple"):
                in_map(attention, Q, Q, Q, axes=axes)
        axes[place] = 0
        with pytest.raises(TypeError, match=rf"{name} is a name or a tuple of names; got a int"):
            in_map(attention, Q, Q, Q, axes=axes)
        axes[place] = "x"
        options = dict(zip(CALLS[attention], axes, strict=False))
        with pytest.raises(
            ValueError, match=rf"{name} .*got 'x', with mesh axes \(\).*Call it inside jax.shard_map"
        ):
            jax.eval_shape(partial(attention, **options), Q, Q, Q)


@every
@pytest.mark.parametrize("in_shard_map", [False, True])
def test_axes_of_vmap(attention, in_shard_map):
    options = dict(zip(CALLS[attention], ("i", (), ()), strict=False))

    def mapped(x):
        return jax.vmap(lambda q: attention(q, q, q, **options), axis_name="i")(x)

    if in_shard_map:
        mapped = jax.shard_map(mapped, mesh=mesh_of(x=2, y=2), in_specs=P(), out_specs=P())
    names = r"\('x', 'y'\)" if in_shard_map else r"\(\)"
    manual = (
        rf"^{attention.__name__}: {CALLS[attention][0]} is a manual axis of the shard_map around the call"
    )
    with pytest.raises(
        ValueError, match=rf"{manual}; got 'i', .* of them manual {names}. Call it inside jax.sh"
    ):
        jax.eval_shape(mapped, rows(2, *Q.shape))


@every
def test_axes_given_twice(attention):
    names = CALLS[attention]
    twice = rf"^{attention.__name__}: every axis has one part; got 'x' in"
    with pytest.raises(ValueError, match=rf"{twice} {names[0]} and in {names[0]}"):
        in_map(attention, Q, Q, Q, axes=(("x", "x"), (), ()))
    for other in range(1, len(names)):
        axes = ["x", (), ()]
        axes[other] = ("y", "x")
        with pytest.raises(ValueError, match=rf"{twice} {names[0]} and in {names[other]}"):
            in_map(attention, Q, Q, Q, axes=axes)


@every
def test_what_is_refused_does_not_run(attention):
    """The error comes while the program is traced: no device has done anything."""
    ran = []

    def per_device(q):
        jax.debug.callback(ran.append, 1)
        return attention(q, q, q[:, :, :3], **dict(zip(CALLS[attention], ("x", "y", ()), strict=False)))

    mapped = jax.shard_map(
        per_device, mesh=mesh_of(x=2, y=2), in_specs=P(), out_specs=P(None, ("x", "y")), check_vma=False
    )
    with pytest.raises(ValueError, match=attention.__name__):
        jax.jit(mapped)(jnp.ones(Q.shape))
    jax.effects_barrier()
    assert not ran
