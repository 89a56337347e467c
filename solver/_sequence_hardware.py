"""What a machine of GPUs does, as far as the time of a sequence-parallel layer depends on it."""

import math
from dataclasses import dataclass

from solver._check import flag, instance, integer, number

_MOST_UNDER_WAY = 8
_MOST_OF_A_GPU = 1 << 16  # processors and the like
# Between these no time of a layer is infinite, or 0.
_LEAST, _MOST = 1e-30, 1e30
_ADVICE = "Give what the data sheet or a measurement says."


@dataclass(frozen=True, slots=True)
class Link:
    """A kind of link: between the devices of a machine, or between machines.

    Two-sided transfers are NCCL's: a kernel on either side, which meet; one-sided ones are puts and gets.

    Args:
        bytes_per_s: of the adapter, in one direction, at its nominal rate.
        shared_by: consecutive devices of a machine that share one adapter; 1 is an adapter for each.
        all_to_all: share of the rate that two-sided exchanges with all peers at once reach.
        one_peer: share that two-sided exchanges with one peer at a time reach, as ring steps are.
        one_sided: share that puts and gets reach.
        two_sided_s: seconds from a two-sided call until data flows: launch, meeting, latency.
        one_sided_s: the same of a put or get.
        message_s: seconds more for each peer of a call.

    Raises:
        TypeError: for what is no number.
        ValueError: for a rate or share that is not positive, a share above 1, a negative time, and what is so small or
            large that times would be infinite.
    """

    bytes_per_s: float
    shared_by: int
    all_to_all: float
    one_peer: float
    one_sided: float
    two_sided_s: float
    one_sided_s: float
    message_s: float

    def __post_init__(self) -> None:
        _check_integer(self, "shared_by")
        _check_positive(self, ("bytes_per_s", "all_to_all", "one_peer", "one_sided"))
        _check_shares(self, ("all_to_all", "one_peer", "one_sided"))
        _check_seconds(self, ("two_sided_s", "one_sided_s", "message_s"))


