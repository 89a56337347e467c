"""Sizes that programs are compiled for: few, whatever sizes are asked for.

A size takes the smallest program that holds it, if that is at most `waste` times as large, or if there are `most` - 2
programs already; else a new one of about its own size. A size that none of these holds gets a program twice as large,
so that few are ever added: sizes drawn at random need no more than `most`, rising ones as many more as they double.
"""

from dataclasses import dataclass, field


@dataclass
class SizeBuckets:
    """Which compiled length a new one runs in.

    Attributes:
        most: programs for which sizes are taken as they come, at least 1.
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
        has_room = len(self.sizes) < self.most - 2
        if best is not None and (best <= self.waste * size or not has_room):
            return best
        new = _rounded(size if has_room else min(2 * size, self.largest), self.step)
        self.sizes.append(new)
        return new


@dataclass
class CanvasBuckets:
    """Which compiled height and width those of a picture are decoded in.

    Attributes:
        most: programs for which sizes are taken as they come, at least 1.
        largest: largest height and width.
        waste: how many times a picture's area a program's may be before a new one is compiled.
        step: heights and widths are multiples of it.
        sizes: those of the programs so far.
    """

    most: int
    largest: tuple[int, int]
    waste: float = 1.5
    step: int = 8
    sizes: list[tuple[int, int]] = field(default_factory=list)

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """The program's size for one that is at least 1 and at most the largest."""
        holding = [have for have in self.sizes if have[0] >= height and have[1] >= width]
        best = min(holding, key=_area, default=None)
        has_room = len(self.sizes) < self.most - 2
        if best is not None and (_area(best) <= self.waste * height * width or not has_room):
            return best
        wanted = (height, width) if has_room else self._roomy(height, width)
        new = _rounded(wanted[0], self.step), _rounded(wanted[1], self.step)
        self.sizes.append(new)
        return new

    def _roomy(self, height: int, width: int) -> tuple[int, int]:
        """Half as high and as wide again as the highest and the widest so far."""
        highest = max(height, *(have[0] for have in self.sizes), 1)
        widest = max(width, *(have[1] for have in self.sizes), 1)
        return min(3 * highest // 2, self.largest[0]), min(3 * widest // 2, self.largest[1])


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]
