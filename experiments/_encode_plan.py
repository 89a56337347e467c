"""What a cache will consist of: a function of data, encoders and settings, the same in every process and every time."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from experiments._canvases import Canvases
from experiments._config import UserError
from experiments._encoders import EncoderSettings, digests, latent_sizes, text_rows
from experiments.data import (
    CACHE_FILE,
    CacheInfo,
    CacheLayout,
    MediaRules,
    MediaSource,
    digest_of,
    read_info,
    write_info,
)
from jaxdit.pipelines import FluxFolder

_PATCH = 2


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What a cache is made with, beside the encoders' settings.

    Attributes:
        rules: how files become sequences.
        shard_bytes: about the most bytes of a shard.
        latent_dtype: of latents and their log-variance.
        has_variance: whether the log-variance is kept, so that training can draw latents.
        group_pixels: pixels that a device encodes together, of pictures smaller than that.
    """

    rules: MediaRules
    shard_bytes: int
    latent_dtype: str
    has_variance: bool
    group_pixels: int


@dataclass(frozen=True, eq=False)
class CachePlan:
    """The samples of a cache, by shard.

    Attributes:
        source: pictures and captions.
        folder: of the encoders.
        info: what `cache.json` says.
        canvases: in which pictures are encoded.
        tokens: text rows of every sample.
        shards: numbers of the samples of each shard, those of one canvas together.
    """

    source: MediaSource
    folder: FluxFolder
    info: CacheInfo
    canvases: Canvases
    tokens: Int32[np.ndarray, " n"]
    shards: list[Int64[np.ndarray, " _"]]

    @classmethod
    def make(
        cls, source: MediaSource, folder: FluxFolder, encoders: EncoderSettings, settings: CacheSettings
    ) -> "CachePlan":
        """The plan.

        Raises:
            DataError: for captions that are too long, or files of the pipeline that cannot be read.
        """
        configs = folder.configs
        layout = CacheLayout(
            latent_channels=configs.vae.latent_channels,
            patch=_PATCH,
            latent_dtype=settings.latent_dtype,
            has_variance=settings.has_variance,
            text_channels=configs.t5.width,
            text_dtype=encoders.text_dtype,
            pooled_channels=configs.clip.width,
        )
        tokens = text_rows(folder, source, padding=encoders.padding)
        canvases = Canvases.plan(
            latent_sizes(source, _PATCH),
            most=encoders.canvases,
            group_pixels=settings.group_pixels // configs.vae.factor**2,
        )
        shards = _shards(source, layout, canvases, tokens, settings.shard_bytes)
        made_of = {
            **digests(folder),
            "data": digest_of([source.digest, *_file_sizes(source)]),
            **_named_settings(folder, encoders, settings),
        }
        info = CacheInfo(layout, len(source), len(shards), made_of)
        return cls(source, folder, info, canvases, tokens, shards)

    def shard_bytes(self, shard: int) -> int:
        """Bytes of a shard's samples."""
        layout, grids = self.info.layout, self.source.grids
        return sum(layout.sample_bytes(grids[i].tolist(), int(self.tokens[i])) for i in self.shards[shard])


def _named_settings(folder: FluxFolder, encoders: EncoderSettings, settings: CacheSettings) -> dict[str, Any]:
    """Settings that what is in a cache depends on, by the program's arguments."""
    rules = settings.rules
    return {
        "--text-tokens": folder.text_tokens,
        "--no-padding": not encoders.padding,
        "--truncate": encoders.on_long == "truncate",
        "--dtype": encoders.dtype,
        "--canvases": encoders.canvases,
        "--shard-mb": settings.shard_bytes / 1e6,
        "--max-tokens": rules.max_tokens,
        "--frame-stride": rules.frame_stride,
        "--max-frames": rules.max_frames,
    }


def _file_sizes(source: MediaSource) -> list[str]:
    """Sizes of the files, which tell a picture that was replaced from what it was."""
    paths = {source.file(i): None for i in range(len(source))}
    return [str(path.stat().st_size) for path in paths]


def _shards(
    source: MediaSource,
    layout: CacheLayout,
    canvases: Canvases,
    tokens: Int32[np.ndarray, " n"],
    most_bytes: int,
) -> list[Int64[np.ndarray, " _"]]:
    """Samples in the order of their canvases, cut where a shard would be larger than that."""
    places = [canvases.of_size[h * _PATCH, w * _PATCH] for h, w in source.grids[:, 1:].tolist()]
    order = sorted(range(len(source)), key=lambda i: (places[i], i))
    cuts, held = [0], 0
    for place, i in enumerate(order):
        size = layout.sample_bytes(source.grids[i].tolist(), int(tokens[i]))
        if held and held + size > most_bytes:
            cuts.append(place)
            held = 0
        held += size
    return np.split(np.asarray(order, np.int64), cuts[1:])


def claim(root: Path, info: CacheInfo) -> None:
    """Makes the folder this cache's, or sees that it is.

    Raises:
        UserError: if it is another cache's, naming what differs, or holds something else.
    """
    if not (root / CACHE_FILE).is_file():
        if root.is_dir() and any(not path.name.startswith(".") for path in root.iterdir()):
            raise UserError(f"--out {root} is neither empty nor a cache. Choose another --out.")
        write_info(root, info)
    there = read_info(root)
    if there == CacheInfo(**_round_trip(info)):
        return
    ours, theirs = _flat(info), _flat(there)
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    told = [
        name if len(str(ours.get(name))) > 24 else f"{name} {theirs.get(name)}, now {ours.get(name)}"
        for name in names
    ]
    raise UserError(
        f"--out {root} was made of something else: {'; '.join(told)}. Restore what it was, or choose another --out."
    )


def _round_trip(info: CacheInfo) -> dict[str, Any]:
    """As JSON gives it back."""
    content = json.loads(info.text())
    content.pop("format")
    return {**content, "layout": CacheLayout(**content["layout"])}


def _flat(info: CacheInfo) -> dict[str, Any]:
    content = _round_trip(info)
    return {**dataclasses.asdict(content["layout"]), **content["made_of"], "samples": content["num_samples"]}
