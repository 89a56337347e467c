"""What the CUDA compiler makes of sequence-parallel attention: needs JAX's CUDA wheels and no GPU; `make aot` runs it.

`python -m experiments.aot_sequence` checks every case; here are some, and that the checks notice what they are for. Not
collected by pytest (its name): `python -m pytest tests/aot/check_sequence.py`.
"""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from jax import lax

from experiments import _aot_sequence
from experiments._aot_gpus import load_gpu
from experiments._aot_sequence import (
    FLUX_3072,
    MACHINES,
    RING,
    TOPOLOGY_AWARE,
    TORUS,
    ULYSSES_IN_GROUPS,
    USP,
    WHOLE_TEXT,
    Case,
    compile_case,
)
from experiments._aot_sequence_reading import is_hidden, problems, read_case, runs
from parallel import RING_AXES, ULYSSES_AXES
from solver import H100_MACHINE, SequenceShape, Topology, layer_timeline

TWO, FOUR = MACHINES[1:]


@cache
def read(case, in_flight=1):
    gpu = load_gpu("h100")
    return read_case(compile_case(case, gpu, in_flight=in_flight), gpu)


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("algorithm", [RING, USP, TORUS], ids=lambda a: a.name)
def test_transfers_between_machines_run_under_attention(algorithm, gradient):
    reading = read(Case(algorithm, FOUR, FLUX_3072, gradient))
    usp = read(Case(USP, FOUR, FLUX_3072, gradient))
    assert problems(reading, usp) == []
    assert runs(reading.across, hidden=True) == runs(reading.across) > 0


def test_torus_forward_and_backward_transfers():
    """3 pulls of queries, 3 of keys, a push; 3 pulls of cotangents, 3 pushes of gradients of keys, one of queries."""
    assert runs(read(Case(TORUS, FOUR, FLUX_3072, False)).across) == 7
    assert runs(read(Case(TORUS, FOUR, FLUX_3072, True)).across) == 7 + 7


def test_two_groups_expose_the_first_and_the_last_exchange():
    reading = read(Case(ULYSSES_IN_GROUPS, TWO, FLUX_3072, True))
    assert problems(reading, None) == []
    assert (runs(reading.across), runs(reading.across, hidden=False)) == (8, 4)


def test_a_ring_of_two_hides_its_step():
    reading = read(Case(USP, TWO, FLUX_3072, False))
    assert reading.case.degrees.ring_across == 2
    assert (runs(reading.across), runs(reading.across, hidden=True)) == (1, 1)


def test_a_whole_text_leaves_transfers_their_attention():
    for algorithm in (USP, TORUS):
        assert problems(read(Case(algorithm, FOUR, WHOLE_TEXT, True)), None) == []


def test_two_transfers_under_way_cover_more_of_torus():
    case = Case(TORUS, FOUR, FLUX_3072, False)
    assert read(case, 2).covered > read(case).covered
    assert problems(read(case, 2), None) == []


def modelled(case, under_way):
    """Of the planner's transfers, how many cross machines or not and run beside attention or not."""
    work = case.workload
    timeline = layer_timeline(
        Topology(case.machines.count, case.machines.gpus),
        SequenceShape(work.num_heads, work.head_dim, work.length, 1),
        case.degrees,
        replace(H100_MACHINE, transfers_under_way=under_way),
        head_groups=None if case.algorithm == TORUS else case.algorithm.head_groups,
    )
    attention = [
        event for event in timeline if event.name.startswith("attention") and event.lane == "compute"
    ]
    # On both lanes a transfer has one name; steps of a ring, which share one, come in order.
    seen, crosses, hidden = Counter(), {}, {}
    for event in timeline:
        if event.lane == "compute":
            continue
        key = event.name, seen[event.lane, event.name]
        seen[event.lane, event.name] += 1
        beside = any(a.start_s < event.stop_s and event.start_s < a.stop_s for a in attention)
        crosses[key] = crosses.get(key, False) or event.lane == "across"
        hidden[key] = hidden.get(key, False) or beside
    return Counter((crosses[key], hidden[key]) for key in crosses)


@pytest.mark.parametrize("under_way", [1, 2])
@pytest.mark.parametrize(
    ("algorithm", "machines"),
    [
        (TOPOLOGY_AWARE, FOUR),
        (replace(TOPOLOGY_AWARE, head_groups=2), FOUR),
        (replace(TOPOLOGY_AWARE, head_groups=3), FOUR),
        (replace(USP, head_groups=3), FOUR),
        (ULYSSES_IN_GROUPS, TWO),
        (replace(TOPOLOGY_AWARE, head_groups=3), TWO),
        (TORUS, FOUR),
    ],
    ids=str,
)
def test_the_planner_hides_what_the_compiler_does(algorithm, machines, under_way):
    case = Case(algorithm, machines, FLUX_3072, False)
    found = Counter()
    for transfer in read(case, under_way).transfers:
        found[transfer.traffic.across > 0, is_hidden(transfer)] += round(transfer.executions)
    assert modelled(case, under_way) == found


def test_without_barriers_the_check_fails(monkeypatch):
    """The order of Torus' transfers is that of its barriers."""
    monkeypatch.setattr(lax, "optimization_barrier", lambda x: x)
    case = Case(TORUS, FOUR, FLUX_3072, False)
    gpu = load_gpu("h100")
    found = problems(read_case(compile_case(case, gpu), gpu), None)
    assert any("transfers between machines are exposed" in text for text in found)


def test_a_gathered_sequence_is_noticed(monkeypatch):
    def gathered(case, rows, text, ids):
        from parallel import ring_attention

        q, k, v = rows
        k, v = (lax.all_gather(x, (*RING_AXES, *ULYSSES_AXES), axis=1, tiled=True) for x in (k, v))
        return ring_attention(q, k, v, axis_name=RING_AXES, keys_replicated=True), None

    monkeypatch.setattr(_aot_sequence, "_attention", gathered)
    gpu = load_gpu("h100")
    found = problems(read_case(compile_case(Case(RING, FOUR, FLUX_3072, False), gpu), gpu), None)
    assert any("is gathered" in text for text in found)


def test_memory_over_usp_is_noticed():
    import dataclasses

    torus, usp = (read(Case(algorithm, FOUR, FLUX_3072, False)) for algorithm in (TORUS, USP))
    allowed = usp.temp_bytes + 4 * usp.tensor_bytes
    assert torus.temp_bytes <= allowed
    larger = dataclasses.replace(torus, temp_bytes=int(allowed) + 1)
    assert any("temporaries" in text for text in problems(larger, usp))
