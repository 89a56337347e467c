"""Attention on one device: the packed kernels on lengths of data mixes, the plain JAX they replace, and cuDNN.

Floating-point operations are those of the products that attention is made of: 4 l^2 d for a head of a sequence of l
tokens forward, and 2.5 times that backward. What a kernel computes again, and what it masks, counts as time only.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments._bench_batches import JOINT_CODES
from experiments._bench_report import Section, Times, markdown_table, paragraph
from experiments.data import StepSampler, SyntheticCodes
from parallel import (
    PackedKernel,
    PackedSegments,
    XlaKernel,
    expand_attention,
    packed_attention,
    uniform_attention,
)
from solver import CostModel, StepLayout, balance, step_needs, step_tables

_LOG = logging.getLogger(__name__)

BACKWARD_OVER_FORWARD = 2.5
# Plain JAX visits one pair of blocks at a time, some tens of microseconds each: one head of what ends within a second.
_MOST_XLA_PAIRS = 20_000


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What is measured.

    Attributes:
        lengths: of sequences, for batches of one length.
        total: tokens of a batch, whatever its lengths; a longer sequence is a batch of its own.
        num_heads, head_dim, block: of the model; rows of a block.
        repeats: timed calls, after one that is not.
    """

    lengths: tuple[int, ...] = (256, 1024, 4096, 16384, 65536)
    total: int = 32768
    num_heads: int = 24
    head_dim: int = 128
    block: int = 128
    repeats: int = 5

    @property
    def dtype(self) -> Any:
        """Of rows."""
        return jnp.bfloat16


QUICK = AttentionSizes(lengths=(48,), total=96, num_heads=2, head_dim=64, block=16, repeats=1)


@dataclass(frozen=True, slots=True)
class Measured:
    """One way to compute attention on one batch.

    Attributes:
        batch, form: what was computed, and by what.
        num_heads: of the batch in this form.
        forward, both: seconds of the forward pass, and of forward and backward.
        flops: of the forward pass.
    """

    batch: str
    form: str
    num_heads: int
    forward: Times
    both: Times
    flops: float

    @property
    def forward_tflops(self) -> float:
        """10^12 operations a second, of the median."""
        return self.flops / self.forward.middle / 1e12

    @property
    def both_tflops(self) -> float:
        """The same for forward and backward together."""
        return self.flops * (1 + BACKWARD_OVER_FORWARD) / self.both.middle / 1e12

    def as_json(self) -> dict[str, Any]:
        """Values for a file."""
        return {
            "batch": self.batch,
            "form": self.form,
            "num_heads": self.num_heads,
            "forward_s": self.forward.samples,
            "forward_backward_s": self.both.samples,
            "forward_tflops": self.forward_tflops,
            "forward_backward_tflops": self.both_tflops,
        }


def attention_flops(lengths: Sequence[int], num_heads: int, head_dim: int) -> float:
    """Operations of a forward pass."""
    return 4.0 * head_dim * num_heads * sum(float(length) ** 2 for length in lengths)


def bench_gpu_attention(*, quick: bool, kernel: PackedKernel | None = None) -> Section:
    """Measure all batches in all forms that apply.

    Args:
        quick: tiny sizes, to see that it works.
        kernel: of packed attention; by default what the platform takes.
    """
    sizes = QUICK if quick else AttentionSizes()
    agreement = compare_kernels(sizes, kernel)
    measured = []
    for name, lengths in batches(sizes).items():
        _LOG.info("attention: %s", name)
        measured += _measure_batch(name, lengths, sizes, kernel)
    figures = {"platform": jax.default_backend(), "measured": [m.as_json() for m in measured], **agreement}
    return Section("attention", "Attention kernels", _body(measured, sizes, agreement), figures)


