"""The service's HTTP side: requests in OpenAI's form, checked, queued, and answered."""

import asyncio
import base64
import io
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from experiments._serve_metrics import ServiceMetrics
from experiments._serve_queue import EndingError, Job, QueueFullError, SamplingQueue
from jaxdit.sampling import Engine, NonFiniteError, Request, Sample

_LOG = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20
# How often a waiting response looks whether its client is still there.
_POLL_S = 0.1
_RETRY_S = "5"
_LATER = (429, 503)
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """What a single request may ask for.

    Attributes:
        pixels, frames: most of a picture or clip.
        steps: most of the sampler.
        pictures: most of one request.
        prompt: most characters.
        size: of requests that name none.
    """

    pixels: int = 2048 * 2048
    frames: int = 121
    steps: int = 100
    pictures: int = 4
    prompt: int = 4000
    size: str = "1024x1024"


class RefusedError(ValueError):
    """A request that is answered by an error.

    Attributes:
        status: HTTP status.
        parameter: which one is wrong; None if it is none.
    """

    def __init__(self, status: int, text: str, parameter: str | None = None) -> None:
        super().__init__(text)
        self.status, self.parameter = status, parameter


@dataclass(frozen=True)
class Service:
    """An engine behind HTTP.

    Attributes:
        engine: checks requests.
        queue: samples them.
        metrics: counts.
        limits: of requests.
        name: of the model.
    """

    engine: Engine
    queue: SamplingQueue
    metrics: ServiceMetrics
    limits: ServiceLimits
    name: str

    def app(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                Route("/v1/images/generations", self._generations, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ]
        )

    async def _health(self, http: HttpRequest) -> Response:
        is_well = self.queue.is_alive
        return JSONResponse({"status": "ok" if is_well else "ending"}, 200 if is_well else 503)

    async def _metrics(self, http: HttpRequest) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.name, "object": "model"}]})

    async def _generations(self, http: HttpRequest) -> Response:
        started = time.monotonic()
        pictures = 0
        try:
            requests = await asyncio.to_thread(self._requests, await _body(http))
            samples = await self._sampled(http, requests)
            response: Response = JSONResponse(await asyncio.to_thread(_answer, samples))
            pictures = len(samples)
        except RefusedError as error:
            response = _refusal(error)
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception as error:  # no request may stop the server
            _LOG.exception("a request failed")
            response = _refusal(RefusedError(500, f"sampling failed: {type(error).__name__}."))
        self.metrics.responded(response.status_code, time.monotonic() - started, pictures)
        return response

    def _requests(self, body: Mapping[str, Any]) -> list[Request]:
        """The requests of a body, one for each picture.

        Raises:
            RefusedError: for what cannot be made.
        """
        given = _Fields(body)
        limits = self.limits
        prompt = given.text("prompt", required=True)
        negative = given.text("negative_prompt")
        for name, text in (("prompt", prompt), ("negative_prompt", negative)):
            if text is not None and len(text) > limits.prompt:
                raise RefusedError(
                    400, f"{name}: at most {limits.prompt} characters; got {len(text)}. Shorten it.", name
                )
        frames = given.whole("frames", 1, least=1, most=limits.frames) or 1
        count = given.whole("n", 1, least=1, most=limits.pictures)
        steps = given.whole("steps", None, least=1, most=limits.steps)
        seed = given.whole("seed", None, least=0, most=(1 << 63) - 1)
        seed = secrets.randbits(53) if seed is None else seed
        guidance, true_guidance = given.number("guidance"), given.number("true_guidance")
        size = given.text("size") or limits.size
        if given.text("response_format") not in (None, "b64_json"):
            raise RefusedError(
                400, "response_format: b64_json; pictures are not kept here.", "response_format"
            )
        model = given.text("model")
        if model not in (None, self.name):
            raise RefusedError(404, f"model: {self.name!r} is served here; got {model!r}.", "model")
        given.refuse_others()
        match = _SIZE.fullmatch(size)
        if match is None:
            raise RefusedError(
                400, f"size: WIDTHxHEIGHT in pixels, such as 1024x768; got {size!r:.80}.", "size"
            )
        width, height = int(match[1]), int(match[2])
        if frames * height * width > limits.pixels:
            raise RefusedError(
                400,
                f"size: at most {limits.pixels:,} pixels, of all frames; got {size} x {frames}. Make it smaller.",
                "size",
            )
        try:
            return self.engine.checked(
                [
                    Request(
                        prompt or "",
                        height,
                        width,
                        frames=frames,
                        steps=steps,
                        guidance=guidance,
                        negative_prompt=negative,
                        true_guidance=1.0 if true_guidance is None else true_guidance,
                        seed=seed,
                        number=number,
                    )
                    for number in range(count or 1)
                ]
            )
        except ValueError as error:
            raise RefusedError(400, str(error), str(error).partition(":")[0]) from error

    async def _sampled(self, http: HttpRequest, requests: list[Request]) -> list[Sample]:
        """Samples of requests, unless the client goes.

        Raises:
            RefusedError: if the queue is full, the server ends, or a request fails.
            ClientDisconnect: if it went.
        """
        jobs = [Job(request, int(np.prod(self.engine.pipeline.grid(request)))) for request in requests]
        try:
            self.queue.put(jobs)
        except QueueFullError as error:
            raise RefusedError(429, str(error)) from error
        except EndingError as error:
            raise RefusedError(503, str(error)) from error
        waiting = asyncio.gather(*(asyncio.wrap_future(job.done) for job in jobs))
        try:
            while not waiting.done():
                await asyncio.wait([waiting], timeout=_POLL_S)
                if not waiting.done() and await http.is_disconnected():
                    raise ClientDisconnect
            samples = waiting.result()
        except EndingError as error:
            raise RefusedError(503, str(error)) from error
        except BaseException:
            for job in jobs:
                self.queue.cancel(job)
            waiting.cancel()
            raise
        for sample in samples:
            if sample.error is not None:
                status = 422 if isinstance(sample.error, NonFiniteError) else 500
                raise RefusedError(status, str(sample.error))
        return samples


