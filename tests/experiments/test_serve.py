"""The service: bad input, a full queue, cancelling, failures, and many clients at once; its engine is a small fake."""

import base64
import io
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from experiments import serve
from experiments._program import UserError
from experiments._serve_app import Service, ServiceLimits
from experiments._serve_metrics import ServiceMetrics
from experiments._serve_queue import EndingError, Job, QueueLimits, SamplingQueue
from experiments._serve_run import bound_socket
from jaxdit.sampling import CancelledError, Request
from tests.experiments._program_cases import run
from tests.experiments._serve_cases import FakeEngine


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
    with pytest.raises(EndingError):
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


def busy_queue(engine):
    """A queue whose engine is at its first job, and two more that wait."""
    engine.gate.clear()
    queue = SamplingQueue(engine, QueueLimits(8, 1, 64, 0.01), ServiceMetrics())
    jobs = [Job(Request("a", 8, 8, steps=4), 1) for _ in range(3)]
    queue.put(jobs)
    while not engine.batches:
        time.sleep(0.01)
    return queue, jobs


def test_closing_answers_what_runs_and_refuses_what_waits():
    engine = FakeEngine()
    queue, jobs = busy_queue(engine)
    threading.Timer(0.2, engine.gate.set).start()
    assert queue.close(10)
    assert jobs[0].done.result(timeout=0).error is None
    for job in jobs[1:]:
        with pytest.raises(EndingError, match="the server ends"):
            job.done.result(timeout=0)
    assert not queue.is_alive


def test_closing_stops_a_batch_that_takes_longer():
    engine = FakeEngine()
    queue, jobs = busy_queue(engine)
    started = time.monotonic()
    assert queue.close(0.2)
    assert time.monotonic() - started < 5
    with pytest.raises(EndingError):
        jobs[0].done.result(timeout=0)


def test_closing_leaves_a_batch_behind_that_does_not_stop(monkeypatch):
    monkeypatch.setattr("experiments._serve_queue._STOP_S", 0.2)
    engine = FakeEngine(is_deaf=True)
    queue, jobs = busy_queue(engine)
    assert not queue.close(0.1)
    with pytest.raises(EndingError):
        jobs[0].done.result(timeout=0)
    engine.gate.set()  # its samples come too late, and are dropped
    queue._thread.join(10)
    assert not queue._thread.is_alive()


def served(*args):
    """A service with a fake engine in a process of its own, and its address."""
    command = [sys.executable, "-m", "tests.experiments.serve_worker", *args]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "serving tiny on" in line:
            return process, line.split()[-1]
    raise AssertionError(f"the service ended with {process.wait()}")


def ended(process, number):
    """Exit code after a signal, and seconds that it took."""
    started = time.monotonic()
    process.send_signal(number)
    try:
        return process.wait(timeout=30), time.monotonic() - started
    finally:
        process.kill()
        process.stderr.close()


@pytest.mark.parametrize(
    ("args", "first", "most_s"),
    [
        # Evaluations take 0.4 s, of which there are 4.
        pytest.param(["--grace", "10"], 200, 8, id="the batch ends"),
        pytest.param(["--grace", "0.1"], 503, 6, id="the batch is stopped"),
        pytest.param(["--grace", "0.1", "--deaf"], 503, 12, id="the batch does not stop"),
    ],
)
def test_sigterm_answers_every_request_and_ends_well(args, first, most_s):
    process, url = served(*args)
    post = partial(httpx.post, f"{url}/v1/images/generations", json={"prompt": "a cat"}, timeout=30)
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(post)
        metrics = lambda: httpx.get(f"{url}/metrics").text  # noqa: E731
        while "jaxdit_running 1.0" not in metrics():
            time.sleep(0.02)
        waiting = [pool.submit(post) for _ in range(2)]
        while "jaxdit_waiting 2.0" not in metrics():
            time.sleep(0.02)
        code, seconds = ended(process, signal.SIGTERM)
        assert running.result().status_code == first
        for answer in waiting:
            assert answer.result().status_code == 503
            assert "the server ends" in answer.result().json()["error"]["message"]
            assert answer.result().headers["retry-after"] == "5"
    assert code == 0
    assert seconds < most_s


def test_sigint_ends_an_idle_service():
    process, url = served()
    assert httpx.get(f"{url}/health").status_code == 200
    code, seconds = ended(process, signal.SIGINT)
    assert code == 0
    assert seconds < 5


def test_addresses_that_cannot_be_listened_at():
    taken = bound_socket("127.0.0.1", 0)
    with taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--host 127.0.0.1 --port {port} cannot be listened at"):
            bound_socket("127.0.0.1", port)
    with pytest.raises(UserError, match="cannot be listened at"):
        bound_socket("no.such.host.invalid", 0)
    with pytest.raises(UserError, match=r"--port must be in 0 \.\. 65535; got 65536"):
        bound_socket("127.0.0.1", 1 << 16)


def test_grace_is_a_time(capfd):
    assert run(serve.main, "--model", "x", "--grace", "-1") == 2
    assert "--grace must be seconds, at least 0" in capfd.readouterr().err
