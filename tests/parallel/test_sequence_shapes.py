"""Random shapes and layouts of segments through every sequence-parallel attention, values and gradients."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel import ring_attention, torus_attention, ulysses_attention, usp_attention
from tests.parallel.sequence_cases import Case, check, draw, mesh_of

# Each with its axes along the sequence, and shapes of meshes.
RING = partial(ring_attention, axis_name="r"), ("r",), [(n,) for n in range(2, 9)]
ULYSSES = partial(ulysses_attention, axis_name="u"), ("u",), [(n,) for n in range(2, 9)]
USP = (
    partial(usp_attention, ulysses_axis="u", ring_axis="r"),
    ("r", "u"),
    [(2, 2), (3, 2), (2, 3), (2, 4), (4, 2), (1, 3), (3, 1)],
)
TORUS = (
    partial(torus_attention, machine_axis="m", ulysses_axis="u", ring_axis="r"),
    ("m", "r", "u"),
    [(2, 1, 2), (3, 1, 1), (2, 2, 1), (4, 1, 2), (2, 2, 2), (3, 2, 1), (1, 2, 2), (8, 1, 1)],
)
every = pytest.mark.parametrize(
    "algorithm", [RING, ULYSSES, USP, TORUS], ids=["ring", "ulysses", "usp", "torus"]
)


@st.composite
def cases(draw_one):
    """The first choices, which make the simplest example, are no trivial ones."""

    def one_of(*values):
        return draw_one(st.sampled_from(values))

    kv_heads = one_of(2, 1, 3, 5)
    return Case(
        q_loc=one_of(3, 1, 2, 5),
        k_loc=one_of(5, 3, 1, 2),
        heads=kv_heads * one_of(3, 1, 2, 4),
        kv_heads=kv_heads,
        dim=one_of(4, 1, 8),
        batch=one_of(2, 1, 3),
        segments=one_of(3, 0),
        causal=one_of(True, False),
        text=one_of(5, None, 1, 0),
        check_vma=one_of(False, True),
    )


def layout(rng, segments, batch, length):
    """Ids of packed rows: runs with padding at their end, any order, one segment for all, padding alone, huge ids."""
    rows = []
    for _ in range(batch):
        kind = rng.integers(5)
        ids = rng.integers(0, segments + 1, length)
        if kind == 0:
            ids = np.sort(ids)[::-1]
        elif kind == 1:
            ids = np.full(length, rng.integers(1, segments + 1))
        elif kind == 2:
            ids = np.zeros(length)
        elif kind == 3:
            ids = np.where(ids > 0, 2**31 - 1 - ids, -ids)  # told apart in no float
        rows.append(ids)
    return np.array(rows, np.int32)


def check_layouts(algorithm, shape, case, seed):
    """Several layouts through one program. Ids of queries and keys may have nothing in common."""
    attention, axes, _ = algorithm
    mesh = mesh_of(**dict(zip(axes, shape, strict=True)))
    for turn in range(3 if case.segments else 1):
        rng = np.random.default_rng((seed, turn))
        arrays = draw(replace(case, seed=seed + turn), mesh.size)
        if case.segments:
            of_queries, of_keys = (layout(rng, case.segments, case.batch, x.shape[1]) for x in arrays.qkv[:2])
            if turn and of_queries.shape == of_keys.shape:
                of_keys = of_queries
            text_ids = None if case.text is None else layout(rng, case.segments, case.batch, case.text)
            arrays = replace(arrays, ids=(of_queries, of_keys), text_ids=text_ids)
        check(attention, mesh, axes, case, arrays=arrays, vanishing=True)


@every
@settings(max_examples=2, deadline=None, derandomize=True)
@given(data=st.data())
def test_some_shapes(algorithm, data):
    shape = data.draw(st.sampled_from(algorithm[2][:3]))
    check_layouts(algorithm, shape, data.draw(cases()), data.draw(st.integers(0, 2**16)))


@pytest.mark.full
@every
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_shape(algorithm, data):
    shape = data.draw(st.sampled_from(algorithm[2]))
    check_layouts(algorithm, shape, data.draw(cases()), data.draw(st.integers(0, 2**16)))