async def _body(http: HttpRequest) -> Mapping[str, Any]:
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > _MOST_BYTES:
            raise RefusedError(413, f"the body has at most {_MOST_BYTES:,} bytes.")
        parts.append(part)
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body must be JSON: {error}.") from error
    if not isinstance(body, dict):
        raise RefusedError(400, f"the body must be a JSON object; got a {type(body).__name__}.")
    return body


class _Fields:
    """A body's values, checked as they are read."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._rest = dict(body)

    def _take(self, name: str) -> Any:
        return self._rest.pop(name, None)

    def text(self, name: str, *, required: bool = False) -> str | None:
        """A text, or None if there is none."""
        value = self._take(name)
        if value is None and not required:
            return None
        if not isinstance(value, str):
            raise RefusedError(400, f"{name}: a text; got {value!r:.80}.", name)
        return value

    def whole(self, name: str, default: int | None, *, least: int, most: int) -> int | None:
        """A whole number in a range."""
        value = self._take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise RefusedError(400, f"{name}: a whole number, {least} to {most}; got {value!r:.80}.", name)
        return value

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self._take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:
            raise RefusedError(400, f"{name}: a number; got {value!r:.80}.", name)
        return float(value)

    def refuse_others(self) -> None:
        """Refuse what is not known, but for OpenAI's options that change nothing here."""
        others = sorted(set(self._rest) - {"user", "quality", "style"})
        if others:
            raise RefusedError(400, f"{others[0]}: not known. Leave it out.", others[0])


def _answer(samples: list[Sample]) -> dict[str, Any]:
    data = [{"b64_json": base64.b64encode(_png(sample)).decode()} for sample in samples]
    return {"created": int(time.time()), "data": data, "seed": samples[0].request.seed}


def _png(sample: Sample) -> bytes:
    """A PNG; of a clip an animated one."""
    assert sample.frames is not None
    about = PngInfo()
    for name, value in sample.about.items():
        about.add_itxt(name, str(value))
    first, *others = (Image.fromarray(frame) for frame in sample.frames)
    buffer = io.BytesIO()
    more: dict[str, Any] = {"save_all": True, "append_images": others, "duration": 125} if others else {}
    first.save(buffer, "PNG", pnginfo=about, **more)
    return buffer.getvalue()


def _refusal(error: RefusedError) -> Response:
    kind = "invalid_request_error" if error.status < 429 else "server_error"
    body = {"error": {"message": str(error), "type": kind, "param": error.parameter, "code": error.status}}
    headers = {"Retry-After": _RETRY_S} if error.status in _LATER else None
    return JSONResponse(body, error.status, headers=headers)
