"""One layer's time under a placement of Ulysses and ring degrees: linear layers, transfers, attention.

A layer is what a device of the fullest kind does: linear layers to q, k and v (a quarter of the layer's FLOP, 6 of 24
l d^2), attention, the other linear layers. Every algorithm is a list of events on the lanes of
`solver.TimelineEvent`; the layer's latency is their end.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

from solver._check import INT32_MAX, MOST_DEVICES, MOST_HEADS, integer
from solver._sequence_hardware import Link, SequenceHardware
from solver._sequence_timeline import Lane, TimelineBuilder, Transfer, TransferPart
from solver._topology import Topology

QKV_FLOPS, OTHER_FLOPS = 6, 18  # of l d^2
_MOST_BATCH = 2 * MOST_HEADS  # both branches of guidance


@dataclass(frozen=True, slots=True)
class SequenceMesh:
    """Degrees of sequence parallelism, each across machines or inside them.

    Attributes:
        ulysses_across, ulysses_inside: heads are dealt out over so many machines, and devices in each.
        ring_across, ring_inside: keys and values go round over so many machines, and devices in each.

    Raises:
        TypeError: for a degree that is no integer.
        ValueError: for one under 1, or above 8,192.
    """

    ulysses_across: int
    ulysses_inside: int
    ring_across: int
    ring_inside: int

    def __post_init__(self) -> None:
        advice = "1 is none; degrees across multiply to the machines, those inside to the devices of each."
        _check_integers(self, dict.fromkeys((f.name for f in fields(self)), MOST_DEVICES), advice)

    @property
    def ulysses_degree(self) -> int:
        """Devices over which heads are dealt out."""
        return self.ulysses_across * self.ulysses_inside

    @property
    def ring_degree(self) -> int:
        """Devices of a ring."""
        return self.ring_across * self.ring_inside

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.ulysses_degree * self.ring_degree


@dataclass(frozen=True, slots=True)
class SequenceShape:
    """Sequences of a layer.

    Attributes:
        num_heads, head_dim: of attention; the width is their product.
        length: tokens of a sequence, text included.
        batch: sequences.

    Raises:
        TypeError: for what is no integer.
        ValueError: for what is under 1, or larger than any.
    """

    num_heads: int
    head_dim: int
    length: int
    batch: int

    def __post_init__(self) -> None:
        most = {"num_heads": MOST_HEADS, "head_dim": MOST_HEADS, "length": INT32_MAX, "batch": _MOST_BATCH}
        _check_integers(self, most, "FLUX.1 at 1024 x 1024 is SequenceShape(24, 128, 4608, 1).")


def _check_integers(owner: SequenceMesh | SequenceShape, most: dict[str, int], advice: str) -> None:
    """Makes Python's integers of the fields, or raises."""
    for name, limit in most.items():
        value = integer(type(owner).__name__, name, getattr(owner, name), most=limit, advice=advice)
        object.__setattr__(owner, name, value)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a device's attention.

    Attributes:
        name: for the timeline.
        queries, keys: rows of each head and sequence.
        heads: of each sequence.
        merges: whether there is a partial output of these queries already.
        same_keys: whether the ring has passed these keys on for another piece.
    """

    name: str
    queries: int
    keys: int
    heads: int
    merges: bool = False
    same_keys: bool = False


@dataclass(slots=True)
class Layer:
    """A layer while its timeline is made; sizes are of one device.

    Attributes:
        topology, shape, mesh, hardware: of the layer.
        one_sided: whether transfers are puts and gets.
        timeline: events so far.
    """

    topology: Topology
    shape: SequenceShape
    mesh: SequenceMesh
    hardware: SequenceHardware
    one_sided: bool
    timeline: TimelineBuilder

    @property
    def tokens(self) -> int:
        """Of each sequence on a device; the fullest has what does not divide."""
        return math.ceil(self.shape.length / self.mesh.num_devices)

    @property
    def heads(self) -> int:
        """Of each sequence on a device, during attention."""
        return math.ceil(self.shape.num_heads / self.mesh.ulysses_degree)

    @property
    def rows(self) -> int:
        """Tokens of each sequence on a device, during attention."""
        return self.tokens * self.mesh.ulysses_degree

    def bytes_of(self, rows: float, heads: float) -> float:
        """Bytes of a tensor of (token, head) rows, for each sequence of the batch."""
        return self.shape.batch * rows * heads * self.shape.head_dim * self.hardware.element_bytes

    def linear(self, name: str, flops: int, after: Iterable[int] = ()) -> int:
        """Linear layers of so many times l d^2 FLOP."""
        width = self.shape.num_heads * self.shape.head_dim
        flops_loc = float(flops) * self.shape.batch * self.tokens * width**2
        return self.timeline.add("compute", name, self.hardware.linear_seconds(flops_loc), after)

    def _attend(self, piece: Piece, after: Iterable[int], shared_s: float) -> tuple[int, float]:
        """Attention of a piece, slower by up to `shared_s`, which transfers take from it; its number, and how much."""
        hardware, heads = self.hardware, self.shape.batch * piece.heads
        head_dim = self.shape.head_dim
        seconds = hardware.attention_seconds(piece.queries, piece.keys, heads, head_dim)
        if piece.merges:
            seconds += hardware.merge_seconds(piece.queries * heads * head_dim)
        slower_s = min(shared_s, seconds / (1 - self._taken) - seconds)
        return self.timeline.add("compute", piece.name, seconds + slower_s, after), slower_s

    @property
    def _taken(self) -> float:
        """Share of the processors that a transfer takes."""
        return 0.0 if self.one_sided else self.hardware.taken

    def _taken_s(self, transfer: Transfer) -> float:
        """Seconds of all processors that a transfer takes from attention, if it is under way beside some."""
        return self._taken * self.timeline.transfer_s(transfer) * (transfer in self.timeline.under_way)

    def transfer(
        self, lane: Lane, name: str, sent_bytes: float, peers: int, after: Iterable[int]
    ) -> Transfer:
        """A transfer on one lane to so many peers; none where nothing is sent."""
        return self.timeline.transfer(name, self._part(lane, sent_bytes, peers), after)

    def _part(self, lane: Lane, sent_bytes: float, peers: int, senders: int = 0) -> list[TransferPart]:
        """What a transfer does on a lane, if anything. `senders` of a machine's devices take part; 0 for all."""
        if not peers or not sent_bytes:
            return []
        link = self.hardware.inside if lane == "inside" else self.hardware.across
        sharing = min(link.shared_by, senders or self.topology.devices_per_machine)
        waiting = link.one_sided_s if self.one_sided else link.two_sided_s
        rate = link.bytes_per_s * self._share(link, peers)
        seconds = waiting + peers * link.message_s + sharing * sent_bytes / rate
        return [TransferPart(lane, seconds, sent_bytes)]

    def _share(self, link: Link, peers: int) -> float:
        if self.one_sided:
            return link.one_sided
        return link.one_peer if peers == 1 else link.all_to_all

    def barrier(self, name: str, after: Iterable[int]) -> list[int]:
        """All devices meet, which puts and gets need at both ends of a layer; two-sided calls meet by themselves."""
        if not self.one_sided or self.mesh.num_devices == 1:
            return []
        alone = self.topology.num_machines == 1
        lane: Lane = "inside" if alone else "across"
        link = self.hardware.inside if alone else self.hardware.across
        return [self.timeline.add(lane, f"barrier: {name}", link.one_sided_s, after)]

    def exchange(self, name: str, tensor_bytes: float, after: Iterable[int]) -> Transfer:
        """All-to-all over the whole Ulysses degree of so many bytes a device, its share to itself included."""
        mesh = self.mesh
        inside = tensor_bytes * (mesh.ulysses_inside - 1) / mesh.ulysses_degree
        across = tensor_bytes * (mesh.ulysses_across - 1) / mesh.ulysses_across
        peers = (mesh.ulysses_across - 1) * mesh.ulysses_inside
        parts = [
            *self._part("across", across, peers),
            *self._part("inside", inside, mesh.ulysses_inside - 1),
        ]
        return self.timeline.transfer(name, parts, after)

    def scatter(self, name: str, tensor_bytes: float, after: Iterable[int]) -> Transfer:
        """All-to-all over the inner part of the Ulysses degree."""
        inside = self.mesh.ulysses_inside
        return self.transfer("inside", name, tensor_bytes * (inside - 1) / inside, inside - 1, after)

    def ring(
        self, piece: Piece, after: Iterable[int], others: Sequence[Callable[[], Transfer]] = ()
    ) -> tuple[int, list[Transfer]]:
        """Attention of a piece's queries to the keys of the whole ring, each of whose members holds `piece.keys`.

        A step's transfer goes into the buffer that the step before last has read, and both sides start it together: it
        waits for that attention and for the transfer before.

        Args:
            piece: the attention.
            after: what its first step waits for.
            others: start transfers that are to run beside the attention.

        Returns:
            The last step, and the other transfers.
        """
        degree = self.mesh.ring_degree
        overlaps = self.hardware.ring_overlaps or self.one_sided
        most = self.timeline.most_under_way
        # Steps of three members and more are a loop, but for the last: beside their own transfer there is room for
        # one less than may be under way, and other transfers start with the last step. As XLA schedules it
        # (`tests/aot/check_sequence.py` compares).
        early = len(others) if most is None or degree <= 2 else most - 1
        held, last, moved, others_s = list(after), -1, [], 0.0
        for step in range(degree):
            passes = step < degree - 1
            waits = held if last < 0 else [*held, last]
            sent = self._pass_on(piece, waits) if passes and overlaps else ()
            now = [*(() if step else others[:early]), *(() if passes else others[early:])]
            new = [start() for start in now]
            moved += new
            own_s, others_s = self._taken_s(sent), others_s + sum(map(self._taken_s, new))
            name = f"{piece.name}, step {step + 1}" if degree > 1 else piece.name
            part = replace(piece, name=name, merges=piece.merges or step > 0)
            last, slower_s = self._attend(part, held, own_s + others_s)
            others_s -= max(slower_s - own_s, 0.0)
            held = list(self._pass_on(piece, [last]) if passes and not overlaps else sent)
        return last, moved

    def _pass_on(self, piece: Piece, after: Iterable[int]) -> Transfer:
        """A ring step's transfer of keys and values.

        A ring runs through a machine's devices before it goes on: those of one Ulysses group cross together, one in
        `ring_inside`, and a step lasts as long as for them.
        """
        mesh = self.mesh
        sent_bytes = 2 * self.bytes_of(piece.keys, piece.heads)
        crossing = 1 / mesh.ring_inside if mesh.ring_across > 1 else 0.0
        # In the one step of a ring of two, which is no loop, the compiler sends the same keys once; timed as if twice.
        sent = 0.0 if piece.same_keys and mesh.ring_degree == 2 and not self.one_sided else 1.0
        across = self._part("across", sent_bytes, mesh.ring_across > 1, senders=mesh.ulysses_inside)
        inside = self._part("inside", sent_bytes, mesh.ring_inside > 1)
        parts = [
            *(replace(part, sent_bytes=sent * crossing * part.sent_bytes) for part in across),
            *(replace(part, sent_bytes=sent * (1 - crossing) * part.sent_bytes) for part in inside),
        ]
        return self.timeline.transfer(f"{piece.name}: keys and values go round", parts, after)
