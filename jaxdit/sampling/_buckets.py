"""Sizes that programs are compiled for: few, whatever sizes are asked for."""

from dataclasses import dataclass, field


@dataclass
class SizeBuckets:
    """Which compiled size a new one runs in. A size that was asked for first has a program of about its own.

    A size takes the smallest program that holds it, if that is at most `waste` times as large; else a new one, while
    there are fewer than `most`. The last of them holds the largest size there can be, so that no other is ever needed.

    Attributes:
        most: programs, at least 1.
        largest: largest size.
        waste: how many times a size a program may be before a new one is compiled.
        step: sizes are multiples of it.
        sizes: those of the programs so far.
    """

    most: int
    largest: int
    waste: float = 1.25
    step: int = 128
    sizes: list[int] = field(default_factory=list)

    def fit(self, size: int) -> int:
        """The program's size for a size that is at least 1 and at most the largest."""
        best = min((have for have in self.sizes if have >= size), default=None)
        is_held = any(have >= self.largest for have in self.sizes)
        has_room = len(self.sizes) + (not is_held) < self.most
        if best is not None and (best <= self.waste * size or not has_room):
            return best
        new = self._rounded(size if has_room else self.largest)
        self.sizes.append(new)
        return new

    def _rounded(self, size: int) -> int:
        return -(-size // self.step) * self.step
