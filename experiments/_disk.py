"""Whether a folder can hold what a run writes, found out before the run starts, and said plainly when it cannot."""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from experiments._config import UserError

logger = logging.getLogger(__name__)


def check_writable(folder: Path, *, option: str = "--workdir") -> None:
    """Makes `folder` if need be and writes and removes a file in it.

    Permission bits do not tell: a read-only mount, a full quota or a file in the way show only on trying.

    Args:
      folder: the folder.
      option: what named it, for the message.

    Raises:
      UserError: with the system's reason.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".probe-", dir=folder)
        os.close(descriptor)
        os.unlink(name)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}. Choose another {option} or change its permissions."
        ) from error


def check_file_writable(path: Path | None, *, option: str) -> None:
    """Refuses a file that `option` names, if it names one, and it cannot be written; its folder is made if need be.

    Raises:
      UserError: for a folder of that name, or with the system's reason.
    """
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} is a file to write; {path} is a folder. Name a file in it.")
    check_writable(path.parent, option=option)
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"cannot write to {path}: not permitted. Choose another {option}.")


@contextlib.contextmanager
def writing(path: Path, way_out: str) -> Iterator[None]:
    """Marks a block that writes `path`: what the system refuses becomes a `UserError`.

    Args:
      path: what is written, for the message.
      way_out: what to do about it, a sentence.

    Raises:
      UserError: with the system's reason.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}. {way_out}") from error


def write_text(path: Path, text: str, *, option: str = "--workdir") -> None:
    """Writes a text file that nobody reads half of; `option` named its folder, for the message.

    Raises:
      UserError: with the system's reason.
    """
    part = path.with_name(f".part-{path.name}")
    with writing(path, f"Make room or choose another {option}."):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)


def check_disk_space(workdir: str | Path, checkpoint_bytes: int, keep: int) -> None:
    """Compares the space that `keep` checkpoints and one being written take with what is free.

    Compression is left out: it saves little on floating-point numbers. What files already in the run's
    checkpoints folder occupy counts as available, since they make way for the new ones.

    Args:
      workdir: the run's folder, which need not exist yet.
      checkpoint_bytes: `state_bytes` of the state to be saved.
      keep: as for `Checkpoints`.

    Raises:
      UserError: not even one more checkpoint fits. If fewer than `keep` + 1 fit, a warning is logged.
    """
    folder = Path(workdir).absolute()
    occupied = sum(file.stat().st_size for file in folder.glob("checkpoints/**/*") if file.is_file())
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    account = (
        f"a checkpoint takes up to {size_text(checkpoint_bytes)}, {keep} are kept while one is written, "
        f"{size_text(free)} are free in {folder}"
    )
    if free < checkpoint_bytes:
        raise UserError(
            f"not enough space for checkpoints: {account}. Make room or choose another --workdir."
        )
    if free < (keep + 1) * checkpoint_bytes - occupied:
        logger.warning("space for checkpoints may run out: %s. Make room or keep fewer.", account)


def size_text(num_bytes: float) -> str:
    """A size for people, in decimal units as `df -H` and disk makers use them: "1.2 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"
