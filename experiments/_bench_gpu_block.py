"""Blocks of FLUX's shape on one device, forward and backward: the share of the device's peak that the model uses.

Model operations of a block: 24 l d^2 + 4 l^2 d forward (each parameter of a matrix once a token, and attention),
twice that backward. What is computed again counts as time only.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments._bench_gpu_attention import call_times
from experiments._bench_report import Section, markdown_table, paragraph
from jaxdit.models import ImageTextRows, MMDiT, MMDiTConfig
from parallel import balanced_attention, expand_attention
from solver import CostModel, StepLayout, balance, step_needs, step_tables

_LOG = logging.getLogger(__name__)

# Dense bfloat16 products a second, by part of the device's name.
_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12}
# A plan for one device moves rows on that device only: no axis is ever looked up.
_NO_AXIS = "unused"
# One double-stream and one single-stream block.
_NUM_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """One sequence of each of `lengths` tokens, `text` of them text, through blocks of this shape."""

    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536)
    text: int = 512
    width: int = 3072
    num_heads: int = 24
    block: int = 128
    repeats: int = 5

    @property
    def config(self) -> MMDiTConfig:
        """Few blocks of FLUX's kind."""
        head_dim = self.width // self.num_heads
        return MMDiTConfig(
            in_channels=64,
            text_channels=64,
            pooled_channels=64,
            width=self.width,
            num_heads=self.num_heads,
            num_double_blocks=1,
            num_single_blocks=1,
            axes_dim=(head_dim // 8, head_dim // 16 * 7, head_dim // 16 * 7),
        )


QUICK = BlockSizes(lengths=(48,), text=16, width=128, num_heads=2, block=16, repeats=1)


def peak_flops(device_kind: str) -> float | None:
    """Of bfloat16 products; None for a device that is not known."""
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in device_kind), None)


def block_flops(length: int, width: int) -> float:
    """Model operations of a block's forward pass."""
    return 24.0 * length * width**2 + 4.0 * float(length) ** 2 * width


def bench_gpu_block(*, quick: bool) -> Section:
    """Measure forward and backward of the blocks at every length."""
    sizes = QUICK if quick else BlockSizes()
    peak = peak_flops(jax.devices()[0].device_kind)
    graph, params = nnx.split(nnx.jit(lambda: MMDiT(sizes.config, rngs=nnx.Rngs(0)))())
    measured = []
    for length in sizes.lengths:
        _LOG.info("block: %d tokens", length)
        run, inputs = _loss_and_gradients(sizes, graph, length)
        times = call_times(run, (params, *inputs), repeats=sizes.repeats)
        flops = 3 * _NUM_BLOCKS * block_flops(length, sizes.width) / times.middle
        measured.append(
            {
                "length": length,
                "seconds": times.samples,
                "model_tflops": flops / 1e12,
                "mfu": None if peak is None else flops / peak,
            }
        )
    return Section("block", "Blocks of FLUX's shape", _body(measured, sizes), {"measured": measured})


def _loss_and_gradients(
    sizes: BlockSizes, graph: Any, length: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A jitted function of (params, rows, tables), and the latter two."""
    cost = CostModel(width=sizes.width, gamma=0.4)
    plan = balance(
        [length],
        [0],
        num_devices=1,
        bags=None,
        cost=cost,
        num_heads=sizes.num_heads,
        text_lengths=[sizes.text],
    )
    layout = StepLayout(plan, sizes.block)
    needs = step_needs(layout)
    tables = jax.tree.map(lambda x: x[0], step_tables(layout, needs))

    def loss(params: Any, rows: ImageTextRows, tables: Any) -> jax.Array:
        attention_layout = expand_attention(tables, needs, num_heads=sizes.num_heads)

        def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return balanced_attention(q, k, v, attention_layout, axis_name=_NO_AXIS)

        return jnp.mean(nnx.merge(graph, params)(rows, attention=attention) ** 2)

    rows = _rows(sizes, needs.text, needs.image, length)
    return jax.jit(jax.value_and_grad(loss)), (rows, tables)


def _rows(sizes: BlockSizes, text_rows: int, image_rows: int, length: int) -> ImageTextRows:
    rng = np.random.default_rng(0)
    config = sizes.config
    real = np.arange(image_rows) < length - sizes.text
    side = int(np.ceil(np.sqrt(image_rows)))
    place = np.arange(image_rows)
    return ImageTextRows(
        img=jnp.asarray(rng.standard_normal((image_rows, config.in_channels), np.float32)),
        img_segment_ids=jnp.asarray(real, jnp.int32),
        img_positions=jnp.asarray(np.stack([0 * place, place // side, place % side], axis=1), jnp.float32),
        txt=jnp.asarray(rng.standard_normal((text_rows, config.text_channels), np.float32)),
        txt_segment_ids=jnp.asarray(np.arange(text_rows) < sizes.text, jnp.int32),
        txt_positions=jnp.zeros((text_rows, 3)),
        time=jnp.full(1, 0.5),
        pooled=jnp.asarray(rng.standard_normal((1, config.pooled_channels), np.float32)),
    )


def _body(measured: list[dict[str, Any]], sizes: BlockSizes) -> str:
    rows = [
        (
            m["length"],
            f"{min(m['seconds']) * 1e3:.2f}",
            f"{m['model_tflops']:.3g}",
            "unknown" if m["mfu"] is None else f"{m['mfu']:.1%}",
        )
        for m in measured
    ]
    note = f"""One double-stream and one single-stream block of width {sizes.width} with {sizes.num_heads} heads, one
    sequence with {sizes.text} text tokens, bfloat16 with float32 parameters, forward and backward, nothing
    recomputed but attention's weights; embeddings and the final layer count as time only."""
    header = ("tokens", "ms, least", "model TFLOP/s", "of peak")
    return markdown_table(header, rows) + "\n\n" + paragraph(note)