@dataclass(frozen=True, slots=True)
class SequenceHardware:
    """A GPU, and the links that it has.

    Args:
        flops_per_s: peak of matrix products in the layer's precision.
        linear: share of the peak that linear layers reach, elementwise work between them included.
        attention: share that attention would reach with heads without end; `attention_half_dim` is the head
            dimension that reaches half of it: what is done for a score costs the same whatever the dimension.
        attention_half_dim: see above.
        tile_rows: queries of a head that a processor takes at a time. Tiles run in waves of one on each processor, and
            the last wave takes as long as a full one: little work leaves processors idle.
        processors: of a GPU (SMs).
        communication_processors: how many a two-sided transfer takes from the attention beside it.
        memory_bytes_per_s: of the GPU's own memory, for merging partial outputs.
        launch_s: seconds of a kernel besides its work.
        inside, across: links between devices of a machine, and between machines.
        one_sided: whether puts and gets are at hand.
        ring_overlaps: whether two-sided ring steps run under attention, and not after it.
        transfers_under_way: how many two-sided transfers of a program may be under way at a time. XLA's GPU compiler
            has one, unless an option of it says more; a program that gives transfers streams of their own, more.
        element_bytes: of an element of q, k, v and o.

    Raises:
        TypeError: for what is no number, no integer where one is asked for, no bool, or no `Link`.
        ValueError: for a value that is not positive, a share above 1, all processors taken by communication, and what
            is so small or large that times would be infinite.
    """

    flops_per_s: float
    linear: float
    attention: float
    attention_half_dim: float
    processors: int
    communication_processors: int
    memory_bytes_per_s: float
    inside: Link
    across: Link
    tile_rows: int = 128
    launch_s: float = 5e-6
    one_sided: bool = False
    ring_overlaps: bool = True
    transfers_under_way: int = 1
    element_bytes: int = 2

    def __post_init__(self) -> None:
        most = integer(
            "SequenceHardware",
            "transfers_under_way",
            self.transfers_under_way,
            most=_MOST_UNDER_WAY,
            advice="XLA's default is 1.",
        )
        object.__setattr__(self, "transfers_under_way", most)
        for name in ("inside", "across"):
            instance(
                "SequenceHardware", name, getattr(self, name), Link, advice="Give Link(bytes_per_s, ...)."
            )
        for name in ("one_sided", "ring_overlaps"):
            value = flag("SequenceHardware", name, getattr(self, name), advice="Give a bool.")
            object.__setattr__(self, name, value)
        for name in ("processors", "tile_rows", "element_bytes"):
            _check_integer(self, name)
        _check_integer(self, "communication_processors", least=0)
        _check_positive(self, ("flops_per_s", "linear", "attention", "memory_bytes_per_s"))
        _check_shares(self, ("linear", "attention"))
        _check_seconds(self, ("launch_s", "attention_half_dim"))
        if self.communication_processors >= self.processors:
            raise ValueError(
                "SequenceHardware: communication_processors < processors; got "
                f"communication_processors={self.communication_processors}, processors={self.processors}. {_ADVICE}"
            )

    def linear_seconds(self, flops: float) -> float:
        """Seconds of so many FLOP of linear layers."""
        return flops / (self.flops_per_s * self.linear)

    def attention_seconds(self, queries: float, keys: float, heads: float, head_dim: int) -> float:
        """Seconds of attention of some queries to some keys; `heads` counts each sequence of a batch anew."""
        reached = self.flops_per_s * self.attention * head_dim / (head_dim + self.attention_half_dim)
        tiles = math.ceil(heads) * math.ceil(queries / self.tile_rows)
        waves = math.ceil(tiles / self.processors)
        return self.launch_s + waves * self.processors * self.tile_rows * keys * 4 * head_dim / reached

    def merge_seconds(self, elements: float) -> float:
        """Seconds to merge a partial output into the float32 accumulator, which is read and written."""
        return self.launch_s + elements * (4 + 4 + self.element_bytes) / self.memory_bytes_per_s

    @property
    def taken(self) -> float:
        """Share of the processors that a two-sided transfer takes."""
        return self.communication_processors / self.processors


# These leave Python's numbers, and no NumPy scalars, in the fields.


def _check_integer(owner: Link | SequenceHardware, name: str, *, least: int = 1) -> None:
    kind = type(owner).__name__
    value = integer(kind, name, getattr(owner, name), least=least, most=_MOST_OF_A_GPU, advice=_ADVICE)
    object.__setattr__(owner, name, value)


def _check_positive(owner: Link | SequenceHardware, names: tuple[str, ...]) -> None:
    kind = type(owner).__name__
    for name in names:
        value = number(kind, name, getattr(owner, name), advice=_ADVICE)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{kind}: {name} finite and > 0; got {name}={value}. {_ADVICE}")
        if not _LEAST <= value <= _MOST:
            raise ValueError(f"{kind}: {name} in {_LEAST:g} to {_MOST:g}; got {name}={value}. {_ADVICE}")
        object.__setattr__(owner, name, value)


def _check_shares(owner: Link | SequenceHardware, names: tuple[str, ...]) -> None:
    kind = type(owner).__name__
    for name in names:
        if getattr(owner, name) > 1:
            raise ValueError(f"{kind}: {name} <= 1; got {name}={getattr(owner, name)}. {_ADVICE}")


def _check_seconds(owner: Link | SequenceHardware, names: tuple[str, ...]) -> None:
    kind = type(owner).__name__
    for name in names:
        value = number(kind, name, getattr(owner, name), advice=_ADVICE)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{kind}: {name} finite and >= 0; got {name}={value}. {_ADVICE}")
        if value > _MOST:
            raise ValueError(f"{kind}: {name} <= {_MOST:g}; got {name}={value}. {_ADVICE}")
        object.__setattr__(owner, name, value)


