"""The page in a real browser: it opens, says what is under the pointer, zooms and searches.

    pip install -e '.[browser]' && apt-get install chromium chromium-driver fonts-dejavu
    python -m pytest -m browser tests/test_timeline_browser.py

Without Chromium these tests fail.
"""

from __future__ import annotations

import shutil
import time

import pytest

from tests.records import empty, large, nothing, small
from zerofx.report.timeline.page import page_of
from zerofx.report.timeline.record import Busy, StepRecord
from zerofx.report.timeline.svg import svg_of

pytestmark = pytest.mark.browser

ODD = """</script><b>bold</b>&amp;"'`${x}"""
WIDTH, HEIGHT = 1300, 1000
LEFT, RIGHT = 132, 18  # of the chart's plots, as draw.js has them
MEMORY_Y, COMPUTE_Y, LINK_Y = 190, 350, 381  # inside of each


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.fail("these tests drive Chromium: install chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
        f"--window-size={WIDTH},{HEIGHT}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driven = webdriver.Chrome(options=options, service=Service(driver))
    yield driven
    driven.quit()


class Opened:
    """A page that is open, and what a reader does there."""

    def __init__(self, browser, record: StepRecord):
        self.browser = browser
        self.record = record
        self.canvas = browser.find_element("id", "chart")

    def script(self, code: str):
        return self.browser.execute_script(f"return {code}")

    def text(self, element_id: str) -> str:
        return self.browser.find_element("id", element_id).text

    @property
    def view(self) -> tuple[str, float, float]:
        """The axis, and from where to where it is shown."""
        name, begin, end = self.canvas.get_attribute("data-view").split()
        return name, float(begin), float(end)

    def actions(self):
        from selenium.webdriver import ActionChains

        return ActionChains(self.browser, duration=50)

    def x(self, share: float) -> float:
        return LEFT + share * (self.canvas.size["width"] - LEFT - RIGHT)

    def at(self, actions, share: float, y: float):
        """Move the pointer to a share of the plots' width; selenium counts from the middle."""
        size = self.canvas.size
        x = self.x(share) - size["width"] / 2
        return actions.move_to_element_with_offset(self.canvas, int(x), int(y - size["height"] / 2))

    def hover(self, share: float, y: float) -> str:
        self.at(self.actions(), share, y).perform()
        return self.text("tip")

    def click(self, share: float, y: float) -> str:
        self.at(self.actions(), share, y).click().perform()
        return self.text("pinned")

    def drag(self, start: float, stop: float, y: float) -> None:
        self.at(self.at(self.actions(), start, y).click_and_hold(), stop, y).release().perform()
        self.settle()

    def settle(self) -> None:
        """Wait for the next frame."""
        self.browser.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
        )

    def press(self, element_id: str) -> None:
        self.browser.find_element("id", element_id).click()
        self.settle()

    def pixel(self, share: float, y: float) -> tuple[int, ...]:
        ratio = self.script("window.devicePixelRatio")
        x = int(self.x(share) * ratio)
        read = f'document.getElementById("chart").getContext("2d").getImageData({x}, {y * ratio}'
        return tuple(self.script(f"Array.from({read}, 1, 1).data).slice(0, 3)"))


@pytest.fixture
def opened(browser, tmp_path):
    """``opened(record)`` -> the page, which has to be ready and without a complaint."""

    def open_page(record: StepRecord, **given) -> Opened:
        path = tmp_path / "page.timeline.html"
        path.write_text(page_of(record, **given), encoding="utf-8")
        browser.get_log("browser")
        browser.get(path.as_uri())
        assert browser.find_element("tag name", "body").get_attribute("data-ready") == "yes"
        return Opened(browser, record)

    yield open_page
    complaints = [entry["message"] for entry in browser.get_log("browser")]
    assert not [words for words in complaints if "getImageData" not in words]  # our own reading


def test_the_page_opens_whole_and_fetches_nothing(opened):
    page = opened(small())
    assert page.view == ("time", 0.0, 3e-3)
    assert page.script("performance.getEntriesByType('resource').length") == 0
    assert "peak" in page.script("document.body.innerText")
    assert not page.script("document.documentElement.scrollWidth > window.innerWidth")


