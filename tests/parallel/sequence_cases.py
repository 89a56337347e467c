"""One program per case of sequence-parallel attention, and its comparison with the whole sequence on one device."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from parallel import BlockAttention, JointOutput, ReplicatedText, XlaBlockAttention
from tests.oracles import close
from tests.oracles_sequence import joint_attention

F32, BF16 = 1e-5, 2e-2
# Explicit, so that no test traces the kernels of a GPU.
BLOCK = XlaBlockAttention(block=16)
# What LLVM makes of a program is not what is tested here, and takes 40 % of the time to compile it.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Case:
    """A problem: what every device has of it.

    Attributes:
        q_loc, k_loc: rows of a device.
        segments: number of segments that the sequence is made of, with padding among them; 0 for no ids.
        text: tokens of a replicated text; None for none.
        check_vma: whether `shard_map` follows which values differ between devices.
        block: attention of a block.
    """

    q_loc: int = 3
    k_loc: int = 3
    heads: int = 4
    kv_heads: int = 4
    dim: int = 4
    batch: int = 2
    segments: int = 0
    causal: bool = False
    text: int | None = None
    dtype: Any = jnp.float32
    seed: int = 0
    check_vma: bool = False
    block: BlockAttention = BLOCK


def combinations(sizes: Sequence[Any]) -> list[tuple[Any, int, bool, int | None]]:
    """(size, segments, causal, text): every choice of the last three, and with each text as many sizes as there are."""
    masks = list(itertools.product((0, 3), (False, True)))
    return [
        (sizes[(i + j) % len(sizes)], segments, causal, text)
        for i, text in enumerate((None, 1, 77))
        for j, (segments, causal) in enumerate(masks)
    ]


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    """The first devices, along the given axes."""
    num = math.prod(axes.values())
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes), devices=jax.devices()[:num]
    )


@dataclass(frozen=True)
class Arrays:
    """Global arrays of a case; None for what it does not have."""

    qkv: tuple[Any, ...]
    d_out: Any
    ids: tuple[Any, Any] | None
    text: tuple[Any, ...] | None
    text_ids: Any
    d_text: Any


def draw(case: Case, devices: int) -> Arrays:
    rng = np.random.default_rng(case.seed)

    def rows(length, heads):
        return np.asarray(jnp.asarray(rng.standard_normal((case.batch, length, heads, case.dim)), case.dtype))

    def ids(length):
        return np.sort(rng.integers(0, case.segments + 1, (case.batch, length)), axis=1).astype(np.int32)

    l_q, l_k = case.q_loc * devices, case.k_loc * devices
    qkv = rows(l_q, case.heads), rows(l_k, case.kv_heads), rows(l_k, case.kv_heads)
    d_out = rows(l_q, case.heads)
    q_ids = ids(l_q) if case.segments else None
    # Where lengths agree, so do segments; else there are segments that have keys only, or queries only.
    pair = None if q_ids is None else (q_ids, q_ids if l_q == l_k else ids(l_k))
    if case.text is None:
        return Arrays(qkv, d_out, pair, None, None, None)
    text = rows(case.text, case.heads), rows(case.text, case.kv_heads), rows(case.text, case.kv_heads)
    text_ids = ids(case.text) if case.segments else None
    return Arrays(qkv, d_out, pair, text, text_ids, rows(case.text, case.heads))


@cache
def program(attention: Callable[..., Any], mesh: jax.sharding.Mesh, axes: Any, case: Case) -> Any:
    """Value and gradient in one jit. `axes` order the devices along the sequence."""

    def per_device(qkv, ids, text, text_ids):
        together = None if text is None else ReplicatedText(*text, text_ids)
        ids = None if ids is None or all(x is None for x in ids) else ids
        return attention(*qkv, segment_ids=ids, causal=case.causal, text=together, block_attention=case.block)

    sharded = P(None, axes)
    mapped = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(sharded, sharded, P(), P()),
        out_specs=sharded if case.text is None else JointOutput(sharded, P()),
        check_vma=case.check_vma,
    )

    @partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(qkv, d_out, ids, text, text_ids, d_text):
        out, pullback = jax.vjp(lambda qkv, text: mapped(qkv, ids, text, text_ids), qkv, text)
        return out, pullback(d_out if case.text is None else JointOutput(d_out, d_text))

    return run


def results(
    attention: Callable[..., Any], mesh: Any, axes: Any, case: Case, arrays: Arrays
) -> tuple[Any, ...]:
    """Output, text output, and gradients of q, k, v and of the text's."""
    run = program(attention, mesh, axes, case)
    args = [jax.tree.map(jnp.asarray, x) for x in (arrays.qkv, arrays.d_out, arrays.ids, arrays.text)]
    out, (d_qkv, d_of_text) = jax.block_until_ready(run(*args, arrays.text_ids, arrays.d_text))
    if case.text is None:
        check_array(out, mesh, axes, case)
        return out, None, d_qkv
    check_array(out.out, mesh, axes, case)
    return out.out, out.text, (*d_qkv, *d_of_text)


