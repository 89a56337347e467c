"""A request to stop, made by a signal and honoured between two steps."""

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)


class StopRequest:
    """Turns SIGTERM and the first SIGINT into a flag that the training loop polls after each step.

    ```
    with StopRequest() as stop:
        for step in ...:
            train(step)
            if stop.agreed():
                break
    save()
    ```

    A second SIGINT raises KeyboardInterrupt at once, for somebody who does not want to wait; a second SIGTERM
    changes nothing, since schedulers repeat it. On leaving, the handlers found on entering are back.

    `jax.distributed.initialize` installs a SIGTERM handler of its own in C++. Enter after it: the last one
    installed gets the signal. Python cannot see that handler, so on leaving SIGTERM has its default action,
    which lets a scheduler end a process that hangs in its shutdown.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._announced = False
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.signal_name is not None

    def agreed(self) -> bool:
        """Whether any process was asked to stop; the same answer on every process.

        With several processes this is a small all-gather: every process has to call it after the same step.
        Processes that each went by their own flag would leave the loop at different steps and hang.
        """
        import jax  # a program that only polls its own flag need not load it

        # Said here and not in the handler, which may interrupt a write to the same stream.
        if self.requested and not self._announced:
            self._announced = True
            logger.warning("%s: stopping here; interrupt once more to stop at once", self.signal_name)
        if jax.process_count() == 1:
            return self.requested
        import numpy as np
        from jax.experimental import multihost_utils

        return bool(multihost_utils.process_allgather(np.array(self.requested)).any())

    def request(self, signal_name: str = "request") -> None:
        """Asks for a stop as a signal would."""
        self.signal_name = signal_name

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "StopRequest: signals reach the main thread only; entered from another. Enter in main()."
            )
        self._install(signal.SIGTERM, self._on_terminate)
        self._install(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signal_number, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be put back from here.
            signal.signal(signal_number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _install(self, number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> None:
        self._previous[number] = signal.signal(number, handler)

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = "SIGTERM"

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name == "SIGINT":
            raise KeyboardInterrupt
        self.signal_name = "SIGINT"
