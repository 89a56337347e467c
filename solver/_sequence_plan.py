"""Which sequence-parallel algorithm, with which degrees across and inside machines, makes a layer soonest done."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from solver._check import MOST_HEADS, instance, integer
from solver._sequence_algorithms import layer_timeline
from solver._sequence_hardware import A100_MACHINE, SequenceHardware
from solver._sequence_layer import SequenceMesh, SequenceShape
from solver._sequence_timeline import TimelineEvent
from solver._topology import Topology

CfgPlacement = Literal["none", "batched", "machines", "devices"]
_MOST_DEVICES = 1024
_MOST_TOKENS = 1 << 30
_MOST_HEAD_GROUPS = 8
_CALLER = "plan_sequence_parallel"


@dataclass(frozen=True, slots=True)
class SequenceParallelPlan:
    """How a layer is spread over devices, and its modelled time.

    With `parallel` a plan becomes a mesh, an attention to call on it, and a program:

        mesh = parallel.sequence_mesh(**plan.mesh_options)
        attention = parallel.sequence_attention(**plan.attention_options)
        step = jax.jit(step, compiler_options=plan.compiler_options)

    Attributes:
        algorithm: "none" (one device), "ulysses", "ring", "usp" (Ulysses inside machines, ring across),
            "topology_aware" (Ulysses across machines first, ring inside) or "torus".
        mesh: degrees of Ulysses and ring across and inside machines; of one of two groups if `cfg` is "machines" or
            "devices".
        head_groups: exchanges that Ulysses is cut into, so that one runs under the attention of another; 1 is uncut.
        one_sided: whether transfers are puts and gets instead of NCCL's calls.
        transfers_under_way: how many of NCCL's calls the program has under way at a time, as `compiler_options` say;
            1 with puts and gets, which nothing limits.
        cfg: the two branches of classifier-free guidance: "none" (there is one), "batched" (twice the batch on all
            devices), on halves of the "machines", or on halves of each machine's "devices".
        layer_s: modelled seconds of a layer, both branches.
        usp_layer_s: the same of USP's best mesh, two-sided.
        timeline: events of a device, from which `layer_s` is computed.
    """

    algorithm: str
    mesh: SequenceMesh
    head_groups: int
    one_sided: bool
    transfers_under_way: int
    cfg: CfgPlacement
    layer_s: float
    usp_layer_s: float
    timeline: tuple[TimelineEvent, ...]

    @property
    def speedup(self) -> float:
        """Over USP's best mesh; 1 at least."""
        return self.usp_layer_s / self.layer_s

    @property
    def mesh_options(self) -> dict[str, Any]:
        """Keyword arguments of `parallel.sequence_mesh`, for all devices planned for.

        Branches of guidance that are apart are on its data axis.
        """
        mesh = self.mesh
        branches = 2 if self.cfg == "devices" else 1
        return {
            "ulysses_degree": mesh.ulysses_degree,
            "ring_degree": mesh.ring_degree,
            "placement": (mesh.ulysses_across, mesh.ring_across),
            "devices_per_machine": branches * mesh.ulysses_inside * mesh.ring_inside,
        }

    @property
    def attention_options(self) -> dict[str, Any]:
        """Keyword arguments of `parallel.sequence_attention`, which has no puts and gets."""
        return {"torus": self.algorithm == "torus", "head_groups": self.head_groups}

    @property
    def compiler_options(self) -> dict[str, Any]:
        """For `jax.jit(..., compiler_options=...)`: what the modelled time takes for granted beyond XLA's defaults."""
        if self.transfers_under_way == 1:
            return {}
        return {"xla_gpu_experimental_parallel_collective_overlap_limit": self.transfers_under_way}

    @property
    def across_bytes(self) -> float:
        """Bytes that a device sends to other machines in a layer, mean over devices."""
        return sum(event.sent_bytes for event in self.timeline if event.lane == "across")

    @property
    def inside_bytes(self) -> float:
        """Bytes that a device sends inside its machine in a layer, mean over devices."""
        return sum(event.sent_bytes for event in self.timeline if event.lane == "inside")


@dataclass(frozen=True, slots=True)
class _Group:
    """Devices that share a sequence: all, or those of one branch of guidance."""

    topology: Topology
    shape: SequenceShape
    hardware: SequenceHardware
    cfg: CfgPlacement

    def plan(
        self,
        mesh: SequenceMesh,
        *,
        head_groups: int | None = 1,
        one_sided: bool = False,
        under_way: int = 1,
    ) -> SequenceParallelPlan:
        """The plan of a candidate; `head_groups` None is Torus attention."""
        hardware = replace(self.hardware, transfers_under_way=under_way)
        timeline = layer_timeline(
            self.topology, self.shape, mesh, hardware, head_groups=head_groups, one_sided=one_sided
        )
        return SequenceParallelPlan(
            algorithm=_name(mesh) if head_groups is not None else "torus",
            mesh=mesh,
            head_groups=head_groups or 1,
            one_sided=one_sided,
            transfers_under_way=under_way,
            cfg=self.cfg,
            layer_s=max(event.stop_s for event in timeline),
            usp_layer_s=math.nan,
            timeline=timeline,
        )


