"""What the service tells Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServiceMetrics:
    """Counters of a service; a `Watcher` of its queue."""

    def __init__(self) -> None:
        self._registry = here = CollectorRegistry()
        self._responses = Counter("jaxdit_responses", "Responses by status code", ["code"], registry=here)
        self._pictures = Counter("jaxdit_pictures", "Pictures and clips made", registry=here)
        self._waiting = Gauge("jaxdit_waiting", "Requests that wait", registry=here)
        self._running = Gauge("jaxdit_running", "Requests that are being sampled", registry=here)
        self._batch = Histogram(
            "jaxdit_batch_size", "Requests of a batch", buckets=(1, 2, 4, 8, 16, 32), registry=here
        )
        self._batch_s = Histogram(
            "jaxdit_batch_seconds", "Seconds of a batch", buckets=_SECONDS, registry=here
        )
        self._request_s = Histogram(
            "jaxdit_request_seconds",
            "Seconds from a request to its response",
            buckets=_SECONDS,
            registry=here,
        )

    def waiting(self, count: int) -> None:
        """So many requests wait."""
        self._waiting.set(count)

    def started(self, batch: int) -> None:
        """A batch is being sampled."""
        self._running.set(batch)
        self._batch.observe(batch)

    def ended(self, batch: int, seconds: float) -> None:
        """A batch has been."""
        self._running.set(0)
        self._batch_s.observe(seconds)

    def responded(self, code: int, seconds: float, pictures: int) -> None:
        """A response went out."""
        self._responses.labels(str(code)).inc()
        self._request_s.observe(seconds)
        self._pictures.inc(pictures)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
