"""Pictures too large for one device's memory: encoded and decoded by several, each with some of the rows."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ._autoencoder import AutoencoderKL, LatentPosterior
from ._picture_rows import PictureRows

__all__ = ["decode_split", "encode_split"]


def decode_split(
    model: AutoencoderKL,
    latents: Float[Array, "b h w c"],
    *,
    mesh: Mesh,
    axis_names: tuple[str, ...],
    size: tuple[int, int] | None = None,
) -> Float[Array, "b h_out w_out c_out"]:
    """What `model.decode` gives, each picture's rows divided over devices. Global arrays, compiled.

    Any height, also of fewer rows than devices: what the devices do not share evenly is filled up, and nothing reads
    what it is filled with. Equal to the whole decode but for the order of sums.

    Communication of each device: 2 rows of activations to neighbours for each 3 x 3 convolution, 2 b g float32 to all
    for each norm of g groups, and one `parallel.ring_attention`. Memory is that of the device's rows.

    Args:
        model: with parameters on the mesh's devices (or on none yet), best replicated; other shardings are gathered.
        latents: as for `model.decode`.
        mesh: of all devices that take part; over axes that are not in `axis_names` all do the same.
        axis_names: axes that share a picture, the outermost first.
        size: height and width of the pictures in the upper left corner of `latents`, where these do not fill it. It is
            data: one program serves all sizes.

    Returns:
        Float32 pixels; rows divided over the axes where the devices share them evenly. Of any value past `size`.

    Raises:
        ValueError: for axes that the mesh does not have, or has twice; a size that does not fit; and as `model.decode`.
    """
    if size is not None and not (1 <= size[0] <= latents.shape[1] and 1 <= size[1] <= latents.shape[2]):
        raise ValueError(
            f"decode_split: size is 1 to {latents.shape[1]} rows and 1 to {latents.shape[2]} columns of latents; got"
            f" size={size}. Fill the latents up, or leave it out."
        )
    real = None if size is None else jnp.asarray(size, jnp.int32)
    return _split("decode_split", AutoencoderKL.decode, model, latents, mesh, axis_names, real)


def encode_split(
    model: AutoencoderKL, images: Float[Array, "b h w c"], *, mesh: Mesh, axis_names: tuple[str, ...]
) -> LatentPosterior:
    """What `model.encode` gives, each picture's rows divided over devices; otherwise as `decode_split`."""
    return _split("encode_split", AutoencoderKL.encode, model, images, mesh, axis_names)


def _split(
    name: str,
    method: Callable[..., Any],
    model: AutoencoderKL,
    x: Array,
    mesh: Mesh,
    axis_names: tuple[str, ...],
    size: Any = None,
) -> Any:
    if (
        not axis_names
        or len(set(axis_names)) < len(axis_names)
        or not set(axis_names) <= set(mesh.axis_names)
    ):
        raise ValueError(
            f"{name}: axis_names must be axes of the mesh, one or more, each once; got axis_names={axis_names}, mesh"
            f" axes {mesh.axis_names}. Name those whose devices share a picture."
        )
    unit = model.config.factor if method is AutoencoderKL.encode else 1
    if x.shape[1] % unit:
        raise ValueError(
            f"{name}: heights must be multiples of {unit}; got pictures {x.shape}. Resize or crop them, channels last."
        )
    graph, state = nnx.split(model)
    return _run(state, x, size, graph=graph, method=method, unit=unit, mesh=mesh, axis_names=axis_names)


@partial(jax.jit, static_argnames=("graph", "method", "unit", "mesh", "axis_names"))
def _run(
    state: Any,
    x: Array,
    size: Any,
    *,
    graph: Any,
    method: Callable[..., Any],
    unit: int,
    mesh: Mesh,
    axis_names: tuple[str, ...],
) -> Any:
    height = x.shape[1] // unit
    devices = math.prod(mesh.shape[name] for name in axis_names)
    padded = -(-height // devices) * devices
    divided = P(None, axis_names)

    def run_loc(state: Any, x: Array, size: Any) -> Any:
        return method(nnx.merge(graph, state), x, rows=PictureRows(axis_names, height, size))

    run: Any = jax.shard_map(run_loc, mesh=mesh, in_specs=(P(), divided, P()), out_specs=divided)
    out = run(state, jnp.pad(x, ((0, 0), (0, (padded - height) * unit), (0, 0), (0, 0))), size)
    return jax.tree.map(lambda y: y[:, : y.shape[1] // padded * height], out)