def plan_sequence_parallel(
    topology: Topology,
    num_heads: int,
    head_dim: int,
    lengths: int | tuple[int, int],
    batch: int = 1,
    cfg: bool = False,
    *,
    hardware: SequenceHardware = A100_MACHINE,
) -> SequenceParallelPlan:
    """The candidate whose layer ends soonest: Ulysses, ring, USP, topology-aware placement, Torus.

    Candidates are all Ulysses and ring degrees across and inside machines; Ulysses uncut or in up to 8 groups of heads;
    Torus wherever Ulysses spans all machines; with guidance, both branches on all devices or on halves of them; each
    two-sided, with one to the hardware's `transfers_under_way` at a time, and where the hardware has it one-sided.
    USP's meshes are candidates, so that the plan is never slower than the best of them; where several end together, the
    plan is one of USP's, or else uncut and two-sided, with as few transfers under way as do.

    The layer is bidirectional self-attention over text and image together, with as many heads of keys as of queries,
    and 24 l d^2 FLOP of linear layers, d = num_heads * head_dim; the fullest device is timed. Grouped heads send fewer
    keys than that, and attention on them refuses a plan's `head_groups` if a device has fewer key heads. Not modelled:
    memory, devices that differ, what a step has besides its layers (with guidance on halves, joining the branches).

    Args:
        topology: machines and devices in each; at most 1,024 devices.
        num_heads: attention heads; a degree that does not divide them leaves some devices a head less.
        head_dim: of a head.
        lengths: tokens of a sequence, or (image tokens, text tokens), which are sharded alike.
        batch: sequences, of one branch.
        cfg: whether there are two branches of classifier-free guidance.
        hardware: of a device and its links.

    Returns:
        The plan, with the timeline of a layer.

    Raises:
        TypeError: for an argument of another kind.
        ValueError: for one out of range.

    Example:
        >>> plan = plan_sequence_parallel(Topology(4, 8), 24, 128, (65_536, 512))
        >>> plan.algorithm, plan.mesh.ulysses_across, plan.head_groups
        ('topology_aware', 4, 2)
        >>> two = replace(A100_MACHINE, transfers_under_way=2)
        >>> plan = plan_sequence_parallel(Topology(4, 8), 24, 128, (65_536, 512), hardware=two)
        >>> plan.algorithm, plan.compiler_options
        ('torus', {'xla_gpu_experimental_parallel_collective_overlap_limit': 2})

    Reference: SwiftFusion, arXiv 2601.20273, whose placement is a fixed rule.
    """
    return sequence_plans(topology, num_heads, head_dim, lengths, batch, cfg, hardware=hardware)[0]


def sequence_plans(
    topology: Topology,
    num_heads: int,
    head_dim: int,
    lengths: int | tuple[int, int],
    batch: int = 1,
    cfg: bool = False,
    *,
    hardware: SequenceHardware = A100_MACHINE,
) -> list[SequenceParallelPlan]:
    """All candidates of `plan_sequence_parallel`, each once, the fastest first; arguments and errors are the same."""
    instance(_CALLER, "cfg", cfg, bool, advice="True where guidance has two branches.")
    shape = _checked_shape(topology, num_heads, head_dim, lengths, batch)
    instance(_CALLER, "hardware", hardware, SequenceHardware, advice="A100_MACHINE is one.")
    groups = list(_groups(topology, shape, hardware, cfg))
    usp = [group.plan(mesh) for group in groups for mesh in _usp_meshes(group)]
    others = [plan for group in groups for plan in _other_candidates(group)]
    baseline_s = min(plan.layer_s for plan in usp)
    # The sort is stable: of equals the first listed wins.
    ordered = sorted([*usp, *others], key=lambda plan: plan.layer_s)
    return [replace(plan, usp_layer_s=baseline_s) for plan in ordered]


