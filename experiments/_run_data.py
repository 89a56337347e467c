"""The data of a run: opened, divided, and checked against the model before the first step."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from experiments._components import ModelSpec, RunSettings
from experiments._config import UserError, checking
from experiments._data_components import DataSpec
from experiments._encoding_source import EncodingSource
from experiments.data import (
    DataError,
    EncodedCache,
    EncodedFolder,
    Source,
    StepSampler,
    Subset,
    ValidationSampler,
    split_source,
)
from jaxdit.models import DiTConfig

# Sources of latents.
_Encoded = EncodedFolder | EncodedCache | EncodingSource
# Fewer held-out names than this are chosen by count and not by chance.
_FEW_NAMES = 8


@dataclass(frozen=True)
class Data:
    """The data of a run: what is trained on, and what is held out."""

    train: StepSampler
    validation: ValidationSampler | None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(
            int((s.image_lengths + np.maximum(s.text_lengths, s.dropped_text_length)).max(initial=0))
            for s in self.train.sources
        )

    @property
    def device_bytes(self) -> int:
        """Memory that frozen encoders take on a device, where they run beside the training."""
        wholes = map(_whole, self.train.sources)
        return sum(whole.device_bytes for whole in wholes if isinstance(whole, EncodingSource))


def open_data(settings: RunSettings) -> Data:
    """Open the sources, hold out validation data, and check that they fit the model.

    Raises:
        UserError: for data that is empty, lacks captions, or does not fit the model or the budget.
    """
    spec = settings.data
    with data_errors(), checking("data"):
        opened = spec.open()
        for source in opened:
            if isinstance(source, _Encoded):
                _check_row_order(source, settings.model)
        sources, held_out = _divided(opened, spec, settings.seed)
        train = StepSampler(
            sources,
            weights=spec.weights,
            token_budget=spec.token_budget,
            seed=settings.seed,
            caption_dropout=spec.caption_dropout,
            max_sequences=spec.max_sequences,
        )
        validation = None
        if held_out:
            validation = ValidationSampler(
                held_out, token_budget=train.token_budget, max_sequences=train.max_sequences
            )
    for source in sources:
        _check_fits_model(source, settings.model)
    return Data(train, validation)


@contextlib.contextmanager
def data_errors() -> Iterator[None]:
    """Marks a block that opens or reads data: data that is unusable is for the user to put right."""
    try:
        yield
    except DataError as error:
        raise UserError(str(error)) from error


def _divided(sources: list[Source], spec: DataSpec, seed: int) -> tuple[list[Source], list[Source]]:
    """Sources to train on, and to validate with; of the latter none if nothing is held out."""
    if not spec.validation_fraction:
        return sources, []
    parts = [_split(source, spec.validation_fraction, seed) for source in sources]
    return [part[0] for part in parts], [part[1] for part in parts]


def _split(source: Source, fraction: float, seed: int) -> tuple[Source, Source]:
    """Hold out a share of a source; of a small one, which chance might leave whole, at least one name."""
    names = len({source.split_name(i) for i in range(min(len(source), _FEW_NAMES * 16))})
    if names * fraction < _FEW_NAMES and len(source) <= _FEW_NAMES * 16:
        return split_source(source, count=max(round(names * fraction), 1), seed=seed)
    return split_source(source, fraction=fraction, seed=seed)


def _check_fits_model(source: Source, model: ModelSpec) -> None:
    if source.channels != model.channels:
        raise UserError(
            f"model.channels must be the data's {source.channels} channels per image row; got"
            f" channels={model.channels}. Change the model's channels, or the patch size."
        )
    if model.uses_labels:
        _check_labels(source, model)
        return
    have = (source.text_channels, source.pooled_channels)
    if have != (model.text_channels, model.pooled_channels):
        raise UserError(
            f"the model's text must come as the data brings it; got data text_channels={have[0]},"
            f" pooled_channels={have[1]} and model {model.text_channels}, {model.pooled_channels} (0 = bytes)."
            " Set text_to_image.max_text for bytes, or None for precomputed features."
        )
    longest = int(source.text_lengths.max(initial=0))
    if model.max_text is not None and longest > model.max_text:
        raise UserError(
            f"text_to_image.max_text must hold the longest caption of {source.name}; got"
            f" max_text={model.max_text}, longest={longest}. Raise it."
        )


def _whole(source: Source) -> Source:
    return source.whole if isinstance(source, Subset) else source


def _check_row_order(source: _Encoded, model: ModelSpec) -> None:
    """A DiT's rows are (row, column, channel) of its own patch; FLUX.1's, (channel, row, column)."""
    wanted = isinstance(model.config, DiTConfig)
    patch = model.config.patch_size if isinstance(model.config, DiTConfig) else source.latent_patch
    if source.channels_last != wanted or source.latent_patch != patch:
        if isinstance(source, EncodingSource):
            raise UserError("folder.encoders makes latents for FLUX.1, text_to_image; got class_to_image.")
        raise UserError(
            f"encoded.channels_last must be {wanted} and encoded.patch {patch} for this model; got"
            f" channels_last={source.channels_last}, patch={source.latent_patch}."
        )


def _check_labels(source: Source, model: ModelSpec) -> None:
    """A class-conditional model needs labels within its table, and has no place for text."""
    if source.labels is None:
        raise UserError(
            f"class_to_image needs a label for every sample; {source.name} has none. Sort the files into one"
            " folder per class, set synthetic.num_classes, or train text_to_image."
        )
    largest = int(source.labels.max(initial=0))
    if largest >= model.num_classes:
        raise UserError(
            f"class_to_image.num_classes must be above every label of {source.name}; got"
            f" num_classes={model.num_classes}, largest label {largest}. Raise it."
        )
    if source.text_lengths.any():
        raise UserError(
            f"class_to_image has no place for text; {source.name} brings captions. Set max_text=0 of the data, or"
            " train text_to_image."
        )
