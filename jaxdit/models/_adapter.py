"""Low-rank adapters (LoRA): small trained products beside frozen linear layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

__all__ = ["AdapterPart", "LowRankAdapter"]


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """One adapter of a linear layer: a name, and the columns of the layer's output that it adds to, half-open."""

    name: str
    start: int
    stop: int


class LowRankAdapter(nnx.Module):
    """What is added to a linear layer's output: for every part scale * (x a) b in the part's columns, else zero.

    A layer here can be several in the published models (q, k and v in one), each with an adapter of its own. `a` starts
    uniform in +- 1 / sqrt(inputs) and `b` at zero, so that training starts from the layer as it is.

    Args:
        shape: of the layer's kernel, (inputs, outputs) or, for a stack of layers, (layers, inputs, outputs).
        parts: in the order of their columns, which do not overlap.
        rank: columns of every `a`.
        scale: factor on the products.
        dtype: of the products.
        rngs: source of the initial parameters.

    Reference: Hu et al., LoRA, arXiv 2106.09685.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        parts: Sequence[AdapterPart],
        *,
        rank: int,
        scale: float,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        *stack, inputs, self.outputs = shape
        self.scale, self.dtype, self.columns = scale, dtype, tuple(parts)
        bound = 1 / math.sqrt(inputs)

        def make(part: AdapterPart) -> Any:
            a = jax.random.uniform(
                rngs.params(), (*stack, inputs, rank), jnp.float32, minval=-bound, maxval=bound
            )
            b = jnp.zeros((*stack, rank, part.stop - part.start), jnp.float32)
            return nnx.Dict(a=nnx.LoRAParam(a), b=nnx.LoRAParam(b))

        self.parts = nnx.Dict({part.name: make(part) for part in parts})

    def __call__(self, x: Float[Array, "n inputs"]) -> Float[Array, "n outputs"]:
        x = x.astype(self.dtype)
        first = [self.parts[part.name]["a"][...].astype(self.dtype) for part in self.columns]
        # One product reads x once for all parts.
        hidden = jnp.split(
            x @ jnp.concatenate(first, axis=1), np.cumsum([a.shape[1] for a in first])[:-1], axis=1
        )
        found, stop = [], 0
        for part, values in zip(self.columns, hidden, strict=True):
            if part.start > stop:
                found.append(jnp.zeros((x.shape[0], part.start - stop), self.dtype))
            found.append(values @ self.parts[part.name]["b"][...].astype(self.dtype))
            stop = part.stop
        if stop < self.outputs:
            found.append(jnp.zeros((x.shape[0], self.outputs - stop), self.dtype))
        return self.scale * jnp.concatenate(found, axis=1)
