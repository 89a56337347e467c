"""Fully sharded parameters: gathered one layer ahead, and gradients scattered one layer behind.

Parameters of a stack of layers are arrays with a leading layer axis, each sharded along one of its other
axes. A scan that gathers a layer and then runs it leaves the link idle during compute and the cores idle
during the gather. So the scan here carries the parameters of the layer it is about to run, and starts the
gather of the next one first; in the backward scan it carries the next (earlier) layer's parameters and the
last layer's full gradient, whose reduce-scatter runs under this layer's backward.

    forward   step i:  gather(i + 1) | run(i)
    backward  step i:  gather(i - 1) | reduce-scatter(gradient of i + 1) | recompute and differentiate(i)

Only the layers' inputs are kept between the two, and the last layer's gathered parameters, with which the
backward scan starts: no others outlive their step.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from parallel._routes import AxisName

# A leaf below this many elements (per layer) is cheaper to replicate than to gather.
_REPLICATE_BELOW = 1024


def shard_axis(shape: Sequence[int], degree: int, *, stacked: bool = False) -> int | None:
    """The axis along which a parameter is sharded: the first that `degree` divides.

    Shards of the first axis lie one after another in the gathered array. Of any other axis the compiler keeps a
    transposed copy of the whole stack to gather from: as many bytes again as the parameters.

    Args:
        shape: global shape.
        degree: devices that share the parameter.
        stacked: whether the leading axis counts layers; it is never sharded.

    Returns:
        The axis, or None for a parameter that is replicated: small, or divisible nowhere.
    """
    first = 1 if stacked else 0
    if degree == 1 or math.prod(shape[first:]) < _REPLICATE_BELOW:
        return None
    return next((i for i in range(first, len(shape)) if shape[i] % degree == 0), None)


def gather_leaf(x: Array, axis: int | None, axis_name: AxisName, dtype: Any = None) -> Array:
    """All-gather one parameter's shards, cast to `dtype` before they travel; replicated parameters pass through.

    Per device. The gradient is reduce-scattered in float32 and has the dtype of `x`; for a replicated parameter it
    stays this device's own part, which the caller must sum over devices.

    Args:
        x: this device's shard, or the whole parameter.
        axis: its sharded axis; None if it is replicated.
        axis_name: mesh axis, or tuple of axes, of the shards.
        dtype: dtype in which the shards travel; their own by default.

    Returns:
        The whole parameter, in the dtype in which it travelled.
    """
    if axis is None:
        return x
    return _gather(axis, axis_name, dtype or x.dtype, x)


def _all_gather(axis: int, axis_name: AxisName, dtype: Any, x: Array) -> Array:
    return lax.all_gather(x.astype(dtype), axis_name, axis=axis, tiled=True)


_gather = jax.custom_vjp(_all_gather, nondiff_argnums=(0, 1, 2))
# The transpose of the gather would sum in the dtype that travelled forward; gradients are summed in float32. The
# residual of no elements remembers the dtype of x.
_gather.defvjp(
    lambda axis, axis_name, dtype, x: (_all_gather(axis, axis_name, dtype, x), jnp.zeros(0, x.dtype)),
    lambda axis, axis_name, dtype, like, g: (_scatter_leaf(g, axis, axis_name).astype(like.dtype),),
)


def _scatter_leaf(g: Array, axis: int | None, axis_name: AxisName) -> Array:
    g = g.astype(jnp.float32)
    if axis is None:
        return g
    return lax.psum_scatter(g, axis_name, scatter_dimension=axis, tiled=True)


LayerFn = Callable[[Any, Any, Any], Any]


def sharded_layer_scan(
    axes: Any,
    *,
    axis_name: AxisName,
    dtype: Any = None,
    replica_axis: AxisName | None = None,
    trained: Any = None,
) -> Callable[[LayerFn, Any, Any, Any], Any]:
    """A `layer_scan(fn, stacked, carry, consts) -> carry` for parameters sharded over `axis_name`.

    Per device: call inside `shard_map`. Every layer is recomputed in the backward pass from its input, which is all
    that is stored. Communication per layer: parameters gathered once forward and once backward in `dtype`, gradients
    reduce-scattered once in float32 (and all-reduced over `replica_axis`).

    Args:
        axes: pytree like `stacked` with the sharded axis of each leaf in the stacked array (layer axis = 0), or -1 for
            a leaf that is replicated (None would vanish from a pytree).
        axis_name: mesh axis, or tuple of axes, of the shards.
        dtype: dtype in which sharded parameters travel; their own by default.
        replica_axis: mesh axis over which there are copies of every shard: gradients of sharded leaves are then added
            up over it as well, each after its reduce-scatter and under the same layer. None leaves that to the caller.
        trained: pytree like `stacked` of bools: leaves that get a gradient; all by default. The others cost neither the
            products of their gradients nor memory for them.

    Returns:
        The scan. `fn(layer_params, carry, consts) -> carry` may close over integers and other values that need no
        gradient; gradients reach `stacked` (shards; replicated leaves: this device's part), `carry` and `consts`,
        which are floating point.
    """

    keep = jax.tree.leaves(jax.tree.map(lambda _: True, axes) if trained is None else trained)
    parts = _Parts(jax.tree.structure(axes), tuple(keep))

    def fetch(stacked: _Divided, i: Any) -> _Divided:
        def leaf(x: Array, axis: int) -> Array:
            layer = lax.dynamic_index_in_dim(x, i, keepdims=False)
            return gather_leaf(layer, None if axis < 0 else axis - 1, axis_name, dtype)

        return jax.tree.map(leaf, stacked, parts.divide(axes))

    def scatter_leaf(g: Array, axis: int) -> Array:
        shard = _scatter_leaf(g, None if axis < 0 else axis - 1, axis_name)
        return shard if axis < 0 or replica_axis is None else lax.psum(shard, replica_axis)

    def scatter(grads: Any) -> Any:
        return jax.tree.map(scatter_leaf, grads, parts.divide(axes).trained)

    def layer_scan(fn: LayerFn, stacked: Any, carry: Any, consts: Any) -> Any:
        count = jax.tree.leaves(stacked)[0].shape[0]

        def apply(params: _Divided, carry: Any, consts: Any) -> Any:
            return fn(parts.join(params), carry, consts)

        def forward(trained, frozen, carry, consts):
            stacked = _Divided(trained, frozen)

            def body(state, i):
                carry, params = state
                following = fetch(stacked, jnp.minimum(i + 1, count - 1))
                return (apply(params, carry, consts), following), carry

            (out, last), inputs = lax.scan(body, (carry, fetch(stacked, 0)), jnp.arange(count))
            return out, (stacked, inputs, last, consts)

        def backward(saved, d_carry):
            stacked, inputs, last, consts = saved
            d_trained, d_carry, d_consts = _backward_scan(
                apply, fetch, scatter, (stacked, inputs, last, consts), d_carry
            )
            return d_trained, None, d_carry, d_consts

        run = jax.custom_vjp(lambda *args: forward(*args)[0])
        run.defvjp(forward, backward)
        return run(*parts.divide(stacked), carry, consts)

    return layer_scan


class _Divided(NamedTuple):
    """Leaves of a layer's parameters that get a gradient, and those that do not."""

    trained: list[Any]
    frozen: list[Any]


class _Parts(NamedTuple):
    """How the leaves of a pytree are divided."""

    treedef: Any
    keep: tuple[bool, ...]

    def divide(self, tree: Any) -> _Divided:
        leaves = list(zip(self.treedef.flatten_up_to(tree), self.keep, strict=True))
        return _Divided([x for x, kept in leaves if kept], [x for x, kept in leaves if not kept])

    def join(self, parts: _Divided) -> Any:
        trained, frozen = iter(parts.trained), iter(parts.frozen)
        return self.treedef.unflatten([next(trained) if kept else next(frozen) for kept in self.keep])


def _backward_scan(fn: LayerFn, fetch: Callable, scatter: Callable, saved: Any, d_carry: Any) -> Any:
    stacked, inputs, last, consts = saved
    count = jax.tree.leaves(stacked)[0].shape[0]

    def body(state, xs):
        d_carry, d_consts, params, pending, d_stacked = state
        i, carry = xs
        earlier = fetch(stacked, jnp.maximum(i - 1, 0))
        # The gradient of layer i + 1; in the first step there is none, and the zeros are overwritten in the next.
        d_stacked = _write(d_stacked, scatter(pending), jnp.minimum(i + 1, count - 1))
        _, vjp = jax.vjp(
            lambda *args: fn(params._replace(trained=args[0]), *args[1:]), params.trained, carry, consts
        )
        d_params, d_carry, d_layer_consts = vjp(d_carry)
        d_consts = jax.tree.map(
            lambda total, part: total + part.astype(jnp.float32), d_consts, d_layer_consts
        )
        return (d_carry, d_consts, earlier, d_params, d_stacked), None

    start = (
        d_carry,
        jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), consts),
        last,
        jax.tree.map(jnp.zeros_like, last.trained),
        jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), stacked.trained),
    )
    state, _ = lax.scan(body, start, (jnp.arange(count), inputs), reverse=True)
    d_carry, d_consts, _, pending, d_stacked = state
    d_stacked = _write(d_stacked, scatter(pending), 0)
    return _cast_like(d_stacked, stacked.trained), d_carry, _cast_like(d_consts, consts)


def _cast_like(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda g, x: g.astype(x.dtype), tree, like)


def _write(stack: Any, layer: Any, i: Any) -> Any:
    return jax.tree.map(lambda s, x: lax.dynamic_update_index_in_dim(s, x, i, 0), stack, layer)
