"""Attention in parts: what a part of the keys contributes to a softmax, how two parts become one, and its gradient.

A part is (out, lse): the softmax over its keys alone, and the log of its denominator. Parts of disjoint keys merge to
that of their union, in any order. In float32 whatever the rows are: rounded parts would lose more the more there are.

The gradient of a merged softmax needs no derivative of the merge. With out and lse of the whole, a key's weight is
exp(logit - lse), and the gradient of its logit is weight * (d_out . v - d_out . out): every block of keys gives its
exact contribution alone, and contributions add up.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from parallel._routes import AxisName


class Partial(NamedTuple):
    """Attention over some of the keys: zeros and -inf where none of them is attended."""

    out: Float[Array, "b l h d"]
    lse: Float[Array, "b l h"]


def empty_partial(q: Float[Array, "b l h d"]) -> Partial:
    """Attention over no keys."""
    return Partial(
        jnp.zeros_like(q, dtype=jnp.float32), jnp.full_like(q[..., 0], -jnp.inf, dtype=jnp.float32)
    )


def as_partial(out: Float[Array, "b l h d"], lse: Float[Array, "b l h"]) -> Partial:
    """A kernel's results in float32."""
    return Partial(out.astype(jnp.float32), lse.astype(jnp.float32))


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both.

    With x = lse_b - lse_a the weights are sigmoid(-x) and sigmoid(x), and lse is the larger of both less
    log sigmoid(|x|): no exponential is taken of anything positive. A side without keys (-inf) has weight 0, two such
    sides stay one; NaN on either side stays NaN.
    """
    neither = jnp.isneginf(a.lse) & jnp.isneginf(b.lse)
    difference = jnp.where(neither, 0.0, b.lse - a.lse)
    lse = jnp.maximum(a.lse, b.lse) - jax.nn.log_sigmoid(jnp.abs(difference))
    of_a, of_b = (jax.nn.sigmoid(x)[..., None] for x in (-difference, difference))
    return Partial(of_a * a.out + of_b * b.out, lse)


def merge_over_axis(partial: Partial, axis_name: AxisName) -> Partial:
    """Attention over the keys of all devices of an axis, the same on each: rows are equal, keys are not.

    Communication: an all-reduce of lse and one of out and lse together, in float32.
    """
    top = lax.pmax(partial.lse, axis_name)
    weight = jnp.exp(partial.lse - jnp.where(jnp.isneginf(top), 0.0, top))[..., None]
    total = lax.psum(jnp.concatenate([partial.out * weight, weight], axis=-1), axis_name)
    out, weights = total[..., :-1], total[..., -1:]
    none = weights == 0.0
    lse = top + jnp.log(jnp.where(none, 1.0, weights))[..., 0]
    return Partial(jnp.where(none, 0.0, out / jnp.where(none, 1.0, weights)), lse)


def share_of_whole(
    part_lse: Float[Array, "b l h"], whole_lse: Float[Array, "b l h"]
) -> Float[Array, "b l h"]:
    """The weight that a part has in the whole that it belongs to: 0 where it, or the whole, has no keys."""
    return jnp.exp(jnp.where(jnp.isneginf(part_lse), -jnp.inf, jnp.minimum(part_lse - whole_lse, 0.0)))


def row_products(d_out: Float[Array, "b l h d"], out: Float[Array, "b l h d"]) -> Float[Array, "b l h"]:
    """d_out . out, in float32: what the gradient of each logit of a row subtracts."""
    return (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
