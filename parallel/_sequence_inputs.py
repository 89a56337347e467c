"""What the sequence-parallel attentions have in common: their arguments, checked once, when they are traced."""

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jaxtyping import Array, Float, Int

from parallel._block_attention import BlockAttention, check_block
from parallel._block_platform import PlatformBlockAttention
from parallel._check import array, flag, int32_ids, kind, static_scale
from parallel._varying import as_varying, varying_axes


class ReplicatedText(NamedTuple):
    """Text that attends, and is attended, together with a sequence that is sharded: the same on all devices.

    Attributes:
        q: (b, t, h, d) queries.
        k, v: (b, t, h_kv, d) keys and values; t may be 0.
        segment_ids: (b, t) ids of the sequences that the tokens belong to, 0 = padding. Without them text belongs to a
            sequence that has no ids either.
    """

    q: Float[Array, "b t h d"]
    k: Float[Array, "b t h_kv d"]
    v: Float[Array, "b t h_kv d"]
    segment_ids: Int[Array, "b t"] | None = None


class JointOutput(NamedTuple):
    """Attention output of the sharded sequence, and of the text, which is the same on all devices."""

    out: Float[Array, "b l_loc h d"]
    text: Float[Array, "b t h d"]


SegmentIds = Array | tuple[Array | None, Array | None]


class Inputs(NamedTuple):
    """Checked arguments.

    Attributes:
        name: of the function that was called.
        q, k, v: as given.
        q_ids, kv_ids: segment ids, both or neither; int32.
        text: as given, with ids where there are any.
        causal, keys_replicated: Python's.
        scale: a Python number.
        block: that was given, or that of the platform.
        axes: mesh axes that share a sequence.
        specs: explicit axes that the types of q and of the text's q named, where they did.
    """

    name: str
    q: Array
    k: Array
    v: Array
    q_ids: Array | None
    kv_ids: Array | None
    text: ReplicatedText | None
    causal: bool
    keys_replicated: bool
    scale: float
    block: BlockAttention
    axes: tuple[Any, ...]
    specs: tuple[P | None, P | None]

    @property
    def text_length(self) -> int:
        """Tokens of the text; 0 if there is none."""
        return 0 if self.text is None else self.text.q.shape[1]

    def alone(self, out: Array) -> Array:
        """What a caller without text gets."""
        return _named(out, self.specs[0])

    def result(self, out: Array, text: Array | None) -> Array | JointOutput:
        """What the caller gets: the output, with the text's if there was a text, be it empty."""
        out = self.alone(out)
        if self.text is None:
            return out
        text = self.text.q if text is None else text
        if varying_axes(text):
            # shard_map(check_vma=True) takes it for the same on all devices only from a collective.
            first = lax.axis_index(self.axes) == 0
            text = lax.psum(jnp.where(first, text, jnp.zeros_like(text)), self.axes)
        return JointOutput(out, _named(text, self.specs[1]))


def check_inputs(
    name: str,
    axes: Mapping[str, Any],
    qkv: tuple[Any, Any, Any],
    *,
    segment_ids: Any,
    causal: Any,
    text: Any,
    keys_replicated: Any,
    scale: Any,
    block_attention: Any,
) -> Inputs:
    """The arguments of function `name`, checked, and the axes that share a sequence.

    What is the same on all devices is marked as varying, as each device's share of its gradient will be; that is a type
    of `shard_map(check_vma=True)`, and nothing otherwise.

    Raises:
        TypeError: for rows that are no arrays of floating point numbers of 16 or 32 bits or of several dtypes, ids that
            are no signed integers of at most 32 bits, a text that is no `ReplicatedText`, flags that are traced or no
            bool, a scale that is traced or no number, or a block attention that is none.
        ValueError: if shapes disagree or have a 0; for ids past int32, a scale that float32 cannot hold, a text without
            ids beside a sequence that has them; for axes that are missing, not manual, or given twice; and for arrays
            that are divided over an explicit mesh axis.
    """
    names = check_axes(name, axes)
    q, k, v = _arrays(name, "", *qkv)
    _check_rows(name, "q, k and v", q, k, v)
    ids = _id_pair(name, segment_ids, q, k)
    if text is not None:
        text = _check_text(name, text, q, k, has_ids=ids is not None)
        if text.segment_ids is not None and ids is None:
            ids = jnp.ones(q.shape[:2], jnp.int32), jnp.ones(k.shape[:2], jnp.int32)
    specs = _spec(q), None if text is None else _spec(text.q)
    q, k, v = (_whole(name, what, x) for what, x in zip("qkv", (q, k, v), strict=True))
    q_ids, kv_ids = (
        None if ids is None else _whole(name, f"segment_ids of {what}", ids[i]) for i, what in enumerate("qk")
    )
    if text is not None:
        text = _whole_text(name, text)
    together = varying_axes(q, k, v, q_ids, kv_ids, text) | set(names)
    mark = partial(as_varying, axes=together)
    q, k, v, q_ids, kv_ids, text = jax.tree.map(mark, (q, k, v, q_ids, kv_ids, text))
    return Inputs(
        name,
        q,
        k,
        v,
        q_ids,
        kv_ids,
        text,
        causal=flag(name, "causal", causal),
        keys_replicated=flag(name, "keys_replicated", keys_replicated),
        scale=static_scale(name, scale, q.shape[-1]),
        block=_block_or_default(name, block_attention),
        axes=names,
        specs=specs,
    )


