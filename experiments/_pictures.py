"""Contact sheets of generated images and clips, single pictures, and animated clips."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from experiments._disk import writing

_PAPER, _INK, _FAINT = (255, 255, 255), (32, 33, 36), (110, 114, 120)
_GAP = 12
_FRAME_GAP = 3
_CAPTION_LINES = 3
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True, slots=True)
class SheetStyle:
    """How a contact sheet is laid out.

    Attributes:
      columns: images side by side.
      cell: side of the square that an image is fitted into, pixels; small images are enlarged by a whole
        factor, so that their pixels stay sharp.
      font_size: of captions, pixels.
    """

    columns: int = 8
    cell: int = 128
    font_size: int = 13

    def __post_init__(self) -> None:
        if min(self.columns, self.cell, self.font_size) < 1:
            raise ValueError(
                f"SheetStyle: columns, cell and font_size must be positive; got {self.columns}, {self.cell}, "
                f"{self.font_size}."
            )


def save_grid(
    path: str | Path,
    images: Sequence[np.ndarray],
    captions: Sequence[str],
    *,
    title: str = "",
    metadata: Mapping[str, str] | None = None,
    style: SheetStyle | None = None,
) -> None:
    """Writes a contact sheet as PNG: pictures of any sizes in rows, each with its caption and size.

    A clip has a row of its own, a strip of its frames; of a longer clip, evenly spaced frames are shown, the
    first and the last among them.

    Args:
      path: ends in .png.
      images: uint8 RGB, of shape (height, width, 3), or (frames, height, width, 3) for a clip.
      captions: one each; long ones are wrapped and cut.
      title: a line at the top.
      metadata: text to store in the file; the captions are stored anyway, as JSON under "captions".
      style: sizes.

    Raises:
      ValueError: no image, numbers differ, or an array is not uint8 RGB.
    """
    style = style or SheetStyle()
    if not images or len(images) != len(captions):
        raise ValueError(
            f"save_grid: needs one caption for each of at least one image; got {len(images)} images and "
            f"{len(captions)} captions."
        )
    rows: list[list[Image.Image]] = []
    open_row = False
    for image, caption in zip(images, captions, strict=True):
        frames = _as_frames(image)
        if len(frames) > 1:
            rows.append([_strip(frames, caption, style)])
            open_row = False
            continue
        if not open_row or len(rows[-1]) == style.columns:
            rows.append([])
            open_row = True
        rows[-1].append(_captioned(_fitted(frames[0], style.cell), caption, _size_note(frames), style))
    text = {**(metadata or {}), "captions": json.dumps(list(captions), ensure_ascii=False)}
    _write_png(path, _sheet(rows, title, style), text)


def save_image(path: str | Path, image: np.ndarray, metadata: Mapping[str, str] | None = None) -> None:
    """Writes one uint8 RGB image as it is; a PNG also takes text.

    Raises:
      ValueError: not uint8 RGB.
    """
    frames = _as_frames(image)
    if len(frames) > 1:
        raise ValueError(f"save_image: image must be one picture; got {len(frames)} frames. Use save_clip.")
    _write_png(path, Image.fromarray(frames[0]), metadata or {})


def save_clip(
    path: str | Path,
    frames: np.ndarray,
    metadata: Mapping[str, str] | None = None,
    *,
    fps: float = 8.0,
    scale: int = 1,
) -> None:
    """Writes a clip, as animated GIF or as H.264 in MP4 by the suffix of `path`; either takes text, as a comment.

    Args:
      path: ends in .gif or .mp4.
      frames: uint8 RGB of shape (frames, height, width, 3).
      metadata: text to store in the file, as JSON in its comment.
      fps: frames per second; a GIF rounds the time of a frame to 10 ms.
      scale: whole factor by which to enlarge, for clips too small to look at. In an MP4, whose sides have to
        be even, the last row or column is repeated where needed.

    Raises:
      ValueError: another suffix, fps or scale not positive, or not uint8 RGB.
    """
    if fps <= 0 or scale < 1:
        raise ValueError(f"save_clip: fps and scale must be positive; got fps={fps}, scale={scale}.")
    clip = np.repeat(np.repeat(_as_frames(frames), scale, axis=1), scale, axis=2)
    writers = {".gif": _write_gif, ".mp4": _write_mp4}
    suffix = Path(path).suffix.lower()
    if suffix not in writers:
        raise ValueError(f"save_clip: path must end in .gif or .mp4; got {str(path)!r}.")
    part = part_path(path)
    writers[suffix](part, clip, fps, json.dumps(dict(metadata or {}), ensure_ascii=False))
    os.replace(part, path)


def _as_frames(image: np.ndarray) -> np.ndarray:
    """(frames, height, width, 3), a picture being one frame."""
    if image.dtype != np.uint8 or image.ndim not in (3, 4) or image.shape[-1] != 3 or 0 in image.shape:
        raise ValueError(
            "images must be uint8 RGB of shape ([frames,] height, width, 3) and not empty; got "
            f"{image.dtype} of shape {image.shape}. Scale to 0..255 and round first."
        )
    return image if image.ndim == 4 else image[None]


def _fitted(pixels: np.ndarray, cell: int) -> Image.Image:
    """The picture with its longer side as near to `cell` as a whole factor gets it, or shrunk to it."""
    picture = Image.fromarray(pixels)
    longer = max(picture.size)
    if longer <= cell:
        factor = cell // longer
        return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    width, height = (max(1, round(side * cell / longer)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def _font(size: int) -> ImageFont.FreeTypeFont:
    # Pillow's own font lacks most of the world's letters; this one comes with Matplotlib.
    return ImageFont.truetype(os.path.join(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), size)


def _size_note(frames: np.ndarray) -> str:
    height, width = frames.shape[1:3]
    size = f"{height}x{width}"  # as --size and the config write it
    return size if len(frames) == 1 else f"{size}, {len(frames)} frames"


def _wrapped(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """At most `_CAPTION_LINES` lines of `text`, broken at spaces where possible."""
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if font.getlength(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and font.getlength(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    if len(lines) > _CAPTION_LINES:
        lines = lines[:_CAPTION_LINES]
        while lines[-1] and font.getlength(lines[-1] + _ELLIPSIS) > width:
            lines[-1] = lines[-1][:-1]
        lines[-1] = lines[-1].rstrip() + _ELLIPSIS
    return lines


def _captioned(picture: Image.Image, caption: str, note: str, style: SheetStyle) -> Image.Image:
    """A cell: the picture, centred if it is narrower, the caption below it, the size in a fainter line."""
    width = max(style.cell, picture.width)
    font, small = _font(style.font_size), _font(max(style.font_size - 3, 8))
    lines = _wrapped(caption, font, width)
    line_height = round(style.font_size * 1.3)
    cell = Image.new("RGB", (width, picture.height + 6 + line_height * (len(lines) + 1)), _PAPER)
    left = 0 if picture.width > style.cell else (width - picture.width) // 2
    cell.paste(picture, (left, 0))
    draw = ImageDraw.Draw(cell)
    # A hairline shows where a white picture ends.
    draw.rectangle((left, 0, left + picture.width - 1, picture.height - 1), outline=(208, 210, 214))
    for row, line in enumerate([*lines, note]):
        faint = row == len(lines)
        centred = picture.width <= style.cell
        draw.text(
            (width // 2 if centred else 0, picture.height + 4 + row * line_height),
            line,
            fill=_FAINT if faint else _INK,
            font=small if faint else font,
            anchor="ma" if centred else "la",
        )
    return cell


def _strip(frames: np.ndarray, caption: str, style: SheetStyle) -> Image.Image:
    row_width = style.columns * (style.cell + _GAP) - _GAP
    first = _fitted(frames[0], style.cell)
    room = max(2, (row_width + _FRAME_GAP) // (first.width + _FRAME_GAP))
    shown = np.unique(np.linspace(0, len(frames) - 1, min(room, len(frames))).round().astype(int))
    film = Image.new(
        "RGB", (len(shown) * (first.width + _FRAME_GAP) - _FRAME_GAP, first.height), (208, 210, 214)
    )
    for position, index in enumerate(shown):
        film.paste(_fitted(frames[index], style.cell), (position * (first.width + _FRAME_GAP), 0))
    note = _size_note(frames)
    if len(shown) < len(frames):
        note += f", {len(shown)} shown"
    return _captioned(film, caption, note, style)


def _sheet(rows: list[list[Image.Image]], title: str, style: SheetStyle) -> Image.Image:
    font = _font(style.font_size + 4)
    top = _GAP + (round(1.8 * (style.font_size + 4)) if title else 0)
    widths = [sum(cell.width + _GAP for cell in row) for row in rows]
    title_width = round(font.getlength(title)) + _GAP
    width = max([*widths, title_width]) + _GAP
    height = top + sum(max(cell.height for cell in row) + _GAP for row in rows)
    sheet = Image.new("RGB", (width, height), _PAPER)
    if title:
        ImageDraw.Draw(sheet).text((_GAP, _GAP), title, fill=_INK, font=font)
    y = top
    for row in rows:
        x = _GAP
        for cell in row:
            sheet.paste(cell, (x, y))
            x += cell.width + _GAP
        y += max(cell.height for cell in row) + _GAP
    return sheet


def part_path(path: str | Path) -> Path:
    """Where a file is written before it takes its name, so that nobody reads half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".part-{path.name}")


