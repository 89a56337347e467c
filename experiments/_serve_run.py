"""Listening until a signal comes, and ending within a bounded time."""

import contextlib
import logging
import math
import socket
import threading

import uvicorn

from experiments._program import UserError
from experiments._serve_app import Service
from experiments._signals import StopRequest

_LOG = logging.getLogger(__name__)

_POLL_S = 0.1
# For answers on their way when everything is sampled.
_ANSWER_S = 5.0


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at the address, at which nobody is heard yet; port 0 takes one that is free.

    Raises:
        UserError: for an address that there is not, or that is taken.
    """
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port must be in 0 .. 65535; got {port}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as opened:
            found = opened.enter_context(socket.socket(family, kind, protocol))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            opened.pop_all()
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port} cannot be listened at: {error}. Choose another --port."
        ) from error
    return found


def serve(service: Service, listener: socket.socket, *, grace_s: float) -> bool:
    """Answer requests until SIGTERM or SIGINT comes; then end.

    What waits is refused with 503. The batch at hand may take `grace_s` more; then it is stopped, and refused. When
    this returns all requests have had their answers. A second SIGINT ends at once.

    Args:
        service: what is served; its queue is closed at the end.
        listener: from `bound_socket`.
        grace_s: seconds that a batch may take after the signal.

    Returns:
        Whether sampling has ended; if not, it did not let itself be stopped in time.

    Raises:
        RuntimeError: if the server ends by itself.
    """
    address = listener.getsockname()
    config = uvicorn.Config(
        service.app(), log_level="warning", timeout_graceful_shutdown=math.ceil(_ANSWER_S)
    )
    # Outside the main thread uvicorn leaves signals alone; by itself it would raise SIGTERM once more when it has
    # ended, before anything here could.
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    with StopRequest() as stop:
        thread.start()
        while thread.is_alive() and not server.started:
            thread.join(_POLL_S)
        _LOG.info("serving %s on %s", service.name, _url(address))
        while thread.is_alive() and not stop.requested:
            thread.join(_POLL_S)
        if not stop.requested:
            service.queue.close(0)
            raise RuntimeError("the HTTP server ended by itself; the log says why.")
        _LOG.warning("%s: ending; the batch at hand may take %g s", stop.signal_name, grace_s)
        has_ended = service.queue.close(grace_s)
        server.should_exit = True
        thread.join(2 * _ANSWER_S)
    _LOG.info("ended")
    return has_ended


def _url(address: tuple) -> str:
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
