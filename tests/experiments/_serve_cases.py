"""An engine for tests of the service that paints at once, or when it is let."""

import threading
import time

import numpy as np

from jaxdit.encoders import Grid
from jaxdit.sampling import CancelledError, NonFiniteError, Sample, check_request, with_defaults


class FakePipeline:
    def grid(self, request):
        return Grid(request.frames, request.height // 8, request.width // 8)


class FakeEngine:
    """Paints a picture by its seed; prompts say what shall go wrong."""

    def __init__(self, *, is_deaf=False, step_s=0.0):
        """`is_deaf`: does not stop when it is asked to."""
        self.is_deaf, self.step_s = is_deaf, step_s
        self.pipeline = FakePipeline()
        self.batches = []
        self.gate = threading.Event()
        self.gate.set()

    def checked(self, requests):
        found = [with_defaults(request, steps=4, guidance=3.5) for request in requests]
        for request in found:
            check_request(request, unit=8, most_pixels=1 << 20, channels=3)
        return found

    def generate(self, requests, *, progress=None):
        self.batches.append(list(requests))
        for step in range(4):
            while not self.gate.wait(0.01):
                self._look(progress, step)
            time.sleep(self.step_s)
            self._look(progress, step + 1)
        if any(request.prompt == "crash" for request in requests):
            raise RuntimeError("out of memory")
        return [self._sample(request) for request in requests]

    def _look(self, progress, step):
        if progress(step, 4) and not self.is_deaf:
            raise CancelledError("stopped")

    def _sample(self, request):
        if request.prompt == "nan":
            return Sample(request, None, NonFiniteError("latents became NaN at step 2 of 4"), {})
        shape = request.frames, request.height, request.width, 3
        frames = np.full(shape, request.seed % 256, np.uint8)
        frames += np.arange(request.frames, dtype=np.uint8)[:, None, None, None]
        return Sample(request, frames, None, {"prompt": request.prompt, "seed": request.seed})
