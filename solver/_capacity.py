"""Static sizes of a step's arrays: the capacities a compiled program has, and how they grow.

A program is compiled for a capacity. Every plan whose needs fit runs in it; a plan that does not fit makes
the capacity grow, which compiles a new program. Growth adds headroom, generously where an unused slot costs
nothing (tables of runs, exchange buffers of rows that are never touched) and sparingly where it costs compute
(tokens).
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from solver._check import INT32_MAX, instance
from solver._layout import StepLayout
from solver._routes import Intervals, Route, round_of_pair, rows_of_rounds

# Rows of the token layout are padded to a multiple of this, so that matrix products keep full tiles.
TOKEN_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class RouteCapacity:
    """Sizes of a route on one device: rows in its buffers, runs in its tables, copies made of a row.

    Attributes:
        send, recv: rows in the send and receive buffers.
        rounds: rows of each round of the padded exchange (`solver.ExchangeTables` defines them), the busiest pair of
            devices deciding; empty in programs for platforms whose collective is ragged.
        send_runs, recv_runs, stay_runs: table lengths.
        copies: the most copies made of a row.
        copied: rows of which there is another copy than the first, and once more for each further one.
    """

    send: int
    recv: int
    rounds: tuple[int, ...]
    send_runs: int
    recv_runs: int
    stay_runs: int
    copies: int
    copied: int = 0


@dataclass(frozen=True, slots=True)
class StepCapacity:
    """Sizes of a step's arrays on one device (`sequences`: of the whole step).

    Attributes:
        num_devices: devices of the plans.
        num_heads: attention heads of the plans.
        block: attention block size in rows.
        sequences: rows of per-sequence tables.
        device_sequences: sequences of which a device holds tokens in token layout.
        home_text, home_image: tokens in home layout.
        text, image: tokens in token layout.
        query_rows, key_rows: rows in attention layout, multiples of the block; as all that follows of the largest head
            group.
        items: head slices.
        text_route, image_route: home to token layout.
        key_route: token to attention layout; moves q, k and v unless `query_route` exists.
        query_route: the queries' and outputs' own route, in programs that can run divided items.
        head_groups: parts in which attention is computed.
    """

    num_devices: int
    num_heads: int
    block: int
    sequences: int
    device_sequences: int
    home_text: int
    home_image: int
    text: int
    image: int
    query_rows: int
    key_rows: int
    items: int
    text_route: RouteCapacity
    image_route: RouteCapacity
    key_route: RouteCapacity
    query_route: RouteCapacity | None
    head_groups: int = 1

    def fits(self, needs: "StepCapacity") -> bool:
        """Whether a step with these needs runs in a program of this capacity.

        Raises:
            ValueError: as `grown`.
        """
        return self.grown(needs) == self

    def grown(self, needs: "StepCapacity") -> "StepCapacity":
        """The smallest bucketed capacity that holds both; `self` if the needs fit already.

        Raises:
            TypeError: needs of another type.
            ValueError: if no program can hold both: numbers of devices or heads or block sizes differ, or only one
                is padded.
        """
        instance("StepCapacity.grown", "needs", needs, StepCapacity, advice="Give step_needs(layout).")
        check_same_program("StepCapacity.grown", self, needs)
        return _merge(with_queries_of(self, needs), with_queries_of(needs, self))


# Headroom by field: what an unused slot costs decides it.
_HEADROOM = {
    "text": 1.02,
    "image": 1.02,
    "query_rows": 1.05,
    "key_rows": 1.05,
    "sequences": 1.1,
    "device_sequences": 1.1,
    "copies": 1.0,
}
_DEFAULT_HEADROOM = 1.2
# Sizes that cost compute or memory traffic while they are empty. What so many steps need says how far others will go
# beyond the largest of them: half a standard deviation, never more than the headroom above, is added, and sizes are
# finer. Draws of the published mixes differ by 0.5 %, for which 2 % and the coarse sizes were 3.5 % of padding.
_SPARING = ("text", "image", "query_rows", "key_rows")
_ENOUGH_TO_TELL = 8
_SPREAD_HEADROOM = 0.5
# What a program has one of; everything else grows.
_FIXED = ("num_devices", "num_heads", "block", "head_groups")
# Of these none is as good as no step needs any.
_MAY_BE_NONE = ("home_text", "home_image", "text", "image", "copied")
_ALIGNMENT = {"text": TOKEN_ALIGNMENT, "image": TOKEN_ALIGNMENT}


def bucket(need: int, *, headroom: float = 1.0, alignment: int = 1, an_octave: int = 32) -> int:
    """Round up to one of about `an_octave` sizes, a power of two, and to a multiple of `alignment`, after headroom."""
    want = max(int(np.ceil(need * headroom)), 1)
    step = max((1 << want.bit_length()) // (2 * an_octave), alignment)
    step = -(-step // alignment) * alignment
    return -(-want // step) * step


_Sizes = TypeVar("_Sizes", RouteCapacity, StepCapacity)


def _merge(current: _Sizes, needs: _Sizes) -> _Sizes:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(needs):
        name = field.name
        have, want = getattr(current, name), getattr(needs, name)
        if isinstance(want, RouteCapacity):
            grown = _merge(have, want)
        elif isinstance(want, tuple):
            grown = _merge_rounds(have, want)
        elif want is None or want <= have:
            continue
        else:
            grown = _bucketed(name, want, needs)
        if grown != have:
            changes[name] = grown
    return dataclasses.replace(current, **changes) if changes else current


def _merge_rounds(have: tuple[int, ...], want: tuple[int, ...]) -> tuple[int, ...]:
    """Round by round; a round that stays empty is never sent, so an empty one grows only when it is needed."""
    return tuple(h if w <= h else _bucketed("rounds", w, None) for h, w in zip(have, want, strict=True))


def _sized(needs: Sequence[_Sizes], least: _Sizes | None) -> _Sizes:
    """Sizes for all the needs; those of `least` where they are enough."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(needs[0]):
        name = field.name
        values, have = [getattr(one, name) for one in needs], getattr(least, name, None)
        if isinstance(values[0], RouteCapacity):
            changes[name] = _sized(values, have)
        elif isinstance(values[0], tuple):
            most = tuple(map(max, *values, values[0]))
            changes[name] = _merge_rounds(have or (0,) * len(most), most)
        elif values[0] is not None and name not in _FIXED:
            enough = have is not None and max(values) <= have
            changes[name] = have if enough else _size_of(name, values, needs[0])
    return dataclasses.replace(needs[0], **changes)


