"""The layouts of one step, and the routes between them, made from a plan."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from solver._attention_layout import ROUND, Placement, block_ranges, copy_numbers, place_rows, split_heads
from solver._check import instance, integer
from solver._plan import BalancePlan
from solver._plan_measure import divides_items
from solver._routes import HeadItems, Intervals, Route, head_route, pack_intervals, token_route

Int = NDArray[np.int64]

# A block's logits are block x block.
_LARGEST_BLOCK = 1 << 15


@dataclass(frozen=True)
class StepLayout:
    """Everything about where rows lie and move in one step, for all devices; derived from the plan alone.

    Attributes:
        plan: the plan.
        block: attention block size in rows.
        head_groups: parts in which every device computes its attention, so that one part's rows can travel while
            another is computed; `groups` has their layouts.

    The derived fields are computed once, on first use. Text and image streams are separate in home and token layout;
    the attention layout has one region of rows for queries and one for keys, the same one unless the plan splits
    items by query range (`splits_items`).

    Raises:
        TypeError: a plan of another type, a block or a number of groups that is no integer.
        ValueError: a block below 8, above 32,768 or no multiple of 8; no group or more than heads.

    Example:
        >>> from solver import balance
        >>> plan = balance([100, 20], [0, 1], num_devices=2, bags="g2n1", num_heads=2)
        >>> layout = StepLayout(plan, block=64)
        >>> layout.home_image.length.tolist(), layout.image.length.tolist()
        ([100, 20], [50, 10, 50, 10])
        >>> layout.key_placement.rows_per_device.tolist()  # a head of each: 100 rows in two blocks, 20 in one
        [192, 192]
    """

    plan: BalancePlan
    block: int
    head_groups: int = 1

    def __post_init__(self) -> None:
        advice = f"Rows are placed in blocks of a multiple of {ROUND}; try 128."
        instance("StepLayout", "plan", self.plan, BalancePlan, advice="Make one with balance.")
        block = integer("StepLayout", "block", self.block, least=ROUND, most=_LARGEST_BLOCK, advice=advice)
        if block % ROUND:
            raise ValueError(
                f"StepLayout: block is a multiple of {ROUND}; got block={block}."
                f" Use {-(-block // ROUND) * ROUND}."
            )
        object.__setattr__(self, "block", block)
        advice = "One computes all attention at once; two let exchanges run under attention."
        most = self.plan.num_heads
        groups = integer("StepLayout", "head_groups", self.head_groups, least=1, most=most, advice=advice)
        object.__setattr__(self, "head_groups", groups)

    @cached_property
    def groups(self) -> "tuple[StepLayout, ...]":
        """For each head group a layout of its attention items alone; itself if there is one group.

        A group has half (a third, ...) of the heads of every slice, so about as much of every device's work and of what
        each device sends each other.
        """
        if self.head_groups == 1:
            return (self,)
        slices = self._head_slices
        work = (slices[:, 4] - slices[:, 3]) * np.asarray(self.plan.lengths, np.int64)[slices[:, 0]]
        return tuple(
            _GroupLayout(self.plan, self.block, whole=self, slices=group)
            for group in split_heads(slices, work, self.head_groups)
        )

    @cached_property
    def text_lengths(self) -> Int:
        """Text tokens of each sequence."""
        return np.asarray(self.plan.text_lengths, np.int64)

    @cached_property
    def image_lengths(self) -> Int:
        """Image tokens of each sequence."""
        return np.asarray(self.plan.lengths, np.int64) - self.text_lengths

    def _home(self, lengths: Int) -> Intervals:
        sequence = np.arange(len(lengths))
        home = np.asarray(self.plan.home, np.int64)
        return pack_intervals(sequence, np.zeros_like(lengths), lengths, home, self.plan.num_devices)

    @cached_property
    def home_text(self) -> Intervals:
        """Where the loader left text tokens: whole sequences by number."""
        return self._home(self.text_lengths)

    @cached_property
    def home_image(self) -> Intervals:
        """Where the loader left image tokens."""
        return self._home(self.image_lengths)

    @cached_property
    def text(self) -> Intervals:
        """Text tokens in token layout, positions counted within the text."""
        sequence, start, stop, device = np.asarray(self.plan.token_slices, np.int64).T
        text = self.text_lengths[sequence]
        return pack_intervals(
            sequence, np.minimum(start, text), np.minimum(stop, text), device, self.plan.num_devices
        )

    @cached_property
    def image(self) -> Intervals:
        """Image tokens in token layout, positions counted within the image."""
        sequence, start, stop, device = np.asarray(self.plan.token_slices, np.int64).T
        text = self.text_lengths[sequence]
        return pack_intervals(
            sequence, np.maximum(start - text, 0), np.maximum(stop - text, 0), device, self.plan.num_devices
        )

    @cached_property
    def present(self) -> Int:
        """(n, 2) device and sequence wherever a device holds tokens of a sequence, each pair once, sorted."""
        sequence, _, _, device = np.asarray(self.plan.token_slices, np.int64).T
        num_sequences = max(len(self.plan.lengths), 1)
        return np.stack(np.divmod(np.unique(device * num_sequences + sequence), num_sequences), -1)

    @cached_property
    def _head_slices(self) -> Int:
        slices = np.asarray(self.plan.head_slices, np.int64)
        return slices[np.lexsort((slices[:, 3], slices[:, 1], slices[:, 0], slices[:, 5]))]

    @cached_property
    def splits_items(self) -> bool:
        """Whether some item's queries are divided, so that queries and keys need layouts of their own."""
        return divides_items(self._head_slices, np.asarray(self.plan.lengths))

    def _place(self, rows: Int) -> Placement:
        _, head_start, head_stop, _, _, device = self._head_slices.T
        return place_rows(
            device, head_stop - head_start, rows, num_devices=self.plan.num_devices, block=self.block
        )

    @cached_property
    def key_placement(self) -> Placement:
        """Rows of keys and values in attention layout."""
        return self._place(np.asarray(self.plan.lengths, np.int64)[self._head_slices[:, 0]])

    @cached_property
    def query_placement(self) -> Placement:
        """Rows of queries in attention layout."""
        if not self.splits_items:
            return self.key_placement
        return self._place(self._head_slices[:, 4] - self._head_slices[:, 3])

    def items(self, *, keys: bool) -> HeadItems:
        """The head slices as route targets: whole sequences for keys, the query range for queries."""
        sequence, head_start, head_stop, start, stop, device = self._head_slices.T
        if not keys:
            return HeadItems(
                sequence, head_start, head_stop, start, stop, device, 0 * start, self.query_placement
            )
        # The parts of a divided item each hold all its keys: number them, so that gradients can be added up.
        copy = copy_numbers(sequence, head_start, head_stop)
        lengths = np.asarray(self.plan.lengths, np.int64)[sequence]
        return HeadItems(
            sequence, head_start, head_stop, 0 * start, lengths, device, copy, self.key_placement
        )

    @cached_property
    def text_route(self) -> Route:
        """The move of text tokens from home to token layout."""
        return self._token_route(self.home_text, self.text)

    @cached_property
    def image_route(self) -> Route:
        """The move of image tokens from home to token layout."""
        return self._token_route(self.home_image, self.image)

    def _token_route(self, home: Intervals, token: Intervals) -> Route:
        return token_route(home, token, num_devices=self.plan.num_devices)

    def _head_route(self, *, keys: bool) -> Route:
        return head_route(
            self.text,
            self.image,
            self.text_lengths,
            self.items(keys=keys),
            num_heads=self.plan.num_heads,
            num_devices=self.plan.num_devices,
        )

    @cached_property
    def key_route(self) -> Route:
        """The move of keys and values (and of queries, unless items are divided) from token to attention layout."""
        return self._head_route(keys=True)

    @cached_property
    def query_route(self) -> Route:
        """The move of queries from token to attention layout."""
        return self._head_route(keys=False) if self.splits_items else self.key_route

    @cached_property
    def key_blocks(self) -> list[NDArray[np.int32]]:
        """Per device: for each query block, the half-open range of key blocks it needs."""
        return self._ranges(self.query_placement, self.key_placement)

    @cached_property
    def query_blocks(self) -> list[NDArray[np.int32]]:
        """Per device: for each key block, the half-open range of query blocks that need it."""
        if not self.splits_items:
            return self.key_blocks
        return self._ranges(self.key_placement, self.query_placement)

    def _ranges(self, of: Placement, to: Placement) -> list[NDArray[np.int32]]:
        _, head_start, head_stop, _, _, device = self._head_slices.T
        heads = head_stop - head_start
        return block_ranges(of, to, device, heads, num_devices=self.plan.num_devices, block=self.block)

    def item_table(self, *, keys: bool) -> tuple[Int, Int]:
        """(num_slices,) device and (num_slices, 7) placement fields, heads, rows of one item; sorted by device."""
        items = self.items(keys=keys)
        fields = items.placement.fields(np.arange(len(items.device)))
        shape = np.stack([items.head_stop - items.head_start, items.stop - items.start], -1)
        return items.device, np.concatenate([fields, shape], -1)


@dataclass(frozen=True)
class _GroupLayout(StepLayout):
    """The layout of some of a step's head slices; tokens lie as in the whole."""

    whole: StepLayout = field(kw_only=True)
    slices: Int = field(kw_only=True)

    @cached_property
    def _head_slices(self) -> Int:
        return self.slices

    @property
    def text(self) -> Intervals:
        return self.whole.text

    @property
    def image(self) -> Intervals:
        return self.whole.image
