"""Layers that MMDiT and DiT share. Parameters are float32; products run in the compute dtype; statistics,
sinusoids and embedders of per-sequence values stay in float32."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ._gather import rows_of_sequences
from ._rope import RopeTable, apply_rope

__all__ = [
    "EmbedMLP",
    "FinalLayer",
    "Linear",
    "Mlp",
    "Modulation",
    "NormScale",
    "add_gated",
    "gelu",
    "linear",
    "norm_and_modulate",
    "norm_and_turn",
    "sinusoid",
    "split_modulation",
    "stack_modules",
    "zero_padding_rows",
]

NORM_EPSILON = 1e-6
xavier = nnx.initializers.xavier_uniform()
zeros = nnx.initializers.zeros_init()


class Linear(nnx.Linear):
    """A linear layer with what its adapter adds, if it has one; see `LowRankAdapter`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter = nnx.data(None)

    def __call__(self, x: Float[Array, "n c"]) -> Float[Array, "n d"]:
        out = super().__call__(x)
        return out if self.adapter is None else out + self.adapter(x)


def linear(
    in_features: int, out_features: int, *, dtype: Any, rngs: nnx.Rngs, init: Any = xavier, bias: bool = True
) -> nnx.Linear:
    """A linear layer whose kernel (in, out) is the transpose of PyTorch's weight."""
    return Linear(
        in_features,
        out_features,
        use_bias=bias,
        dtype=dtype,
        param_dtype=jnp.float32,
        kernel_init=init,
        bias_init=zeros,
        rngs=rngs,
    )


class Modulation(NamedTuple):
    """Shift, scale and gate of one sub-layer, one vector per sequence."""

    shift: Float[Array, "s d"]
    scale: Float[Array, "s d"]
    gate: Float[Array, "s d"]


def split_modulation(values: Float[Array, "s kd"], num_parts: int) -> list[Modulation]:
    """Cuts the output of a modulation layer into (shift, scale, gate) triples, in this order."""
    parts = jnp.split(values, 3 * num_parts, axis=1)
    return [Modulation(*parts[3 * i : 3 * i + 3]) for i in range(num_parts)]


# Elementwise work between matrix products is recomputed in the backward pass whatever the policy: its
# intermediates (several float32 arrays of n x d or n x 4d each) cost more to keep and read than to make again.
recomputed = partial(jax.checkpoint, prevent_cse=False)


def norm_and_modulate(
    x: Float[Array, "n d"],
    shift: Float[Array, "s d"],
    scale: Float[Array, "s d"],
    ids: Int[Array, " n"],
    epsilon: float = NORM_EPSILON,
) -> Float[Array, "n d"]:
    """(1 + scale) * LayerNorm(x) + shift with the vectors of each row's sequence, in float32."""
    return recomputed(partial(_norm_and_modulate, epsilon=epsilon))(x, shift, scale, ids)


def _norm_and_modulate(x: Array, shift: Array, scale: Array, ids: Array, *, epsilon: float) -> Array:
    x = x.astype(jnp.float32)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + epsilon)
    scale_rows = rows_of_sequences(scale, ids).astype(jnp.float32)
    shift_rows = rows_of_sequences(shift, ids).astype(jnp.float32)
    return normed * (1 + scale_rows) + shift_rows


@recomputed
def add_gated(
    x: Float[Array, "n d"], gate: Float[Array, "s d"], ids: Int[Array, " n"], update: Float[Array, "n d"]
) -> Float[Array, "n d"]:
    """x + gate * update; a padding row has gate 0 and keeps its value."""
    return x + rows_of_sequences(gate, ids) * update


def zero_padding_rows(x: Float[Array, "n c"], ids: Int[Array, " n"]) -> Float[Array, "n c"]:
    """Zeros where a row is padding, whatever was there: neither its value nor a gradient gets past."""
    return jnp.where(ids[:, None] > 0, x, jnp.zeros((), x.dtype))