def _checked_shape(
    topology: Topology, num_heads: int, head_dim: int, lengths: int | tuple[int, int], batch: int
) -> SequenceShape:
    instance(_CALLER, "topology", topology, Topology, advice="Give Topology(machines, devices in each).")
    advice = "Give the devices that share one sequence; others work on other sequences."
    integer(_CALLER, "num_devices", topology.num_devices, most=_MOST_DEVICES, advice=advice)
    heads = integer(_CALLER, "num_heads", num_heads, most=MOST_HEADS, advice="FLUX.1 has 24.")
    dim = integer(_CALLER, "head_dim", head_dim, most=MOST_HEADS, advice="FLUX.1 has 128.")
    batch = integer(_CALLER, "batch", batch, most=MOST_HEADS, advice="Give the sequences of one branch.")
    return SequenceShape(heads, dim, _checked_tokens(lengths), batch)


def _checked_tokens(lengths: int | tuple[int, int]) -> int:
    """Tokens of a sequence, image and text together."""
    advice = "Give tokens after patches are made, as an integer or a tuple (image tokens, text tokens)."
    if not isinstance(lengths, tuple):
        return integer(_CALLER, "lengths", lengths, most=_MOST_TOKENS, advice=advice)
    if len(lengths) != 2:
        raise ValueError(
            f"{_CALLER}: lengths is tokens, or (image tokens, text tokens); got {len(lengths)}"
            f" {'entry' if len(lengths) == 1 else 'entries'}. Plan sequences of other lengths one by one;"
            " an integer is all tokens."
        )
    parts = zip(("image tokens", "text tokens"), lengths, (1, 0), strict=True)
    total = sum(
        integer(_CALLER, f"{name} of lengths", part, most=_MOST_TOKENS, least=low, advice=advice)
        for name, part, low in parts
    )
    return integer(_CALLER, "lengths, image and text together,", total, most=_MOST_TOKENS, advice=advice)


def _groups(
    topology: Topology, shape: SequenceShape, hardware: SequenceHardware, cfg: bool
) -> Iterator[_Group]:
    """All devices, and with guidance the halves that take a branch each."""
    if not cfg:
        yield _Group(topology, shape, hardware, "none")
        return
    machines, devices = topology.num_machines, topology.devices_per_machine
    yield _Group(topology, replace(shape, batch=2 * shape.batch), hardware, "batched")
    if machines % 2 == 0:
        yield _Group(Topology(machines // 2, devices), shape, hardware, "machines")
    if devices % 2 == 0:
        across = hardware.across
        if across.shared_by > devices // 2:  # by devices of both branches
            across = replace(across, bytes_per_s=across.bytes_per_s / 2)
        halves = Topology(machines, devices // 2)
        yield _Group(halves, shape, replace(hardware, across=across), "devices")


def _usp_meshes(group: _Group) -> Iterator[SequenceMesh]:
    """USP's: a Ulysses degree that divides the heads, inside machines first, whole machines from there on."""
    for mesh in _meshes(group.topology):
        inside_first = mesh.ulysses_across == 1 or mesh.ring_inside == 1
        if inside_first and group.shape.num_heads % mesh.ulysses_degree == 0:
            yield mesh


def _meshes(topology: Topology) -> Iterator[SequenceMesh]:
    machines, devices = topology.num_machines, topology.devices_per_machine
    for across in _divisors(machines):
        for inside in _divisors(devices):
            yield SequenceMesh(across, inside, machines // across, devices // inside)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _other_candidates(group: _Group) -> Iterator[SequenceParallelPlan]:
    """All there are but USP's."""
    of_usp = set(_usp_meshes(group))
    for one_sided in (False, True) if group.hardware.one_sided else (False,):
        most = 1 if one_sided else group.hardware.transfers_under_way
        for mesh in _meshes(group.topology):
            if mesh.ulysses_degree > group.shape.num_heads:
                continue
            if one_sided or mesh not in of_usp:
                yield group.plan(mesh, one_sided=one_sided)
            # These alone have transfers beside those of the ring.
            for head_groups in _overlapped(group.shape, mesh):
                for under_way in range(1, most + 1):
                    yield group.plan(mesh, head_groups=head_groups, one_sided=one_sided, under_way=under_way)


def _overlapped(shape: SequenceShape, mesh: SequenceMesh) -> Iterator[int | None]:
    """Groups of heads that Ulysses can be cut into; None is Torus attention."""
    if mesh.ulysses_degree > 1:
        heads = math.ceil(shape.num_heads / mesh.ulysses_degree)
        yield from range(2, min(heads, _MOST_HEAD_GROUPS) + 1)
    if mesh.ulysses_across > 1 and mesh.ring_across == 1:
        yield None


def _name(mesh: SequenceMesh) -> str:
    if mesh.num_devices == 1:
        return "none"
    if mesh.ring_degree == 1:
        return "ulysses"
    if mesh.ulysses_degree == 1:
        return "ring"
    return "usp" if mesh.ulysses_across == 1 or mesh.ring_inside == 1 else "topology_aware"