def check_axes(name: str, axes: Mapping[str, Any]) -> tuple[Any, ...]:
    """The axes in order: of an enclosing `shard_map`, each once.

    Raises:
        TypeError: for what is no name, nor a tuple of names.
        ValueError: for axes that are missing, not manual, or given twice.
    """
    seen: dict[Any, str] = {}
    mesh = jax.sharding.get_abstract_mesh()
    for argument, axis in axes.items():
        for one in axis if isinstance(axis, tuple) else (axis,):
            # JAX takes integers for axes of an array.
            if isinstance(one, (tuple, int)) or not isinstance(one, Hashable):
                where = " inside a tuple" if isinstance(axis, tuple) else ""
                raise TypeError(
                    f"{name}: {argument} is a name or a tuple of names; got a {type(one).__name__}{where}. Use a flat"
                    " tuple of mesh axes, () for none."
                )
            if one not in mesh.manual_axes:  # vmap names axes too
                advice = (
                    "Give () for none."
                    if one is None
                    else "Call it inside jax.shard_map over a mesh that has the axis; if shard_map has axis_names, name"
                    " it there too."
                )
                raise ValueError(
                    f"{name}: {argument} is a manual axis of the shard_map around the call; got {one!r}, with mesh axes"
                    f" {mesh.axis_names}, of them manual {tuple(mesh.manual_axes)}. {advice}"
                )
            if one in seen:
                raise ValueError(
                    f"{name}: every axis has one part; got {one!r} in {seen[one]} and in {argument}. Split the axis in"
                    " two when the mesh is made (sequence_mesh), or leave one of them out as ()."
                )
            seen[one] = argument
    return tuple(seen)


def _spec(x: Array) -> P | None:
    """The explicit axes that an array's type names; None for none."""
    spec = jax.typeof(x).sharding.spec
    return spec if spec and any(spec) else None


def _named(x: Array, spec: P | None) -> Array:
    """The array, whose type names these explicit axes of size 1."""
    return x if spec is None else jax.sharding.reshard(x, spec)


def _whole(name: str, what: str, x: Array) -> Array:
    """The array, whose type names no explicit axis: one of size 1 divides nothing, but has its say in any reshape.

    Raises:
        ValueError: for an array that is in parts where it looks whole, by the types of explicit axes.
    """
    spec = _spec(x)
    if spec is None:
        return x
    named = [axis for axes in spec if axes for axis in (axes if isinstance(axes, tuple) else (axes,))]
    sizes = jax.typeof(x).sharding.mesh.shape
    over = [axis for axis in named if sizes[axis] > 1]
    if over:
        raise ValueError(
            f"{name}: {what} is divided by shard_map alone; got {jax.typeof(x)}, divided over the explicit mesh"
            f" {'axis' if len(over) == 1 else 'axes'} {', '.join(map(repr, over))}. Make that manual: name it in"
            " axis_names of the jax.shard_map around the call, or leave axis_names out for all."
        )
    return jax.sharding.reshard(x, P())


def _whole_text(name: str, text: ReplicatedText) -> ReplicatedText:
    q, k, v = (_whole(name, f"the text's {what}", x) for what, x in zip("qkv", text[:3], strict=True))
    ids = text.segment_ids
    return ReplicatedText(q, k, v, None if ids is None else _whole(name, "segment_ids of the text", ids))


def _arrays(name: str, of: str, *qkv: Any) -> tuple[Array, ...]:
    advice = "Give (batch, length, heads, head_dim)."
    return tuple(array(name, f"{of}{what}", x, advice=advice) for what, x in zip("qkv", qkv, strict=True))


