"""How a program ends: a line on stderr and an exit code for what its user can put right.

A program is `sys.exit(run_program(main, sys.argv[1:]))`.
"""

import contextlib
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence

EXIT_DEFECT = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
# How long a process that failed waits for its peers to fail as well.
_LEAVE_S = 5.0
# gin appends its call stack to the text of every exception that passes through a configurable.
_GIN_CALL_NOTE = "\n  In call to configurable"


class UserError(Exception):
    """What the person who started the program can put right: one line that names the way out."""


def run_program(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int:
    """Runs `main(argv)` and turns what it raises into an exit code.

    A `UserError` (and a missing gin binding, which gin reports at the call) is printed as one line on stderr.
    Any other exception is a defect and keeps its traceback.

    With several processes, one that failed alone does not wait for the others, which wait for it in a
    collective operation: it leaves after `_LEAVE_S`, and they end when its connections or heartbeats do.

    Args:
      main: takes the arguments after the program's name, returns an exit code or None for 0.
      argv: `sys.argv[1:]`.

    Returns:
      The exit code: 2 for a `UserError`, 130 after an interrupt from the keyboard.
    """
    try:
        return main(argv) or 0
    except UserError as error:
        message: str | None = str(error)
    except KeyboardInterrupt:
        message = None
    except Exception as error:
        message = _missing_bindings(str(error)) if isinstance(error, RuntimeError) else None
        if message is None and not _has_peers():
            raise
        if message is None:
            traceback.print_exc()
            return _leave(EXIT_DEFECT)
    sys.stderr.write("interrupted\n" if message is None else f"error: {one_line(message)}\n")
    return _leave(EXIT_INTERRUPTED if message is None else EXIT_USER_ERROR)


def write_report(text: str) -> None:
    """Writes to standard output; a reader that has seen enough is no error.

    Raises:
      UserError: with the system's reason.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise UserError(f"cannot write to standard output: {error.strerror}.") from error


def log_to_stderr(form: str = "%(asctime)s %(message)s") -> None:
    """Sends the log to stderr, without what libraries say of themselves."""
    logging.basicConfig(level=logging.INFO, format=form, datefmt="%H:%M:%S", stream=sys.stderr)
    for name in ("absl", "jax", "orbax", "grain"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _has_peers() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1


def _leave(code: int) -> int:
    """Returns `code`, or with several processes ends this one even if the others do not come along."""
    if _has_peers():
        import jax

        # Succeeds at once where all processes met the same error, and else waits for minutes.
        goodbye = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        goodbye.start()
        goodbye.join(_LEAVE_S)
        if goodbye.is_alive():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return code


@contextlib.contextmanager
def checking(subject: str = "") -> Iterator[None]:
    """Marks a block as checks of what the user asked for: its ValueErrors and kin become `UserError`s.

    Args:
      subject: what is being checked, put before the text ("bag spec"); empty for nothing.

    Raises:
      UserError: for a ValueError, TypeError or NotImplementedError from the block, first line of its text.
    """
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        text = one_line(str(error)) or type(error).__name__
        raise UserError(f"{subject}: {text}" if subject else text) from error


def seed(text: str) -> int:
    """A command line's seed, for `argparse`.

    Raises:
      ValueError: it is not in [0, 2^63), which argparse reports.
    """
    value = int(text)
    if not 0 <= value < 1 << 63:
        raise ValueError("out of range")
    return value


def one_line(text: str) -> str:
    """`text` without gin's call notes, its line breaks and indentation folded into single spaces."""
    return " ".join(text.split(_GIN_CALL_NOTE)[0].split())


def _missing_bindings(text: str) -> str | None:
    match = re.match(r"Required bindings for `(.+?)` not provided in config: \[(.*?)\]", text)
    if match is None:
        return None
    names = [f"{match[1]}.{name.strip(chr(39))}" for name in match[2].split(", ")]
    example = f"--set {names[0]}=VALUE"
    return f"config: {', '.join(names)} must be set and is not. Set it in the config file or with {example}."
