"""FLUX.1's transformer on packed rows.

Double-stream blocks keep image and text rows apart (own weights) and attend jointly over [text; image];
single-stream blocks run on the joint rows. Every formula is the original's; only the batch dimension is gone:
a row finds the modulation of its sequence by segment id, and attention is a callable that knows the segments.

Checkpoints map one to one. A kernel is the transpose of PyTorch's weight, block i is slice i of the stacked
leading axis, `s` is `img` or `txt`:

    here                            original FLUX.1                     diffusers
    img_in, txt_in                  the same                            x_embedder, context_embedder
    time_in.in_layer, .out_layer    the same                            (E) timestep_embedder.linear_1, _2
    guidance_in, vector_in          the same                            (E) guidance_embedder, text_embedder
    (D) s.modulation                (D) s_mod.lin                       (F) norm1.linear, norm1_context.linear
    (D) s.qkv                       (D) s_attn.qkv                      (F) attn.to_q | to_k | to_v,
                                                                       add_q_proj | add_k_proj | add_v_proj
    (D) s.query_norm, s.key_norm    (D) s_attn.norm.query_norm...    (F) attn.norm_q, norm_k, norm_added_*
    (D) s.proj                      (D) s_attn.proj                     (F) attn.to_out.0, attn.to_add_out
    (D) s.mlp.in_layer, .out_layer  (D) s_mlp.0, .2                     (F) ff.net.0.proj, .2, ff_context...
    (S) modulation                  (S) modulation.lin                  (T) norm.linear
    (S) linear1                     (S) linear1                         (T) attn.to_q | to_k | to_v | proj_mlp
    (S) query_norm, key_norm        (S) norm.query_norm, norm.key_norm  (T) attn.norm_q, norm_k
    (S) linear2                     (S) linear2                         (T) proj_out
    final_layer.modulation          final_layer.adaLN_modulation.1      norm_out.linear, halves swapped
    final_layer.linear              final_layer.linear                  proj_out

(D) double_blocks, (S) single_blocks, there followed by the block's number; (E) time_text_embed,
(F) transformer_blocks.i, (T) single_transformer_blocks.i; a | b: outputs concatenated in this order.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ._layers import (
    EmbedMLP,
    FinalLayer,
    Mlp,
    Modulation,
    NormScale,
    add_gated,
    gelu,
    linear,
    norm_and_modulate,
    norm_and_turn,
    sinusoid,
    split_modulation,
    stack_modules,
    zero_padding_rows,
    zeros,
)
from ._mmdit_config import MMDiTConfig
from ._rope import RopeTable, rope_table
from ._rows import Attention, ImageTextRows, LayerScan
from ._scan import name_attention, run_first_layer, run_layers, scan_layers

__all__ = ["MMDiT"]

TIME_FACTOR = 1000.0


class _Joint(NamedTuple):
    """What blocks know of the rows beside their values; nothing in it needs a gradient."""

    txt_ids: Int[Array, " n_txt"]
    img_ids: Int[Array, " n_img"]
    rope: RopeTable

    @property
    def num_txt(self) -> int:
        return self.txt_ids.shape[0]

    @property
    def ids(self) -> Int[Array, " n"]:
        return jnp.concatenate([self.txt_ids, self.img_ids])


class _Embedded(NamedTuple):
    """What blocks start from."""

    img: Float[Array, "n_img d"]
    txt: Float[Array, "n_txt d"]
    cond: Float[Array, "s d"]
    joint: _Joint


class _QKV(NamedTuple):
    q: Float[Array, "n h d"]
    k: Float[Array, "n h d"]
    v: Float[Array, "n h d"]


def _split_heads(qkv: Float[Array, "n d3"], block: Any, rope: RopeTable) -> _QKV:
    """Cuts fused [q, k, v] into heads, normalises and turns q and k."""
    num_rows, width = qkv.shape  # of a batch without any text there are no text rows, and -1 has no value
    shape = num_rows, 3, block.num_heads, width // (3 * block.num_heads)
    q, k, v = jnp.moveaxis(qkv.reshape(shape), 1, 0)
    q = norm_and_turn(q, block.query_norm.scale[...], rope)
    k = norm_and_turn(k, block.key_norm.scale[...], rope)
    return _QKV(q, k, v)


def _attend(attention: Attention, parts: list[_QKV], num_rows: int) -> Float[Array, "n d"]:
    q, k, v = (jnp.concatenate(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
    return name_attention(attention(q, k, v)).reshape(num_rows, q.shape[1] * q.shape[2])


class _Stream(nnx.Module):
    """The image or the text half of a double-stream block."""

    def __init__(self, config: MMDiTConfig, *, rngs: nnx.Rngs) -> None:
        width, dtype = config.width, config.dtype
        self.num_heads = config.num_heads
        self.modulation = linear(width, 6 * width, dtype=dtype, init=zeros, rngs=rngs)
        self.qkv = linear(width, 3 * width, dtype=dtype, bias=config.qkv_bias, rngs=rngs)
        self.query_norm = NormScale(config.head_dim)
        self.key_norm = NormScale(config.head_dim)
        self.proj = linear(width, width, dtype=dtype, rngs=rngs)
        self.mlp = Mlp(width, config.mlp_width, dtype=dtype, rngs=rngs)

    def project(
        self, x: Float[Array, "n d"], mod: Modulation, ids: Int[Array, " n"], rope: RopeTable
    ) -> _QKV:
        return _split_heads(self.qkv(norm_and_modulate(x, mod.shift, mod.scale, ids)), self, rope)

    def update(
        self, x: Float[Array, "n d"], attended: Array, mods: list[Modulation], ids: Int[Array, " n"]
    ) -> Float[Array, "n d"]:
        x = add_gated(x, mods[0].gate, ids, self.proj(attended))
        hidden = self.mlp(norm_and_modulate(x, mods[1].shift, mods[1].scale, ids))
        return add_gated(x, mods[1].gate, ids, hidden)


class _DoubleBlock(nnx.Module):
    def __init__(self, config: MMDiTConfig, *, rngs: nnx.Rngs) -> None:
        self.img = _Stream(config, rngs=rngs)
        self.txt = _Stream(config, rngs=rngs)

    def __call__(self, carry: Any, cond: Float[Array, "s d"], joint: _Joint, attention: Attention) -> Any:
        txt, img = carry
        n_txt, n = joint.num_txt, joint.num_txt + img.shape[0]
        txt_mods = split_modulation(self.txt.modulation(cond), 2)
        img_mods = split_modulation(self.img.modulation(cond), 2)
        txt_qkv = self.txt.project(txt, txt_mods[0], joint.txt_ids, joint.rope.rows(0, n_txt))
        img_qkv = self.img.project(img, img_mods[0], joint.img_ids, joint.rope.rows(n_txt, n))
        attended = _attend(attention, [txt_qkv, img_qkv], n)
        txt = self.txt.update(txt, attended[:n_txt], txt_mods, joint.txt_ids)
        img = self.img.update(img, attended[n_txt:], img_mods, joint.img_ids)
        return txt, img


class _SingleBlock(nnx.Module):
    def __init__(self, config: MMDiTConfig, *, rngs: nnx.Rngs) -> None:
        width, hidden, dtype = config.width, config.mlp_width, config.dtype
        self.num_heads = config.num_heads
        self.modulation = linear(width, 3 * width, dtype=dtype, init=zeros, rngs=rngs)
        self.linear1 = linear(width, 3 * width + hidden, dtype=dtype, rngs=rngs)
        self.linear2 = linear(width + hidden, width, dtype=dtype, rngs=rngs)
        self.query_norm = NormScale(config.head_dim)
        self.key_norm = NormScale(config.head_dim)

    def __call__(
        self, x: Float[Array, "n d"], cond: Float[Array, "s d"], joint: _Joint, attention: Attention
    ) -> Float[Array, "n d"]:
        (mod,) = split_modulation(self.modulation(cond), 1)
        ids, width = joint.ids, x.shape[1]
        hidden = self.linear1(norm_and_modulate(x, mod.shift, mod.scale, ids))
        qkv, mlp = hidden[:, : 3 * width], hidden[:, 3 * width :]
        attended = _attend(attention, [_split_heads(qkv, self, joint.rope)], x.shape[0])
        update = self.linear2(jnp.concatenate([attended, gelu(mlp)], axis=1))
        return add_gated(x, mod.gate, ids, update)


class MMDiT(nnx.Module):
    """FLUX.1's transformer on packed rows of any mixture of lengths; parameters as the module docstring maps.

    Kernels start Xavier-uniform and biases at zero; modulations and the final layer start at zero, so every
    block starts as the identity (adaLN-Zero); embedders of per-sequence values start normal(0.02). That is
    how DiT starts: FLUX.1 was published without its initialisation.

    Args:
        config: shape and dtypes.
        rngs: source of the initial parameters.

    Reference: FLUX.1 (Black Forest Labs, 2024); MMDiT: Esser et al., arXiv 2403.03206.
    """

    def __init__(self, config: MMDiTConfig, *, rngs: nnx.Rngs) -> None:
        width, dtype = config.width, config.dtype
        embed_init = nnx.initializers.normal(0.02)
        self.config = config
        self.img_in = linear(config.in_channels, width, dtype=dtype, rngs=rngs)
        self.txt_in = linear(config.text_channels, width, dtype=dtype, rngs=rngs)
        self.time_in = EmbedMLP(config.time_channels, width, init=embed_init, rngs=rngs)
        self.vector_in = EmbedMLP(config.pooled_channels, width, init=embed_init, rngs=rngs)
        self.guidance_in = (
            EmbedMLP(config.time_channels, width, init=embed_init, rngs=rngs)
            if config.guidance_embed
            else None
        )
        self.double_blocks = stack_modules(
            lambda rngs: _DoubleBlock(config, rngs=rngs), config.num_double_blocks, rngs
        )
        self.single_blocks = stack_modules(
            lambda rngs: _SingleBlock(config, rngs=rngs), config.num_single_blocks, rngs
        )
        self.final_layer = FinalLayer(width, config.out_channels or config.in_channels, rngs=rngs)

    def condition(self, rows: ImageTextRows) -> Float[Array, "s d"]:
        """The vector that modulates each sequence: time, guidance and pooled text, embedded and added."""
        size = self.config.time_channels
        cond = self.time_in(sinusoid(TIME_FACTOR * rows.time.astype(jnp.float32), size=size))
        if self.guidance_in is not None and rows.guidance is not None:
            cond += self.guidance_in(sinusoid(TIME_FACTOR * rows.guidance.astype(jnp.float32), size=size))
        return cond + self.vector_in(rows.pooled.astype(jnp.float32))

    def __call__(
        self, rows: ImageTextRows, *, attention: Attention, layer_scan: LayerScan | None = None
    ) -> Float[Array, "n_img c_out"]:
        """Predicts one output row per image row (for flow matching: the velocity).

        Args:
            rows: packed input; what lies in padding rows is ignored.
            attention: joint attention over [text rows; image rows], see `Attention`.
            layer_scan: runs a stack of blocks, see `LayerScan`; by default `scan_layers()`.

        Returns:
            Float32 rows; padding rows are zero.

        Raises:
            ValueError: if guidance is missing for a model that embeds it, or given to one that does not.
        """
        embedded = self.embed(rows)
        return self.head(self.run_blocks(embedded, attention=attention, layer_scan=layer_scan), embedded)

    def embed(self, rows: ImageTextRows) -> _Embedded:
        """What the blocks start from: rows `img` and `txt` in the model's width, and what conditions them.

        Raises:
            ValueError: as calling the model does.
        """
        _check_guidance(self.config, rows)
        return _Embedded(
            img=self.img_in(zero_padding_rows(rows.img, rows.img_segment_ids)),
            txt=self.txt_in(zero_padding_rows(rows.txt, rows.txt_segment_ids)),
            cond=self.condition(rows),
            joint=_Joint(rows.txt_segment_ids, rows.img_segment_ids, self._rope(rows)),
        )

    def run_blocks(
        self, embedded: _Embedded, *, attention: Attention, layer_scan: LayerScan | None = None
    ) -> Float[Array, "n_img d"]:
        """Image rows after all blocks."""
        layer_scan = scan_layers() if layer_scan is None else layer_scan
        img, txt, cond, joint = embedded
        # Every block applies SiLU before its modulation; it is the same for all, so it is done once.
        consts = nnx.silu(cond)

        def apply(block: Any, carry: Any, consts: Any) -> Any:
            return block(carry, consts, joint, attention)

        if self.double_blocks is not None:
            txt, img = run_layers(layer_scan, self.double_blocks, apply, (txt, img), consts)
        x = jnp.concatenate([txt, img])
        if self.single_blocks is not None:
            x = run_layers(layer_scan, self.single_blocks, apply, x, consts)
        return x[joint.num_txt :]

    def head(self, img: Float[Array, "n_img d"], embedded: _Embedded) -> Float[Array, "n_img c_out"]:
        """Output rows from the image rows after all blocks."""
        return self.final_layer(img, embedded.cond, embedded.joint.img_ids)

    def first_input(
        self, embedded: _Embedded, *, layer_scan: LayerScan | None = None
    ) -> Float[Array, "n_img d"]:
        """The normed and modulated image rows that the first block works on, float32; see `StepCache`."""
        layer_scan = scan_layers() if layer_scan is None else layer_scan
        is_double = self.double_blocks is not None

        def apply(block: Any, img: Any, consts: Any) -> Any:
            modulation, parts = (block.img.modulation, 2) if is_double else (block.modulation, 1)
            mod = split_modulation(modulation(consts), parts)[0]
            return norm_and_modulate(img, mod.shift, mod.scale, embedded.joint.img_ids)

        blocks = self.double_blocks if is_double else self.single_blocks
        img = embedded.img.astype(jnp.float32)
        return run_first_layer(layer_scan, blocks, apply, img, nnx.silu(embedded.cond))

    def _rope(self, rows: ImageTextRows) -> RopeTable:
        positions = jnp.concatenate([rows.txt_positions, rows.img_positions])
        return rope_table(positions, axes_dim=self.config.axes_dim, theta=self.config.theta)


def _check_guidance(config: MMDiTConfig, rows: ImageTextRows) -> None:
    if config.guidance_embed and rows.guidance is None:
        raise ValueError(
            "MMDiT: a model with guidance_embed needs guidance; got guidance=None. "
            "Give one scale per sequence."
        )
    if not config.guidance_embed and rows.guidance is not None:
        raise ValueError(
            f"MMDiT: guidance needs a model with guidance_embed; got guidance of shape "
            f"{rows.guidance.shape}. Set guidance_embed=True, or guide in the sampler."
        )