def check_array(out: Any, mesh: Any, axes: Any, case: Case) -> None:
    assert out.dtype == case.dtype
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, axes)), out.ndim)


def check(
    attention: Callable[..., Any],
    mesh: Any,
    axes: Any,
    case: Case,
    tolerance: float = F32,
    *,
    arrays: Arrays | None = None,
    vanishing: bool = False,
) -> None:
    """Value and gradients against the oracle, for arrays like those of `draw`.

    Where a gradient may vanish, as that of queries which attend to one key, its rounding errors are those of its terms:
    they are then compared with the largest of all gradients.
    """
    arrays = arrays or draw(case, mesh.size)
    out, text_out, gradients = results(attention, mesh, axes, case, arrays)
    wanted = joint_attention(
        arrays.qkv,
        arrays.d_out,
        ids=arrays.ids,
        causal=case.causal,
        text=arrays.text,
        text_ids=arrays.text_ids,
        d_text=arrays.d_text,
    )
    close(out, wanted.out, tolerance)
    if case.text is not None:
        close(text_out, wanted.text_out, tolerance)
    floor = tolerance * max(np.abs(x).max(initial=0.0) for x in wanted.gradients) if vanishing else 0.0
    assert len(gradients) == len(wanted.gradients)
    for gradient, expected in zip(gradients, wanted.gradients, strict=True):
        close(gradient, expected, tolerance, max(floor, 1e-30))


def check_poison(attention: Callable[..., Any], mesh: Any, axes: Any, case: Case) -> None:
    """What is not finite in all rows of one segment, and in all padding, changes no bit of the others."""
    arrays = draw(case, mesh.size)
    assert arrays.ids is not None
    assert (arrays.ids[0] == case.segments).any()
    before = results(attention, mesh, axes, case, arrays)
    q_ids, kv_ids = arrays.ids
    of_rows = [q_ids, arrays.text_ids, q_ids, kv_ids, kv_ids, *(arrays.text_ids,) * 3]
    flat = partial(jax.tree.leaves, is_leaf=lambda x: x is None)
    for value in (np.nan, np.inf):
        after = results(attention, mesh, axes, case, _poisoned(case, arrays, value))
        for a, b, ids in zip(flat(before), flat(after), of_rows, strict=case.text is not None):
            if ids is None:
                continue
            others = (ids != case.segments) & (ids != 0)
            np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])
            assert not np.asarray(b)[ids == 0].any(), "padding stays zero"
        assert any(np.isnan(x).any() for x in flat(after) if x is not None), (
            "it is not hidden where it belongs"
        )


def _poisoned(case: Case, arrays: Arrays, value: float) -> Arrays:
    def poison(x, ids):
        x = x.copy()
        x[(ids == case.segments) | (ids == 0)] = value
        return x

    q_ids, kv_ids = arrays.ids
    q, k, v = arrays.qkv
    arrays = replace(
        arrays,
        qkv=(poison(q, q_ids), poison(k, kv_ids), poison(v, kv_ids)),
        d_out=poison(arrays.d_out, q_ids),
    )
    if arrays.text is None:
        return arrays
    return replace(
        arrays,
        text=tuple(poison(x, arrays.text_ids) for x in arrays.text),
        d_text=poison(arrays.d_text, arrays.text_ids),
    )


@dataclass(frozen=True)
class Counted:
    """Plain blocks that tell whenever one is computed."""

    tell: Callable[[str], None]

    def forward(self, *args):
        jax.debug.callback(partial(self.tell, "forward"))
        return BLOCK.forward(*args)

    def backward(self, *args):
        jax.debug.callback(partial(self.tell, "backward"))
        return BLOCK.backward(*args)


