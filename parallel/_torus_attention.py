"""Torus attention: Ulysses across machines in steps that hide under attention, Ulysses and a ring inside."""

from jaxtyping import Array, Float

from parallel._block_attention import BlockAttention
from parallel._routes import AxisName
from parallel._sequence_inputs import JointOutput, ReplicatedText, SegmentIds, check_inputs
from parallel._ulysses_attention import Axes, attend_by_heads


def torus_attention(
    q: Float[Array, "b l_loc h d"],
    k: Float[Array, "b k_loc h_kv d"],
    v: Float[Array, "b k_loc h_kv d"],
    *,
    machine_axis: AxisName,
    ulysses_axis: AxisName = (),
    ring_axis: AxisName = (),
    segment_ids: SegmentIds | None = None,
    causal: bool = False,
    text: ReplicatedText | None = None,
    keys_replicated: bool = False,
    scale: float | None = None,
    block_attention: BlockAttention | None = None,
) -> Array | JointOutput:
    """Softmax attention of a sequence divided among N machines of U x R devices, by topology-aware placement.

    Per device: call inside `shard_map`, q, k and v sharded along their length over all axes. Each machine computes some
    heads of the whole sequence: Ulysses of degree N U, whose exchange across machines is cut in N - 1 pulls of queries,
    N - 1 of keys, and a push of outputs, each issued before attention to what is there already (`_torus_schedule` has
    the schedule, also of the gradient). Rows a machine computes itself never leave it.

    Communication per machine, across machines: 2 (N - 1) / N (h' + h_kv') b (L / N) d elements for L tokens of queries
    and of keys, that is 4 (N - 1) / N b L h d / N where N U divides heads; h' and h_kv' are N U times a device's heads
    (30 heads on 4 x 8 devices move as 32). As much for the gradient. Inside a machine Ulysses over U before and after,
    and a ring of R for each of 2 N steps, 4 (R - 1) b l_loc h d a device; for the gradient 2 + 1 / N times that of
    `ring_attention` (N times if N = 2 or `causal`: a ring for each pair of machines). Segment ids are gathered: int32,
    b L. A text's output is gathered, b t h d. Memory is O(l_loc).

    What is hidden: on GPUs XLA has one transfer under way at a time, and a pull hides under one step of the ring; with
    two (`xla_gpu_experimental_parallel_collective_overlap_limit`, a compiler option of `jax.jit`) it spans all R.
    Ulysses inside a machine is not hidden, nor are those steps of the ring that give way to a pull, of a ring of two
    and in the gradient; and of the gradient in some programs one pull of cotangents gives way to the ring.

    Args:
        q, k, v, segment_ids, text, keys_replicated, scale, block_attention: as `ring_attention`.
        machine_axis: mesh axis, or tuple of axes, across machines.
        ulysses_axis, ring_axis: mesh axes, or tuples of axes, inside a machine; () for none.
        causal: as `ring_attention`; the sequence is in the order of (machine_axis, ring_axis, ulysses_axis), as in
            `PartitionSpec(None, (machine_axis, ring_axis, ulysses_axis))`. Without it any order will do. Machines skip
            pairs of parts that it hides, all as many; such a pair hides no transfer.

    Returns:
        Output of this device's rows in their dtype; with `text` a `JointOutput`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `ring_attention`.

    Reference: SwiftFusion (arXiv 2601.20273). Here as collectives of XLA, with a gradient.
    """
    inputs = check_inputs(
        "torus_attention",
        {"machine_axis": machine_axis, "ulysses_axis": ulysses_axis, "ring_axis": ring_axis},
        (q, k, v),
        segment_ids=segment_ids,
        causal=causal,
        text=text,
        keys_replicated=keys_replicated,
        scale=scale,
        block_attention=block_attention,
    )
    return attend_by_heads(inputs, Axes(machine_axis, ulysses_axis, ring_axis))
