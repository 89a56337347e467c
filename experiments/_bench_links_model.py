"""What bytes and the planner's model say of the programs of `bench_links`."""

from experiments._bench_links_measure import Machines
from experiments._bench_links_variants import Sizes, Variant, variants
from solver import Link, SequenceHardware, SequenceShape, layer_timeline

# Between processes of this computer: loopback of a few processes at a time, and a gloo call's meeting.
_MEMORY_BYTES_PER_S = 2e9
_CALL_S = 1e-3


def emulated_hardware(machines: Machines, sizes: Sizes, rate_mbit: float) -> SequenceHardware:
    """The emulated machines for the planner: links of a known rate, two-sided; compute as measured apart.

    XLA on CPU runs collectives and compute in turn, so ring steps do not hide; the planner still hides Torus' pulls,
    whatever goes round inside machines meanwhile.
    """
    devices = machines.topology.devices_per_machine
    flops_per_s = sizes.attention_flops / machines.topology.num_devices / machines.compute_s
    across = rate_mbit * 1e6 / 8
    return SequenceHardware(
        flops_per_s=flops_per_s,
        linear=1.0,
        attention=1.0,
        attention_half_dim=0.0,
        processors=1,
        communication_processors=0,
        memory_bytes_per_s=_MEMORY_BYTES_PER_S,
        inside=Link(_MEMORY_BYTES_PER_S, 1, 1.0, 1.0, 1.0, _CALL_S, _CALL_S, 0.0),
        across=Link(across, devices, 1.0, 1.0, 1.0, _CALL_S, _CALL_S, 0.0),
        tile_rows=1,
        one_sided=False,
        ring_overlaps=False,
        transfers_under_way=2,
        element_bytes=4,
    )


def modelled_seconds(
    variant: Variant, machines: Machines, sizes: Sizes, rate_mbit: float, *, in_turn: bool = False
) -> float:
    """Of the attention of a layer and its transfers, forward: what is between the layer's linear parts.

    Args:
        variant: the algorithm.
        machines: where, with the time of their compute.
        sizes: of the attention.
        rate_mbit: of a link.
        in_turn: everything that the planner lists, one after another: nothing is hidden, as on CPU.
    """
    shape = SequenceShape(sizes.num_heads, sizes.head_dim, sizes.seq_len, sizes.batch)
    events = layer_timeline(
        machines.topology,
        shape,
        variant.mesh,
        emulated_hardware(machines, sizes, rate_mbit),
        head_groups=None if variant.is_torus else 1,
    )
    if in_turn:
        return sum(event.stop_s - event.start_s for event in events[1:-1])
    return events[-1].start_s - events[0].stop_s


def transfer_seconds(num_bytes: float, rate_mbit: float) -> float:
    """Bytes of a machine over the rate of its link."""
    return num_bytes * 8 / (rate_mbit * 1e6)


def all_modelled(
    machines: Machines, sizes: Sizes, rate_mbit: float, *, in_turn: bool = False
) -> dict[str, float]:
    """`modelled_seconds` of every variant, by name."""
    return {
        variant.name: modelled_seconds(variant, machines, sizes, rate_mbit, in_turn=in_turn)
        for variant in variants(machines.topology)
    }
