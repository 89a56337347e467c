"""Block attention by cuDNN's flash attention."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from parallel._block_attention import Attended, BlockMask
from parallel._online_softmax import Partial

# What cuDNN's flash attention takes on every GPU since Ampere.
_DTYPES = frozenset({jnp.dtype("bfloat16"), jnp.dtype("float16")})
_MOST_HEAD_DIM = 128


def cudnn_applies(q: Array, k: Array, v: Array, mask: BlockMask) -> bool:
    """Whether cuDNN can serve: no mask but a diagonal one, half precision, head size a multiple of 8 up to 128."""
    return (
        (mask.allows_all or (mask.is_diagonal and mask.q_ids is None))
        and q.dtype == k.dtype == v.dtype
        and q.dtype in _DTYPES
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= _MOST_HEAD_DIM
        and q.size > 0
        and k.size > 0
    )


def cudnn_partitions() -> bool:
    """Whether JAX can lower cuDNN's calls here: not where some mesh axes are manual and others are not."""
    mesh = jax.sharding.get_abstract_mesh()
    return len(mesh.manual_axes) in (0, len(mesh.axis_names))


def cudnn_installed() -> bool:
    """Whether JAX finds the library: it is asked for its version where the call is traced, on any platform."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    return fused.cuda_versions is not None


@dataclass(frozen=True, slots=True)
class CudnnBlockAttention:
    """Block attention by cuDNN, forward and backward, on CUDA only; of causal masks the diagonal one.

    Calls JAX's internal binding, for two reasons. `jax.nn.dot_product_attention` rounds its residual to the inputs'
    dtype: a bfloat16 lse is off by up to 0.4 %, some 4 % of a weight at lse = 10. And its gradient is that of its own
    softmax, while a block's needs the statistics of the whole: cuDNN's backward kernel takes them as arguments.

    A causal mask makes weights of later rows 0, and 0 * NaN is NaN: what is not finite there may reach earlier rows.
    """

    def forward(self, q: Array, k: Array, v: Array, mask: BlockMask, scale: float) -> Partial:
        """As `BlockAttention.forward`; the output is rounded to the inputs' dtype, lse is float32.

        Raises:
            NotImplementedError: for what cuDNN does not take.
        """
        fused = self._binding(q, k, v, mask)
        out, lse = fused.dot_product_attention(
            q, k, v, scale=scale, mask_type=_mask_type(fused, mask), return_residual=True
        )
        return Partial(out, lse.transpose(0, 2, 1))

    def backward(
        self, q: Array, k: Array, v: Array, whole: Attended, mask: BlockMask, scale: float
    ) -> tuple[Array, Array, Array]:
        """As `BlockAttention.backward`, rounded to the inputs' dtype.

        Raises:
            NotImplementedError: for what cuDNN does not take.
        """
        fused = self._binding(q, k, v, mask)
        nothing = jnp.zeros(0, q.dtype)  # bias, lengths, offsets and page tables that are not used
        dq, dk, dv = fused._dot_product_attention_bwd_p_wrapper.bind(
            q,
            k,
            v,
            *(nothing,) * 7,
            whole.lse.transpose(0, 2, 1).astype(jnp.float32),
            whole.out.astype(q.dtype),
            whole.d_out.astype(q.dtype),
            scale=scale,
            seed=42,
            dropout_rate=0.0,
            variadic_args=(False, False),
            mask_type=_mask_type(fused, mask),
            layout=fused.AttentionLayout.BTNH.value,
            sliding_window_length=None,
        )
        return dq, dk, dv

    def _binding(self, q: Array, k: Array, v: Array, mask: BlockMask) -> Any:
        if not cudnn_applies(q, k, v, mask):
            raise NotImplementedError(
                "CudnnBlockAttention: no mask but a diagonal one, bfloat16 or float16, head size a multiple of 8 up to"
                f" 128; got {q.dtype}{list(q.shape)}, {k.dtype}{list(k.shape)}, masked={not mask.allows_all},"
                f" diagonal={mask.is_diagonal}. Use PackedBlockAttention or XlaBlockAttention."
            )
        from jax._src.cudnn import fused_attention_stablehlo as fused

        return fused


def _mask_type(fused: Any, mask: BlockMask) -> Any:
    return fused.MaskType.CAUSAL if mask.is_diagonal else fused.MaskType.NO_MASK
