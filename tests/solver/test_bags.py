"""Bag specs and how they lie over devices."""

import pytest

from solver import BagSpec, parse_bags


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("g1n1", (1,)),
        ("g8n4", (8, 8, 8, 8)),
        ("g1n2+g2n1+g4n1", (1, 1, 2, 4)),
        ("g4n1+g1n2+g2n1", (1, 1, 2, 4)),
        (" g2n1 + g1n1 ", (1, 2)),
        ("g12n10", (12,) * 10),
    ],
)
def test_parse_bags_gives_sizes_in_ascending_order(text, sizes):
    spec = parse_bags(text)
    assert spec.sizes == sizes
    assert spec.num_devices == sum(sizes)
    assert spec.num_bags == len(sizes)


def test_spec_prints_as_it_parses():
    assert str(parse_bags("g4n1+g1n2")) == "g1n2+g4n1"
    assert parse_bags(str(parse_bags("g4n1+g1n2"))) == BagSpec(((1, 2), (4, 1)))


@pytest.mark.parametrize(
    "text", ["", "g8", "n8", "8x4", "g1n2,g2n1", "g1n2+", "+g1n2", "g-1n2", "G8N4", "g1.5n2"]
)
def test_other_syntax_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"parse_bags: .*got spec=.*'g1n2\+g2n1\+g4n1'"):
        parse_bags(text)


@pytest.mark.parametrize("text", ["g0n8", "g8n0", "g1n1+g2n0"])
def test_zeros_are_refused(text):
    with pytest.raises(ValueError, match="sizes and numbers >= 1"):
        parse_bags(text)


def test_repeated_size_is_refused():
    with pytest.raises(ValueError, match="every size once; got g2 more than once"):
        parse_bags("g2n1+g1n2+g2n3")


def test_a_spec_is_a_string():
    with pytest.raises(TypeError, match="parse_bags: spec is a string; got int"):
        parse_bags(8)


def test_layout_repeats_the_pattern_over_replicas():
    layout = parse_bags("g1n2+g2n1").layout(8)
    assert layout.first_device.tolist() == [0, 1, 2, 4, 5, 6]
    assert layout.size.tolist() == [1, 1, 2, 1, 1, 2]
    assert layout.replica.tolist() == [0, 0, 0, 1, 1, 1]
    assert layout.bag_of_device.tolist() == [0, 1, 2, 2, 3, 4, 5, 5]


@pytest.mark.parametrize("num_devices", [0, 2, 6, 9])
def test_layout_needs_a_multiple_of_the_spec(num_devices):
    with pytest.raises(ValueError, match=rf"multiple of the 4 of g1n2\+g2n1; got num_devices={num_devices}"):
        parse_bags("g1n2+g2n1").layout(num_devices)
