"""The barrier of a checkpoint written by several processes, which a process that failed does not leave waiting."""

import sys
import threading
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils


class PeerFailedError(RuntimeError):
    """Another process could not write its part; it says why itself."""


class Rendezvous:
    """For `orbax.checkpoint.AsyncOptions.barrier_sync_fn`: a barrier at which every process says how it is doing.

    In Orbax a process that cannot write skips the barrier "all have written", the others wait there until a
    timeout of many minutes, and so does the failed one, at a later barrier. Here the n-th barrier of one process
    meets the n-th of every other, whatever it is called. A process that arrives while an exception is passing
    through its background thread has failed: then the others raise too, and what barriers are left of this save
    let everybody through.

    Communication: a key and a barrier of the coordination service per call, no collective, so any thread may.
    """

    def __init__(self) -> None:
        self._client = ocp.multihost.get_jax_distributed_client()
        # The service keeps names for the whole run; several of these may exist in it.
        identity = multihost_utils.broadcast_one_to_all(np.array(time.time_ns() % 2**31, np.int32))
        self._name = f"checkpoint-{int(identity)}"
        self._count = 0
        self._broken = False

    def reset(self) -> None:
        """For a new save, after all processes have seen the end of the one before."""
        self._broken = False

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits for the others.

        Args:
          key: Orbax's name of the barrier, for messages only.
          timeout_ms: after which the service raises.

        Raises:
          PeerFailedError: another process has failed and this one has not.
        """
        if self._broken:
            return
        # On the main thread the caller may be handling an exception that has nothing to do with us.
        in_background = threading.current_thread() is not threading.main_thread()
        failed = in_background and sys.exc_info()[0] is not None
        place, own = f"{self._name}/{self._count}", jax.process_index()
        self._client.key_value_set(f"{place}/{own}", "failed" if failed else "fine")
        self._client.wait_at_barrier(place, timeout_ms)
        states = [state for _, state in self._client.key_value_dir_get(place)]
        if self._count >= 2:
            # All have come to this barrier, so all have read the states of the last but one.
            self._client.key_value_delete(f"{self._name}/{self._count - 2}/{own}")
        self._count += 1
        self._broken = "failed" in states
        if self._broken and not failed:
            raise PeerFailedError(f"Rendezvous: another process failed before {key}. See its own message.")
