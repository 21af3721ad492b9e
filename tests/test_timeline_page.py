"""The page and the picture stand alone, parse, and say what the record says, whatever its names."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import esprima
import pytest

from tests.records import empty, large, nothing, small
from zerofx.report.timeline import colours
from zerofx.report.timeline.page import page_of
from zerofx.report.timeline.record import KINDS, PHASES, Busy
from zerofx.report.timeline.svg import svg_of

ODD = """</script><b>&amp;"'`${x}\u2028\\größe<!--"""
RECORDS = {"small": small, "empty": empty, "nothing": nothing, "odd names": lambda: small(ODD)}
VOID = {"meta", "input", "br", "link"}


class Page(HTMLParser):
    """A page's elements: what is open is closed, in order; the text of each element by its path."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def text(self, *tags):
        return "".join(data for tag, data in self.texts if not tags or tag in tags)

    def scripts(self):
        """The page's JSON, and its program."""
        data, program = [text for tag, text in self.texts if tag == "script"]
        return json.loads(data), program


@pytest.fixture(params=RECORDS.values(), ids=RECORDS.keys())
def record(request):
    return request.param()


def test_every_element_is_closed_and_every_id_is_one_elements(record):
    page = Page(page_of(record, before="02.html", after="04.html"))
    assert len(page.ids) == len(set(page.ids))


def test_the_script_is_valid_and_finds_every_element_that_it_asks_for(record):
    page = Page(page_of(record))
    _, program = page.scripts()
    esprima.parseScript(program)
    asked = set(re.findall(r'getElementById\("([\w-]+)"\)|press\("([\w-]+)"', program))
    asked = {first or second for first, second in asked} | {"by-time", "by-order"}
    assert asked - {""} <= set(page.ids)
    assert "`by-${one}`" in program


def test_nothing_is_fetched(record):
    page = Page(page_of(record))
    for _, attributes in page.tags:
        assert not {"src", "srcset", "action", "data"} & set(attributes)
    _, program = page.scripts()
    style = page.text("style")
    for text in (program, style):
        assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    links = [attributes["href"] for tag, attributes in page.tags if "href" in attributes]
    assert links == []


def test_the_pages_of_the_programs_around_it_are_linked():
    page = Page(page_of(small(), before='0"1<.html', after="04.html"))
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links == ['0"1<.html', "04.html"]


def test_odd_names_are_words_and_not_markup():
    html = page_of(small(ODD))
    page = Page(html)
    assert "b" not in page.open and ODD in page.text("td", "code")
    given, _ = page.scripts()
    assert given["record"]["parameters"] == [ODD]
    assert f"gather_{ODD}" in given["record"]["texts"]
    assert html.count("</script>") == 2
    title = [data for tag, data in Page(page_of(small(title=ODD))).texts if tag == "title"]
    assert "".join(title) == f"{ODD}: 03_prefetch"


def test_the_page_says_what_the_record_says():
    page = Page(page_of(small("body.weight")))
    words = page.text()
    assert "The peak is 16.0 MiB at 2 ms" in words
    assert "A step is predicted to take 3 ms" in words
    rows = [data for tag, data in page.texts if tag in ("td", "code")]
    assert "body.weight" in "".join(rows) and "train.py:7 loss = model(body.weight)" in rows
    assert "rank 1 of 2" in words and "step0_0: 03_prefetch" in words


def test_the_page_has_no_element_per_node():
    sizes = [len(Page(page_of(large(count))).tags) for count in (1_000, 10_000)]
    assert sizes[0] == sizes[1] < 400


def test_measured_spans_are_drawn_below_the_predicted():
    measured = [Busy(2, "compute", 1e-3, 4e-3, 0)]
    page = Page(page_of(small(), measured=measured))
    given, _ = page.scripts()
    assert given["measured"]["end_s"] == [4e-3] and given["end_s"] == 4e-3
    assert "step, measured" in page.text("span")
    texts = given["record"]["texts"]
    assert [texts[lane] for lane in given["measured"]["lane"]] == ["compute"]
    picture = svg_of(small(), measured=measured)
    assert ">measured<" in picture and ">measured<" not in svg_of(small())


def test_every_kind_and_phase_has_a_colour_and_no_two_kinds_the_same():
    assert set(KINDS["device"]) | set(KINDS["host"]) == set(colours.KINDS)
    assert len(set(colours.KINDS.values())) == len(colours.KINDS)
    assert set(PHASES) <= set(colours.WORK)


def contrast(first: str, second: str) -> float:
    """As WCAG 2 defines it, of two colours ``#rrggbb``."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", (0, 1), ids=("light", "dark"))
def test_words_stand_out_from_the_ground_in_both_themes(theme):
    style = Page(page_of(small())).text("style")
    block = style.split(":root {")[1 + theme].split("}")[0]
    value = dict(re.findall(r"(--\w+): (#\w{6})", block))
    for ground in ("--ground", "--panel", "--track"):
        for ink in ("--text", "--muted", "--strong", "--accent"):
            assert contrast(value[ink], value[ground]) >= 4.5, (ink, ground)


# The picture


def test_the_picture_is_valid_and_alone(record):
    text = svg_of(record)
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"<script|<image|href|@import|https?:(?!//www.w3.org)|nan|inf", text)


def shapes(record):
    elements = list(ElementTree.fromstring(svg_of(record)).iter())
    tags = [element.tag.split("}")[1] for element in elements]
    named = zip(tags, elements, strict=True)
    words = [element.text or "" for tag, element in named if tag in ("text", "title")]
    return tags, "\n".join(words)


def test_the_picture_names_its_lanes_kinds_and_peak():
    _, words = shapes(small())
    assert all(kind in words for kind in ("parameters", "gathered parameters", "activations"))
    assert "optimizer states" not in words and "host" not in words
    assert "peak 16.0 MiB at 2 ms" in words
    assert "gather_w: 1 ms" in words and "mm_backward: 1 ms" in words


def test_odd_names_are_words_in_the_picture_too():
    _, words = shapes(small(ODD, title=ODD + "\x01"))
    assert f"gather_{ODD}" in words and f"{ODD}\ufffd: 03_prefetch" in words


def test_the_pictures_size_does_not_grow_with_the_program():
    assert len(svg_of(large(100_000))) < 250_000
    tags, _ = shapes(large(20_000))
    assert len(tags) < 1500


def test_nothing_that_takes_no_time_is_drawn():
    _, words = shapes(empty())
    assert "Nothing takes any time." in words and "peak " not in words and "1 B" not in words


def test_the_documents_pictures_are_there_and_small():
    docs = Path(__file__).resolve().parent.parent / "docs"
    text = (docs / "debugging-timeline.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^]]+\]\((pictures/[^)]+)\)", text)
    assert len(pictures) >= 4
    for name in pictures:
        assert 0 < (docs / name).stat().st_size < 200_000
        if name.endswith(".svg"):
            ElementTree.parse(docs / name)
