"""Cases, formulas and table of sequence-parallel attention compiled for GPUs; what is compiled, `make aot` checks."""

import dataclasses

import pytest

from experiments import _aot_sequence as sequence
from experiments._aot_sequence import MACHINES, Case, cases
from experiments._aot_sequence_reading import Reading, problems, usp_of
from experiments._aot_sequence_text import section
from experiments.hlo import Collective, Traffic, Work

ONE, TWO, FOUR = MACHINES
MESSAGES = ("transfers between machines are exposed", "every step of a ring", "bytes inside", "is gathered")


def reading(case, *transfers, aside=(), temp=0):
    return Reading(case, 1, temp, transfers, tuple(aside), 1.0)


def collective(kind, traffic, num_bytes=0, *, hidden=True):
    under = Work({"bf16": 1.0} if hidden else {}, 0.0, {})
    return Collective(
        kind, kind, "", "", "", 1.0, False, num_bytes, 1, 2, traffic, traffic, False, under, 1, True
    )


def test_every_shape_and_number_of_machines_in_both_directions():
    every = cases()
    assert {case.machines for case in every} == set(MACHINES)
    assert len(every) == 2 * len({dataclasses.replace(case, gradient=False) for case in every})
    assert not Case(sequence.ULYSSES, FOUR, sequence.FLUX_3072, False).is_possible
    with pytest.raises(LookupError, match=r"no Ulysses of Flux 3072\^2 on 4x8"):
        _ = Case(sequence.ULYSSES, FOUR, sequence.FLUX_3072, False).degrees


def test_lengths_that_devices_do_not_share_evenly_have_ids():
    assert not Case(sequence.RING, ONE, sequence.VIDEO, False).has_ids
    video = Case(sequence.RING, TWO, sequence.VIDEO, False)
    assert (video.padded_length, video.has_ids) == (167_008, True)
    even = Case(sequence.RING, FOUR, sequence.VIDEO_EVEN, False)
    assert (even.padded_length, even.has_ids) == (167_008, False)


def test_bytes_by_hand():
    """Flux 3072^2: 37,376 tokens, 24 heads of 128."""
    rows = 37_376 / 8 * 24 * 128
    ring = Case(sequence.RING, ONE, sequence.FLUX_3072, False)
    assert ring.rows.traffic == Traffic(7 * 2 * rows * 2, 0)
    both = dataclasses.replace(ring, gradient=True)
    assert both.rows.traffic.inside == (7 + 8) * 2 * rows * 2 + 7 * 2 * rows * 4
    ulysses = Case(sequence.ULYSSES, ONE, sequence.FLUX_3072, False)
    assert ulysses.rows.traffic == Traffic(7 / 8 * 4 * rows * 2, 0)
    torus = Case(sequence.TORUS, FOUR, sequence.FLUX_3072, False)
    assert torus.rows.traffic.across == 4 * 3 / 4 * torus.rows.tensor_bytes


def test_heads_that_do_not_divide_count_as_they_move():
    torus = Case(sequence.TORUS, FOUR, sequence.HEADS_30, False)
    heads = torus.rows.tensor_bytes / (torus.padded_length / 32 * 64 * 2)
    assert heads == 32
    assert heads % torus.degrees.ulysses_degree == 0


@pytest.mark.parametrize(
    ("kind", "traffic", "hidden", "message"),
    [
        ("collective-permute", Traffic(0, 8), False, MESSAGES[0]),
        ("collective-permute", Traffic(8, 0), False, MESSAGES[1]),
        ("collective-permute", Traffic(8, 0), True, MESSAGES[2]),
        ("all-gather", Traffic(8, 0), True, MESSAGES[3]),
    ],
)
def test_what_is_not_as_it_should_be_is_named(kind, traffic, hidden, message):
    case = Case(sequence.RING, TWO, sequence.FLUX_3072, False)
    one = collective(kind, traffic, 1 << 20, hidden=hidden)
    found = problems(reading(case, aside=[one]) if kind == "all-gather" else reading(case, one), None)
    assert any(message in text for text in found)
    assert all(text.startswith("Ring, 2x8, Flux 3072^2, forward: ") for text in found)


def test_what_is_as_it_should_be_is_not_named():
    case = Case(sequence.RING, TWO, sequence.FLUX_3072, False)
    good = collective("collective-permute", case.rows.traffic)
    assert problems(reading(case, good), None) == []


def test_table():
    torus, usp = (Case(a, FOUR, sequence.FLUX_3072, False) for a in (sequence.TORUS, sequence.USP))
    exposed = collective("all-to-all", Traffic(8e6, 0), hidden=False)
    readings = [reading(usp, exposed, temp=60 << 20), reading(torus, temp=64 << 20)]
    assert usp_of(readings, readings[1]) is readings[0]
    text = section(readings, {torus: readings[1]}, "H100")
    assert "| USP | 1 x 8, 4 x 1 | forward | 0 | - | - | 0 | 1 exchange | 60 | 0.0, 8.0 |" in text
    assert "| Flux 3072^2, 4x8 | forward | +4.0 | 27.4 |" in text