def batches(sizes: AttentionSizes) -> dict[str, list[int]]:
    """Lengths by name: batches of one length each, and a mix."""
    found = {f"{length}": [length] * max(sizes.total // length, 1) for length in sizes.lengths}
    found["joint mix"] = mixed_lengths(sizes.total, most=max(sizes.lengths))
    return found


def mixed_lengths(total: int, *, most: int) -> list[int]:
    """Lengths of the joint mix in random order up to `total`, the last cut to fit.

    All are halved until the longest is at most `most`.
    """
    step = StepSampler([SyntheticCodes(JOINT_CODES, num_steps=1)]).step(0)
    drawn = np.random.default_rng(0).permutation(step.lengths)
    while drawn.max() > most:
        drawn = -(-drawn // 2)
    stops = np.minimum(np.cumsum(drawn), total)
    lengths = np.diff(stops, prepend=0)
    return [int(n) for n in lengths if n > 0]


def device_segments(lengths: Sequence[int], num_heads: int, block: int) -> PackedSegments:
    """The attention layout of one device that has all heads of all sequences, as the solver places them."""
    cost = CostModel(width=num_heads * 64, gamma=0.4)
    plan = balance(lengths, [0] * len(lengths), num_devices=1, bags=None, cost=cost, num_heads=num_heads)
    layout = StepLayout(plan, block)
    sizes = step_needs(layout)
    tables = jax.tree.map(lambda x: x[0], step_tables(layout, sizes))
    return jax.jit(lambda t: expand_attention(t, sizes, num_heads=num_heads).groups[0].segments)(tables)


def compare_kernels(sizes: AttentionSizes, kernel: PackedKernel | None) -> dict[str, Any]:
    """What is measured against plain JAX on a small batch, and against itself, before any time is taken.

    Returns:
        `largest_difference` of output, dq, dk and dv over the largest value of each, and whether a second run gives the
        same bits: `repeats_exactly`.
    """
    lengths = mixed_lengths(min(sizes.total, 2048), most=1024)
    segments = device_segments(lengths, 2, sizes.block)
    # Padding rows of a real layout hold what an exchange left there.
    q, k, v, d_out = _rows((segments.query_ids.shape[0], sizes.head_dim), sizes.dtype)

    def run(kernel: PackedKernel | None) -> list[np.ndarray]:
        both = jax.jit(_value_and_gradients(_packed_by(kernel)))
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(both(q, k, v, d_out, segments))]

    found, again, plain = run(kernel), run(kernel), run(XlaKernel())
    pairs = zip(found, plain, strict=True)
    return {
        "largest_difference": [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs],
        "repeats_exactly": all(np.array_equal(a, b) for a, b in zip(found, again, strict=True)),
    }


def _packed_by(kernel: PackedKernel | None) -> Callable[..., jax.Array]:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: PackedSegments) -> jax.Array:
        return packed_attention(q, k, v, segments, kernel=kernel).out

    return attend


def _value_and_gradients(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, segments: Any) -> Any:
        out, pull_back = jax.vjp(lambda *qkv: attend(*qkv, segments), q, k, v)
        return out, pull_back(d_out)

    return both


def _measure_batch(
    name: str, lengths: list[int], sizes: AttentionSizes, kernel: PackedKernel | None
) -> list[Measured]:
    measured = [_measure_packed(name, "packed", lengths, sizes.num_heads, sizes, kernel)]
    one_head = device_segments(lengths, 1, sizes.block)
    pairs = int(np.diff(np.asarray(one_head.key_blocks)).sum())
    if pairs <= _MOST_XLA_PAIRS:
        measured.append(_measure_packed(name, "plain JAX", lengths, 1, sizes, XlaKernel()))
    if len(set(lengths)) == 1:
        shape = (len(lengths), lengths[0], sizes.num_heads, sizes.head_dim)
        flops = attention_flops(lengths, sizes.num_heads, sizes.head_dim)
        times = _times(lambda q, k, v, _: uniform_attention(q, k, v), shape, None, sizes)
        measured.append(Measured(name, "one length (cuDNN)", sizes.num_heads, *times, flops))
    return measured


def _measure_packed(
    name: str,
    form: str,
    lengths: list[int],
    num_heads: int,
    sizes: AttentionSizes,
    kernel: PackedKernel | None,
) -> Measured:
    segments = device_segments(lengths, num_heads, sizes.block)
    shape = (segments.query_ids.shape[0], sizes.head_dim)
    times = _times(_packed_by(kernel), shape, segments, sizes)
    return Measured(name, form, num_heads, *times, attention_flops(lengths, num_heads, sizes.head_dim))


def _times(
    attend: Callable[..., jax.Array], shape: tuple[int, ...], segments: Any, sizes: AttentionSizes
) -> tuple[Times, Times]:
    """Of the forward pass, and of forward and backward, on normal rows."""
    q, k, v, d_out = _rows(shape, sizes.dtype)
    return (
        call_times(jax.jit(attend), (q, k, v, segments), repeats=sizes.repeats),
        call_times(jax.jit(_value_and_gradients(attend)), (q, k, v, d_out, segments), repeats=sizes.repeats),
    )


def _rows(shape: tuple[int, ...], dtype: Any) -> tuple[jax.Array, ...]:
    make = jax.jit(lambda: tuple(jax.random.normal(jax.random.key(i), shape, dtype) for i in range(4)))
    return jax.block_until_ready(make())


def call_times(run: Callable[..., Any], args: Sequence[Any], *, repeats: int) -> Times:
    """Seconds of each of `repeats` calls, after one that compiles."""
    jax.block_until_ready(run(*args))
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run(*args))
        samples.append(time.perf_counter() - started)
    return Times(tuple(samples))


def _body(measured: Sequence[Measured], sizes: AttentionSizes, agreement: dict[str, Any]) -> str:
    rows = [
        (
            m.batch,
            m.form,
            m.num_heads,
            f"{m.forward_tflops:.3g}",
            f"{m.both_tflops:.3g}",
            m.forward.text(1e-3, 2),
            m.both.text(1e-3, 2),
        )
        for m in measured
    ]
    header = (
        "lengths",
        "form",
        "heads",
        "TFLOP/s forward",
        "forward and backward",
        "ms forward",
        "ms forward and backward",
    )
    note = f"""bfloat16, heads of {sizes.head_dim}, {sizes.total} tokens (or one longer sequence), blocks of
    {sizes.block} rows. Operations are those of the products, 4 l^2 d a head forward and
    {1 + BACKWARD_OVER_FORWARD} times that with the gradient; plain JAX on one head, where that ends soon. Times:
    median (minimum). On a small batch, output and gradients differ from plain JAX's by
    {max(agreement["largest_difference"]):.1e} of the largest value at most; a second run gives
    {"the same bits" if agreement["repeats_exactly"] else "OTHER bits"}."""
    return markdown_table(header, rows) + "\n\n" + paragraph(note)
