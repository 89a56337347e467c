"""What `balance` refuses, and how it says so: the rule, the value, and what to do."""

import numpy as np
import pytest

from solver import BagSpec, CostModel, Links, Topology, balance

GOOD = {"lengths": [3, 4], "home": [0, 7], "num_devices": 8, "bags": "g2n4", "text_lengths": [3, 0]}
NAN = float("nan")


def test_good_input_is_not_refused():
    balance(**GOOD)
    numbers = {"lengths": np.array([3, 4], np.uint64), "num_devices": np.int32(8), "num_heads": np.int8(2)}
    plan = balance(**GOOD | numbers | {"home": range(2), "topology": Topology(np.int32(2), np.int64(4))})
    assert {type(n) for n in (plan.num_devices, plan.num_heads, plan.topology.devices_per_machine)} == {int}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [3, -1]}, r"lengths in 0\.\.2147483647; got lengths=-1 at sequence 1\. Lengths count"),
        ({"lengths": [3, 2**31]}, r"lengths in 0\.\.2147483647; got lengths=2147483648 at sequence 1"),
        ({"lengths": [2**31 - 1, 4]}, r"below 2\^62.* got .*of 2147483647 tokens at sequence 0\. Check the"),
        ({"lengths": [3]}, r"got shapes lengths=\(1,\), home=\(2,\), text_lengths=\(2,\)\. Entry i"),
        (
            {"home": [0, 8]},
            r"home in 0\.\.7; got home=8 at sequence 1\. Devices are numbered from 0; num_dev",
        ),
        ({"home": [-1, 0]}, r"home in 0\.\.7; got home=-1 at sequence 0"),
        ({"home": [0]}, r"got shapes lengths=\(2,\), home=\(1,\)"),
        ({"text_lengths": [0]}, r"text_lengths=\(1,\)"),
        ({"text_lengths": [0, 5]}, r"text_lengths <= lengths; got text_lengths=5 of lengths=4 at sequence 1"),
        ({"text_lengths": [-1, 4]}, r"got text_lengths=-1 at sequence 0"),
        ({"num_devices": 0}, r"num_devices >= 1; got num_devices=0"),
        ({"num_devices": 10**30}, r"num_devices <= 8192; got num_devices=a number of more than 64 bits"),
        ({"num_heads": 0}, r"num_heads >= 1; got num_heads=0"),
        ({"num_heads": 2**40}, r"num_heads <= 65536; got num_heads=1099511627776"),
        ({"topology": Topology(2, 8)}, r"got 2 machines of 8 and num_devices=8"),
        ({"bags": "g3n1"}, r"multiple of the 3 of g3n1; got num_devices=8"),
        ({"bags": "8 bags"}, r"parse_bags: .*got spec='8 bags'"),
        ({"bags": "AUTO"}, r"got spec='AUTO'.*`balance` also takes 'auto'"),
    ],
)
def test_values_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        balance(**GOOD | change)


@pytest.mark.parametrize("name", ["lengths", "home", "text_lengths"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], "are integers; got dtype=float64. Convert them"),
        ([NAN, 2], "are integers; got dtype=float64"),
        ([True, False], "are integers; got a bool. Convert them"),
        (np.array([True, False]), "are integers; got dtype=bool"),
        ([True, 2], "are integers; got a bool"),
        (np.ma.MaskedArray([1, 2], [True, False]), "has no mask; got a masked array. Give its compressed"),
        ([None, 2], "are integers; got dtype=object"),
        (["1", "2"], "are integers; got dtype=<U1"),
        ([[3, 4]], r"is one-dimensional; got shape \(1, 2\). One entry per sequence"),
        ([[3], [4, 5]], "is one-dimensional; got entries of different shapes. One entry per sequence"),
        (3, "is one-dimensional; got int"),
        ({3, 4}, "is one-dimensional; got set"),
        (iter([3, 4]), "is one-dimensional; got list_iterator"),
        ([2**63, 0], r"in 0\.\.\d+; got \w+=9223372036854775808 at sequence 0"),
        (np.array([2**63, 0], np.uint64), r"in 0\.\.\d+; got \w+=9223372036854775808 at sequence 0"),
        ([0, 10**30], r"in 0\.\.\d+; got \w+=a number of more than 64 bits at sequence 1"),
    ],
)
def test_lists_that_are_no_lists_of_integers(name, values, message):
    with pytest.raises(ValueError, match=f"balance: {name} {message}"):
        balance(**GOOD | {name: values})