def write_figure(figure: Figure, path: Path, *, option: str, metadata: dict[str, Any] | None = None) -> None:
    """Writes a drawing whole or not at all; the suffix gives the format. `option` named the file, for the message.

    Raises:
      UserError: with the system's reason.
    """
    with writing(path, f"Make room or choose another {option}."):
        part = part_path(path)
        figure.savefig(part, facecolor="white", metadata=metadata)
        part.replace(path)


def _write_png(path: str | Path, picture: Image.Image, metadata: Mapping[str, str]) -> None:
    text = PngInfo()
    for key, value in metadata.items():
        text.add_itxt(key, value)
    part = part_path(path)
    picture.save(part, pnginfo=text)
    os.replace(part, path)


def _write_gif(path: Path, clip: np.ndarray, fps: float, comment: str) -> None:
    first, *rest = [Image.fromarray(frame).quantize(256, dither=Image.Dither.NONE) for frame in clip]
    first.save(
        path,
        save_all=True,
        append_images=rest,
        duration=round(1000 / fps),
        loop=0,
        optimize=False,
        comment=comment.encode(),
    )


def _write_mp4(path: Path, clip: np.ndarray, fps: float, comment: str) -> None:
    _, height, width, _ = clip.shape
    clip = np.pad(clip, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    with av.open(str(path), "w", format="mp4") as container:
        container.metadata["comment"] = comment
        stream: Any = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height = clip.shape[2], clip.shape[1]
        stream.pix_fmt = "yuv420p"  # what browsers play
        stream.options = {"crf": "18"}
        for frame in clip:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), "rgb24")))
        container.mux(stream.encode())
