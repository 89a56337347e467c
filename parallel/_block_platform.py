"""The default block attention: the best kernel of the platform that a program is compiled for."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from parallel._block_attention import Attended, BlockAttention, BlockMask
from parallel._block_cudnn import CudnnBlockAttention, cudnn_applies, cudnn_installed, cudnn_partitions
from parallel._block_packed import PackedBlockAttention
from parallel._block_xla import XlaBlockAttention
from parallel._online_softmax import as_partial
from parallel._pallas_attention import PallasKernel, kernel_tiles


@dataclass(frozen=True, slots=True)
class PlatformBlockAttention:
    """On CUDA cuDNN where there are no segments, Triton for segments, both for the rows that they take; else plain JAX.

    cuDNN: bfloat16 or float16, no mask or a diagonal one, head size a multiple of 8 up to 128. Triton: float32 or
    bfloat16, head size 64 or 128, no positions. The one place where that is chosen; the platform is that of the lowered
    program.
    """

    def forward(self, q: Array, k: Array, v: Array, mask: BlockMask, scale: float) -> Any:
        """As `BlockAttention.forward`."""

        def run(block: BlockAttention, q, k, v, mask):
            out, lse = block.forward(q, k, v, mask, scale)
            return as_partial(out, lse)

        return _on_platform(run, q, k, v, mask, scale, q, k, v, mask)

    def backward(
        self, q: Array, k: Array, v: Array, whole: Attended, mask: BlockMask, scale: float
    ) -> tuple[Array, Array, Array]:
        """As `BlockAttention.backward`, in float32."""

        def run(block: BlockAttention, q, k, v, whole, mask):
            gradients = block.backward(q, k, v, whole, mask, scale)
            return tuple(x.astype(jnp.float32) for x in gradients)

        return _on_platform(run, q, k, v, mask, scale, q, k, v, whole, mask)


def _on_platform(run: Any, q: Array, k: Array, v: Array, mask: BlockMask, scale: float, *args: Any) -> Any:
    default = partial(run, XlaBlockAttention())
    cuda = _cuda_block(q, k, v, mask, scale)
    if cuda is None:
        return default(*args)
    return lax.platform_dependent(*args, cuda=partial(run, cuda), default=default)


def _cuda_block(q: Array, k: Array, v: Array, mask: BlockMask, scale: float) -> BlockAttention | None:
    """The kernel that takes these rows; None if only plain JAX does."""
    if cudnn_applies(q, k, v, mask) and cudnn_partitions() and cudnn_installed():
        return CudnnBlockAttention()
    packed = PackedBlockAttention(PallasKernel())
    q_rows, k_rows, v_rows = packed.row_shapes(q, k, v)
    if mask.q_positions is None and kernel_tiles(q_rows, k_rows, v_rows, scale) is not None:
        return packed
    return None