def sinusoid(
    time: Float[Array, " s"], *, size: int = 256, max_period: float = 10_000.0, frequency_shift: int = 0
) -> Float[Array, "s e"]:
    """[cos(time * f), sin(time * f)] in float32 with `size / 2` frequencies from 1 towards 1 / max_period.

    With `frequency_shift` 1 the last frequency is 1 / max_period itself. The originals round exponents, frequencies and
    angles to float32, which moves angles of a guidance of 3.5 by 2e-4; models were trained so, and so it is here.
    """
    half = size // 2
    exponents = np.float32(-math.log(max_period)) * np.arange(half, dtype=np.float32)
    exponents /= np.float32(half - frequency_shift)
    frequencies = np.exp(exponents.astype(np.float64)).astype(np.float32)
    angles = jax.lax.stop_gradient(time.astype(jnp.float32))[:, None] * frequencies[None, :]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1)


class EmbedMLP(nnx.Module):
    """Linear, SiLU, linear on per-sequence vectors, in float32: S rows cost nothing beside the tokens."""

    def __init__(self, in_features: int, width: int, *, init: Any, rngs: nnx.Rngs) -> None:
        self.in_layer = linear(in_features, width, dtype=jnp.float32, init=init, rngs=rngs)
        self.out_layer = linear(width, width, dtype=jnp.float32, init=init, rngs=rngs)

    def __call__(self, x: Float[Array, "s c"]) -> Float[Array, "s d"]:
        return self.out_layer(nnx.silu(self.in_layer(x)))


@recomputed
def gelu(x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """GELU in its tanh form."""
    return nnx.gelu(x, approximate=True)


@recomputed
def norm_and_turn(
    x: Float[Array, "n h d"], scale: Float[Array, " d"], rope: RopeTable
) -> Float[Array, "n h d"]:
    """Turns x / rms(x) * scale, the mean taken over a head's channels; float32 inside, the input's dtype out."""
    heads = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(heads), axis=-1, keepdims=True)
    heads = heads * jax.lax.rsqrt(mean_square + NORM_EPSILON) * scale.astype(jnp.float32)[None, None, :]
    return apply_rope(heads, rope).astype(x.dtype)


class NormScale(nnx.Module):
    """The learned scale of a norm over a head's channels."""

    def __init__(self, features: int) -> None:
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))


class Mlp(nnx.Module):
    """Linear, GELU (tanh form), linear, in the compute dtype."""

    def __init__(self, width: int, hidden: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.in_layer = linear(width, hidden, dtype=dtype, rngs=rngs)
        self.out_layer = linear(hidden, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        return self.out_layer(gelu(self.in_layer(x)))


class FinalLayer(nnx.Module):
    """Modulated norm and projection to output channels, all in float32, padding rows zero.

    The two halves of `modulation` are (shift, scale), as in both originals.
    """

    def __init__(self, width: int, out_channels: int, *, rngs: nnx.Rngs) -> None:
        self.modulation = linear(width, 2 * width, dtype=jnp.float32, init=zeros, rngs=rngs)
        self.linear = linear(width, out_channels, dtype=jnp.float32, init=zeros, rngs=rngs)

    def __call__(
        self, x: Float[Array, "n d"], cond: Float[Array, "s d"], ids: Int[Array, " n"]
    ) -> Float[Array, "n c_out"]:
        shift, scale = jnp.split(self.modulation(nnx.silu(cond)), 2, axis=1)
        return zero_padding_rows(self.linear(norm_and_modulate(x, shift, scale, ids)), ids)


def stack_modules(make: Any, depth: int, rngs: nnx.Rngs) -> Any:
    """`depth` modules from `make(rngs)` as one, its parameters with a leading layer axis; None for 0."""
    if depth == 0:
        return None
    return nnx.split_rngs(splits=depth)(nnx.vmap(make, in_axes=0, out_axes=0))(rngs)