@pytest.mark.parametrize("record", (empty, nothing))
def test_a_program_with_nothing_in_it_opens(opened, record):
    page = opened(record())
    for share in (0.0, 0.5, 1.0):
        page.hover(share, MEMORY_Y)
        page.hover(share, COMPUTE_Y)
    page.press("to-peak")
    page.press("by-time")
    page.press("in")


def test_hovering_a_lane_shows_the_node_and_the_users_line(opened):
    page = opened(small("body.weight"))
    words = page.hover(0.5, COMPUTE_Y)
    assert words.startswith("mm\n") and "1 ms, from 1 ms in predicted time" in words
    assert "aten.mm → f32[8, 8]" in words
    assert "/home/me/train.py:7 loss = model(body.weight)" in words
    words = page.hover(0.2, LINK_Y)
    assert "gather_body.weight" in words and "bucket 0: body.weight" in words
    assert "4.00 MiB, 3.91 GiB/s" in words
    assert "shard_parameters: body.weight is sharded" in words
    words = page.hover(0.2, COMPUTE_Y)
    assert words.startswith("wait\n") and "gather_body.weight, issued at 0" in words
    assert page.hover(0.9, LINK_Y) == ""


def test_hovering_memory_shows_its_kinds_and_its_largest_tensors(opened):
    page = opened(small())
    words = page.hover(0.8, MEMORY_Y)
    assert words.startswith("16.0 MiB at 2 ms")
    assert "activations\n8.00 MiB" in words and "temporaries\n6.00 MiB" in words
    assert "mm_backward runs (backward)" in words and "train.py:8 loss.backward()" in words


def test_a_click_keeps_what_it_hits_and_lists_memory_there(opened):
    page = opened(small())
    assert "the 3 largest of 3 tensors" in page.text("moment")
    assert page.click(0.5, COMPUTE_Y).startswith("mm\n")
    page.click(0.15, MEMORY_Y + 120)
    assert "while wait runs: the 2 largest of 2 tensors" in page.text("moment")
    assert "gathered parameters" in page.text("tensors")
    assert "activations" not in page.text("tensors")
    page.press("back")
    assert "activations" in page.text("tensors")
    page.browser.find_element("tag name", "body").send_keys("\ue00c")  # escape
    assert page.text("pinned") == ""


def test_dragging_zooms_and_a_double_click_shows_all_again(opened):
    page = opened(small())
    page.drag(0.25, 0.5, COMPUTE_Y)
    name, begin, end = page.view
    assert name == "time"
    assert begin == pytest.approx(0.75e-3, rel=0.02) and end == pytest.approx(1.5e-3, rel=0.02)
    assert page.hover(0.9, COMPUTE_Y).startswith("mm\n")
    page.at(page.actions(), 0.5, COMPUTE_Y).double_click().perform()
    page.settle()
    assert page.view == ("time", 0.0, 3e-3)


def test_keys_and_buttons_zoom_and_pan_and_never_past_the_ends(opened):
    page = opened(small())
    body = page.browser.find_element("tag name", "body")
    page.press("in")
    assert page.view[1:] == pytest.approx((0.75e-3, 2.25e-3))
    body.send_keys("\ue014")  # right
    page.settle()
    assert page.view[1:] == pytest.approx((1.05e-3, 2.55e-3))
    for _ in range(9):
        body.send_keys("\ue014")
    page.settle()
    assert page.view[1:] == pytest.approx((1.5e-3, 3e-3))
    page.press("to-peak")
    _, begin, end = page.view
    assert begin < 2e-3 < end and end - begin < 1e-3
    for _ in range(60):
        body.send_keys("+")
    page.settle()
    _, begin, end = page.view
    assert 0 < end - begin < 1e-8
    page.press("all")
    assert page.view[1:] == (0.0, 3e-3)


