"""Pictures of plans: pages, SVG and PNG."""

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from PIL import Image

from experiments import _plan_page
from experiments._plan_figure import plot_plan
from experiments._plan_page import plan_page, save_plan
from experiments._program import UserError
from solver import Topology, balance
from tests.experiments._simulate_cases import SMALL, simulated


class Page(HTMLParser):
    """Elements and attributes of a page, and the text of its data."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.data, self.title = [], [], "", ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][1].get("id") == "plan":
            self.data += data
        if self.open and self.open[-1][0] == "title":
            self.title += data


def test_the_page_of_a_plan(capsys, tmp_path):
    path = tmp_path / "new" / "plan.html"
    simulated(capsys, *SMALL, "--topology", "2x2", "--steps", 1, "--bags", "g2n2", "--plot", path)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    # Nothing from elsewhere: no address in the text, no element that loads anything, and a policy that forbids it.
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bimport\b|fetch\(|XMLHttp", text)
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not any("src" in attrs or "href" in attrs for _, attrs in page.tags)
    assert any("default-src 'none'" in str(attrs.get("content")) for _, attrs in page.tags)
    data = json.loads(page.data)
    assert data["devices"] == 4
    assert data["perMachine"] == 2
    home, token, attention = data["panels"]
    assert (
        sum(home["height"]) == sum(token["height"]) == sum(data["lengths"]) == sum(data["figures"]["tokens"])
    )
    assert sum(attention["height"]) == 4 * sum(length**2 for length in data["lengths"])
    for panel in data["panels"]:
        assert len(panel["device"]) == len(panel["sequence"]) == len(panel["height"])
        assert set(panel["sequence"]) == set(range(6))
    assert data["arcs"][1]["inside"] == sum(data["figures"]["sent"]) == sum(data["figures"]["received"])
    assert data["arcs"][1]["between"] == sum(data["figures"]["across"]) == 0
    assert len(data["headSlices"]) == len(attention["device"])


def test_a_title_cannot_end_the_page():
    title = "</script><script>alert('&')</script> {{data}}"
    plan = balance([5, 6], [0, 1], num_devices=2, bags="g2n1", num_heads=2)
    page = Page(plan_page(plan, title=title))
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert page.title == title
    assert json.loads(page.data)["lengths"] == [5, 6]


def test_data_cannot_end_its_element():
    assert _plan_page._embedded({"a": "</script>&\u2028"}) == '{"a":"\\u003c/script\\u003e\\u0026\\u2028"}'


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_pictures_of_plans(tmp_path, name):
    plan = balance(
        [90, 20, 33, 0], [0, 0, 1, 3], num_devices=4, bags="auto", num_heads=3, topology=Topology(2, 2)
    )
    save_plan(tmp_path / name, plan, title="a & b <c>")
    if name.endswith("svg"):
        ET.parse(tmp_path / name)
    else:
        with Image.open(tmp_path / name) as picture:
            assert picture.size[1] > 800
            assert len(picture.convert("RGB").getcolors(1 << 20)) > 50
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_pictures_of_plans_that_send_nothing_and_without_arcs(tmp_path):
    plan = balance([9, 0], [0, 1], num_devices=2, bags=None, num_heads=3)
    plot_plan(tmp_path / "arcs.png", plan, arcs=True)
    plot_plan(tmp_path / "plain.png", plan)
    with Image.open(tmp_path / "arcs.png") as tall, Image.open(tmp_path / "plain.png") as flat:
        assert tall.size[1] > flat.size[1]


def test_plans_too_large_to_draw(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments._plan_page._MOST_BLOCKS", 3)
    plan = balance([90, 20], [0, 1], num_devices=2, bags="g2n1", num_heads=4)
    with pytest.raises(UserError, match=r"--plot draws at most 3 parts of sequences; this plan has 8"):
        save_plan(tmp_path / "plan.svg", plan)
