"""Batches that benchmarks run on: the recorded draws of the published mixes, brought to few devices, and fresh ones."""

import dataclasses
import functools
import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from experiments._program import UserError
from experiments.data import MIXES, StepData, StepIndex, StepSampler, SyntheticCodes

CHECKOUT = Path(__file__).parents[1]
RECORDED = CHECKOUT / "tests" / "data" / "balance.json.gz"

JOINT_CODES = MIXES["joint"]
# By which lengths are divided to bring the mixes from 32 devices of a cluster to 8 virtual ones.
SCALE = 32
# The mixes draw 0 to 392 text tokens; the recorded lengths are totals, so each gets the mean, scaled.
MEAN_TEXT = 196 // SCALE
_TAIL_PER_DEVICE, _TAIL_MEDIAN, _TAIL_SIGMA, _TAIL_RANGE = 8, 2000, 1.2, (64, 65_536)


@functools.lru_cache(maxsize=1)
def _recorded(path: Path) -> dict[str, list[list[list[int]]]]:
    if not path.is_file():
        raise UserError(
            f"the recorded batches, {path}, are part of a checkout and not of the wheel. Clone the project and run"
            " `make bench` there."
        )
    batches = json.loads(gzip.decompress(path.read_bytes()))["batches"]
    return {mix: entry["steps"] for mix, entry in batches.items()}


def recorded_steps(mix: str, path: Path = RECORDED) -> list[list[list[int]]]:
    """The recorded steps of a mix: `[step][rank]` is a list of lengths, text and image together.

    Raises:
        UserError: outside a checkout.
    """
    return _recorded(path)[mix]


def scaled_joint(step: int, scale: int = SCALE) -> StepIndex:
    """A recorded step of the joint mix: 32 ranks, every length divided by `scale` and rounded up.

    Of each sequence `MEAN_TEXT` tokens are text, half of it where it is shorter than twice that.
    """
    ranks = recorded_steps("joint")[step]
    lengths = [-(-length // scale) for rank in ranks for length in rank]
    home_rank = [rank for rank, sequences in enumerate(ranks) for _ in sequences]
    text = [min(MEAN_TEXT, length // 2) for length in lengths]
    return make_index(step, lengths, text, home_rank, num_ranks=len(ranks))


def tail_step(step: int, scale: int = SCALE, *, num_devices: int = 8) -> StepIndex:
    """A step with a long tail: 8 sequences a device, lognormal lengths of median 2,000 and sigma 1.2.

    They are clipped to 64 .. 65,536, divided by `scale` and rounded up; text as in `scaled_joint`.
    """
    rng = np.random.default_rng([step, 2])
    drawn = rng.lognormal(math.log(_TAIL_MEDIAN), _TAIL_SIGMA, _TAIL_PER_DEVICE * num_devices)
    lengths = -(-np.clip(drawn, *_TAIL_RANGE).astype(np.int64) // scale)
    home = np.repeat(np.arange(num_devices), _TAIL_PER_DEVICE)
    return make_index(step, lengths, np.minimum(MEAN_TEXT, lengths // 2), home, num_ranks=num_devices)


def fresh_tails(num_steps: int) -> list[StepIndex]:
    """Steps with a long tail, the first of which are those that are timed."""
    return [tail_step(step) for step in range(num_steps)]


def fresh_mix(mix: str, num_steps: int) -> list[StepIndex]:
    """Steps of a published mix with draws of our own, at full length on 32 ranks."""
    sampler = StepSampler([SyntheticCodes(MIXES[mix], num_steps=num_steps, seed=1)])
    return [sampler.step(t) for t in range(num_steps)]


def fresh_joint(num_steps: int) -> list[StepIndex]:
    """Steps of the joint mix with draws of our own, brought to the same scale."""
    indices = []
    for t, index in enumerate(fresh_mix("joint", num_steps)):
        lengths, text = -(-index.lengths // SCALE), index.text_lengths // SCALE
        assert index.home_rank is not None  # synthetic codes name one
        indices.append(make_index(t, lengths, text, index.home_rank, num_ranks=index.num_ranks))
    return indices


def make_index(
    step: int, lengths: ArrayLike, text: ArrayLike, home_rank: ArrayLike, *, num_ranks: int
) -> StepIndex:
    """A step of sequences of the given total and text lengths, each starting on a rank."""
    total, texts = np.asarray(lengths, np.int32), np.asarray(text, np.int32)
    image, zeros = total - texts, np.zeros(len(total), np.int32)
    side = np.maximum(np.sqrt(image).astype(np.int32), 1)
    return StepIndex(
        step=step,
        source=zeros,
        index=np.arange(len(total), dtype=np.int32),
        epoch=zeros,
        grid=np.stack([zeros + 1, side, -(-image // side)], axis=1),
        image_lengths=image,
        text_lengths=texts,
        lengths=total,
        dropped=zeros.astype(bool),
        loss_weight=np.ones(len(total), np.float32),
        home_rank=np.asarray(home_rank, np.int32),
        num_ranks=num_ranks,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class RowWidths:
    """Features of image rows, text rows and per-sequence text vectors."""

    channels: int = 64
    text_channels: int = 64
    pooled_channels: int = 64


def random_data(index: StepIndex, widths: RowWidths, *, num_devices: int) -> StepData:
    """Normal rows for a step, all devices local."""
    rng = np.random.default_rng([index.step, *index.lengths[:4].tolist()])

    def draw(lengths: np.ndarray, width: int) -> tuple[np.ndarray, ...]:
        return tuple(rng.standard_normal((int(n), width), np.float32) for n in lengths)

    return StepData(
        index=index,
        num_devices=num_devices,
        local_devices=tuple(range(num_devices)),
        sequences=np.arange(index.num_sequences, dtype=np.int32),
        rows=draw(index.image_lengths, widths.channels),
        text=draw(index.text_lengths, widths.text_channels),
        pooled=tuple(rng.standard_normal(widths.pooled_channels, np.float32) for _ in index.lengths),
        loss_weight=index.loss_weight,
        channels=widths.channels,
        text_channels=widths.text_channels,
        pooled_channels=widths.pooled_channels,
    )


def uniform_index(length: int, per_device: int, *, num_devices: int) -> StepIndex:
    """`per_device` sequences of one length on every device."""
    count = per_device * num_devices
    text = min(MEAN_TEXT, length // 2)
    ranks = np.repeat(np.arange(num_devices), per_device)
    return make_index(0, [length] * count, [text] * count, ranks, num_ranks=num_devices)


def random_lengths(num: int, total: int, *, least: int, most: int, seed: int) -> list[int]:
    """`num` lengths uniform in `least` .. `most`, scaled to add up to `total`."""
    drawn = np.random.default_rng(seed).uniform(least, most, num)
    edges = np.rint(np.concatenate([[0.0], np.cumsum(drawn)]) * (total / drawn.sum())).astype(int)
    return np.maximum(np.diff(edges), 1).tolist()


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(values) / len(values)
