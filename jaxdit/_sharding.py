"""How parameters and what follows them (gradients, optimiser state, EMA) are laid over the mesh."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallel import DATA_AXES, REPLICA_AXIS, SHARD_AXIS, gather_leaf, shard_axis, sharded_layer_scan

from .models import LayerScan, scan_layers

# Modules whose parameters have a leading layer axis.
STACKS = frozenset({"double_blocks", "single_blocks", "blocks"})
REPLICATED = -1
AxisName = str | tuple[str, ...]
# An abstract one is enough for tracing programs of devices that are not here.
AnyMesh = Mesh | AbstractMesh


def module_params(module: nnx.Module, kind: Any = nnx.Param) -> dict[str, Any]:
    """The module's parameters (of a kind, such as `nnx.LoRAParam`) as nested dicts of arrays."""
    return nnx.to_pure_dict(nnx.state(module, kind))


def picked(tree: Any, like: Any) -> Any:
    """Of nested dicts, the leaves at whose paths `like` has something."""
    if not isinstance(like, Mapping):
        return tree
    return {name: picked(tree[name], value) for name, value in like.items()}


def without(tree: Any, like: Any) -> Any:
    """Of nested dicts, the leaves at whose paths `like` has nothing; no empty dicts."""
    if not isinstance(tree, Mapping):
        return tree
    rest = {}
    for name, value in tree.items():
        if name not in like:
            rest[name] = value
        elif isinstance(value, Mapping) and (inner := without(value, like[name])):
            rest[name] = inner
    return rest


def merged(first: Any, second: Any) -> Any:
    """Nested dicts with the leaves of both; of a path in both, the second's."""
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return second
    return {**first, **{name: merged(first.get(name, {}), value) for name, value in second.items()}}


def _is_stacked(path: tuple[Any, ...]) -> bool:
    return any(getattr(key, "key", None) in STACKS for key in path)


def shard_axes(params: Any, degree: int) -> Any:
    """The sharded axis of every parameter, or -1 where it is replicated; a pytree of ints like `params`.

    Args:
        params: arrays or shapes, global.
        degree: size of the shard axis of the mesh.
    """

    def axis(path: Any, leaf: Any) -> int:
        chosen = shard_axis(leaf.shape, degree, stacked=_is_stacked(path))
        return REPLICATED if chosen is None else chosen

    return jax.tree_util.tree_map_with_path(axis, params)


def param_specs(axes: Any, axis_name: AxisName = SHARD_AXIS) -> Any:
    """Partition specs of parameters with the given sharded axes, over a mesh axis or tuple of axes."""
    return jax.tree.map(lambda axis: P() if axis < 0 else P(*[None] * axis, axis_name), axes)


def param_shardings(axes: Any, mesh: AnyMesh, axis_name: AxisName = SHARD_AXIS) -> Any:
    """Shardings of parameters with the given sharded axes, over a mesh axis or tuple of axes."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), param_specs(axes, axis_name), is_leaf=_is_spec
    )


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def optimizer_shardings(
    optimizer: optax.GradientTransformation, params: Any, shardings: Any, mesh: AnyMesh
) -> Any:
    """Shardings of the optimiser's state: moments lie with their parameters, counters are replicated."""
    state = jax.eval_shape(optimizer.init, params)
    replicated = NamedSharding(mesh, P())
    return optax.tree.map_params(
        optimizer, lambda _, sharding: sharding, state, shardings, transform_non_params=lambda _: replicated
    )


def gather_unstacked(shards: Any, axes: Any, axis_name: AxisName = SHARD_AXIS) -> Any:
    """Gather the parameters outside layer stacks; stacked ones stay shards, for the layer scan to gather."""

    def gather(path: Any, x: jax.Array, axis: int) -> jax.Array:
        keep = axis == REPLICATED or _is_stacked(path)
        return x if keep else gather_leaf(x, axis, axis_name)

    return jax.tree_util.tree_map_with_path(gather, shards, axes)


def layer_scan_for(
    axes: Any, mesh: AnyMesh, *, remat: str, dtype: Any, sum_replicas: bool = False, trained: Any = None
) -> LayerScan:
    """The layer scan for parameters on this mesh: plain with a remat policy, or sharded with prefetch.

    With `sum_replicas` the sharded one adds up gradients of its sharded parameters over replicas; `trained`, bools like
    `axes`, says which parameters have one.

    Raises:
        ValueError: for a remat policy that the sharded scan cannot follow.
        NotImplementedError: for sharded parameters of two stacks that are built alike.
    """
    plain = scan_layers(remat)
    if mesh.shape[SHARD_AXIS] == 1:
        return plain
    if remat != "full":
        raise ValueError(
            "layer_scan_for: sharded parameters are gathered again in the backward pass, which recomputes whole layers;"
            f" got remat={remat!r}. Use remat='full', or replicate the parameters (shards=1)."
        )
    replica_axis = REPLICA_AXIS if sum_replicas and mesh.shape[REPLICA_AXIS] > 1 else None
    return stacks_scan(axes, axis_name=SHARD_AXIS, dtype=dtype, replica_axis=replica_axis, trained=trained)


def stacks_scan(
    axes: Any, *, axis_name: AxisName, dtype: Any, replica_axis: str | None = None, trained: Any = None
) -> LayerScan:
    """The layer scan for parameters that are sharded over a mesh axis or axes: every stack gathered a layer ahead.

    Raises:
        NotImplementedError: for two stacks that are built alike.
    """
    scans: dict[Any, Callable] = {}
    trained = jax.tree.map(lambda _: True, axes) if trained is None else trained
    for stack, stack_trained in zip(_stacks(axes), _stacks(trained), strict=True):
        if jax.tree.structure(stack) in scans:
            raise NotImplementedError(
                "layer_scan_for: two stacks of layers with the same parameters cannot be told apart; got"
                f" {jax.tree.structure(stack)} twice. Make them one stack, or replicate the parameters (shards=1)."
            )
        scans[jax.tree.structure(stack)] = sharded_layer_scan(
            stack, axis_name=axis_name, dtype=dtype, replica_axis=replica_axis, trained=stack_trained
        )

    def layer_scan(fn: Any, stacked: Any, carry: Any, consts: Any) -> Any:
        return scans[jax.tree.structure(stacked)](fn, stacked, carry, consts)

    return layer_scan


def sum_gradients(grads: Any, axes: Any, *, summed_replicas: bool) -> Any:
    """Add up over devices what they still hold of each gradient; inside `shard_map`.

    Shards are summed over their group already; with `summed_replicas` those of stacks over replicas too.
    """

    def total(path: Any, g: jax.Array, axis: int) -> jax.Array:
        if axis >= 0 and summed_replicas and _is_stacked(path):
            return g
        return lax.psum(g, REPLICA_AXIS if axis >= 0 else DATA_AXES)

    return jax.tree_util.tree_map_with_path(total, grads, axes)


def _stacks(axes: Any) -> list[Any]:
    if not isinstance(axes, Mapping):
        return []
    found = [axes[name] for name in axes if name in STACKS]
    return found + [stack for name in axes if name not in STACKS for stack in _stacks(axes[name])]


def bytes_per_device(params: Any, axes: Any, degree: int, *, copies: int) -> int:
    """Bytes that a device holds of the parameters and of `copies` - 1 arrays like them."""

    def size(leaf: Any, axis: int) -> int:
        return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize // (degree if axis >= 0 else 1)

    return copies * sum(jax.tree.leaves(jax.tree.map(size, params, axes)))
