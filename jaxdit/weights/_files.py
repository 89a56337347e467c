"""Safetensors files on disk: what is in them, read piece by piece."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

__all__ = [
    "TensorFiles",
    "TensorInfo",
    "WeightsError",
    "checkpoint_digest",
    "open_files",
]

WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
INDEX_SUFFIX = ".index.json"
# Formats that run code when they are opened.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_DTYPES = ("F64", "F32", "F16", "BF16")
# Bytes of a tensor read at once.
_CHUNK_BYTES = 8 << 20
_MOST_NAMED = 8


class WeightsError(ValueError):
    """A checkpoint that cannot be used; the message names the tensors."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file: where, its shape, and its dtype as safetensors writes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """The tensors of a checkpoint; the data is read when asked for.

    Attributes:
        path: what was opened, for messages.
        tensors: by name.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]

    def chunks(self, name: str, rows: tuple[int, int]) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, rows) of a tensor between two rows of its first axis, at most 8 MiB at a time.

        The file is mapped anew for every chunk, so that pages read before do not stay in this process.

        Raises:
            WeightsError: for values that are not finite.
        """
        info = self.tensors[name]
        row_bytes = int(np.prod(info.shape[1:])) * int(info.dtype.lstrip("BF")) // 8
        step = max(_CHUNK_BYTES // max(row_bytes, 1), 1)
        for start in range(*rows, step):
            with _opened(info.file) as file:
                chunk = file.get_slice(name)[start : min(start + step, rows[1])]
            if not np.isfinite(chunk).all():
                raise WeightsError(
                    f"{self.path}: {name} has values that are not finite. Take another checkpoint."
                )
            yield start, chunk

    def scalar(self, name: str) -> float:
        """The value of a tensor of one element.

        Raises:
            WeightsError: if it has several.
        """
        with _opened(self.tensors[name].file) as file:
            value = np.asarray(file.get_tensor(name), np.float32)
        if value.size != 1:
            raise WeightsError(f"{self.path}: {name} must be one number; got shape {list(value.shape)}.")
        return float(value.reshape(()))

    def metadata(self) -> dict[str, str]:
        """What the headers of the files say beside their tensors."""
        found: dict[str, str] = {}
        for path in sorted({info.file for info in self.tensors.values()}):
            with _opened(path) as file:
                found.update(file.metadata() or {})
        return found

    def check(self, shapes: Mapping[str, tuple[int, ...]], *, unread: frozenset[str] = frozenset()) -> None:
        """Compare with what a model needs; there may be `unread` tensors beside it.

        Raises:
            WeightsError: naming what is missing, not of the model, of another shape, or of a dtype that is no float.
        """
        found = self.tensors
        same = found.keys() & shapes.keys()
        wrong = [name for name in shapes if name in same and found[name].shape != shapes[name]]
        kinds = [name for name in found if name in same and found[name].dtype not in _DTYPES]
        problems = {
            "missing": [f"{name} {list(shape)}" for name, shape in shapes.items() if name not in found],
            "not of this model": [
                f"{name} {list(info.shape)}"
                for name, info in found.items()
                if name not in shapes and name not in unread
            ],
            "of another shape": [
                f"{name} {list(found[name].shape)}, needs {list(shapes[name])}" for name in wrong
            ],
            f"neither {', '.join(_DTYPES[:-1])} nor {_DTYPES[-1]}": [
                f"{name} {found[name].dtype}" for name in kinds
            ],
        }
        lines = [f"{len(names)} {what}: {_some(names)}" for what, names in problems.items() if names]
        if lines:
            raise WeightsError(f"{self.path} is not a checkpoint of this model. " + "; ".join(lines) + ".")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="np")
    except SafetensorError as error:
        raise WeightsError(
            f"{file} is no complete safetensors file ({error}). Fetch or save it again."
        ) from error
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error.strerror or error}.") from error


def open_files(path: str | os.PathLike[str]) -> TensorFiles:
    """Open a safetensors file, or the one checkpoint (of one file, or several with an index) in a folder.

    Raises:
        WeightsError: for anything else, and for files that are truncated, missing or disagree with their index. No
            format that can run code is ever opened.
    """
    path = Path(path)
    files, index = _files_of(path)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping: it cannot be iterated over)
                if name in tensors:
                    raise WeightsError(
                        f"{path} has {name} twice, in {tensors[name].file.name} and {file.name}."
                    )
                part = opened.get_slice(name)
                tensors[name] = TensorInfo(file, tuple(part.get_shape()), part.get_dtype())
    if index is not None:
        _check_index(path, index, tensors)
    return TensorFiles(path, tensors)


# Of each file, so many pieces of so many bytes enter its digest.
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def checkpoint_digest(path: str | os.PathLike[str]) -> str:
    """A number in hex that tells one checkpoint from another: of names, sizes, and samples of the values.

    Reads a quarter of a megabyte a file, wherever it lies.

    Raises:
        WeightsError: for what cannot be opened.
    """
    files, _ = _files_of(Path(path))
    state = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            size = file.stat().st_size
            state.update(f"{file.name} {size} ".encode())
            with open(file, "rb") as opened:
                for start in np.linspace(0, max(size - _SAMPLE_BYTES, 0), _SAMPLES).astype(np.int64):
                    opened.seek(int(start))
                    state.update(opened.read(_SAMPLE_BYTES))
        except OSError as error:
            raise WeightsError(f"{file} cannot be read: {error.strerror or error}.") from error
    return state.hexdigest()


def _files_of(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files of a checkpoint, and its index if it has one."""
    if path.suffix in _PICKLES:
        raise WeightsError(
            f"{path} is a pickle, which runs code when it is opened, and is not opened here. Save it as safetensors"
            " where it was made (diffusers: save_pretrained(..., safe_serialization=True))."
        )
    if path.name.endswith(INDEX_SUFFIX):
        return _indexed(path)
    if path.is_file():
        return [path], None
    if not path.is_dir():
        raise WeightsError(f"{path} does not exist. Give a safetensors file or the folder that holds it.")
    indices = sorted(path.glob("*.safetensors" + INDEX_SUFFIX))
    if len(indices) == 1:
        return _indexed(indices[0])
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1 and not indices:
        return files, None
    if files:
        names = _some([file.name for file in indices or files])
        raise WeightsError(f"{path} has several checkpoints: {names}. Name the file, or the index of one.")
    pickles = [file.name for file in sorted(path.iterdir()) if file.suffix in _PICKLES]
    more = (
        f" Its {_some(pickles)} are pickles, which are not opened here: save them as safetensors."
        if pickles
        else ""
    )
    raise WeightsError(f"{path} has no .safetensors file.{more}")


def _indexed(index: Path) -> tuple[list[Path], dict[str, str]]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({index.parent / Path(name).name for name in names.values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise WeightsError(f"{index} is no index of safetensors files ({error!r}).") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise WeightsError(f"{index} names files that are not beside it: {_some(missing)}.")
    return files, names


def _check_index(path: Path, index: dict[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    differ = [
        f"{name} (index: {index.get(name)}, file: {tensors[name].file.name if name in tensors else None})"
        for name in sorted(index.keys() | tensors.keys())
        if name not in tensors or index.get(name) != tensors[name].file.name
    ]
    if differ:
        raise WeightsError(
            f"{path}: the index and the files disagree on {len(differ)} tensors: {_some(differ)}."
        )
