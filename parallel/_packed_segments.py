"""The contract of packed attention: which rows attend to which, what comes out, and what a kernel must do."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, no_type_check, runtime_checkable

import jax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
@no_type_check  # JAX rebuilds pytrees with placeholders for leaves
class PackedSegments:
    """Which rows attend to which, on one device.

    Attributes:
        query_ids, key_ids: segment of each row; 0 (or less) = padding, which attends to nothing and is attended by
            nothing.
        key_blocks: for each query block, the half-open range of key blocks that hold its segments.
        query_blocks: for each key block, the half-open range of query blocks that hold its segments.
    """

    query_ids: Int[Array, " rows_q"]
    key_ids: Int[Array, " rows_k"]
    key_blocks: Int[Array, "blocks_q 2"]
    query_blocks: Int[Array, "blocks_k 2"]


class PackedOutput(NamedTuple):
    """Output rows in the queries' dtype, and float32 log-sum-exp of scaled logits (-inf where nothing is attended)."""

    out: Float[Array, "rows_q d"]
    lse: Float[Array, " rows_q"]


@runtime_checkable
class PackedKernel(Protocol):
    """Forward and backward of packed attention on whole row arrays; both see only what `segments` allows."""

    def forward(self, q: Array, k: Array, v: Array, segments: PackedSegments, scale: float) -> PackedOutput:
        """(rows_q, d), (rows_k, d), (rows_k, d) to output and lse."""
        ...

    def backward(
        self,
        inputs: tuple[Array, Array, Array],
        saved: PackedOutput,
        cotangent: PackedOutput,
        segments: PackedSegments,
        scale: float,
    ) -> tuple[Array, Array, Array]:
        """Gradients of q, k, v in their dtypes."""
        ...
