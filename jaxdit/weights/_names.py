"""Which tensor of a checkpoint is which part of which parameter.

A checkpoint of PyTorch modules has one tensor per layer and projection; here layers are stacked and projections that
read the same rows are fused. Every tensor is described by pieces: rows of the tensor that are columns of a parameter
(a kernel is the transpose of a weight), in one layer of it. Loading and saving both follow the same pieces.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Path", "Piece", "Rule", "TensorTable", "pieces_of"]

# Keys of nested dicts: names, and numbers in lists of modules.
Path = tuple[Any, ...]

# Name of a module's array here, and in PyTorch.
_SUFFIXES = {"kernel": ".weight", "bias": ".bias", "scale": ""}


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a tensor, and where they are.

    Attributes:
        name: of the tensor.
        shape: of the whole tensor.
        rows: half-open range of its first axis.
        path: of the parameter in the module's nested dict.
        layer: index on the parameter's leading axis; None for parameters outside stacks.
        start: where the rows begin on the axis of the parameter that they are: the last, or the first for a table.
        is_table: whether the tensor is a table of embeddings, which is not transposed.
        is_copy: whether another tensor before it holds the same values.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int]
    path: Path
    layer: int | None
    start: int
    is_table: bool = False
    is_copy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one module here is written in a checkpoint.

    Attributes:
        path: of the module here; of the parameter itself for a norm's scale or a table.
        names: modules (or, for scales and tables, tensors) in the checkpoint, `{}` standing for the layer; those whose
            outputs are fused here in their order, or, with `copies`, several with the same values.
        widths: outputs of each; all of them if there is one.
        swapped: whether the two halves of the outputs change places.
        copies: whether `names` are copies of one another.
        patch: edge and channels of a convolution that is a linear layer on patches here.
        is_table: whether it is a table of embeddings.
    """

    path: Path
    names: tuple[str, ...]
    widths: tuple[int, ...] = ()
    swapped: bool = False
    copies: bool = False
    patch: tuple[int, int] | None = None
    is_table: bool = False


@dataclass(frozen=True, slots=True)
class TensorTable:
    """All tensors of a checkpoint of one model in one layout.

    Attributes:
        pieces: of all tensors, in the order of the rules; pieces of a tensor are neighbours.
        patches: for tensors that are convolutions, the edge and channels of the patch.
        constants: tensors that are no parameters here but must have these values, such as a fixed table of positions.
        unread: names of tensors that may be there and do not matter.
    """

    pieces: tuple[Piece, ...]
    patches: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        shapes = {piece.name: piece.shape for piece in self.pieces}
        return shapes | {name: value.shape for name, value in self.constants.items()}

    def by_name(self) -> dict[str, list[Piece]]:
        """Pieces of every tensor."""
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.name, []).append(piece)
        return found


def pieces_of(rules: Iterable[Rule], shapes: Any) -> list[Piece]:
    """The pieces of a model's parameters.

    Args:
        rules: one per module.
        shapes: the module's parameters as nested dicts of arrays or shapes.

    Raises:
        AssertionError: if rules and parameters do not cover each other: a mistake in the rules.
    """
    pieces = [piece for rule in rules for piece in _rule_pieces(rule, shapes)]
    # Every element of every parameter is in one piece that is no copy.
    covered: dict[Path, int] = {}
    for piece in pieces:
        if not piece.is_copy:
            size = (piece.rows[1] - piece.rows[0]) * int(np.prod(piece.shape[1:]))
            covered[piece.path] = covered.get(piece.path, 0) + size
    assert covered == {path: int(np.prod(leaf.shape)) for path, leaf in leaves_of(shapes)}
    return pieces


def leaves_of(tree: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """(path, leaf) of nested dicts."""
    if not isinstance(tree, Mapping):
        return [(path, tree)]
    return [pair for name, child in tree.items() for pair in leaves_of(child, (*path, name))]


def nested(leaves: Mapping[Path, Any]) -> dict[Any, Any]:
    """Nested dicts of leaves by path: what `leaves_of` takes apart."""
    tree: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        at = tree
        for name in path[:-1]:
            at = at.setdefault(name, {})
        at[path[-1]] = leaf
    return tree


def leaf_at(tree: Any, path: Sequence[Any]) -> Any:
    """The leaf of nested dicts at a path."""
    for name in path:
        tree = tree[name]
    return tree


def _rule_pieces(rule: Rule, shapes: Any) -> list[Piece]:
    found = leaf_at(shapes, rule.path)
    leaves = found.items() if isinstance(found, Mapping) else [("scale", found)]
    stacked = "{}" in rule.names[0] and not rule.copies
    pieces = []
    for suffix, leaf in leaves:
        path = (*rule.path, suffix) if isinstance(found, Mapping) else rule.path
        for layer in range(leaf.shape[0]) if stacked else [None]:
            shape = leaf.shape[1:] if stacked else leaf.shape
            pieces += _layer_pieces(rule, _SUFFIXES[suffix], path, layer, shape)
    return pieces


def _layer_pieces(
    rule: Rule, suffix: str, path: Path, layer: int | None, shape: tuple[int, ...]
) -> list[Piece]:
    """Pieces of one layer (or of a parameter without layers) of this shape."""
    outputs = shape[0] if rule.is_table else shape[-1]
    widths = rule.widths or (outputs,) * len(rule.names)
    pieces, start = [], 0
    for number, (name, width) in enumerate(zip(rule.names, widths, strict=True)):
        tensor = _tensor_shape(rule, shape, width)
        full = name.format(layer) + suffix
        for rows, to in _halves(width) if rule.swapped else [((0, width), 0)]:
            is_copy = rule.copies and number > 0
            pieces.append(Piece(full, tensor, rows, path, layer, start + to, rule.is_table, is_copy))
        start += 0 if rule.copies else width
    return pieces


def _halves(width: int) -> list[tuple[tuple[int, int], int]]:
    half = width // 2
    return [((0, half), half), ((half, width), 0)]


def _tensor_shape(rule: Rule, shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    if rule.is_table or len(shape) == 1:
        return (width, *shape[1:])
    if rule.patch is not None:
        edge, channels = rule.patch
        return (width, channels, edge, edge)
    if len(shape) == 4:  # a convolution: (h, w, in, out)
        return (width, shape[2], *shape[:2])
    return (width, *reversed(shape[:-1]))
