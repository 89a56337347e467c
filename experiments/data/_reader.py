"""Reading the part of a step that lives on this process's devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from experiments.data._bad import BadLimit, BadTally
from experiments.data._types import (
    BadSampleError,
    BatchSource,
    SampleRows,
    Source,
    StepData,
    StepIndex,
    TextRows,
    Wanted,
)
from experiments.data._validation import Subset


@runtime_checkable
class Sampler(Protocol):
    """What a reader needs: sources, and the sequences of any step."""

    sources: tuple[Source, ...]
    seed: int

    def step(self, t: int) -> StepIndex:
        """The sequences of step t."""
        ...


class StepReader:
    """Reads the sequences of a step whose home is one of this process's devices; others are not touched.

    A sample that cannot be decoded keeps its place: zero rows, loss weight 0, lengths as planned, so every
    process still agrees on the step. It is counted and logged by name.

    Args:
      sampler: a `StepSampler` or `ValidationSampler`; its seed is that of what a source draws anew in each step.
      local_devices: global ids of this process's devices.
      num_devices: devices of the run.
      bad_limit: when unreadable samples stop the run.

    Raises:
      ValueError: a device id that is repeated or not below num_devices, or sources of different widths.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        local_devices: Sequence[int],
        num_devices: int,
        bad_limit: BadLimit | None = None,
    ):
        self.sampler = sampler
        self.local_devices = tuple(int(d) for d in local_devices)
        self.num_devices = num_devices
        valid = set(range(num_devices))
        if not set(self.local_devices) <= valid or len(set(self.local_devices)) < len(self.local_devices):
            raise ValueError(
                f"StepReader: local_devices must be distinct and below num_devices; got local_devices="
                f"{list(self.local_devices)}, num_devices={num_devices}."
            )
        self.channels, self.text_channels, self.pooled_channels = _common_widths(sampler.sources)
        self.labelled = all(source.labels is not None for source in sampler.sources)
        self.tally = BadTally(BadLimit() if bad_limit is None else bad_limit, "StepReader")

    def read(self, t: int) -> StepData:
        """Step t with the content of the local sequences.

        Raises:
          DataError: too many samples could not be read.
        """
        index = self.sampler.step(t)
        local = self._local(index)
        loss_weight = index.loss_weight[local].copy()
        together = self._read_together(index, local.tolist())
        samples, bad = list[SampleRows](), list[str]()
        for i, sequence in enumerate(local.tolist()):
            try:
                found = together[sequence] if sequence in together else self._read_one(index, sequence)
                samples.append(self._checked(index, sequence, found))
                self.tally.good()
            except BadSampleError as error:
                source, sample = self._source(index, sequence)
                self.tally.bad(source.sample_name(sample), error)
                bad.append(source.sample_name(sample))
                loss_weight[i] = 0.0
                samples.append(self._blank(index, sequence))
        return dataclasses.replace(self._data(index, local, samples), loss_weight=loss_weight, bad=tuple(bad))

    def blank(self, t: int) -> StepData:
        """Step t with zeros in the place of images and features: what it takes, without reading it."""
        index = self.sampler.step(t)
        local = self._local(index)
        return self._data(index, local, [self._blank(index, s) for s in local.tolist()])

    def _local(self, index: StepIndex) -> Int32[np.ndarray, " l"]:
        """Sequences at home on this process's devices."""
        return np.flatnonzero(np.isin(index.home(self.num_devices), self.local_devices)).astype(np.int32)

    def _data(
        self, index: StepIndex, local: Int32[np.ndarray, " l"], samples: Sequence[SampleRows]
    ) -> StepData:
        return StepData(
            index=index,
            num_devices=self.num_devices,
            local_devices=self.local_devices,
            sequences=local,
            rows=tuple(sample.rows for sample in samples),
            text=tuple(sample.text for sample in samples),
            pooled=tuple(sample.pooled for sample in samples),
            loss_weight=index.loss_weight[local].copy(),
            channels=self.channels,
            text_channels=self.text_channels,
            pooled_channels=self.pooled_channels,
            labels=tuple(self._label(index, s) for s in local.tolist()) if self.labelled else None,
        )

    def _source(self, index: StepIndex, sequence: int) -> tuple[Source, int]:
        return self.sampler.sources[int(index.source[sequence])], int(index.index[sequence])

    def _read_together(
        self, index: StepIndex, sequences: Sequence[int]
    ) -> dict[int, SampleRows | BadSampleError]:
        """What sources that read a step's samples together give, by sequence."""
        home = index.home(self.num_devices)
        found: dict[int, SampleRows | BadSampleError] = {}
        for number in range(len(self.sampler.sources)):
            mine = [s for s in sequences if index.source[s] == number]
            if not mine:
                continue
            wanted = [
                Wanted(
                    sample=int(index.index[s]),
                    is_dropped=bool(index.dropped[s]),
                    device=self.local_devices.index(int(home[s])),
                    draw=(self.sampler.seed, index.step, s),
                )
                for s in mine
            ]
            samples = _read_batch(self.sampler.sources[number], wanted)
            if samples is not None:
                found.update(zip(mine, samples, strict=True))
        return found

    def _read_one(self, index: StepIndex, sequence: int) -> SampleRows:
        source, sample = self._source(index, sequence)
        rows = source.read(sample)
        # One sample after the other: a source may have read them together.
        return SampleRows(rows, self._text(index, sequence), self._pooled(index, sequence))

    def _checked(self, index: StepIndex, sequence: int, found: SampleRows | BadSampleError) -> SampleRows:
        if isinstance(found, BadSampleError):
            raise found
        planned = (int(index.image_lengths[sequence]), self.channels)
        if found.rows.shape != planned:
            raise BadSampleError(
                f"content changed since it was indexed: planned {planned}, read {found.rows.shape}"
            )
        return found

    def _blank(self, index: StepIndex, sequence: int) -> SampleRows:
        """What stands in the place of a sample that cannot be read: zeros, and its caption where that is at hand."""
        rows = np.zeros((int(index.image_lengths[sequence]), self.channels), np.float32)
        if not self.text_channels:
            return SampleRows(rows, self._text(index, sequence), self._pooled(index, sequence))
        text = np.zeros((int(index.text_lengths[sequence]), self.text_channels), np.float32)
        return SampleRows(rows, text, np.zeros(self.pooled_channels, np.float32))

    def _text(self, index: StepIndex, sequence: int) -> TextRows:
        source, sample = self._source(index, sequence)
        text = source.text(sample)
        return text[:0] if index.dropped[sequence] else text

    def _pooled(self, index: StepIndex, sequence: int) -> np.ndarray:
        source, sample = self._source(index, sequence)
        if index.dropped[sequence]:
            return np.zeros(self.pooled_channels, np.float32)
        return source.pooled(sample)

    def _label(self, index: StepIndex, sequence: int) -> int:
        source, sample = self._source(index, sequence)
        assert source.labels is not None
        return int(source.labels[sample])


def _read_batch(source: Source, wanted: Sequence[Wanted]) -> list[SampleRows | BadSampleError] | None:
    """The samples of a source that reads them together; None for another."""
    if isinstance(source, Subset):
        return _read_batch(source.whole, [w._replace(sample=source.index_in_whole(w.sample)) for w in wanted])
    return source.read_batch(wanted) if isinstance(source, BatchSource) else None


def _common_widths(sources: Sequence[Source]) -> tuple[int, int, int]:
    widths = {s.name: (s.channels, s.text_channels, s.pooled_channels) for s in sources}
    if len(set(widths.values())) > 1:
        raise ValueError(
            "StepReader: all sources must have rows of one width (channels, text_channels, pooled_channels); "
            f"got {widths}. Give every source the same patch."
        )
    return next(iter(widths.values()))