def _size_of(name: str, values: Sequence[int], owner: Any) -> int:
    """A size for what several steps need."""
    most = max(values)
    if name not in _SPARING or len(values) < _ENOUGH_TO_TELL or not most:
        return _bucketed(name, most, owner)
    headroom = min(_HEADROOM[name], 1 + _SPREAD_HEADROOM * float(np.std(values)) / most)
    return bucket(most, headroom=headroom, alignment=_alignment(name, owner), an_octave=128)


def with_queries_of(sizes: StepCapacity, other: StepCapacity) -> StepCapacity:
    """The sizes with a query route if the other has one: queries of whole items move as their keys do."""
    if sizes.query_route is None and other.query_route is not None:
        return dataclasses.replace(sizes, query_route=sizes.key_route)
    return sizes


def check_same_program(caller: str, a: StepCapacity, b: StepCapacity) -> None:
    """Refuse sizes that no program can share however much it grows."""
    for name, rule, advice in (
        ("num_devices", "are for as many devices", "A plan for other devices needs a capacity of its own."),
        ("num_heads", "have one number of heads", "Balance all steps with the model's heads."),
        ("block", "have one attention block size", "Make both layouts with the same block."),
        ("head_groups", "have as many head groups", "Make both layouts with the same head_groups."),
    ):
        have, want = getattr(a, name), getattr(b, name)
        if have != want:
            raise ValueError(
                f"{caller}: capacities of one program {rule}; got {name}={have} and {name}={want}. {advice}"
            )
    if len(a.key_route.rounds) != len(b.key_route.rounds):
        raise ValueError(
            f"{caller}: capacities of one program are all padded or none;"
            f" got num_rounds={len(a.key_route.rounds)} and num_rounds={len(b.key_route.rounds)}."
            " Give step_needs the same padded= for every step."
        )


