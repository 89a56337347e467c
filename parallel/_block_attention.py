"""The contract of block attention: what one device computes for one block of queries and one of keys.

All sequence-parallel attention here is made of such blocks. A block returns its output and log-sum-exp, so that blocks
merge (`_online_softmax`); its gradient takes those of the whole softmax, so that contributions add up. cuDNN, the
packed kernels, plain XLA, or a function of your own can serve.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from parallel._check import implementation, kind
from parallel._online_softmax import Partial, as_partial, row_products, share_of_whole


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
@no_type_check  # JAX rebuilds pytrees with placeholders for leaves
class BlockMask:
    """Which queries attend to which keys. A condition that is None does not limit anything; all that are given hold.

    Attributes:
        q_ids, kv_ids: (b, l_q) and (b, l_k) segment ids, signed integers; rows attend to keys of their id. At most 0 =
            padding: such rows attend to nothing (zeros, -inf), and nothing attends to such keys. Both or neither.
        q_positions, kv_positions: (l_q,) and (l_k,) places in the sequence, int32; rows attend to keys that are not
            behind them. Both or neither.
        is_diagonal: whether these are the same rising places of both, known when the program is traced: row i attends
            to keys 0 to i. For kernels that know no other causal mask; who heeds positions may ignore it.
    """

    q_ids: Array | None = None
    kv_ids: Array | None = None
    q_positions: Array | None = None
    kv_positions: Array | None = None
    is_diagonal: bool = field(default=False, metadata={"static": True})

    @property
    def allows_all(self) -> bool:
        """Whether every query attends to every key."""
        return self.q_ids is None and self.q_positions is None

    def of_queries(self, rows: slice) -> "BlockMask":
        """For some of the queries."""
        return BlockMask(
            None if self.q_ids is None else self.q_ids[:, rows],
            self.kv_ids,
            None if self.q_positions is None else self.q_positions[rows],
            self.kv_positions,
        )


def diagonal_mask(q_ids: Array | None, kv_ids: Array | None, length: int) -> BlockMask:
    """The causal mask between as many queries as keys, at the same places of the sequence, whichever these are."""
    places = jnp.arange(length, dtype=jnp.int32)
    return BlockMask(q_ids, kv_ids, places, places, is_diagonal=True)


class Attended(NamedTuple):
    """The whole softmax of some queries, over these keys and any others, and the cotangent of its output.

    Attributes:
        out, d_out: (b, l_q, h, d).
        lse: (b, l_q, h), float32.
    """

    out: Array
    lse: Array
    d_out: Array

    def rows(self, rows: slice) -> "Attended":
        """Of some of the queries."""
        return Attended(*(x[:, rows] for x in self))


@runtime_checkable
class BlockAttention(Protocol):
    """Attention of a block of queries (b, l_q, h, d) over one of keys and values (b, l_k, h_kv, d), and its gradient.

    Heads of keys divide those of queries: query head i reads key head i // (h / h_kv). An implementation is hashable,
    since it is a static argument. What is not finite in one segment must not reach another.
    """

    def forward(self, q: Array, k: Array, v: Array, mask: BlockMask, scale: float) -> Partial:
        """Output (b, l_q, h, d) in any precision, and lse (b, l_q, h) of scaled logits in float32.

        Rows that attend to nothing here give zeros and -inf.
        """
        ...

    def backward(
        self, q: Array, k: Array, v: Array, whole: Attended, mask: BlockMask, scale: float
    ) -> tuple[Array, Array, Array]:
        """What these keys contribute to the gradients of q, k and v, in their shapes and any precision."""
        ...


def check_block(caller: str, name: str, block: Any) -> None:
    """Raises TypeError if it is no `BlockAttention`."""
    rule = f"{name} is an object with forward and backward"
    implementation(caller, rule, block, BlockAttention, advice="Wrap a function in DifferentiableAttention.")


@dataclass(frozen=True, slots=True)
class DifferentiableAttention:
    """A `BlockAttention` made of a plain function that JAX can differentiate.

    The gradient runs the function again, for the block's own out and lse, and gives its derivative the cotangents that
    these have in the whole: with w = exp(lse - lse of the whole), w d_out for out and w d_out . (out - out of the
    whole) for lse. The function must therefore be differentiable in lse too, and give it in float32.
    `jax.nn.dot_product_attention` does neither: its residual is rounded to the inputs' dtype and has no derivative.

    Attributes:
        function: f(q, k, v, mask, scale) -> (out, lse), shapes as in `BlockAttention.forward`. It must heed the mask.
    """

    function: Callable[[Array, Array, Array, BlockMask, float], tuple[Array, Array]]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"DifferentiableAttention: function is f(q, k, v, mask, scale) -> (out, lse); got a"
                f" {kind(self.function)}. Give a function."
            )

    def forward(self, q: Array, k: Array, v: Array, mask: BlockMask, scale: float) -> Partial:
        """The function's results.

        Raises:
            TypeError: if they are no pair of arrays.
        """
        rule = "DifferentiableAttention: function returns (out, lse)"
        return Partial(*_arrays_of(rule, self.function(q, k, v, mask, scale), 2))

    def backward(
        self, q: Array, k: Array, v: Array, whole: Attended, mask: BlockMask, scale: float
    ) -> tuple[Array, Array, Array]:
        """The function's derivative, weighted by the block's share of the whole."""
        part, pullback = jax.vjp(lambda q, k, v: block_forward(self, q, k, v, mask, scale), q, k, v)
        share = share_of_whole(part.lse, whole.lse)
        d_part_out = share[..., None] * whole.d_out.astype(jnp.float32)
        d_part_lse = share * row_products(whole.d_out, part.out - whole.out.astype(jnp.float32))
        dq, dk, dv = pullback(Partial(d_part_out, d_part_lse))
        return dq, dk, dv


def block_forward(
    block: BlockAttention, q: Array, k: Array, v: Array, mask: BlockMask, scale: float
) -> Partial:
    """A block's partial result in float32, checked.

    Raises:
        TypeError: if the block does not return two floating point arrays, or an lse of less than 32 bits.
        ValueError: if it returns other shapes than its contract says.
    """
    rule = "block_attention: forward returns out of q's shape and lse of (batch, length, heads)"
    out, lse = _arrays_of(rule, block.forward(q, k, v, mask, scale), 2)
    if out.shape != q.shape or lse.shape != q.shape[:3]:
        raise ValueError(
            f"{rule}; got {out.shape} and {lse.shape} for q={q.shape}. Transpose lse if heads come first."
        )
    if jnp.finfo(lse.dtype).bits < 32:
        raise TypeError(
            f"block_attention: forward returns lse in float32; got {lse.dtype}, too coarse to weigh parts by. Take it"
            " of logits in float32, before anything is rounded."
        )
    return as_partial(out, lse)


def block_backward(
    block: BlockAttention, q: Array, k: Array, v: Array, whole: Attended, mask: BlockMask, scale: float
) -> tuple[Array, Array, Array]:
    """A block's contributions to gradients, as it gives them, checked.

    Raises:
        TypeError: if the block does not return three floating point arrays.
        ValueError: if it returns other shapes than those of q, k and v.
    """
    rule = "block_attention: backward returns (dq, dk, dv) in the shapes of q, k and v"
    dq, dk, dv = _arrays_of(rule, block.backward(q, k, v, whole, mask, scale), 3)
    if (dq.shape, dk.shape, dv.shape) != (q.shape, k.shape, v.shape):
        raise ValueError(
            f"{rule}; got {dq.shape}, {dk.shape} and {dv.shape} for q={q.shape}, k={k.shape} and v={v.shape}."
            " Broadcast them, add up what query heads give to a key head, and do not reorder axes."
        )
    return dq, dk, dv


def _arrays_of(rule: str, found: Any, number: int) -> tuple[Any, ...]:
    """What a block returned, a tuple of so many floating point arrays.

    Raises:
        TypeError: by `rule` if it is something else.
    """
    results = tuple(found) if isinstance(found, (tuple, list)) else None
    if results is None or len(results) != number:
        what = _kind_of_result(found) if results is None else f"{len(results)} results"
        raise TypeError(f"{rule}; got {what}. Return a tuple of {number} arrays.")
    for result in results:
        if not (isinstance(result, (jax.Array, np.ndarray)) and jnp.issubdtype(result.dtype, jnp.floating)):
            raise TypeError(
                f"{rule}; got {_kind_of_result(result)} among them. Return floating point arrays."
            )
    return results


def _kind_of_result(result: Any) -> str:
    is_array = isinstance(result, (jax.Array, np.ndarray))
    return f"an array of {result.dtype}" if is_array else kind(result)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _local(block: BlockAttention, scale: float, mask: BlockMask, q, k, v) -> Array:
    return block_forward(block, q, k, v, mask, scale).out.astype(q.dtype)


def _local_fwd(block, scale, mask, q, k, v):
    out, lse = block_forward(block, q, k, v, mask, scale)
    out = out.astype(q.dtype)
    return out, (mask, q, k, v, out, lse)


def _local_bwd(block, scale, saved, d_out):
    mask, q, k, v, out, lse = saved
    gradients = once_differentiable(partial(_local_gradients, block, scale))(
        q, k, v, Attended(out, lse, d_out), mask
    )
    return None, *(g.astype(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True))


def _local_gradients(block, scale, q, k, v, whole, mask):
    return block_backward(block, q, k, v, whole, mask, scale)


_local.defvjp(_local_fwd, _local_bwd)


def once_differentiable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which refuses to be differentiated: it computes a gradient, through kernels and loops."""
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def _(*_):
        raise NotImplementedError(
            "sequence-parallel attention: first derivatives only; got a derivative of its gradient. Write the attention"
            " in plain JAX."
        )

    return guarded


def local_attention(
    q: Float[Array, "b l_q h d"],
    k: Float[Array, "b l_k h_kv d"],
    v: Float[Array, "b l_k h_kv d"],
    mask: BlockMask,
    *,
    scale: float,
    block_attention: BlockAttention,
) -> Float[Array, "b l_q h d"]:
    """Attention of one block that is the whole softmax, with the block's own gradient; output in the queries' dtype.

    Per device, no communication; keeps q, k, v, the output and lse for the gradient. What the public functions come
    down to where nothing is divided; their checks are not repeated here.
    """
    return _local(block_attention, scale, mask, q, k, v)