def computed_blocks(attention: Callable[..., Any], mesh: Any, axes: Any, case: Case) -> Counter[str]:
    """How many blocks all devices compute, forward and backward, beside `check`."""
    computed: Counter[str] = Counter()
    case = replace(case, block=Counted(lambda name: computed.update([name])))
    check(attention, mesh, axes, case)
    jax.effects_barrier()
    return computed


def errors(attention: Callable[..., Any], mesh: Any, axes: Any, case: Case) -> list[float]:
    """Of each output and gradient, relative to the oracle's largest, for the rounded inputs."""
    arrays = draw(case, mesh.size)
    out, _, gradients = results(attention, mesh, axes, case, arrays)
    wanted = joint_attention(arrays.qkv, arrays.d_out, ids=arrays.ids, causal=case.causal)
    found = []
    for actual, expected in zip((out, *gradients), (wanted.out, *wanted.gradients), strict=True):
        error = np.abs(np.asarray(actual, np.float64) - expected).max()
        found.append(error / np.abs(expected).max())
    return found


def check_replicated_keys(attention: Callable[..., Any], mesh: Any, axes: Any) -> None:
    """Cross-attention to short keys that all devices have; gradients of these add up over devices."""
    rng = np.random.default_rng(1)
    q, d_out = rng.standard_normal((2, 2, 3 * mesh.size, 4, 4)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 5, 2, 4)).astype(np.float32)
    q_ids, kv_ids = (rng.integers(0, 3, (2, n)).astype(np.int32) for n in (q.shape[1], 5))

    def per_device(q, k, v, ids):
        return attention(q, k, v, keys_replicated=True, segment_ids=ids, block_attention=BLOCK)

    sharded = P(None, axes)
    mapped = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(sharded, P(), P(), (sharded, P())),
        out_specs=sharded,
        check_vma=False,
    )

    @jax.jit
    def run(q, k, v):
        out, pullback = jax.vjp(lambda *qkv: mapped(*qkv, (q_ids, kv_ids)), q, k, v)
        return out, pullback(d_out)

    found = moves(run, q, k, v)
    assert all(move.kind.startswith("psum") for move in found), (
        "nothing moves but sums of the keys' gradients"
    )
    assert sum(move.num_bytes for move in found) == 2 * k.nbytes
    out, gradients = run(q, k, v)
    wanted = joint_attention((q, k, v), d_out, ids=(q_ids, kv_ids))
    close(out, wanted.out, F32)
    for gradient, expected in zip(gradients, wanted.gradients, strict=True):
        close(gradient, expected, F32)


@dataclass(frozen=True)
class Move:
    """A collective of a program: its kind, bytes that enter it on a device, and how often it runs."""

    kind: str
    num_bytes: int
    times: int
    axes: tuple[str, ...]


_COLLECTIVES = frozenset({"ppermute", "all_to_all", "all_gather", "psum", "psum2", "pmax", "reduce_scatter"})


def moves(function: jax.stages.Wrapped, *args: Any) -> list[Move]:
    """Collectives of a jitted program, those in loops with their trip counts."""
    found: list[Move] = []
    _walk_moves(function.trace(*args).jaxpr.jaxpr, 1, found)
    return found


def _walk_moves(jaxpr: Any, times: int, found: list[Move]) -> None:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _COLLECTIVES or name.startswith(("psum", "pmax")):
            num_bytes = sum(math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in eqn.invars)
            axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
            found.append(Move(name, num_bytes, times, axes if isinstance(axes, tuple) else (axes,)))
        inner = times * eqn.params["length"] if name == "scan" else times
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            body = getattr(value, "jaxpr", value)
            if hasattr(body, "eqns"):
                _walk_moves(body, inner, found)


def lowered_text(attention: Callable[..., Any], mesh: Any, axes: Any, case: Case) -> str:
    """StableHLO of value and gradient."""
    arrays = draw(case, mesh.size)
    run = program(attention, mesh, axes, case)
    return (
        run.trace(arrays.qkv, arrays.d_out, arrays.ids, arrays.text, arrays.text_ids, arrays.d_text)
        .lower()
        .as_text()
    )