def _bucketed(name: str, want: int, owner: Any) -> int:
    if not want and name in _MAY_BE_NONE:
        return 0
    return bucket(want, headroom=_HEADROOM.get(name, _DEFAULT_HEADROOM), alignment=_alignment(name, owner))


def _alignment(name: str, owner: Any) -> int:
    return owner.block if name in ("query_rows", "key_rows") else _ALIGNMENT.get(name, 1)


def capacity_for(needs: Iterable[StepCapacity], *, at_least: StepCapacity | None = None) -> StepCapacity:
    """The bucketed capacity that holds all of the given needs, with headroom; the same on every process.

    A stream (text or image) of which no step has a token gets no rows. From 8 steps on, rows get as much headroom as
    the steps differ, and no more.

    Args:
        needs: `step_needs` of the steps that one program is to run.
        at_least: a capacity to grow; sizes that are enough for the needs stay as they are.

    Raises:
        TypeError: if `needs` or `at_least` are not `StepCapacity`.
        ValueError: if `needs` is empty, or no program can hold them all (numbers of devices or heads or block sizes
            differ).

    Example:
        >>> from solver import StepLayout, balance
        >>> lengths_of_steps = [100, 20, 7], [90, 40, 50]
        >>> plans = [balance(n, [0, 1, 1], num_devices=2, bags="g2n1", num_heads=4) for n in lengths_of_steps]
        >>> needs = [step_needs(StepLayout(plan, block=64)) for plan in plans]
        >>> [n.image for n in needs], [n.home_image for n in needs], [n.text for n in needs]
        ([64, 90], [100, 90], [0, 0])
        >>> capacity = capacity_for(needs)
        >>> capacity.image, capacity.home_image, capacity.text
        (96, 120, 0)
        >>> all(capacity.fits(n) for n in needs)
        True
    """
    needs = _listed(needs)
    if not needs:
        raise ValueError("capacity_for: needs at least one step to size a program for; got none.")
    if at_least is not None:
        instance(
            "capacity_for", "at_least", at_least, StepCapacity, advice="Give a capacity to grow, or None."
        )
    all_sizes = needs if at_least is None else [*needs, at_least]
    for other in all_sizes[1:]:
        check_same_program("capacity_for", needs[0], other)
    divided = next((one for one in all_sizes if one.query_route is not None), needs[0])
    least = None if at_least is None else with_queries_of(at_least, divided)
    return _sized([with_queries_of(one, divided) for one in needs], least)


def _listed(needs: Any) -> list[StepCapacity]:
    advice = "Give a list of step_needs(layout)."
    if isinstance(needs, StepCapacity) or not isinstance(needs, Iterable):
        raise TypeError(f"capacity_for: needs are one for each step; got {type(needs).__name__}. {advice}")
    needs = list(needs)
    for one in needs:
        instance("capacity_for", "every one of needs", one, StepCapacity, advice=advice)
    return needs


def route_needs(route: Route, *, padded: bool) -> RouteCapacity:
    """Exact needs of a route: the largest over devices of each size; `padded` as in `step_needs`."""
    sent = route.sent()
    rounds: tuple[int, ...] = ()
    if padded:
        rounds = tuple(rows_of_rounds(sent, round_of_pair(route.num_devices))[1:].tolist())
    leaves = route.source != route.target
    later = route.copy > 0
    copied = np.bincount(route.source[later], weights=(route.heads * route.length)[later], minlength=1)

    def count(device: NDArray[np.int64], mask: NDArray[np.bool_]) -> int:
        return int(np.bincount(device[mask], minlength=1).max(initial=0))

    return RouteCapacity(
        send=int(sent.sum(1).max(initial=0)),
        recv=int(sent.sum(0).max(initial=0)),
        rounds=rounds,
        send_runs=count(route.source, leaves),
        recv_runs=count(route.target, leaves),
        stay_runs=count(route.source, ~leaves),
        copies=int(route.copy.max(initial=0)) + 1,
        copied=int(copied.max()),
    )


