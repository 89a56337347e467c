"""A model to evaluate: its parameters, what it takes and puts out, and what is left out of its blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from .._sharding import AnyMesh
from ..models import Attention
from ._denoiser import Denoiser, DenoiserRows
from ._step_cache import CacheState, StepCache, cached_call
from ._weights import ShardedModule

Evaluate = Callable[[DenoiserRows, Attention], tuple[Float[Array, "n c"], CacheState | None]]
"""A denoiser with its module and layer scan; it also returns its cache, if it has one."""


class CacheUse(NamedTuple):
    """How an evaluation uses a step cache; see `cached_call`.

    Attributes:
        settings: when blocks run again.
        state: from the evaluation before.
        reduce: adds arrays up over all devices.
        force: whether blocks run in any case.
    """

    settings: StepCache
    state: CacheState
    reduce: Callable[[Any], Any]
    force: Any


@dataclass(frozen=True, eq=False)
class Backbone:
    """A model to evaluate, and how its parameters lie.

    Attributes:
        weights: the model.
        denoiser: what it takes and puts out.
    """

    weights: ShardedModule
    denoiser: Denoiser

    def evaluate(self, shards: Any, mesh: AnyMesh, cache: CacheUse | None = None) -> Evaluate:
        """Inside `shard_map`: the evaluation, with parameters gathered a layer ahead."""
        module, layer_scan = self.weights.gathered(shards, mesh)

        def evaluate(rows: DenoiserRows, attention: Attention) -> tuple[Array, CacheState | None]:
            inputs, attention = self.denoiser.inputs(rows, attention)
            if cache is None:
                output = module(inputs, attention=attention, layer_scan=layer_scan)
                return self.denoiser.prediction(output), None
            output, state = cached_call(
                module,
                inputs,
                cache.state,
                cache.settings,
                attention=attention,
                layer_scan=layer_scan,
                reduce=cache.reduce,
                force=cache.force,
            )
            return self.denoiser.prediction(output), state

        return evaluate
