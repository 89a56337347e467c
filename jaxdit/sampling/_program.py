"""Compiled programs of sampling: the start from noise, and one evaluation of the denoiser, on all devices.

A program is compiled for the sizes of a layout. What differs from evaluation to evaluation, and from batch to batch, is
data: noise levels, methods, conditions, the requests' sizes, plans.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from .._random import request_noise
from .._sharding import AnyMesh
from ..schedulers import SamplerState, advance, initial_state
from ._backbone import Backbone, CacheUse, Evaluate
from ._denoiser import Conditions, guided
from ._home import HomeRows
from ._step_cache import CacheState, StepCache, initial_cache


@runtime_checkable
class Layout(Protocol):
    """Where latents and the rows of an evaluation lie: a `SequenceLayout` or a `PackedLayout`."""

    @property
    def mesh(self) -> AnyMesh: ...
    @property
    def requests(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def table_specs(self) -> Any: ...
    @property
    def evaluated_rows(self) -> int: ...
    @property
    def sequences(self) -> int: ...
    def home(self, grids: Int[Array, "r 3"], tables: Any) -> HomeRows: ...
    def predict(
        self,
        evaluate: Evaluate,
        x: Float[Array, "n c"],
        time: Float[Array, " r"],
        conditions: Conditions,
        grids: Int[Array, "r 3"],
        tables: Any,
    ) -> tuple[Float[Array, "g n c"], CacheState | None]: ...


class Batch(NamedTuple):
    """Requests to sample, as a program takes them.

    Attributes:
        grids: (r, 3) image tokens of each request along (t, h, w), replicated; zeros for no request.
        tables: of the layout; None where it needs none.
    """

    grids: Any
    tables: Any


class SamplingState(NamedTuple):
    """What goes from evaluation to evaluation; arrays (devices, ...), sharded over devices.

    Attributes:
        sampler: rows of latents (devices, rows, channels), and what the method remembers.
        cache: of the step cache; None without one.
    """

    sampler: SamplerState
    cache: CacheState | None


class EvaluationInputs(NamedTuple):
    """What is of one evaluation; replicated.

    Attributes:
        time, coefficients: (r,) and (r, 2, 3), of a `SamplingTable`.
        is_last: scalar, whether it is the last one: a step cache computes it.
    """

    time: Any
    coefficients: Any
    is_last: Any


def _specs(layout: Layout) -> Batch:
    return Batch(P(), layout.table_specs)


def _here(batch: Batch) -> Batch:
    """Inside `shard_map`: tables without their device axis."""
    return batch._replace(tables=jax.tree.map(lambda x: x[0], batch.tables))


def make_start(
    layout: Layout, backbone: Backbone, channels: int, step_cache: StepCache | None = None
) -> Callable[..., SamplingState]:
    """The jitted `start(keys, names, batch)`: the state of noise.

    Args:
        layout: of the batch.
        backbone: what will be evaluated.
        channels: of a row.
        step_cache: of the evaluations.

    Returns:
        A function of key data (r, 2) of threefry keys and names (r,), both replicated (see `request_noise`), and a
        `Batch`.
    """
    config = backbone.weights.config

    def device_start(keys: Array, names: Array, batch: Batch) -> SamplingState:
        batch = _here(batch)
        home = layout.home(batch.grids, batch.tables)
        wrapped = jax.random.wrap_key_data(keys, impl="threefry2x32")
        noise = request_noise(wrapped, names, home.request, home.token, channels)
        cache = None
        if step_cache is not None:
            sizes = layout.evaluated_rows, layout.sequences
            cache = initial_cache(*sizes, width=config.width, dtype=config.dtype)
        return jax.tree.map(lambda x: x[None], SamplingState(initial_state(noise), cache))

    by_device = P(layout.axes)
    return jax.jit(
        jax.shard_map(
            device_start,
            mesh=layout.mesh,
            in_specs=(P(), P(), _specs(layout)),
            out_specs=by_device,
            check_vma=False,
        )
    )


def make_home(layout: Layout) -> Callable[[Batch], HomeRows]:
    """The jitted `home(batch)`: `HomeRows` of all devices, (devices, rows), sharded over devices."""

    def device_home(batch: Batch) -> HomeRows:
        batch = _here(batch)
        return jax.tree.map(lambda x: x[None], layout.home(batch.grids, batch.tables))

    return jax.jit(
        jax.shard_map(
            device_home,
            mesh=layout.mesh,
            in_specs=(_specs(layout),),
            out_specs=P(layout.axes),
            check_vma=False,
        )
    )


def make_evaluation(
    layout: Layout,
    backbone: Backbone,
    compiler_options: Mapping[str, Any] | None = None,
    *,
    step_cache: StepCache | None = None,
) -> jax.stages.Wrapped:
    """The jitted `evaluation(params, state, inputs, conditions, batch)`; donates the state.

    Args:
        layout: of the batch.
        backbone: what is evaluated.
        compiler_options: as `jax.jit` takes them.
        step_cache: leaves blocks out where little changes; None computes all.

    Returns:
        A function of the backbone's parameters, a `SamplingState`, `EvaluationInputs`, `Conditions`, replicated, and a
        `Batch`. It returns the next state, and for each request whether all its values are finite, (r,) replicated.
    """

    def device_evaluation(
        params: Any, state: SamplingState, inputs: EvaluationInputs, given: Conditions, batch: Batch
    ) -> tuple[SamplingState, Array]:
        batch, state = _here(batch), jax.tree.map(lambda x: x[0], state)
        home = layout.home(batch.grids, batch.tables)
        cache = None
        if step_cache is not None and state.cache is not None:
            cache = CacheUse(step_cache, state.cache, lambda x: lax.psum(x, layout.axes), inputs.is_last)
        evaluate = backbone.evaluate(params, layout.mesh, cache)
        rows = state.sampler.rows
        predictions, kept = layout.predict(evaluate, rows, inputs.time, given, batch.grids, batch.tables)
        prediction = guided(predictions, given.scale[jnp.maximum(home.request - 1, 0)])
        sampler = advance(state.sampler, prediction, inputs.coefficients, home.request)
        bad = ~jnp.isfinite(sampler.rows).all(axis=1) & (home.request > 0)
        counts = jnp.zeros(layout.requests + 1, jnp.int32).at[home.request].add(bad)
        finite = lax.psum(counts, layout.axes)[1:] == 0
        return jax.tree.map(lambda x: x[None], SamplingState(sampler, kept)), finite

    by_device, params = P(layout.axes), backbone.weights.specs(layout.mesh)
    return jax.jit(
        jax.shard_map(
            device_evaluation,
            mesh=layout.mesh,
            in_specs=(params, by_device, P(), P(), _specs(layout)),
            out_specs=(by_device, P()),
            check_vma=False,
        ),
        donate_argnums=1,
        compiler_options=None if compiler_options is None else dict(compiler_options),
    )
