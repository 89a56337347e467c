"""What the figures of sequence-parallel attention show is what the programs do."""

import xml.etree.ElementTree as ET
from collections import Counter

import jax
import pytest

from experiments import sequence_figures
from experiments._sequence_figure import FIGURES, devices_text, save_sequence_figure
from experiments._sequence_figure_trace import trace

# Elements that each machine sends to others, of b L h d, by the formulas of the docstrings: 3 machines of 2 devices.
SENT = {
    "sequence_ulysses": [4 * 2 / 9] * 2,
    "sequence_ring": [2 * 5 / 6],
    "sequence_usp": [2 * 2 / 3, 4 * 2 / 9],
    "sequence_torus": [4 * 2 / 9],
}


@pytest.fixture(scope="module")
def drawn():
    return {name: [panel.events() for panel in panels] for name, panels in FIGURES.items()}


def attention(events, device=None):
    return [e for e in events if e.unit == "attention" and device in (None, e.device)]


@pytest.mark.parametrize("name", FIGURES)
def test_everything_is_attended_once_and_sent_by_the_formulas(name, drawn):
    for panel, sent in zip(drawn[name], SENT[name], strict=True):
        work = Counter()
        for event in attention(panel):
            pairs = [(q, k) for q in event.owners["q"] for k in event.owners["kv"]]
            work.update(dict.fromkeys(pairs, (event.stop - event.start) / len(pairs)))
        assert {pair: pytest.approx(6 / 36) for pair in work} == work
        assert len(work) == 36
        assert sum(event.share for event in panel) / 3 / 6 == pytest.approx(sent)


def test_a_ring_passes_on_what_it_attends_to_next(drawn):
    (events,) = drawn["sequence_ring"]
    assert [sorted(e.owners["kv"]) for e in attention(events, 2)] == [[2], [1], [0], [5], [4], [3]]
    assert {e.sources for e in events if e.device == 2 and e.unit != "attention"} == {(1,)}


def test_torus_follows_its_schedule(drawn):
    (events,) = drawn["sequence_torus"]
    blocks = [(sorted(e.owners["q"]), sorted(e.owners["kv"])) for e in attention(events, 2)]
    own, following, last = [2, 3], [4, 5], [0, 1]
    assert blocks == [
        (own, own),
        (following, own),
        (last, own),
        (list(range(6)), following),
        ([0, 1, 4, 5], last),
        (own, last),
    ]
    across = [e for e in events if e.device == 2 and e.unit == "across"]
    assert [(*e.owners, e.sources) for e in across] == [
        ("q", (4,)),
        ("q", (0,)),
        ("kv", (4,)),
        ("kv", (0,)),
        ("o", (0, 4)),
    ]
    for event in across:  # each inside the attention that hides it
        assert any(e.start <= event.start and event.stop <= e.stop for e in attention(events, 2))


def test_what_it_does_not_read_is_refused():
    def summed(q, k, v, *, block_attention):
        return jax.lax.psum(q, "device")

    with pytest.raises(NotImplementedError, match="without masks or text; got psum"):
        trace(summed, {"device": 2}, sharded=("device",), devices_per_machine=2, num_heads=2)


def test_a_picture(tmp_path):
    path = tmp_path / "ring.svg"
    save_sequence_figure(path, FIGURES["sequence_ring"])
    assert ET.parse(path).getroot().tag.endswith("svg")


@pytest.mark.full
def test_the_program_draws_all(tmp_path, capsys):
    assert sequence_figures.main(["--out", str(tmp_path)]) == 0
    paths = [tmp_path / f"{name}.svg" for name in FIGURES]
    assert capsys.readouterr().out.split() == list(map(str, paths))
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    (tmp_path / "again").mkdir()
    save_sequence_figure(tmp_path / "again" / paths[1].name, FIGURES[paths[1].stem])
    assert (tmp_path / "again" / paths[1].name).read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize(
    ("devices", "text"), [((), ""), ((3,), "3"), ((0, 1), "0, 1"), ((5, 0, 1, 2), "0-2, 5")]
)
def test_devices_text(devices, text):
    assert devices_text(devices) == text