@pytest.mark.parametrize("name", ["num_devices", "num_heads"])
@pytest.mark.parametrize("value", [8.0, True, "8", None, NAN, [8]])
def test_counts_are_integers(name, value):
    with pytest.raises(TypeError, match=f"{name} is an integer; got {type(value).__name__}"):
        balance(**GOOD | {name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bags": 8}, "bags is a string, a BagSpec or None; got int. Write 'g8n4' or 'auto'"),
        ({"topology": (2, 4)}, "topology is a Topology; got tuple. Write Topology"),
        ({"cost": "flux"}, "cost is a CostModel; got str. Write CostModel"),
        ({"cost": CostModel}, "cost is a CostModel; got type"),
        ({"links": None}, "links is a Links; got NoneType. Write Links"),
        ({"bags": "auto", "max_rows": "2"}, "max_rows is a number; got str. 1.5 suits"),
        ({"bags": "auto", "max_rows": True}, "max_rows is a number; got bool"),
    ],
)
def test_arguments_of_another_kind(change, message):
    with pytest.raises(TypeError, match=message):
        balance(**GOOD | change)


@pytest.mark.parametrize("max_rows", [0, 0.999, -1, NAN, float("-inf"), -(10**400)])
def test_a_cap_on_rows_is_at_least_the_mean(max_rows):
    with pytest.raises(ValueError, match=r"balance: max_rows >= 1, the mean; got max_rows=.* 1\.5 suits"):
        balance(**GOOD | {"bags": "auto", "max_rows": max_rows})
    for enough in (float("inf"), 10**400):
        balance(**GOOD | {"bags": "auto", "max_rows": enough})


@pytest.mark.parametrize("bags", ["auto", None, "g2n4"])
def test_a_step_of_nothing(bags):
    for lengths in ([], [0], [0, 0]):
        plan = balance(lengths, [7] * len(lengths), num_devices=8, bags=bags)
        assert not plan.tokens.any()
        assert plan.static_step_cost == plan.load_max_over_mean == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology(1.0, 8), "Topology: num_machines is an integer; got float 1.0"),
        (lambda: Topology(1, True), "Topology: devices_per_machine is an integer; got bool"),
        (lambda: CostModel(8.5, 0.4), "CostModel: width is an integer; got float 8.5"),
        (lambda: CostModel("8", 0.4), "CostModel: width is an integer; got str"),
        (lambda: CostModel(8, None), "CostModel: gamma is a number; got NoneType. 0.4 suits"),
        (lambda: CostModel(8, 0.4, "1"), "CostModel: seconds_per_flop is a number; got str"),
        (lambda: Links(flops_per_s="fast"), "Links: flops_per_s is a number; got str"),
        (lambda: Links(element_bytes=True), "Links: element_bytes is a number; got bool"),
        (lambda: Links(padded="no"), "Links: padded is a bool; got str. Exchanges are padded on CPUs"),
        (lambda: BagSpec(8), r"BagSpec: counts are pairs .* got counts=8"),
        (lambda: BagSpec(((1,),)), r"BagSpec: counts are pairs .* got counts=\(\(1,\),\)"),
        (lambda: BagSpec(((1.5, 2),)), "BagSpec: size is an integer; got float 1.5"),
        (lambda: BagSpec(((1, 8),)).layout(8.0), "BagSpec.layout: num_devices is an integer; got float 8.0"),
    ],
)
def test_parts_of_another_kind(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology(2**10, 2**10), "Topology: num_devices <= 8192; got num_devices=1048576"),
        (
            lambda: Links(across_bytes_per_s=NAN),
            r"across_bytes_per_s in 1 \.\. 1e\+24; got across_bytes_per_s=nan",
        ),
        (lambda: Links(flops_per_s=1e-320), r"flops_per_s in 1 \.\. 1e\+24; got flops_per_s=1e-320"),
        (
            lambda: CostModel(8, 0.4, 1e308),
            r"seconds_per_flop in 1e-30 \.\. 1e\+06; got seconds_per_flop=1e\+308",
        ),
        (lambda: BagSpec(()), "BagSpec: at least one bag; got none"),
        (lambda: BagSpec(((2**17, 1),)), "BagSpec: size <= 8192; got size=131072"),
        (lambda: BagSpec(((2, 2**12 + 1),)), "BagSpec: num_devices <= 8192; got num_devices=8194"),
    ],
)
def test_parts_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()
