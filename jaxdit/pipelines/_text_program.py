"""Text encoders on all devices: each computes all captions, with parameters gathered a layer ahead."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from ..models import LayerScan
from ..sampling import ShardedModule


class TextProgram:
    """A text encoder with its parameters.

    Args:
        weights: the encoder.
        params: its parameters, placed as `weights.shardings` says.
        mesh: of them.
        call: of the module, ids (b, l) and a layer scan, to what is wanted of it.
    """

    def __init__(
        self,
        weights: ShardedModule,
        params: Any,
        mesh: Mesh,
        call: Callable[[Any, Array, LayerScan], Array],
    ) -> None:
        def device_encode(shards: Any, ids: Array) -> Array:
            module, layer_scan = weights.gathered(shards, mesh)
            return call(module, ids, layer_scan)

        self._params, self._replicated = params, NamedSharding(mesh, P())
        self._encode = jax.jit(
            jax.shard_map(
                device_encode,
                mesh=mesh,
                in_specs=(weights.specs(mesh), P()),
                out_specs=P(),
                check_vma=False,
            )
        )

    def __call__(self, ids: Int[np.ndarray, "b l"]) -> Array:
        """What is wanted of captions, replicated; compiled for numbers of captions that are powers of two."""
        count = len(ids)
        ids = np.resize(ids, (1 << (count - 1).bit_length(), ids.shape[1]))
        placed = jax.make_array_from_process_local_data(self._replicated, ids, ids.shape)
        return self._encode(self._params, placed)[:count]
