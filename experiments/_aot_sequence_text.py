"""The table of sequence-parallel attention compiled for GPUs, as a section of docs/benchmarks.md."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from datetime import date

from experiments._aot_sequence import TORUS, Case
from experiments._aot_sequence_reading import Reading, is_hidden, runs, usp_of
from experiments._bench_report import markdown_table, paragraph
from experiments.hlo import Collective

SECTION = "sequence-aot"
_HEADER = (
    "algorithm",
    "Ulysses, ring",
    "",
    "between machines: hidden",
    "exposed",
    "covered",
    "inside: hidden",
    "exposed",
    "temp, MiB",
    "MB sent across, inside",
    "formula",
)


def section(readings: Sequence[Reading], two_in_flight: Mapping[Case, Reading], gpu: str) -> str:
    """Heading, what the table says, the table by workload and machines, and how it was made."""
    parts = ["## Sequence parallelism, compiled for H100", _lead(readings)]
    groups: dict[tuple[str, str], list[Reading]] = {}
    for reading in readings:
        key = reading.case.workload.name, str(reading.case.machines)
        groups.setdefault(key, []).append(reading)
    for (workload, machines), members in groups.items():
        rows = [_row(reading, two_in_flight.get(reading.case)) for reading in members]
        parts.append(
            f"{workload}, {machines} ({_shape(members[0].case)}):\n\n{markdown_table(_HEADER, rows)}"
        )
    parts += [_notes(), _memory(readings)]
    versions = f"JAX {importlib.metadata.version('jax')}, {gpu}"
    command = "`make aot` (`python -m experiments.aot_sequence --out docs/benchmarks.md` in its environment)"
    parts.append(f"{command}, {date.today().isoformat()}: {versions}, no GPU.")
    return "\n\n".join(parts)


def _lead(readings: Sequence[Reading]) -> str:
    torus = [r for r in readings if r.case.algorithm == TORUS]
    hidden, exposed = (sum(runs(r.across, hidden=x) for r in torus) for x in (True, False))
    but = f"All but {exposed} of {hidden + exposed}" if exposed else f"All {hidden}"
    return paragraph(
        f"""What XLA schedules between the start and the end of every transfer, read from {len(readings)} programs.
        {but} transfers between machines of Torus attention have attention under them, and all ring steps of ring
        attention and USP; of Ulysses in two groups all but the first and the last of a pass. Nothing gathers the
        sequence: what is gathered is segment ids (int32) and the output of a text that is whole on every device. A
        device sends what the formulas say, to the byte. None of this has run: it is what the compiler schedules."""
    )


def _shape(case: Case) -> str:
    work = case.workload
    padded = f", filled up to {case.padded_length:,} with segment ids" if case.has_ids else ""
    kernel = "Triton" if case.has_ids else "cuDNN"
    text = f"; {work.text} of text on every device" if work.text else ""
    heads = f"{work.num_heads} heads of {work.head_dim}"
    return f"{work.length:,} tokens{padded}{text}, {heads}; kernels of {kernel}"


def _row(reading: Reading, two: Reading | None) -> list[str]:
    d, sent, wanted = reading.case.degrees, reading.sent, reading.wanted
    covered = f"{reading.covered:.0%}" if reading.across else "-"
    if two is not None:
        covered += f" ({two.covered:.0%})"
    return [
        reading.case.algorithm.title,
        f"{d.ulysses_across} x {d.ulysses_inside}, {d.ring_across} x {d.ring_inside}",
        "with gradient" if reading.case.gradient else "forward",
        str(runs(reading.across, hidden=True)),
        _exposed(reading.across, permute="pull" if reading.case.algorithm == TORUS else "ring step"),
        covered,
        str(runs(reading.inside, hidden=True)),
        _exposed(reading.inside),
        f"{reading.temp_bytes / 2**20:.0f}",
        f"{sent.across / 1e6:.1f}, {sent.inside / 1e6:.1f}",
        f"{wanted.across / 1e6:.1f}, {wanted.inside / 1e6:.1f}",
    ]


def _exposed(transfers: Sequence[Collective], *, permute: str = "ring step") -> str:
    """How many of which kind have no attention under them; `permute` is what a permute is."""
    bare = [c for c in transfers if not is_hidden(c)]
    exchanges = runs(c for c in bare if c.kind == "all-to-all")
    steps = runs(c for c in bare if c.kind == "collective-permute")
    counts = ((exchanges, "exchange"), (steps, permute))
    texts = [f"{count} {what}{'s' if count > 1 else ''}" for count, what in counts if count]
    return " and ".join(texts) or "-"


def _notes() -> str:
    notes = (
        """*Ulysses, ring*: degrees across x inside machines, those of the planner's fastest candidate of the name
        (`solver.plan_sequence_parallel`, H100). Ulysses alone has none on more devices than heads (24 heads, 32
        devices); 24 heads on 16 devices move and are computed as 32, 30 on 4 x 8 as 32, and the formulas count so.""",
        """*Hidden*, *exposed*: runs of transfers with and without attention between start and end. Between machines
        Ulysses leaves its first and its last exchange exposed, forward and again for the gradient: attention waits for
        one, the other for attention. Rings leave none, and Torus none but a pull of cotangents in one program, beside
        whose attention the compiler has a step of the ring inside machines go round.""",
        """*Inside*: Ulysses inside a machine goes before the first pull and after the last push, exposed. With XLA's
        default of one transfer under way at a time, a step of Torus' inner ring gives way to the transfer between
        machines where both want the same attention.""",
        """*Covered*, modelled and not measured: of the time of transfers between machines (400 Gbit/s a GPU) the part
        for which there is attention beside them, at the speed that the planner takes. In brackets with two transfers
        under way (`compiler_options={"xla_gpu_experimental_parallel_collective_overlap_limit": 2}` of `jax.jit`): a
        pull of Torus then spans a whole turn of its inner ring, and not one step of it. The planner counts on the same
        (`transfers_under_way`). A ring over all devices is short of attention, as the planner says too.""",
        """*MB sent*: by a device, mean over devices, of rows (10^6 bytes); segment ids that go round with their keys
        count. *Formula*: those of the docstrings. Torus' inner rings of the same keys share their first step, where the
        compiler sees it: all of a ring of two, and the first of each ring of the gradient.""",
    )
    return "\n".join(paragraph(note, bullet=True) for note in notes)


def _memory(readings: Sequence[Reading]) -> str:
    rows = []
    for reading in readings:
        usp = usp_of(readings, reading)
        if usp is None:
            continue
        more = reading.temp_bytes - usp.temp_bytes
        rows.append(
            [
                f"{reading.case.workload.name}, {reading.case.machines}",
                "with gradient" if reading.case.gradient else "forward",
                f"{more / 2**20:+.1f}",
                f"{4 * reading.tensor_bytes / 2**20:.1f}",
            ]
        )
    return markdown_table(
        ("Torus' temporaries beside USP's", "", "MiB more", "allowed: q, k, v, o, MiB"), rows
    )
