"""Text encoders on all devices of a mesh, with parameters gathered a layer ahead where they are sharded."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from ..models import LayerScan
from ..sampling import ShardedModule


def t5_features(t5: Any, ids: Array, scan: LayerScan) -> Array:
    """What FLUX.1 takes of T5: features of all tokens, padding too."""
    return t5(ids, layer_scan=scan)


def clip_pooled(clip: Any, ids: Array, scan: LayerScan) -> Array:
    """What FLUX.1 takes of CLIP: the pooled vector."""
    return clip(ids, layer_scan=scan).pooled


class TextProgram:
    """A text encoder with its parameters.

    Args:
        weights: the encoder.
        params: its parameters, placed as `weights.shardings` says.
        mesh: of them.
        call: of the module, ids (b, l) and a layer scan, to what is wanted of it.
        divided: whether each device computes its share of the captions; else all compute all.
    """

    def __init__(
        self,
        weights: ShardedModule,
        params: Any,
        mesh: Mesh,
        call: Callable[[Any, Array, LayerScan], Array],
        *,
        divided: bool = False,
    ) -> None:
        def device_encode(shards: Any, ids: Array) -> Array:
            module, layer_scan = weights.gathered(shards, mesh)
            return call(module, ids, layer_scan)

        captions = P(mesh.axis_names) if divided else P()
        self._params, self._captions = params, NamedSharding(mesh, captions)
        self._encode = jax.jit(
            jax.shard_map(
                device_encode,
                mesh=mesh,
                in_specs=(weights.specs(mesh), captions),
                out_specs=captions,
                check_vma=False,
            )
        )

    def __call__(self, ids: Int[np.ndarray, "b l"]) -> Array:
        """What is wanted of captions, replicated; compiled for numbers of captions that are powers of two."""
        count = len(ids)
        return self.batch(np.resize(ids, (1 << (count - 1).bit_length(), ids.shape[1])))[:count]

    def batch(self, ids: Int[np.ndarray, "b l"]) -> Array:
        """What is wanted of captions, not waited for; compiled for their number (if divided, a multiple of devices)."""
        return self._encode(
            self._params, jax.make_array_from_process_local_data(self._captions, ids, ids.shape)
        )
