"""Requests of all kinds for the service, and clients that send them."""

import base64
import http.client
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from experiments._tiny_pipeline import WORDS

# Shares of requests whose client goes before the answer comes, and that cannot be made.
_GONE, _WRONG = 0.08, 0.08
_UNIT = 16
_TIMEOUT_S = 600.0
_RETRY_S = 0.2
_INVALID: tuple[dict[str, Any], ...] = (
    {"size": "65x64"},
    {"size": "huge"},
    {"size": "99999x99999"},
    {"steps": 0},
    {"n": 99},
    {"guidance": "much"},
    {"prompt": None},
    {"colour": "blue"},
)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request to send.

    Attributes:
        body: JSON values.
        kind: "whole", "gone" (its client goes) or "wrong" (it cannot be made).
        leaves_s: seconds after which the client goes.
    """

    body: dict[str, Any]
    kind: str
    leaves_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request.

    Attributes:
        sent: the request.
        status: HTTP status; 0 where the client went.
        seconds: from the first attempt to the answer.
        refused: attempts answered by 429 before.
        problem: what is wrong with it; empty if nothing.
    """

    sent: Sent
    status: int
    seconds: float
    refused: int
    problem: str


def draw_requests(count: int, *, seed: int, largest: int) -> list[Sent]:
    """Mixed requests: sizes of 64 to `largest` pixels, 1 to 4 steps, 1 to 3 pictures, some guided."""
    rng = np.random.default_rng(seed)
    return [_draw(rng, number, largest) for number in range(count)]


def _draw(rng: np.random.Generator, number: int, largest: int) -> Sent:
    width, height = _UNIT * rng.integers(4, largest // _UNIT + 1, 2)
    body: dict[str, Any] = {
        "prompt": " ".join(rng.choice(WORDS, rng.integers(0, 9))),
        "size": f"{width}x{height}",
        "steps": int(rng.integers(1, 5)),
        "n": int(rng.choice(3, p=[0.8, 0.1, 0.1])) + 1,
        "seed": number,
    }
    if rng.random() < 0.5:
        body["guidance"] = round(float(rng.uniform(1, 7)), 1)
    if rng.random() < 0.1:
        body |= {"true_guidance": 2.0, "negative_prompt": "grey"}
    chance, leaves_s = rng.random(), float(rng.uniform(0.01, 0.5))
    if chance < _WRONG:
        return Sent(body | _INVALID[number % len(_INVALID)], "wrong")
    return Sent(body, "gone", leaves_s) if chance < _WRONG + _GONE else Sent(body, "whole")


class Load:
    """Clients that send requests, each its next as soon as the one before is answered.

    Args:
        address: host and port.
        requests: in the order in which they are taken.
        clients: that send at a time.
    """

    def __init__(self, address: tuple[str, int], requests: Sequence[Sent], clients: int) -> None:
        self._address, self._clients = address, clients
        self._next: Iterator[Sent] = iter(requests)
        self._lock = threading.Lock()
        self.answers: list[Answer] = []

    def run(self) -> list[Answer]:
        """Answers of all requests, in the order in which they came."""
        with ThreadPoolExecutor(self._clients) as pool:
            for client in [pool.submit(self._client) for _ in range(self._clients)]:
                client.result()
        return self.answers

    def _client(self) -> None:
        while True:
            with self._lock:
                sent = next(self._next, None)
            if sent is None:
                return
            answer = self._asked(sent)
            with self._lock:
                self.answers.append(answer)

    def _asked(self, sent: Sent) -> Answer:
        started, refused = time.monotonic(), 0
        while True:
            status, body = self._attempt(sent)
            if status != 429:
                break
            refused += 1
            time.sleep(_RETRY_S)
        return Answer(sent, status, time.monotonic() - started, refused, _problem(sent, status, body))

    def _attempt(self, sent: Sent) -> tuple[int, bytes]:
        """Status and body; 0 and nothing where the client goes or the connection breaks."""
        connection = http.client.HTTPConnection(*self._address, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", "/v1/images/generations", json.dumps(sent.body))
            if sent.kind == "gone":
                time.sleep(sent.leaves_s)
                return 0, b""
            response = connection.getresponse()
            return response.status, response.read()
        except OSError:
            return 0, b""
        finally:
            connection.close()


def _problem(sent: Sent, status: int, body: bytes) -> str:
    """What is wrong with an answer."""
    wanted = {"whole": 200, "wrong": 400, "gone": 0}[sent.kind]
    if status != wanted:
        return f"status {status} instead of {wanted}"
    if sent.kind != "whole":
        return ""
    pictures = [Image.open(io.BytesIO(base64.b64decode(one["b64_json"]))) for one in json.loads(body)["data"]]
    sizes = [f"{picture.width}x{picture.height}" for picture in pictures]
    return "" if sizes == [sent.body["size"]] * sent.body["n"] else f"pictures of {sizes}"


def statuses(answers: Sequence[Answer]) -> dict[str, int]:
    """How many answers of each kind and status."""
    found = Counter(f"{answer.sent.kind} {answer.status or '-'}" for answer in answers)
    return dict(sorted(found.items()))


def get(address: tuple[str, int], path: str) -> tuple[int, str]:
    """Status and text of a GET."""
    connection = http.client.HTTPConnection(*address, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()
