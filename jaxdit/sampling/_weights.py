"""Parameters divided among all devices, for modules that are run inside `shard_map`."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._sharding import (
    AnyMesh,
    AxisName,
    gather_unstacked,
    module_params,
    param_specs,
    shard_axes,
    stacks_scan,
)
from ..models import LayerScan, scan_layers

# Devices that share a copy of the parameters.
SHARDS = ("all", "machine", "one")


@dataclass(frozen=True, eq=False)
class ShardedModule:
    """A module, and how its parameters lie on a mesh of `parallel.sequence_mesh`.

    Attributes:
        module: its abstract form (`nnx.eval_shape`).
        dtype: of the parameters, in which they are gathered.
        shards: devices that share a copy: "all", those of a "machine", or "one", each device with its own; or names of
            axes of another mesh, over which parameters are divided.

    Raises:
        ValueError: for other shards.
    """

    module: nnx.Module
    dtype: Any
    shards: str | tuple[str, ...] = "all"

    @property
    def config(self) -> Any:
        """Of the module."""
        module: Any = self.module
        return module.config

    def __post_init__(self) -> None:
        if isinstance(self.shards, str) and self.shards not in SHARDS:
            raise ValueError(
                f"ShardedModule: shards must be one of {', '.join(SHARDS)}; got shards={self.shards!r}. 'all' takes"
                " least memory."
            )

    def _names(self, mesh: AnyMesh) -> tuple[str, ...]:
        if not isinstance(self.shards, str):
            return self.shards
        return {"all": mesh.axis_names, "machine": mesh.axis_names[-2:], "one": ()}[self.shards]

    def _axes(self, mesh: AnyMesh) -> Any:
        """The divided axis of every parameter, -1 for none."""
        degree = math.prod(mesh.shape[name] for name in self._names(mesh))
        return shard_axes(module_params(self.module), degree)

    def specs(self, mesh: AnyMesh) -> Any:
        """Partition specs of the parameters."""
        names: AxisName = self._names(mesh)
        return param_specs(self._axes(mesh), names)

    def shardings(self, mesh: AnyMesh) -> Any:
        """Shardings of the parameters."""
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), self.specs(mesh), is_leaf=lambda x: isinstance(x, P)
        )

    def gathered(self, shards: Any, mesh: AnyMesh) -> tuple[Any, LayerScan]:
        """Inside `shard_map`: the module, and the layer scan that gathers its stacks a layer ahead."""
        axes, names = self._axes(mesh), self._names(mesh)
        module = nnx.merge(nnx.graphdef(self.module), gather_unstacked(shards, axes, names))
        if all(axis < 0 for axis in jax.tree.leaves(axes)):
            return module, scan_layers()
        return module, stacks_scan(axes, axis_name=names, dtype=self.dtype)
