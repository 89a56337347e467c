"""The text half of CLIP, as transformers' `CLIPTextModel` computes it: layers stacked; q, k and v fused."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ..models import LayerScan, scan_layers
from ..models._layers import linear, stack_modules
from ..models._scan import name_attention, run_layers
from ._text_attention import attend, check_tokens, embed
from ._text_config import ClipTextConfig

__all__ = ["ClipTextEncoder", "ClipTextFeatures"]

# In a config, stands for the token with the highest id.
HIGHEST_ID = 2


class ClipTextFeatures(NamedTuple):
    """What `ClipTextEncoder` makes of captions.

    Attributes:
        features: one row a token, after the last norm.
        pooled: the row of each caption's end token; FLUX.1's pooled vector.
    """

    features: Float[Array, "b l d"]
    pooled: Float[Array, "b d"]


def _quick_gelu(x: Array) -> Array:
    return x * nnx.sigmoid(1.702 * x)


class _LayerNorm(nnx.Module):
    """(x - mean) / deviation * scale + bias in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))

    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        scale, bias = (p[...].astype(jnp.float32)[None] for p in (self.scale, self.bias))
        return centred * jax.lax.rsqrt(variance + self.epsilon) * scale + bias


class _Block(nnx.Module):
    def __init__(self, config: ClipTextConfig, *, rngs: nnx.Rngs) -> None:
        width, dtype = config.width, config.dtype
        self.num_heads = config.num_heads
        self.quick = config.activation == "quick_gelu"
        self.attention_norm = _LayerNorm(width, config.norm_epsilon)
        self.qkv = linear(width, 3 * width, dtype=dtype, rngs=rngs)
        self.proj = linear(width, width, dtype=dtype, rngs=rngs)
        self.mlp_norm = _LayerNorm(width, config.norm_epsilon)
        self.mlp_in = linear(width, config.mlp_width, dtype=dtype, rngs=rngs)
        self.mlp_out = linear(config.mlp_width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b l d"], mask: Bool[Array, "b l"] | None) -> Float[Array, "b l d"]:
        batch, length, width = x.shape
        rows = x.reshape(batch * length, width)
        qkv = self.qkv(self.attention_norm(rows)).reshape(batch, length, 3, self.num_heads, -1)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        attended = name_attention(attend(q, k, v, scale=q.shape[3] ** -0.5, mask=mask, causal=True))
        rows += self.proj(attended.reshape(batch * length, width))
        hidden = self.mlp_in(self.mlp_norm(rows)).astype(jnp.float32)
        rows += self.mlp_out(_quick_gelu(hidden) if self.quick else nnx.gelu(hidden, approximate=False))
        return rows.reshape(x.shape)


class ClipTextEncoder(nnx.Module):
    """Features of captions by CLIP's text encoder; FLUX.1's pooled vectors are those of CLIP ViT-L/14.

    The stream between layers, norms and softmax are float32, matrix products run in the compute dtype. Parameters start
    random, to be replaced by loaded ones (`jaxdit.weights.load_params`).

    Args:
        config: shape and dtypes.
        rngs: source of the initial parameters.

    Reference: Radford et al., arXiv 2103.00020.
    """

    def __init__(self, config: ClipTextConfig, *, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(0.02)
        self.config = config
        self.embedding = nnx.Param(normal(rngs.params(), (config.vocab_size, config.width), jnp.float32))
        self.positions = nnx.Param(normal(rngs.params(), (config.max_length, config.width), jnp.float32))
        self.blocks = stack_modules(lambda rngs: _Block(config, rngs=rngs), config.depth, rngs)
        self.norm = _LayerNorm(config.width, config.norm_epsilon)

    def __call__(
        self,
        ids: Int[Array, "b l"],
        *,
        mask: Bool[Array, "b l"] | None = None,
        layer_scan: LayerScan | None = None,
    ) -> ClipTextFeatures:
        """Encodes captions; a token attends to itself and to those before it.

        Args:
            ids: tokens, at most `max_length` a caption; an id beyond the vocabulary gives NaN.
            mask: tokens that others attend to. None: all; padding stands behind the end token, whose features, the
                pooled ones, it cannot change. FLUX.1's pipeline gives none.
            layer_scan: runs the stack of layers, see `jaxdit.models.LayerScan`; by default `scan_layers()`.

        Returns:
            Float32 features, and the pooled vector: features at the first end token, NaN for a caption without one.

        Raises:
            TypeError: for ids that are no integers, or a mask that is not boolean.
            ValueError: for other shapes, no tokens or more than there are positions.
        """
        check_tokens("ClipTextEncoder", ids, mask)
        config, length = self.config, ids.shape[1]
        if length > config.max_length:
            raise ValueError(
                f"ClipTextEncoder: a caption must have at most max_length={config.max_length} tokens; got ids of shape "
                f"{ids.shape}. Make them by a Tokenizer of that max_length."
            )
        x = embed(self.embedding[...], ids) + self.positions[:length].astype(jnp.float32)[None]

        def apply(block: Any, x: Any, consts: Any) -> Any:
            return block(x, mask)

        layer_scan = scan_layers() if layer_scan is None else layer_scan
        x = run_layers(layer_scan, self.blocks, apply, x, ())
        features = self.norm(x.reshape(-1, config.width)).reshape(x.shape)
        return ClipTextFeatures(features, self._pool(features, ids))

    def _pool(self, features: Float[Array, "b l d"], ids: Int[Array, "b l"]) -> Float[Array, "b d"]:
        eos = self.config.eos_id
        is_end = ids == (jnp.max(ids, axis=1, keepdims=True) if eos == HIGHEST_ID else eos)
        end = jnp.argmax(is_end, axis=1)
        pooled = jnp.take_along_axis(features, end[:, None, None], axis=1)[:, 0]
        return jnp.where(jnp.any(is_end, axis=1)[:, None], pooled, jnp.nan)