# Where the figures come from; what has no source here is an estimate, and no figure is fitted.
#   312 TFLOP/s (dense, bfloat16), 2.039 TB/s, 600 GB/s of NVLink in both directions: NVIDIA's data sheet of A100 80 GB
#     SXM (nvidia-a100-datasheet-us-nvidia-1758950-r4). 108 SMs, 12 links of 25 GB/s each way: its Ampere white paper.
#   400 Gb/s a machine of 8 A100, not a GPU, which is also what SwiftFusion (arXiv 2601.20273) has: Amazon's p4d and
#     p4de (aws.amazon.com/blogs/compute/amazon-ec2-p4d-instances-deep-dive).
#   attention: FlashAttention-2 (arXiv 2307.08691) reaches 50 to 73 % of the peak. 0.9 D / (D + 32) is 72 % at a head
#     dimension of 128 and 60 % at 64; the 60 % are an estimate.
#   linear: estimate. Whole training steps reach 54 % of the peak, communication included (arXiv 2205.05198).
#   links, shares: all-reduce, a ring, moves 231 GB/s in a p4d, 31.8 GB/s between 3 and 29.6 between 4 of them
#     (github.com/NVIDIA/nccl/issues/527): 0.77 and 0.6. All-to-all, puts and gets between machines: estimate.
#   communication_processors: DeepSeek-V3 (arXiv 2412.19437, section 3.2.2) gives 20 of an H800's 132 SMs to transfers.
#   latencies, launch_s: estimates. An all-to-all of a few bytes over 16 GPUs of two machines of Amazon's takes some 105
#     us (github.com/bottlerocket-os/bottlerocket-kernel-kit/pull/313, of newer GPUs); here it is 56.
A100_MACHINE = SequenceHardware(
    flops_per_s=312e12,
    linear=0.6,
    attention=0.9,
    attention_half_dim=32,
    processors=108,
    communication_processors=20,
    memory_bytes_per_s=2.039e12,
    inside=Link(300e9, 1, 0.77, 0.77, 0.77, 15e-6, 3e-6, 1e-6),
    across=Link(50e9, 8, 0.8, 0.6, 0.8, 40e-6, 20e-6, 2e-6),
)

# Likewise.
#   989.4 TFLOP/s (dense, bfloat16), 132 SMs, 3.35 TB/s, 900 GB/s of NVLink in both directions: NVIDIA's data sheet and
#     Hopper white paper, of H100 SXM5. H200 differs in its memory alone, 4.8 TB/s.
#   400 Gb/s for each GPU: NVIDIA's DGX H100 user guide (eight ConnectX-7, one by each GPU).
#   attention: FlashAttention-3 (arXiv 2407.08608) reaches up to 740 TFLOP/s; 621 at a head dimension of 128 and 16,384
#     tokens, not causal, in PyTorch's benchmark (github.com/pytorch/benchmark/pull/2391). 0.93 D / (D + 55) is 644 at
#     128 and 495 at 64; the latter is an estimate.
#   linear: 400 TFLOP/s, as `Links` has them: whole training steps of Llama 3 405B reach 380 to 430 (arXiv 2407.21783).
#   links, shares: estimates. Inside machines as A100's; of its adapters ConnectX-7 reaches 48 to 49 GB/s, also in
#     all-to-all (github.com/NVIDIA/nccl-tests/issues/267), of which 0.8 leaves some for contention.
#   latencies: estimates, InfiniBand's at a half to a third of A100_MACHINE's network.
H100_MACHINE = SequenceHardware(
    flops_per_s=989.4e12,
    linear=400 / 989.4,
    attention=0.93,
    attention_half_dim=55,
    processors=132,
    communication_processors=20,
    memory_bytes_per_s=3.35e12,
    inside=Link(450e9, 1, 0.77, 0.77, 0.77, 15e-6, 3e-6, 1e-6),
    across=Link(50e9, 1, 0.8, 0.8, 0.8, 20e-6, 6e-6, 1e-6),
)
