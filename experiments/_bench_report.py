"""What a benchmark reports: sections of docs/benchmarks.md, between markers so that each is written on its own."""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax

from experiments._disk import check_file_writable
from experiments._program import write_report

_TITLE = """# Benchmarks

Measured with the commands each section names. Ratios of things measured in one run on one machine carry over; times are
those of the machine named beside them and do not.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """One benchmark's report.

    Attributes:
        name: what `--only` calls it.
        title: heading.
        body: markdown, without the heading and without where it was measured.
        figures: the same as JSON values.
    """

    name: str
    title: str
    body: str
    figures: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conditions:
    """Where and when benchmarks ran; made before the first starts, so that the load is that of others."""

    date: str
    load: float
    cpus: int
    cpu_name: str
    versions: str

    @classmethod
    def now(cls) -> "Conditions":
        """The conditions at this moment."""
        return cls(
            date=datetime.date.today().isoformat(),
            load=os.getloadavg()[0],
            cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            cpu_name=_cpu_name(),
            versions=f"JAX {jax.__version__}, Python {platform.python_version()}",
        )

    def line(self, command: str, devices: str) -> str:
        """A line of markdown that says where figures come from."""
        return (
            f"`{command}`, {self.date}: {devices} on {self.cpus} CPU cores ({self.cpu_name}), {self.versions}; load"
            f" average at the start {self.load:.1f}."
        )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def paragraph(text: str, *, bullet: bool = False) -> str:
    """Text, line breaks and indentation folded, wrapped for a file that people also read as it is."""
    lead = "* " if bullet else ""
    return textwrap.fill(
        " ".join(text.split()),
        width=118,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; numbers are formatted by the caller."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of repeated measurements."""

    samples: tuple[float, ...]

    @property
    def least(self) -> float:
        return min(self.samples)

    @property
    def middle(self) -> float:
        return median(self.samples)

    def text(self, unit_s: float = 1.0, digits: int = 2) -> str:
        """Median (minimum), in the unit."""
        return f"{self.middle / unit_s:.{digits}f} ({self.least / unit_s:.{digits}f})"


class Report:
    """Sections as they are measured: printed, put into a document, and at the end written as JSON.

    Args:
        args: of `add_report_options`.

    Raises:
        UserError: for files that cannot be written.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        checkout = Path(__file__).parents[1]
        self._out: Path | None = args.out
        if args.out is None and not args.quick:
            self._out = checkout / "docs" / "benchmarks.md"
        self._json: Path | None = args.json
        check_file_writable(self._out, option="--out")
        check_file_writable(self._json, option="--json")
        self._conditions = Conditions.now()  # before the load is our own
        self._figures: dict[str, Any] = {}

    def add(self, section: Section, command: str, devices: str) -> None:
        """A section, the command that measures it, and on what it was measured."""
        text = f"## {section.title}\n\n{section.body}\n\n{self._conditions.line(command, devices)}"
        self._figures[section.name] = {**section.figures, "conditions": dataclasses.asdict(self._conditions)}
        write_report(text + "\n\n")
        if self._out is not None:
            write_section(self._out, section.name, text)

    def close(self) -> None:
        """Write the figures of all sections."""
        if self._json is not None:
            self._json.write_text(json.dumps(self._figures, indent=1) + "\n")


def write_section(path: Path, name: str, text: str) -> None:
    """Put a section's text between its markers in a markdown file, after the other sections if it is new.

    Args:
        path: the file; made with a title if it does not exist.
        name: of the section.
        text: markdown.
    """
    start, stop = f"<!-- section {name} -->", f"<!-- end of {name} -->"
    block = f"{start}\n{text.strip()}\n{stop}"
    old = path.read_text() if path.is_file() else _TITLE
    found = re.search(re.escape(start) + ".*?" + re.escape(stop), old, re.DOTALL)
    new = old[: found.start()] + block + old[found.end() :] if found else f"{old.rstrip()}\n\n{block}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(new)
    partial.replace(path)
