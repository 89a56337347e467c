"""Cost model and topology."""

import numpy as np
import pytest

from solver import CostModel, Topology


def test_cost_is_linear_layers_plus_attention():
    cost = CostModel(width=8, gamma=0.5)
    assert cost.linear(3) == 24 * 3 * 64
    assert cost.attention(3) == 0.5 * 4 * 9 * 8
    assert cost.total(3) == cost.linear(3) + cost.attention(3)


def test_cost_takes_arrays_of_any_length():
    cost = CostModel(width=3072, gamma=0.4, seconds_per_flop=1e-14)
    lengths = np.array([0, 1, 448, 2**31 - 1])
    expected = [cost.total(int(length)) for length in lengths]
    np.testing.assert_allclose(cost.total(lengths), expected, rtol=1e-15)
    assert cost.total(lengths)[0] == 0


def test_seconds_per_flop_scales_everything():
    slow, fast = CostModel(64, 0.4, 2.0), CostModel(64, 0.4)
    assert slow.total(100) == 2 * fast.total(100)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("width", 1, 0),
        ("gamma", 0.0, -0.1),
        ("gamma", 1.0, float("nan")),
        ("gamma", 1.0, float("inf")),
        ("seconds_per_flop", 1e-30, 0.0),
        ("seconds_per_flop", 1.0, float("nan")),
    ],
)
def test_cost_model_refuses_values_out_of_range(field, good, bad):
    valid = {"width": 8, "gamma": 0.4, "seconds_per_flop": 1.0}
    CostModel(**valid | {field: good})
    with pytest.raises(ValueError, match=rf"CostModel: {field} .*got {field}="):
        CostModel(**valid | {field: bad})


def test_topology_numbers_devices_machine_by_machine():
    topology = Topology(2, 3)
    assert topology.num_devices == 6
    assert topology.machine_of(np.arange(6)).tolist() == [0, 0, 0, 1, 1, 1]
    assert topology.machine_of(5) == 1


@pytest.mark.parametrize(("machines", "devices"), [(0, 8), (8, 0), (-1, 1)])
def test_topology_needs_a_device(machines, devices):
    with pytest.raises(ValueError, match=r"Topology: (\w+) >= 1; got \1="):
        Topology(machines, devices)
