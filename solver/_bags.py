"""Bag specs: how the devices are divided into groups that share sequences.

`g1n2+g2n1+g4n1` is two bags of one device, one bag of two and one bag of four, eight devices in all, in this
order. When there are more devices, the pattern repeats: each copy is a replica and balances on its own.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from solver._check import MOST_DEVICES, integer

_TERM = re.compile(r"g([0-9]{1,9})n([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class BagSpec:
    """Bags by size; devices are dealt to them consecutively, smallest bags first.

    Args:
        counts: (devices in a bag, bags of that size) for each size, in any order; kept by ascending size.

    Raises:
        TypeError: entries that are no pairs of integers.
        ValueError: no entry, a size or number below 1, more than 65,536 devices, a size given twice.

    Example:
        >>> BagSpec(((4, 1), (1, 2))).sizes
        (1, 1, 4)
    """

    counts: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", _checked_counts(self.counts))
        repeated = [size for size, times in Counter(size for size, _ in self.counts).items() if times > 1]
        if repeated:
            raise ValueError(
                f"BagSpec: every size once; got g{repeated[0]} more than once in {self.counts}. "
                "Add up the numbers of bags of one size."
            )

    @property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return sum(size * number for size, number in self.counts)

    @property
    def num_bags(self) -> int:
        """Bags of one replica."""
        return sum(number for _, number in self.counts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of every bag of one replica, in device order (ascending)."""
        return tuple(size for size, number in self.counts for _ in range(number))

    def layout(self, num_devices: int) -> "BagLayout":
        """Lay the bags out over devices, repeating the pattern when there are more devices than it needs.

        Args:
            num_devices: all devices; a multiple of this spec's own.

        Returns:
            First device, size and replica of every bag.

        Raises:
            TypeError: num_devices is no integer.
            ValueError: the devices are not a multiple of the spec's.
        """
        num_devices = integer(
            "BagSpec.layout",
            "num_devices",
            num_devices,
            least=0,
            most=MOST_DEVICES,
            advice="Give all devices.",
        )
        if num_devices < 1 or num_devices % self.num_devices:
            raise ValueError(
                f"BagSpec.layout: num_devices a multiple of the {self.num_devices} of {self}; "
                f"got num_devices={num_devices}. Choose bags whose sizes times numbers add up to a divisor."
            )
        num_replicas = num_devices // self.num_devices
        size = np.array(self.sizes * num_replicas, np.int64)
        return BagLayout(
            first_device=np.cumsum(size) - size,
            size=size,
            replica=np.repeat(np.arange(num_replicas), self.num_bags),
        )

    def __str__(self) -> str:
        return "+".join(f"g{size}n{number}" for size, number in self.counts)


def _checked_counts(counts: Any) -> tuple[tuple[int, int], ...]:
    """Pairs of integers by ascending size."""
    try:
        pairs = [(size, number) for size, number in counts]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"BagSpec: counts are pairs (devices in a bag, bags of that size); got counts={counts!r:.80}. "
            "((1, 8),) is eight bags of one device."
        ) from error
    advice = f"Got counts={counts!r:.80}; sizes and numbers >= 1, ((1, 8),) is eight bags of one device."
    for size, number in pairs:
        integer("BagSpec", "size", size, most=MOST_DEVICES, advice=advice)
        integer("BagSpec", "number", number, most=MOST_DEVICES, advice=advice)
    if not pairs:
        raise ValueError("BagSpec: at least one bag; got none. ((1, 8),) is eight bags of one device.")
    total = sum(size * number for size, number in pairs)
    integer("BagSpec", "num_devices", total, most=MOST_DEVICES, advice=advice)
    return tuple(sorted((int(size), int(number)) for size, number in pairs))


@dataclass(frozen=True, slots=True, eq=False)
class BagLayout:
    """Every bag over all devices, in device order; arrays have one entry a bag.

    Attributes:
        first_device: the bag has this device and the `size - 1` that follow.
        size: devices of the bag.
        replica: copy of the spec that the bag belongs to.
    """

    first_device: Int[np.ndarray, " bags"]
    size: Int[np.ndarray, " bags"]
    replica: Int[np.ndarray, " bags"]

    @property
    def bag_of_device(self) -> Int[np.ndarray, " devices"]:
        """Bag of every device."""
        return np.repeat(np.arange(len(self.size)), self.size)


def parse_bags(spec: str) -> BagSpec:
    """Read a bag spec: `g{devices in a bag}n{bags of that size}`, joined by `+`, each size once.

    Args:
        spec: for example `g1n2+g2n1+g4n1`.

    Returns:
        The bags, smallest first whatever the order given.

    Raises:
        TypeError: not a string.
        ValueError: another syntax, a zero, more than 65,536 devices, a size given twice.

    Example:
        >>> spec = parse_bags("g4n1+g1n2+g2n1")
        >>> str(spec), spec.num_devices
        ('g1n2+g2n1+g4n1', 8)
        >>> spec.layout(8).bag_of_device.tolist()
        [0, 1, 2, 2, 3, 3, 3, 3]

    Reference: KnapFormer, arXiv 2508.06001 (compute bags).
    """
    if not isinstance(spec, str):
        raise TypeError(f"parse_bags: spec is a string; got {type(spec).__name__}. Write for example 'g2n4'.")
    terms = [_TERM.fullmatch(term.strip()) for term in spec.split("+")]
    if any(term is None for term in terms):
        raise ValueError(
            f"parse_bags: g{{size}}n{{number}} terms joined by '+'; got spec={spec!r:.80}. "
            "Write for example 'g1n2+g2n1+g4n1': two bags of 1 device, one of 2, one of 4; `balance` also takes 'auto'."
        )
    return BagSpec(tuple((int(term[1]), int(term[2])) for term in terms if term is not None))