def test_by_node_what_takes_no_time_can_be_seen(opened):
    page = opened(small())
    page.press("by-order")
    assert page.view == ("order", 0.0, 5.0)
    assert page.hover(0.3, COMPUTE_Y).startswith("wait\n")  # the second of five
    assert page.hover(0.3, MEMORY_Y + 120).startswith("6.00 MiB")
    page.press("by-time")
    assert page.view == ("time", 0.0, 3e-3)


def test_searching_counts_nodes_and_dims_the_others(opened):
    page = opened(small())
    before = page.pixel(0.9, COMPUTE_Y)
    search = page.browser.find_element("id", "search")
    search.send_keys("train.py:7")
    page.settle()
    assert page.text("found").startswith("1 node;")
    assert page.pixel(0.9, COMPUTE_Y) != before
    assert page.hover(0.9, COMPUTE_Y) == "" and page.hover(0.5, COMPUTE_Y).startswith("mm\n")
    search.send_keys(" nothing like it")
    assert page.text("found").startswith("0 nodes")


def test_a_kind_of_memory_can_be_left_out(opened):
    page = opened(small())
    green = page.pixel(0.5, MEMORY_Y + 20)
    assert green == (0x00, 0x9E, 0x73)
    page.browser.find_element("css selector", '[data-kind="activations"]').click()
    page.settle()
    assert page.pixel(0.5, MEMORY_Y + 20) != green


def test_the_page_follows_the_readers_theme(opened, browser):
    page = opened(small())
    seen = {}
    for theme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": theme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        page.settle()
        ground = page.script("getComputedStyle(document.body).backgroundColor")
        seen[theme] = ground, page.pixel(0.9, LINK_Y), page.pixel(0.5, COMPUTE_Y)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert seen["light"][0] == "rgb(255, 255, 255)" and seen["dark"][0] == "rgb(20, 23, 26)"
    assert sum(seen["light"][1]) > 600 > 200 > sum(seen["dark"][1])
    assert seen["light"][2] == seen["dark"][2]  # colours mean the same in both


def test_odd_names_stay_words(opened):
    page = opened(small(ODD, title=ODD))
    assert page.browser.title == f"{ODD}: 03_prefetch"
    assert f"gather_{ODD}" in page.hover(0.2, LINK_Y)
    page.click(0.2, LINK_Y)
    page.click(0.5, MEMORY_Y)
    assert ODD in page.text("tensors")
    assert page.script("Array.from(document.querySelectorAll('b')).every(b => b.textContent"
                       " !== 'bold')")  # fmt: skip


def test_measured_spans_are_told_from_predicted_ones(opened):
    page = opened(small(), measured=[Busy(2, "compute", 0.0, 6e-3, 0)])
    assert page.view == ("time", 0.0, 6e-3)
    assert "in predicted time" in page.hover(0.25, COMPUTE_Y)
    assert "6 ms, from 0 in measured time" in page.hover(0.75, COMPUTE_Y + 23)


def test_a_program_of_100_000_nodes_opens_and_answers(opened):
    page = opened(large())
    assert page.script("document.querySelectorAll('*').length") < 500
    started = time.monotonic()
    assert "node_" in page.hover(0.5, COMPUTE_Y)
    assert "more here: zoom in" in page.text("tip")
    for share in (0.2, 0.4, 0.6):
        page.drag(share, share + 0.1, COMPUTE_Y)
    assert "MiB" in page.hover(0.5, MEMORY_Y + 100)
    page.browser.find_element("id", "search").send_keys("layers.500.weight")
    page.settle()
    assert page.text("found").startswith("100 nodes")
    assert time.monotonic() - started < 60  # a reader would have left


def test_the_picture_opens_by_itself(browser, tmp_path):
    path = tmp_path / "page.timeline.svg"
    path.write_text(svg_of(small(ODD)), encoding="utf-8")
    browser.get_log("browser")
    browser.get(path.as_uri())
    root = browser.find_element("tag name", "svg")
    assert root.size["width"] > 500
    assert browser.execute_script("return document.querySelectorAll('text').length") > 10
    assert not browser.get_log("browser")