def _check_rows(name: str, what: str, q: Array, k: Array, v: Array, *, may_be_empty: bool = False) -> None:
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (q, k, v)) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"{name}: {what} are floating point, of one dtype; got {q.dtype}, {k.dtype} and {v.dtype}. Cast them."
        )
    if q.dtype == jnp.float64:
        raise TypeError(
            f"{name}: {what} are computed in float32 at most; got {q.dtype}, which would keep no more digits than that."
            " Cast them to float32."
        )
    if q.dtype.itemsize < 2:
        raise TypeError(
            f"{name}: {what} have 16 bits at least; got {q.dtype}, to which outputs and gradients would be rounded."
            " Cast them to bfloat16."
        )
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(
            f"{name}: {what} are (batch, length, heads, head_dim); got {q.shape}, {k.shape} and {v.shape}. Add axes of"
            " size 1."
        )
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{name}: {what} have one batch and head_dim, and v the shape of k; got {q.shape}, {k.shape} and {v.shape}."
        )
    if 0 in (*q.shape[::2], *k.shape[::2], q.shape[3]) or not (may_be_empty or q.shape[1] * k.shape[1]):
        raise ValueError(
            f"{name}: {what} have no axis of size 0; got {q.shape} and {k.shape}. Pad the rows (pad_sequence)."
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{name}: heads of keys divide those of queries; got q={q.shape[2]}, k={k.shape[2]} heads. Repeat heads of"
            " k and v."
        )


def _id_pair(name: str, segment_ids: Any, q: Array, k: Array) -> tuple[Array, Array] | None:
    if segment_ids is None:
        return None
    if not isinstance(segment_ids, (tuple, jax.Array, np.ndarray)):
        raise TypeError(
            f"{name}: segment_ids is one array, or a tuple (query ids, key ids); got a {kind(segment_ids)}. Leave it"
            " out if there are none."
        )
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise ValueError(
            f"{name}: segment_ids is one array, or a pair of query and key ids; got {len(pair)} arrays. Give a tuple of"
            " two."
        )
    if all(ids is None for ids in pair):
        return None
    # `pad_sequence` has no ids for a length that divides, beside one that does not.
    pair = tuple(
        jnp.ones(x.shape[:2], jnp.int32) if ids is None else ids for ids, x in zip(pair, (q, k), strict=True)
    )
    q_ids, kv_ids = (
        _check_ids(name, f"segment_ids of {what}", ids, x)
        for what, ids, x in zip("qk", pair, (q, k), strict=True)
    )
    return q_ids, kv_ids


def _check_ids(name: str, what: str, ids: Any, rows: Array) -> Array:
    ids = int32_ids(name, what, ids)
    if ids.shape != rows.shape[:2]:
        raise ValueError(
            f"{name}: {what} are (batch, length) like the rows; got {ids.shape} for rows {rows.shape}. Give a tuple"
            " (query ids, key ids) if lengths differ, and ids of the device's own rows."
        )
    return ids


def _check_text(name: str, text: Any, q: Array, k: Array, *, has_ids: bool) -> ReplicatedText:
    if not isinstance(text, ReplicatedText):
        raise TypeError(f"{name}: text is a ReplicatedText(q, k, v); got a {type(text).__name__}.")
    rows = _arrays(name, "the text's ", text.q, text.k, text.v)
    text = text._replace(**dict(zip("qkv", rows, strict=True)))
    _check_rows(name, "the text's q, k and v", text.q, text.k, text.v, may_be_empty=True)
    for mine, of in ((text.q, q), (text.k, k)):
        if mine.dtype != of.dtype or (mine.shape[0], *mine.shape[2:]) != (of.shape[0], *of.shape[2:]):
            raise ValueError(
                f"{name}: text has batch, heads, head_dim and dtype of the sequence; got {mine.dtype}{list(mine.shape)}"
                f" beside {of.dtype}{list(of.shape)}."
            )
    if text.q.shape[1] != text.k.shape[1]:
        raise ValueError(
            f"{name}: the text's q and k have one length; got {text.q.shape} and {text.k.shape}. For keys without"
            " queries give them as k and v with keys_replicated=True."
        )
    if text.segment_ids is not None:
        ids = _check_ids(name, "segment_ids of the text", text.segment_ids, text.q)
        return text._replace(segment_ids=ids)
    if has_ids and text.q.shape[1]:
        raise ValueError(
            f"{name}: text beside rows with segment_ids has segment_ids too; got none for text of {text.q.shape}. Give"
            " each token the id of its sequence (1 if padding is all that segment_ids mark)."
        )
    return text._replace(segment_ids=jnp.zeros(text.q.shape[:2], jnp.int32) if has_ids else None)


def _block_or_default(name: str, block: Any) -> BlockAttention:
    if block is None:
        return PlatformBlockAttention()
    check_block(name, "block_attention", block)
    return block
