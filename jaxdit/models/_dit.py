"""Peebles & Xie's class-conditional DiT with adaLN-Zero blocks, on packed rows.

The original's parameters map one to one (a kernel is the transpose of PyTorch's weight; block i is slice i of
the stacked leading axis):

    here                                   original DiT
    img_in                                 x_embedder.proj, weight (d, c, p, p) taken as (d, p, p, c)
    time_in.in_layer, .out_layer           t_embedder.mlp.0, .2
    label_in                               y_embedder.embedding_table.weight
    blocks.modulation                      blocks.i.adaLN_modulation.1
    blocks.qkv, .proj                      blocks.i.attn.qkv, .proj
    blocks.mlp.in_layer, .out_layer        blocks.i.mlp.fc1, .fc2
    final_layer.modulation, .linear        final_layer.adaLN_modulation.1, .linear

`pos_embed`, a fixed table there, is computed from the positions here. A row is a patch, row-major, channels
last, at input and output; the output has per pixel `channels` predictions and then `channels` variances.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Num

from ._angles import cos_sin
from ._dit_config import DiTConfig
from ._layers import (
    EmbedMLP,
    FinalLayer,
    Mlp,
    add_gated,
    linear,
    norm_and_modulate,
    sinusoid,
    split_modulation,
    stack_modules,
    zero_padding_rows,
    zeros,
)
from ._rows import Attention, ImageLabelRows, LayerScan
from ._scan import name_attention, run_first_layer, run_layers, scan_layers

__all__ = ["DiT", "position_embedding"]

STEPS_PER_UNIT_TIME = 1000.0


def position_embedding(positions: Num[Array, "n 3"], width: int) -> Float[Array, "n d"]:
    """Fixed sine-cosine embedding of (h, w); t is not encoded.

    A quarter of the channels each: sin(w f), cos(w f), sin(h f), cos(h f), f_j = 10000^(-4 j / width). The
    original puts w first (its names say h), and so do we.
    """
    quarter = width // 4
    omega = 10_000.0 ** -(np.arange(quarter, dtype=np.float64) / quarter)
    axis = np.repeat([2, 1], quarter)
    cos, sin = cos_sin(positions[:, axis], np.tile(omega, 2))
    parts = [sin[:, :quarter], cos[:, :quarter], sin[:, quarter:], cos[:, quarter:]]
    return jnp.concatenate(parts, axis=1)


def _step_of_time(time: Float[Array, " s"]) -> Float[Array, " s"]:
    """1000 * time on a grid of 1/4096: float32 rounds k / 1000, and this gives back exactly k."""
    return jnp.round(time.astype(jnp.float32) * (STEPS_PER_UNIT_TIME * 4096)) / 4096


class _Embedded(NamedTuple):
    """What blocks start from."""

    img: Float[Array, "n d"]
    cond: Float[Array, "s d"]
    ids: Int[Array, " n"]


class _Block(nnx.Module):
    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs) -> None:
        width, dtype = config.width, config.dtype
        self.num_heads = config.num_heads
        self.mlp_norm_epsilon = config.mlp_norm_epsilon
        self.modulation = linear(width, 6 * width, dtype=dtype, init=zeros, rngs=rngs)
        self.qkv = linear(width, 3 * width, dtype=dtype, rngs=rngs)
        self.proj = linear(width, width, dtype=dtype, rngs=rngs)
        self.mlp = Mlp(width, config.mlp_width, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "n d"], cond: Float[Array, "s d"], ids: Int[Array, " n"], attention: Attention
    ) -> Float[Array, "n d"]:
        attn, mlp = split_modulation(self.modulation(cond), 2)
        qkv = self.qkv(norm_and_modulate(x, attn.shift, attn.scale, ids))
        shape = x.shape[0], 3, self.num_heads, x.shape[1] // self.num_heads
        q, k, v = jnp.moveaxis(qkv.reshape(shape), 1, 0)
        attended = name_attention(attention(q, k, v)).reshape(x.shape)
        x = add_gated(x, attn.gate, ids, self.proj(attended))
        hidden = norm_and_modulate(x, mlp.shift, mlp.scale, ids, self.mlp_norm_epsilon)
        return add_gated(x, mlp.gate, ids, self.mlp(hidden))


class DiT(nnx.Module):
    """adaLN-Zero DiT on packed rows of any mixture of sizes; parameters as the module docstring maps.

    Starts as the original: kernels Xavier-uniform, biases zero, embedders normal(0.02), modulations and the
    final layer zero.

    Args:
        config: shape and dtypes.
        rngs: source of the initial parameters.

    Reference: Peebles & Xie, Scalable Diffusion Models with Transformers, arXiv 2212.09748.
    """

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs) -> None:
        width = config.width
        embed_init = nnx.initializers.normal(0.02)
        self.config = config
        self.img_in = linear(config.in_channels, width, dtype=config.dtype, rngs=rngs)
        self.time_in = EmbedMLP(config.time_channels, width, init=embed_init, rngs=rngs)
        num_labels = config.num_classes + int(config.null_class)
        self.label_in = nnx.Param(embed_init(rngs.params(), (num_labels, width), jnp.float32))
        self.blocks = stack_modules(lambda rngs: _Block(config, rngs=rngs), config.depth, rngs)
        self.final_layer = FinalLayer(width, config.out_channels, rngs=rngs)

    def condition(self, rows: ImageLabelRows) -> Float[Array, "s d"]:
        """The vector that modulates each sequence: time and label, embedded and added.

        A label outside the table gives NaN, not another class.
        """
        step = _step_of_time(rows.time)
        config = self.config
        embedded = sinusoid(step, size=config.time_channels, frequency_shift=config.time_frequency_shift)
        cond = self.time_in(embedded)
        return cond + jnp.take(self.label_in[...], rows.labels, axis=0, mode="fill")

    def __call__(
        self, rows: ImageLabelRows, *, attention: Attention, layer_scan: LayerScan | None = None
    ) -> Float[Array, "n_img c_out"]:
        """Predicts one output row per image row: the noise, and with `learn_sigma` the variance.

        Args:
            rows: packed input; what lies in padding rows is ignored.
            attention: attention over the image rows, see `Attention`.
            layer_scan: runs the stack of blocks, see `LayerScan`; by default `scan_layers()`.

        Returns:
            Float32 rows; padding rows are zero.
        """
        embedded = self.embed(rows)
        return self.head(self.run_blocks(embedded, attention=attention, layer_scan=layer_scan), embedded)

    def embed(self, rows: ImageLabelRows) -> _Embedded:
        """What the blocks start from: rows `img` in the model's width, and what conditions them."""
        ids = rows.img_segment_ids
        img = self.img_in(zero_padding_rows(rows.img, ids))
        position = position_embedding(rows.img_positions, self.config.width)
        return _Embedded(img + position.astype(img.dtype), self.condition(rows), ids)

    def run_blocks(
        self, embedded: _Embedded, *, attention: Attention, layer_scan: LayerScan | None = None
    ) -> Float[Array, "n d"]:
        """Rows after all blocks."""
        layer_scan = scan_layers() if layer_scan is None else layer_scan

        def apply(block: Any, x: Any, cond: Any) -> Any:
            return block(x, cond, embedded.ids, attention)

        # Every block applies SiLU before its modulation; it is the same for all, so it is done once.
        return run_layers(layer_scan, self.blocks, apply, embedded.img, nnx.silu(embedded.cond))

    def head(self, img: Float[Array, "n d"], embedded: _Embedded) -> Float[Array, "n c_out"]:
        """Output rows from the rows after all blocks."""
        return self.final_layer(img, embedded.cond, embedded.ids)

    def first_input(self, embedded: _Embedded, *, layer_scan: LayerScan | None = None) -> Float[Array, "n d"]:
        """The normed and modulated rows that the first block works on, float32; see `StepCache`."""
        layer_scan = scan_layers() if layer_scan is None else layer_scan

        def apply(block: Any, x: Any, cond: Any) -> Any:
            mod = split_modulation(block.modulation(cond), 2)[0]
            return norm_and_modulate(x, mod.shift, mod.scale, embedded.ids)

        img = embedded.img.astype(jnp.float32)
        return run_first_layer(layer_scan, self.blocks, apply, img, nnx.silu(embedded.cond))
