"""The service: bad input, a full queue, cancelling, failures, and many clients at once; its engine is a small fake."""

import base64
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from experiments._serve_app import Service, ServiceLimits
from experiments._serve_metrics import ServiceMetrics
from experiments._serve_queue import Job, QueueFullError, QueueLimits, SamplingQueue
from jaxdit.encoders import Grid
from jaxdit.sampling import CancelledError, NonFiniteError, Request, Sample
from jaxdit.sampling._request import check_request, with_defaults


class FakePipeline:
    def grid(self, request):
        return Grid(request.frames, request.height // 8, request.width // 8)


class FakeEngine:
    """Paints a picture by its seed; prompts say what shall go wrong."""

    def __init__(self):
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
                if progress(step, 4):
                    raise CancelledError("stopped")
            if progress(step + 1, 4):
                raise CancelledError("stopped")
        if any(request.prompt == "crash" for request in requests):
            raise RuntimeError("out of memory")
        return [self._sample(request) for request in requests]

    def _sample(self, request):
        if request.prompt == "nan":
            return Sample(request, None, NonFiniteError("latents became NaN at step 2 of 4"), {})
        shape = request.frames, request.height, request.width, 3
        frames = np.full(shape, request.seed % 256, np.uint8)
        frames += np.arange(request.frames, dtype=np.uint8)[:, None, None, None]
        return Sample(request, frames, None, {"prompt": request.prompt, "seed": request.seed})


@pytest.fixture
def made():
    engine, metrics = FakeEngine(), ServiceMetrics()
    queue = SamplingQueue(engine, QueueLimits(waiting=8, batch=4, batch_tokens=64, gather_s=0.01), metrics)
    service = Service(engine, queue, metrics, ServiceLimits(pixels=1 << 16, size="16x8"), "tiny")
    with TestClient(service.app(), raise_server_exceptions=False) as client:
        yield engine, queue, client
    engine.gate.set()
    queue.close(10)


def ask(client, **body):
    return client.post("/v1/images/generations", json={"prompt": "a cat", **body})


def pictures(response):
    return [Image.open(io.BytesIO(base64.b64decode(data["b64_json"]))) for data in response.json()["data"]]


def test_pictures_and_what_they_say_of_themselves(made):
    _, _, client = made
    response = ask(client, n=2, size="24x16", seed=7)
    assert response.status_code == 200
    first, second = pictures(response)
    assert first.size == second.size == (24, 16)
    assert first.getpixel((0, 0)) == (7, 7, 7)
    assert first.text["prompt"] == "a cat"
    (clip,) = pictures(ask(client, frames=3))
    assert clip.n_frames == 3


def test_a_seed_is_drawn_where_none_is_given(made):
    _, _, client = made
    assert ask(client).json()["seed"] != ask(client).json()["seed"]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"prompt": None}, "prompt: a text"),
        ({"prompt": 3}, "prompt: a text"),
        ({"prompt": "a" * 4001}, "at most 4000 characters"),
        ({"size": "large"}, "WIDTHxHEIGHT"),
        ({"size": "16x17"}, "height: a positive multiple of 8; got height=17. Try 16."),
        ({"size": "0x16"}, "width: a positive multiple of 8"),
        ({"size": "99999x99999"}, "at most 65,536 pixels"),
        ({"n": 0}, "n: a whole number, 1 to 4"),
        ({"n": 5}, "n: a whole number, 1 to 4"),
        ({"n": True}, "n: a whole number"),
        ({"steps": 101}, "steps: a whole number, 1 to 100"),
        ({"steps": 2.5}, "steps: a whole number"),
        ({"seed": -1}, "seed: a whole number"),
        ({"seed": 1 << 70}, "seed: a whole number"),
        ({"guidance": "much"}, "guidance: a number"),
        ({"guidance": -1.0}, "guidance: finite and not negative"),
        ({"guidance": 1e9}, "guidance: a number"),
        ({"response_format": "url"}, "b64_json"),
        ({"cfg": 3}, "cfg: not known"),
        ({"frames": 0}, "frames: a whole number"),
    ],
)
def test_bad_input_is_refused_by_name(made, body, part):
    engine, _, client = made
    response = ask(client, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert part in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == next(iter(body)) or error["param"] in ("height", "width")
    assert not engine.batches


def test_bodies_that_are_none(made):
    _, _, client = made
    for content, status in (
        (b"{", 400),
        (b"[1]", 400),
        (b"\xff", 400),
        (b"[" * 100_000, 400),
        (b"1" * (2 << 20), 413),
    ):
        assert client.post("/v1/images/generations", content=content).status_code == status
    assert client.get("/v1/images/generations").status_code == 405
    assert ask(client, model="other").status_code == 404
    assert ask(client, model="tiny").status_code == 200


def test_a_request_that_fails_fails_alone(made):
    engine, queue, client = made
    engine.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(ask, client)
        while not engine.batches:
            time.sleep(0.01)
        others = [pool.submit(ask, client, prompt=prompt) for prompt in ("nan", "a dog")]
        while len(queue._jobs) < 2:
            time.sleep(0.01)
        engine.gate.set()
        assert first.result().status_code == 200
        assert others[0].result().status_code == 422
        assert "at step 2 of 4" in others[0].result().json()["error"]["message"]
        assert others[1].result().status_code == 200
    assert [len(batch) for batch in engine.batches] == [1, 2]


def test_no_request_stops_the_server(made):
    _, _, client = made
    assert ask(client, prompt="crash").status_code == 500
    assert ask(client).status_code == 200
    assert client.get("/health").json() == {"status": "ok"}


def test_a_full_queue_says_so_and_all_of_a_request_is_refused(made):
    engine, queue, client = made
    engine.gate.clear()
    with ThreadPoolExecutor(12) as pool:
        running = pool.submit(ask, client)
        while not engine.batches:
            time.sleep(0.01)
        waiting = [pool.submit(ask, client) for _ in range(7)]
        while len(queue._jobs) < 7:
            time.sleep(0.01)
        refused = ask(client, n=2)
        assert refused.status_code == 429
        assert "7 requests wait, of 8 at most" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "5"
        engine.gate.set()
        assert {x.result().status_code for x in (running, *waiting)} == {200}


def test_batches_are_of_one_number_of_steps_and_fit():
    engine = FakeEngine()
    engine.gate.clear()
    queue = SamplingQueue(engine, QueueLimits(8, 4, 64, 0.01), ServiceMetrics())
    requests = [Request("a", 8, 8, steps=s) for s in (4, 4, 9, 4)]
    jobs = [Job(request, tokens) for request, tokens in zip(requests, (100, 30, 1, 30), strict=True)]
    queue.put(jobs)
    engine.gate.set()
    for job in jobs:
        job.done.result(timeout=10)
    assert [[request.steps for request in batch] for batch in engine.batches] == [[4], [4, 4], [9]]
    queue.close(10)
    with pytest.raises(QueueFullError):
        queue.put([Job(requests[0], 1)])


def test_a_batch_that_nobody_waits_for_is_stopped():
    engine = FakeEngine()
    engine.gate.clear()
    queue = SamplingQueue(engine, QueueLimits(8, 1, 64, 0.01), ServiceMetrics())
    first, second, third = (Job(Request("a", 8, 8, steps=4), 1) for _ in range(3))
    queue.put([first, second, third])
    while not engine.batches:
        time.sleep(0.01)
    queue.cancel(second)
    queue.cancel(first)
    with pytest.raises(CancelledError):
        first.done.result(timeout=10)
    engine.gate.set()
    assert third.done.result(timeout=10).error is None
    assert len(engine.batches) == 2
    queue.close(10)


def test_many_clients_and_none_is_lost(made):
    engine, _, client = made
    rng = np.random.default_rng(0)
    sizes = [f"{8 * w}x{8 * h}" for w, h in rng.integers(1, 9, (60, 2))]

    def one(number):
        while True:
            response = ask(client, size=sizes[number], seed=number)
            if response.status_code != 429:
                return number, response
            time.sleep(0.05)

    with ThreadPoolExecutor(16) as pool:
        for number, response in pool.map(one, range(60)):
            assert response.status_code == 200
            (picture,) = pictures(response)
            assert f"{picture.width}x{picture.height}" == sizes[number]
            assert picture.getpixel((0, 0)) == (number,) * 3
    assert max(map(len, engine.batches)) > 1
    text = client.get("/metrics").text
    assert 'jaxdit_responses_total{code="200"} 60.0' in text
    assert "jaxdit_waiting 0.0" in text
    assert "jaxdit_pictures_total 60.0" in text