def _largest(a: RouteCapacity, b: RouteCapacity) -> RouteCapacity:
    """Sizes that hold both, without headroom."""
    sizes: dict[str, Any] = {}
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        sizes[field.name] = tuple(map(max, x, y)) if isinstance(x, tuple) else max(x, y)
    return RouteCapacity(**sizes)


def rows_by_device(layout: StepLayout) -> dict[str, NDArray[np.int64]]:
    """For each size that is a device's own: what every device needs."""
    num_devices = layout.plan.num_devices

    def count(device: NDArray[np.integer]) -> NDArray[np.int64]:
        return np.bincount(device, minlength=num_devices)

    def tokens(intervals: Intervals) -> NDArray[np.int64]:
        return np.bincount(intervals.device, weights=intervals.length, minlength=num_devices).astype(np.int64)

    return {
        "device_sequences": count(layout.present[:, 0]),
        "home_text": tokens(layout.home_text),
        "home_image": tokens(layout.home_image),
        "text": tokens(layout.text),
        "image": tokens(layout.image),
        **{
            name: np.max([sizes[name] for sizes in map(_attention_rows, layout.groups)], axis=0)
            for name in ("query_rows", "key_rows", "items")
        },
    }


def _attention_rows(group: StepLayout) -> dict[str, NDArray[np.int64]]:
    """What every device needs for the attention of one head group."""
    device, _ = group.item_table(keys=True)
    return {
        "query_rows": group.query_placement.rows_per_device,
        "key_rows": group.key_placement.rows_per_device,
        "items": np.bincount(device, minlength=group.plan.num_devices),
    }


def step_needs(layout: StepLayout, *, padded: bool = True) -> StepCapacity:
    """Exact needs of one step's layout: what a program must hold to run it.

    Args:
        layout: the step's layouts.
        padded: whether the program must run on a platform without a ragged collective (CPU), where exchanges have
            rounds of static size. Without it, plans that differ only in who talks to whom share a program.

    Raises:
        TypeError: a layout or a `padded` of another type.
        ValueError: if a device would hold more rows than int32 counts.
    """
    instance("step_needs", "layout", layout, StepLayout, advice="Make one with StepLayout(plan, block).")
    instance("step_needs", "padded", padded, bool, advice="True on CPUs.")
    largest = {name: int(sizes.max(initial=0)) for name, sizes in rows_by_device(layout).items()}
    num_heads = layout.plan.num_heads
    most = max(largest["query_rows"], largest["key_rows"], (largest["text"] + largest["image"]) * num_heads)
    if most > INT32_MAX:
        raise ValueError(
            f"step_needs: a device has at most {INT32_MAX} (token, head) rows; got {most}."
            " Use more devices, or shorter sequences."
        )
    key_route, query_route = _attention_routes(layout, padded=padded)
    return StepCapacity(
        num_devices=layout.plan.num_devices,
        num_heads=num_heads,
        block=layout.block,
        sequences=len(layout.plan.lengths),
        **largest,
        text_route=route_needs(layout.text_route, padded=padded),
        image_route=route_needs(layout.image_route, padded=padded),
        key_route=key_route,
        query_route=query_route,
        head_groups=layout.head_groups,
    )


def _attention_routes(layout: StepLayout, *, padded: bool) -> tuple[RouteCapacity, RouteCapacity | None]:
    """Needs of the keys' routes of all head groups, and of the queries' if any group divides items."""
    divided = any(group.splits_items for group in layout.groups)
    keys = [route_needs(group.key_route, padded=padded) for group in layout.groups]
    queries = [route_needs(group.query_route, padded=padded) for group in layout.groups if divided]
    return reduce(_largest, keys), reduce(_largest, queries) if queries else None
