"""The GPUs' ring kernel, every block of every device a thread: keys are whole when read, and overwritten no earlier.

What moves and attends is replaced by notes of whose keys lie where; waits and signals are the kernel's own.
"""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from parallel import _one_sided_mosaic as kernel

PUT, ATTEND = 2, 2


class Machine:
    """Devices in a ring. A slot's note is whose keys each putting block has left there."""

    def __init__(self, size: int, slow: tuple[int, int]) -> None:
        self.size, self.slow = size, slow
        self.slots = [[[None] * PUT for _ in range(2)] for _ in range(size)]
        self.counts: dict[Any, int] = {}
        self.changed = threading.Condition()
        self.here = threading.local()
        self.attended: dict[tuple[int, int], list[int]] = {}
        self.errors: list[str] = []

    def work(self) -> None:
        """Takes long in the slow block."""
        time.sleep(0.01 if (self.here.device, self.here.block) == self.slow else 0.0002)

    def notes(self, keys: Any) -> list[Any]:
        own, device, slot = keys
        return [device] * PUT if own else list(self.slots[device][slot])

    def put(self, keys: Any, there: Any, block: int, blocks: int) -> None:
        assert blocks == PUT
        (owner,) = set(self.notes(keys)[block : block + 1])
        self.work()
        self.slots[there[1]][there[2]][block] = owner

    def attend(self, attention: Any, q: Any, keys: Any, total: Any, *, is_first: bool) -> None:
        before = self.notes(keys)
        self.work()
        after = self.notes(keys)
        done = self.attended.setdefault((self.here.device, self.here.block), [])
        assert is_first == (not done)
        if before != after or len(set(before)) != 1:
            self.errors.append(f"device {self.here.device}, step {len(done)}: {before}, then {after}")
        done.append(before[0])

    def signal(self, semaphore: Any, device_id: int) -> None:
        with self.changed:
            key = device_id, semaphore
            self.counts[key] = self.counts.get(key, 0) + 1
            self.changed.notify_all()

    def wait(self, semaphore: Any, value: int, decrement: bool) -> None:
        assert not decrement
        key = self.here.device, semaphore
        with self.changed:
            if not self.changed.wait_for(lambda: self.counts.get(key, 0) >= value, timeout=30):
                self.errors.append(f"device {self.here.device} waits for {semaphore} for ever")
                raise TimeoutError

    def run_block(self, device: int, block: int) -> None:
        self.here.device, self.here.block = device, block
        slots = Indexed(lambda slot: (False, device, slot))
        semaphores = ("entered", *(Indexed(lambda i, name=name: (name, i)) for name in ("arrived", "room")))
        blocks = kernel.Blocks(PUT, ATTEND)
        own = (True, device, None)
        kernel._ring_kernel("x", blocks, 1.0, None, own, None, None, slots, *semaphores)


class Indexed:
    """x.at[i]."""

    def __init__(self, item: Any) -> None:
        self.at = type("At", (), {"__getitem__": lambda _, i: item(i)})()


@pytest.fixture
def run_ring(monkeypatch):
    def run(size: int, slow: tuple[int, int]) -> Machine:
        machine = Machine(size, slow)
        here = machine.here
        index = {"x": lambda: here.device, "blocks": lambda: here.block}
        lax = SimpleNamespace(
            axis_size=lambda _: size, axis_index=lambda axis: index[axis](), rem=lambda a, b: a % b
        )
        pallas = SimpleNamespace(
            when=lambda condition: lambda function: function() if condition else None,
            semaphore_signal=machine.signal,
            semaphore_wait=machine.wait,
        )
        monkeypatch.setattr(kernel, "lax", lax)
        monkeypatch.setattr(kernel, "pl", pallas)
        remote_ref = SimpleNamespace(remote_ref=lambda ref, device: (False, device, ref[2]))
        monkeypatch.setattr(kernel, "plgpu", remote_ref)
        monkeypatch.setattr(kernel, "device_id", lambda _, index: index)
        monkeypatch.setattr(kernel, "_put_keys", machine.put)
        monkeypatch.setattr(kernel, "attend_tiles", machine.attend)
        places = [(device, block) for device in range(size) for block in range(PUT + ATTEND)]
        threads = [threading.Thread(target=machine.run_block, args=place, daemon=True) for place in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return machine

    return run


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("block", range(PUT + ATTEND))
def test_a_slow_block_neither_reads_nor_leaves_wrong_keys(run_ring, size, block):
    machine = run_ring(size, (1, block))
    assert not machine.errors
    for device in range(size):
        for attending in range(PUT, PUT + ATTEND):
            assert machine.attended[device, attending] == [(device - step) % size for step in range(size)]


def test_the_threads_notice_keys_that_are_overwritten_early(run_ring, monkeypatch):
    monkeypatch.setattr(kernel, "needs_room", lambda step: False)
    assert run_ring(6, (1, PUT)).errors
