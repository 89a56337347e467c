"""Step caching: while a model's input barely changes from one evaluation to the next, its blocks are not run again.

The blocks add something to the image rows. As long as the first block's input has changed little since they last ran,
what they added then is added again, and only the embedding and the last layer are computed. It is an approximation, off
unless asked for; `cache_error` says of what size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from .._schedules import AnyArray
from ..models import Attention, LayerScan, sums_of_sequences

__all__ = [
    "CacheError",
    "CacheState",
    "StagedModel",
    "StepCache",
    "cache_error",
    "cached_call",
    "initial_cache",
]


@dataclass(frozen=True, slots=True)
class StepCache:
    """When blocks run again.

    Attributes:
        threshold: accumulated relative change of the first block's input from which on they do; 0 for always, which is
            exact. Published for FLUX.1: 0.25 to 0.8, with the paper's polynomial.
        polynomial: turns a relative change of the input into one of the output, coefficients from the highest power to
            the constant, measured for a model; by default it is taken as it is.

    Raises:
        ValueError: for a negative threshold, or a polynomial without coefficients.

    Reference: Liu et al. (TeaCache), arXiv 2411.19108, section 3.
    """

    threshold: float
    polynomial: tuple[float, ...] = (1.0, 0.0)

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ValueError(
                f"StepCache: threshold must be at least 0; got threshold={self.threshold}. 0 runs all blocks; leave the"
                " cache out for exact pictures."
            )
        if not self.polynomial:
            raise ValueError(
                "StepCache: polynomial must have coefficients; got none. (1.0, 0.0) changes nothing."
            )


class CacheState(NamedTuple):
    """What is kept from one evaluation to the next (per device inside shard_map).

    Attributes:
        first_input: of the first block, at the last evaluation.
        residual: what the blocks added to the image rows when they last ran.
        change: of each sequence, accumulated since then; the same on every device.
        num_runs, num_evaluations: how often the blocks ran, of how many times.
    """

    first_input: Float[Array, "n d"]
    residual: Float[Array, "n d"]
    change: Float[Array, " s"]
    num_runs: Int[Array, ""]
    num_evaluations: Int[Array, ""]


@runtime_checkable
class StagedModel(Protocol):
    """A model in stages, as `MMDiT` and `DiT` are: embedding, blocks, head."""

    def embed(self, rows: Any) -> Any: ...
    def run_blocks(
        self, embedded: Any, *, attention: Attention, layer_scan: LayerScan | None = None
    ) -> Any: ...
    def head(self, img: Any, embedded: Any) -> Any: ...
    def first_input(self, embedded: Any, *, layer_scan: LayerScan | None = None) -> Any: ...


def initial_cache(num_rows: int, num_sequences: int, *, width: int, dtype: Any) -> CacheState:
    """The state before the first evaluation.

    Args:
        num_rows: image rows (on this device).
        num_sequences: S.
        width, dtype: of rows inside the model, `config.width` and `config.dtype`.
    """
    # No array twice: a program may be given the state to overwrite.
    first_input, residual = (jnp.zeros((num_rows, width), dtype) for _ in range(2))
    num_runs, num_evaluations = (jnp.zeros((), jnp.int32) for _ in range(2))
    return CacheState(first_input, residual, jnp.zeros(num_sequences, jnp.float32), num_runs, num_evaluations)


def cached_call(
    model: StagedModel,
    rows: Any,
    cache: CacheState,
    settings: StepCache,
    *,
    attention: Attention,
    layer_scan: LayerScan | None = None,
    reduce: Callable[[Any], Any] = lambda sums: sums,
    force: bool | Array = False,
) -> tuple[Float[Array, "n c"], CacheState]:
    """What `model(rows)` puts out, from the cache if it is near enough.

    Per device inside shard_map, in one program for both cases. All sequences decide together: the blocks run for all as
    soon as one has changed by the threshold, for then they cost the others nothing. So a sequence's result depends on
    the others of its batch, within the cache's error. It does not depend on where rows lie, but for a change within
    rounding of the threshold. Communication besides the model's: two numbers per sequence and one for all, added up.

    Args:
        model: an `MMDiT` or `DiT`.
        rows: its input. Segment ids count the sequences of the whole batch, not of the device.
        cache: from the evaluation before.
        settings: when to run.
        attention, layer_scan: as the model takes them.
        reduce: adds arrays up over the devices that share the rows.
        force: run the blocks in any case: at the last step, where an error stays. They always run at first.

    Returns:
        The model's output, and the cache for the next evaluation.
    """
    embedded = model.embed(rows)
    first_input = model.first_input(embedded, layer_scan=layer_scan).astype(cache.first_input.dtype)
    sums = reduce(_changes(first_input, cache.first_input, rows.img_segment_ids, cache.change.shape[0]))
    relative = sums[:, 0] / jnp.maximum(sums[:, 1], jnp.finfo(jnp.float32).tiny)
    # A sequence that is not there has no change, whatever the polynomial's constant.
    grown = jnp.where(sums[:, 1] > 0, jnp.polyval(jnp.asarray(settings.polynomial), relative), 0.0)
    change = cache.change + grown
    run = jnp.any(change >= settings.threshold) | force | (cache.num_evaluations == 0)
    # Blocks hold collectives: devices that did not agree to the last bit would wait for each other for ever.
    run = reduce(run.astype(jnp.int32)) > 0

    def compute() -> tuple[Array, Array]:
        img = model.run_blocks(embedded, attention=attention, layer_scan=layer_scan)
        return img, img - embedded.img

    def reuse() -> tuple[Array, Array]:
        return embedded.img + cache.residual, cache.residual

    img, residual = lax.cond(run, compute, reuse)
    state = CacheState(
        first_input,
        residual,
        jnp.where(run, 0.0, change),
        cache.num_runs + run.astype(jnp.int32),
        cache.num_evaluations + 1,
    )
    return model.head(img, embedded), state


def _changes(new: Array, old: Array, ids: Array, num_sequences: int) -> Float[Array, "s 2"]:
    """Sums over each sequence's rows of |new - old| and |old|."""
    new, old = (x.astype(jnp.float32) for x in (new, old))
    per_row = jnp.stack([jnp.sum(jnp.abs(new - old), axis=1), jnp.sum(jnp.abs(old), axis=1)], axis=1)
    return sums_of_sequences(jnp.where(ids[:, None] > 0, per_row, 0.0), ids, num_sequences)


class CacheError(NamedTuple):
    """What a cache cost and saved.

    Attributes:
        largest: largest difference of a number from the exact one.
        mean: mean difference.
        relative: mean difference over the mean size of the exact numbers.
        skipped: share of evaluations whose blocks did not run.
    """

    largest: float
    mean: float
    relative: float
    skipped: float

    @property
    def text(self) -> str:
        """For people."""
        return (
            f"blocks were left out of {self.skipped:.0%} of the evaluations; latents differ from exact ones by"
            f" {self.relative:.2%} of their mean size, {self.largest:.3g} at most"
        )


def cache_error(exact: Float[AnyArray, "n c"], cached: Float[AnyArray, "n c"], skipped: float) -> CacheError:
    """Compares rows sampled with a cache with those sampled without, from the same noise.

    Args:
        exact: global rows sampled without; no padding.
        cached: with the cache.
        skipped: share of evaluations whose blocks did not run.
    """
    difference, size = np.abs(np.asarray(cached) - np.asarray(exact)), np.abs(np.asarray(exact)).mean()
    return CacheError(
        largest=float(difference.max()),
        mean=float(difference.mean()),
        relative=float(difference.mean() / size),
        skipped=skipped,
    )
