"""Safetensors files written whole or not at all, by the first of several processes."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ._files import INDEX_SUFFIX, WeightsError

__all__ = ["check_target", "shared_target", "write_files"]


def check_target(folder: str | os.PathLike[str]) -> Path:
    """The folder to write a checkpoint to.

    Raises:
        WeightsError: if something is there already: nothing that was saved is overwritten; or for a link.
    """
    folder = Path(os.path.abspath(folder))
    if folder.is_symlink():
        raise WeightsError(f"{folder} is a link. Name the folder it leads to, or another one.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(
            f"{folder} is there already and not empty. Choose another folder, or move it away."
        )
    return folder


def shared_target(folder: str | os.PathLike[str]) -> Path:
    """The folder as the first process sees it: the others need not have it, and must not see what it has begun.

    Raises:
        WeightsError: as `check_target`, on all processes.
    """
    with _first_process_writes(Path(folder)) as is_writer:
        if is_writer:
            check_target(folder)
    return Path(os.path.abspath(folder))


def write_files(
    folder: Path,
    name: str,
    sizes: Mapping[str, int],
    fetch: Callable[[str], np.ndarray],
    *,
    max_file_bytes: int,
    others: Mapping[str, str],
) -> None:
    """Write tensors to one file, or to several with an index; the folder appears whole or not at all.

    Args:
        folder: must not be there, or be empty.
        name: of the file if there is one, such as diffusion_pytorch_model.safetensors.
        sizes: bytes of every tensor, in the order in which to write.
        fetch: gives a tensor; called once for each, on every process.
        max_file_bytes: most bytes of tensors in a file, and so in host memory, unless one tensor is larger.
        others: text files to write beside, by name.

    Raises:
        OSError: on the first process, if the system refuses to write.
        WeightsError: on the others, then.
    """
    groups = _grouped(sizes, max_file_bytes)
    stem = name.removesuffix(".safetensors")
    names = [f"{stem}-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else [name]
    texts = dict(others)
    if len(groups) > 1:
        weight_map = {tensor: file for file, group in zip(names, groups, strict=True) for tensor in group}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        texts[name + INDEX_SUFFIX] = json.dumps(index, indent=2) + "\n"
    with _appearing(folder) as partial:
        for file, group in zip(names, groups, strict=True):
            tensors = {tensor: fetch(tensor) for tensor in group}
            with _first_process_writes(folder) as is_writer:
                if is_writer:
                    _save(tensors, partial / file)
        with _first_process_writes(folder) as is_writer:
            for file, text in texts.items() if is_writer else ():
                (partial / file).write_text(text, encoding="utf-8")


@contextmanager
def _first_process_writes(folder: Path) -> Iterator[bool]:
    """A block that the first process alone does, and after which all know whether it could.

    Else the others would go on to the next tensor and wait there for a process that has left. Every process comes to
    every such block; what can fail on one of them alone stands inside. Communication: one number from the first.

    Args:
        folder: what is written, for the message.

    Yields:
        Whether this process is the one that writes.

    Raises:
        WeightsError: on the others, if the first one raised.
    """
    failed = True
    try:
        yield jax.process_index() == 0
        failed = False
    finally:  # also while an exception passes: the others wait here
        failed_there = bool(multihost_utils.broadcast_one_to_all(np.array(failed)))
    if failed_there:
        raise WeightsError(
            f"{folder} was not written: the first process could not, and says why itself. Run again once it can."
        )


def _save(tensors: dict[str, np.ndarray], file: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # what the system refuses comes as this
        raise OSError(str(error)) from error
    file.chmod(0o666 & ~_umask())  # the library makes files that only their owner reads


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder of its own beside, which takes the place of `folder` at the end, and is removed if anything fails.

    The first process makes, moves and removes it; the others get its path only.
    """
    partial = folder
    with _first_process_writes(folder) as is_writer:
        if is_writer:
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield partial
        with _first_process_writes(folder) as is_writer:
            if is_writer:
                partial.chmod(0o777 & ~_umask())
                if folder.exists():
                    folder.rmdir()  # refuses if something has appeared in it
                partial.rename(folder)
    finally:
        if partial != folder:
            shutil.rmtree(partial, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _grouped(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups
