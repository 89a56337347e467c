"""What `balance` refuses, and how it says so."""

import pytest

from solver import Topology, balance


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [1.0, 2.0]}, r"lengths are integers; got dtype=float64"),
        ({"lengths": [True, False]}, r"lengths are integers; got dtype=bool"),
        ({"lengths": [3, -1]}, r"lengths in 0\.\.2147483647; got lengths=-1 at sequence 1"),
        ({"lengths": [3, 2**31]}, r"lengths in 0\.\.2147483647; got lengths=2147483648 at sequence 1"),
        ({"lengths": [[3, 4]]}, r"lengths is one-dimensional; got shape \(1, 2\)"),
        ({"home": [0.0, 1.0]}, r"home are integers; got dtype=float64"),
        ({"home": [0, 8]}, r"home in 0\.\.7; got home=8 at sequence 1"),
        ({"home": [-1, 0]}, r"home in 0\.\.7; got home=-1 at sequence 0"),
        ({"home": [0]}, r"got shapes lengths=\(2,\), home=\(1,\)"),
        ({"text_lengths": [0]}, r"text_lengths=\(1,\)"),
        ({"text_lengths": [0, 5]}, r"text_lengths <= lengths; got text_lengths=5 of lengths=4 at sequence 1"),
        ({"text_lengths": [-1, 4]}, r"got text_lengths=-1 at sequence 0"),
        ({"text_lengths": [0.5, 1]}, r"text_lengths are integers"),
        ({"num_devices": 0}, r"num_devices >= 1; got num_devices=0"),
        ({"num_heads": 0}, r"num_heads >= 1; got num_heads=0"),
        ({"topology": Topology(2, 8)}, r"got 2 machines of 8 and num_devices=8"),
        ({"bags": "g3n1"}, r"multiple of the 3 of g3n1; got num_devices=8"),
        ({"bags": "8 bags"}, r"parse_bags: .*got spec='8 bags'"),
    ],
)
def test_bad_input_is_refused(change, message):
    good = {"lengths": [3, 4], "home": [0, 7], "num_devices": 8, "bags": "g2n4", "text_lengths": [3, 0]}
    balance(**good)
    with pytest.raises(ValueError, match=message):
        balance(**good | change)


def test_bags_of_another_type_are_refused():
    with pytest.raises(TypeError, match="bags is a string, a BagSpec or None; got int"):
        balance([1], [0], num_devices=1, bags=8)


@pytest.mark.parametrize("name", ["num_devices", "num_heads"])
@pytest.mark.parametrize("value", [8.0, True, "8"])
def test_counts_are_integers(name, value):
    with pytest.raises(TypeError, match=f"{name} is an integer; got {type(value).__name__}"):
        balance([1], [0], **{"num_devices": 8, "bags": "g8n1", name: value})
