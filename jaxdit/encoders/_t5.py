"""The encoder of T5 v1.1 (and of the first T5), as transformers' `T5EncoderModel` computes it.

Layers are stacked, q, k, v and the two input projections of a gated MLP fused. The relative position bias, which
checkpoints keep with the first layer, serves all.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ..models import LayerScan, scan_layers
from ..models._layers import linear, stack_modules
from ..models._scan import name_attention, run_layers
from ._text_attention import attend, check_tokens, embed
from ._text_config import T5Config

__all__ = ["T5Encoder", "relative_buckets"]


def relative_buckets(length: int, num_buckets: int, max_distance: int) -> Int[np.ndarray, " distances"]:
    """The bucket of every distance key - query from -(length - 1) to length - 1.

    Keys after the query have the second half of the buckets. Of each half, the first half is of one distance each, the
    others grow in proportion up to `max_distance`; where they begin is found in whole numbers, not rounded logarithms.
    """
    half = num_buckets // 2
    exact, wide = half // 2, half - half // 2
    distance = np.arange(length)
    # Bucket exact + i begins at exact * (max_distance / exact)^(i / wide).
    starts = [
        next(n for n in range(exact, max_distance + 1) if n**wide >= max_distance**i * exact ** (wide - i))
        for i in range(1, wide)
    ]
    near = np.minimum(distance, exact) + np.searchsorted(starts, distance, side="right")
    return np.concatenate([near[:0:-1], near[:1], near[1:] + half]).astype(np.int32)


class _RMSNorm(nnx.Module):
    """x / rms(x) * scale in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))

    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        x = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(mean_square + self.epsilon) * self.scale[...].astype(jnp.float32)[None]


class _Block(nnx.Module):
    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        width, hidden, dtype = config.width, config.mlp_width, config.dtype
        inner = config.num_heads * config.head_dim
        self.num_heads = config.num_heads
        self.gated = config.activation == "gated-gelu"
        self.attention_norm = _RMSNorm(width, config.norm_epsilon)
        self.qkv = linear(width, 3 * inner, dtype=dtype, bias=False, rngs=rngs)
        self.proj = linear(inner, width, dtype=dtype, bias=False, rngs=rngs)
        self.mlp_norm = _RMSNorm(width, config.norm_epsilon)
        self.mlp_in = linear(width, (1 + self.gated) * hidden, dtype=dtype, bias=False, rngs=rngs)
        self.mlp_out = linear(hidden, width, dtype=dtype, bias=False, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b l d"], bias: Float[Array, "h distances"], mask: Bool[Array, "b l"] | None
    ) -> Float[Array, "b l d"]:
        batch, length, width = x.shape
        rows = x.reshape(batch * length, width)
        qkv = self.qkv(self.attention_norm(rows)).reshape(batch, length, 3, self.num_heads, -1)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        attended = name_attention(attend(q, k, v, scale=1.0, bias=bias, mask=mask))
        rows += self.proj(attended.reshape(batch * length, -1))
        rows += self.mlp_out(self._activate(self.mlp_in(self.mlp_norm(rows))))
        return rows.reshape(x.shape)

    def _activate(self, hidden: Float[Array, "n c"]) -> Float[Array, "n h"]:
        if not self.gated:
            return nnx.relu(hidden)
        gate, values = jnp.split(hidden.astype(jnp.float32), 2, axis=1)
        return nnx.gelu(gate, approximate=True) * values


class T5Encoder(nnx.Module):
    """Features of captions by T5's encoder; FLUX.1's rows of text are those of T5 v1.1 XXL.

    The stream between layers, norms and softmax are float32, matrix products run in the compute dtype. float16 is
    refused: activations of T5 overflow in it. Parameters start random, to be replaced by loaded ones
    (`jaxdit.weights.load_params`); they can stay sharded, layers being gathered one by one by a `layer_scan`.

    Args:
        config: shape and dtypes.
        rngs: source of the initial parameters.

    Reference: Raffel et al., arXiv 1910.10683; gated MLP: Shazeer, arXiv 2002.05202.
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(1.0)
        self.config = config
        self.embedding = nnx.Param(normal(rngs.params(), (config.vocab_size, config.width), jnp.float32))
        self.relative_bias = nnx.Param(
            normal(rngs.params(), (config.num_buckets, config.num_heads), jnp.float32)
        )
        self.blocks = stack_modules(lambda rngs: _Block(config, rngs=rngs), config.depth, rngs)
        self.norm = _RMSNorm(config.width, config.norm_epsilon)

    def __call__(
        self,
        ids: Int[Array, "b l"],
        *,
        mask: Bool[Array, "b l"] | None = None,
        layer_scan: LayerScan | None = None,
    ) -> Float[Array, "b l d"]:
        """Encodes captions.

        Args:
            ids: tokens; an id beyond the vocabulary gives NaN.
            mask: tokens that others attend to. None: to all, padding too. FLUX.1 was trained so: its pipeline pads
                captions to 512 tokens and gives T5 no mask, and features of all 512 are text rows.
            layer_scan: runs the stack of layers, see `jaxdit.models.LayerScan`; by default `scan_layers()`.

        Returns:
            One float32 row a token; where the mask is False, a finite one without a meaning.

        Raises:
            TypeError: for ids that are no integers, or a mask that is not boolean.
            ValueError: for other shapes, or no tokens.
        """
        check_tokens("T5Encoder", ids, mask)
        config = self.config
        buckets = relative_buckets(ids.shape[1], config.num_buckets, config.max_distance)
        bias = self.relative_bias[...].astype(jnp.float32)[buckets].T

        def apply(block: Any, x: Any, bias: Any) -> Any:
            return block(x, bias, mask)

        layer_scan = scan_layers() if layer_scan is None else layer_scan
        x = run_layers(layer_scan, self.blocks, apply, embed(self.embedding[...], ids), bias)
        return self.norm(x.reshape(-1, config.width)).reshape(x.shape)
