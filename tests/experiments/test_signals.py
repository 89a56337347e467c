"""Stop requests: the flag, the second interrupt, and the handlers afterwards."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from experiments._signals import StopRequest

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_sets_the_flag_and_handlers_come_back(number):
    before = [signal.getsignal(n) for n in SIGNALS]
    with StopRequest() as stop:
        assert not stop.requested
        assert not stop.agreed()
        send(number)
        assert stop.requested
        assert stop.agreed()
        assert stop.signal_name == number.name
    assert [signal.getsignal(n) for n in SIGNALS] == before


def test_second_interrupt_raises_and_handlers_come_back():
    before = [signal.getsignal(n) for n in SIGNALS]

    def interrupted_twice():
        with StopRequest():
            send(signal.SIGINT)
            send(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert [signal.getsignal(n) for n in SIGNALS] == before


def test_terminate_may_be_repeated_and_an_interrupt_may_follow():
    with StopRequest() as stop:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        send(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_request_from_the_program_is_announced_once(caplog):
    with StopRequest() as stop:
        stop.request()
        assert stop.agreed()
        assert stop.agreed()
    assert len(caplog.records) == 1


def test_only_in_the_main_thread():
    caught = []

    def enter():
        try:
            StopRequest().__enter__()
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]


def test_after_jax_distributed_took_the_signal():
    code = """
    import os, signal, socket, sys
    import jax
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=1, process_id=0)
    from experiments._signals import StopRequest
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed() and stop.signal_name == "SIGTERM"
    os.kill(os.getpid(), signal.SIGTERM)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60, check=False)
    assert done.returncode == -signal.SIGTERM
