"""The report in a real browser, where there is one: `apt-get install chromium`, or a google-chrome on the path."""

from __future__ import annotations

import html as escaping
import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from latentfold.eval.report.html import html
from tests.evaluations import bare_evaluation, full_evaluation, healed_evaluation, text_result
from tests.recipes import HEALING, RECIPE, recipe_of

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the path")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=10000",
    "--window-size=1400,900",
)
WIDTHS = (1280, 390)

MEASURE = """<script>addEventListener("load", () => {
  const width = document.documentElement.clientWidth, box = (e) => e.getBoundingClientRect();
  const sideways = [...document.querySelectorAll("body *")].filter((e) =>
    !e.closest(".scroll") && !e.closest("defs") && (box(e).right > width + 1 || box(e).left < -1));
  const texts = [...document.querySelectorAll("svg text")];
  const clipped = texts.filter((e) => {
    const svg = box(e.closest("svg"));
    return box(e).right > svg.right + 1 || box(e).left < svg.left - 1 || box(e).bottom > svg.bottom + 1;
  });
  parent.postMessage({
    name: NAME, frame: innerWidth, width, scrollWidth: document.documentElement.scrollWidth,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    page: getComputedStyle(document.body).backgroundColor,
    labels: [...new Set(texts.map((e) => getComputedStyle(e).fill))],
    smallestLabel: Math.min(...texts.map((e) => {
      const {a, b} = e.getScreenCTM();  // some labels are turned
      return parseFloat(getComputedStyle(e).fontSize) * Math.hypot(a, b);
    })),
    sideways: sideways.map((e) => e.outerHTML.slice(0, 120)),
    clipped: clipped.map((e) => e.textContent),
    regions: [...document.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth).length,
  }, "*");
});</script>"""

COLLECT = """<!doctype html><meta name="color-scheme" content="light dark"><pre id="found"></pre><script>
const found = [];
addEventListener("message", ({data}) => {
  found.push(data);
  document.getElementById("found").textContent = JSON.stringify(found);
});</script>"""


def look(pages: dict[str, str], folder: Path, *, dark: bool) -> tuple[dict[tuple[str, int], dict[str, Any]], list[str]]:
    """What every page measures of itself at every width, and what the browser's console said."""
    # frames, since a browser window is never as narrow as a phone
    frames = []
    for name, page in pages.items():
        (folder / f"{name}.html").write_text(page + MEASURE.replace("NAME", json.dumps(name)), encoding="utf-8")
        frames += [
            f'<iframe src="{name}.html" width="{width}" height="900" style="border: 0"></iframe>' for width in WIDTHS
        ]
    index = folder / "index.html"
    index.write_text(COLLECT + "".join(frames), encoding="utf-8")
    assert BROWSER is not None
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [BROWSER, *FLAGS, scheme, f"--user-data-dir={folder / 'profile'}", "--dump-dom", index.as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    match = re.search(r'<pre id="found">(.*?)</pre>', ran.stdout, flags=re.DOTALL)
    assert match and match[1], ran.stderr[-2000:]
    found = {(one["name"], one["frame"]): one for one in json.loads(escaping.unescape(match[1]))}
    return found, [line for line in ran.stderr.splitlines() if "CONSOLE" in line]


@cache
def pages() -> dict[str, str]:
    long = "/a/very/long/path/" + "x" * 120 + "/<script>console.error('ran')</script>.txt"
    recipe = replace(recipe_of(name=long), calibration=replace(RECIPE.calibration, texts=(long, long)))
    several = full_evaluation(texts=(text_result(), text_result(long, gap=0.1)), converted=long, original=long)
    healed = replace(recipe, healing=(replace(HEALING, texts=(long,), teacher=long), HEALING))
    return {
        "full": html(full_evaluation()),
        "bare": html(bare_evaluation()),
        "several": html(several, recipe),
        "healed": html(healed_evaluation(healed), healed),
    }


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_fit_any_width_and_follow_the_colour_scheme(tmp_path: Path, dark: bool) -> None:
    found, console = look(pages(), tmp_path, dark=dark)
    assert console == []
    assert len(found) == len(pages()) * len(WIDTHS)
    for place, one in found.items():
        assert one["scrollWidth"] <= one["width"], place
        assert one["sideways"] == [] and one["clipped"] == [], place
        assert one["dark"] is dark
        paper = [int(part) for part in re.findall(r"\d+", one["page"])]
        (ink,) = one["labels"]  # plots write in the page's own colour
        assert (sum(paper) < 128) is dark and (sum(map(int, re.findall(r"\d+", ink))) > 384) is dark
        assert one["smallestLabel"] >= 8, place
    assert found["full", 390]["regions"] > 0  # wide tables scroll in their own place
    assert found["full", 1280]["regions"] == found["healed", 1280]["regions"] == 0


def test_the_check_sees_what_is_too_wide_and_what_the_console_says(tmp_path: Path) -> None:
    wrong = pages()["bare"].replace(
        "</main>", '<p style="width: 700px">wide</p><script>console.error("complaint")</script></main>'
    )
    found, console = look({"wrong": wrong}, tmp_path, dark=False)
    assert found["wrong", 1280]["sideways"] == []
    assert found["wrong", 390]["scrollWidth"] > 390 and any("wide" in part for part in found["wrong", 390]["sideways"])
    assert any("complaint" in line for line in console)
