"""Verdict, Markdown, plots and page of an evaluation."""

from __future__ import annotations

import io
import json
import math
import re
import warnings
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from latentfold.convert.formats import size
from latentfold.convert.write.recipe import CalibrationRecord, HealingPoint
from latentfold.eval.records import CacheSize, Continuation, Evaluation, SpeedPoint
from latentfold.eval.report import plots
from latentfold.eval.report.formats import converted_name, duration, listed, one_line, ppl, printable, score, shortened
from latentfold.eval.report.html import conversion_facts, html, parted
from latentfold.eval.report.markdown import markdown
from latentfold.eval.report.verdict import BROKEN, GRADES, clearly_worse, grade, verdict
from tests import recipes
from tests.evaluations import bare_evaluation, full_evaluation, healed_evaluation, text_result
from tests.recipes import recipe_of

HOSTILE = "</title><script>alert('x')</script>|`$a_b$ &amp; \x1b[31m\n\ud800\ufffe ünï 文.txt"
FIGURES = (plots.loss_by_context, plots.error_by_layer, plots.cache_by_context, plots.speed_by_context)
RECIPE = replace(
    recipe_of(name=HOSTILE, revision=None),
    calibration=CalibrationRecord((HOSTILE,), (7, 4096), "6f96"),
    options=replace(recipes.RECIPE.options, seed=0),
)
FURTHER = replace(  # by steps, on from what the first one kept
    recipes.HEALING,
    texts=(HOSTILE,),
    minutes=None,
    curve=(HealingPoint(0, 0, 0.0, 0.33, 3.35), HealingPoint(50, 102400, 200.0, 0.31, 3.33)),
    best=1,
)
HEALED = replace(RECIPE, healing=(recipes.HEALING, FURTHER))
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Tags that balance, ids, headings, header cells and visible text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def hostile_evaluation() -> Evaluation:
    texts = (text_result(HOSTILE), text_result("other.txt", gap=0.1))
    full = full_evaluation(texts=texts, original=HOSTILE, converted=HOSTILE)
    assert full.tasks
    return replace(
        full,
        continuations=(Continuation(HOSTILE, HOSTILE + "a", HOSTILE + "b", 3, 9),),
        tasks=(replace(full.tasks[0], task=HOSTILE, metric=HOSTILE),),
        provenance=full.provenance | {"command": HOSTILE, "machine": HOSTILE, "device": HOSTILE},
    )


EVALUATIONS = {
    "full": full_evaluation(),
    "bare": bare_evaluation(),
    "several": full_evaluation(texts=(text_result(), text_result("b.txt", gap=0.1, window_length=512))),
    "hostile": hostile_evaluation(),
    "broken": full_evaluation(gap=math.nan, layers=None, speed=None, cache_by_context=()),
    "hopeless": full_evaluation(gap=2000.0, layers=None, speed=None, cache_by_context=()),
    "healed": healed_evaluation(HEALED),
    "no provenance": bare_evaluation(provenance={}, speed=full_evaluation().speed),
}
every_evaluation = pytest.mark.parametrize("name", EVALUATIONS)


@cache
def page_of(name: str) -> str:
    """Drawing takes most of a test's time."""
    return html(EVALUATIONS[name], HEALED if name == "healed" else RECIPE)


# verdict


@pytest.mark.parametrize(
    ("gap", "name"),
    [
        (-0.1, "No loss"),
        (0.0, "No loss"),
        (0.02, "Practically lossless"),
        (0.021, "Small loss"),
        (0.2, "Noticeable loss"),
        (0.53, "Large loss"),
        (1.01, "Not usable without training"),
        (1e6, "Not usable without training"),
        (math.nan, "Broken"),
        (math.inf, "Broken"),
    ],
)
def test_verdict_grades_by_the_gap(gap: float, name: str) -> None:
    found = full_evaluation(gap=gap)
    assert verdict(found).startswith(f"{name}: ")
    assert grade(found).name == name


@every_evaluation
def test_verdict_is_whole_sentences(name: str) -> None:
    words = verdict(EVALUATIONS[name])
    assert words.endswith(".") and "  " not in words and ".." not in words and "{" not in words
    assert "None" not in words
    for sentence in re.split(r"\. ", words):
        assert sentence[0].isupper(), sentence


def test_verdict_of_every_grade_speaks_of_one_text_or_several() -> None:
    for one in (*GRADES, BROKEN):
        gap = {math.inf: 3.0}.get(one.limit, one.limit)
        single = verdict(full_evaluation(gap=gap))
        several = verdict(full_evaluation(texts=(text_result(gap=gap), text_result("b", gap=gap))))
        assert single.startswith(one.name) and "this text" in single and "these texts" not in single
        assert several.startswith(one.name) and "these texts" in several and "this text" not in several


def test_verdict_states_what_it_cost() -> None:
    words = verdict(full_evaluation())
    for part in (
        "7,680 bytes per token instead of 23,040 (measured), 66.7 % less",
        "0.530 ± 0.011 nats per token higher",
        "perplexity is 51.42 instead of 30.27, 1.70 times as much",
        "The gap grows with context",
        "first at 57.6 % of positions",
        "1.23 times the original's speed with 1,024 tokens of context (batch 8",
        "two standard errors: 2 of 2",
        "Not measured: contexts beyond 4,096 tokens.",
    ):
        assert part in words


def test_verdict_says_what_was_not_measured() -> None:
    words = verdict(bare_evaluation())
    assert "(counted)" in words and "decodes" not in words and "Task" not in words
    assert words.endswith(
        "Not measured: contexts beyond 64 tokens, the uncertainty of the loss (too little text), the cache in use, "
        "the error of each layer, continuations, speed and tasks."
    )


def test_verdict_does_not_mistake_noise_for_a_difference() -> None:
    found = full_evaluation(gap=0.01)
    noisy = replace(found, overall=replace(found.overall, gap_standard_error=0.008))
    assert "cannot be told from no difference" in verdict(noisy)
    assert "cannot be told" not in verdict(found)
    assert "changes little with context" in verdict(found)


def test_verdict_of_shrinking_gaps_and_growing_caches() -> None:
    text = text_result(gap=0.5)
    turned = replace(text, by_position=tuple(replace(row, gap=1 - row.gap) for row in text.by_position))
    words = verdict(full_evaluation(texts=(turned,), cache_converted=CacheSize(30000.0, 30000.0)))
    assert "The gap shrinks with context" in words
    assert "The KV cache is no smaller: 30,000 bytes per token against 23,040 (measured)." in words


def test_tasks_are_judged_only_where_direction_and_errors_are_known() -> None:
    tasks = full_evaluation().tasks
    assert tasks
    assert [clearly_worse(task) for task in tasks] == [True, True, None]
    assert clearly_worse(replace(tasks[1], converted=15.0)) is False
    assert clearly_worse(replace(tasks[0], converted=tasks[0].original - 0.01)) is False
    assert clearly_worse(replace(tasks[0], higher_is_better=None)) is None


# markdown


def tables(text: str) -> list[list[list[str]]]:
    """Cells of every Markdown table, without the rule below the header."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    split = re.compile(r"(?<!\\)\|")
    return [[[cell.strip() for cell in split.split(row)[1:-1]] for row in block] for block in blocks]


@every_evaluation
def test_markdown_tables_are_rectangular(name: str) -> None:
    found = tables(markdown(EVALUATIONS[name]))
    assert len(found) >= 2
    for table in found:
        assert len({len(row) for row in table}) == 1 and set(table[1]) == {"---"}


def test_markdown_of_one_text_is_the_readme_table() -> None:
    lines = markdown(full_evaluation()).splitlines()
    assert lines[0] == "`smollm2-mla` against `HuggingFaceTB/SmolLM2-135M-Instruct`"
    assert lines[2] == "Text: Persuasion (1817), bundled; 4 windows of 4096 tokens, float32."
    assert (
        lines[4] == "| context | NLL original ↓ | NLL converted ↓ | gap (nats) ↓ | PPL original ↓ | PPL converted ↓ |"
    )
    assert lines[6] == "| **all** | 3.410 | 3.940 | +0.530 ± 0.011 | 30.27 | 51.42 |"
    assert lines[7].startswith("| 0-512 |") and lines[10].startswith("| 2048-4095 |")
    assert "| | original | converted |" in lines
    assert "| cache bytes per token, measured ↓ | 23,040 | 7,680 |" in lines
    assert "| arc_easy | acc_norm ↑ | 2,376 | 0.486 ± 0.010 | 0.426 ± 0.010 |" in lines
    assert "**mean**" not in markdown(full_evaluation())
    assert lines[-1].startswith("Provenance: measured 2026-11-30") and "latentfold eval" in lines[-1]


def test_markdown_of_several_texts_has_their_mean_and_every_table() -> None:
    text = markdown(full_evaluation(texts=(text_result(gap=0.5), text_result("b.txt", gap=0.1))))
    overview, *rest = tables(text)
    assert [row[0] for row in overview[2:]] == ["Persuasion (1817), bundled", "b.txt", "**mean**"]
    assert overview[-1][3].startswith("+0.300 ±")
    assert sum(table[0][0] == "context" and "gap (nats) ↓" in table[0] for table in rest) == 2


def test_markdown_leaves_out_what_was_not_measured() -> None:
    text = markdown(bare_evaluation())
    for absent in ("| layer |", "decode", "measured ↓", "Greedy", "| task |", "±", "None"):
        assert absent not in text
    assert "1 window of 64 tokens" in text


def test_markdown_keeps_hostile_names_in_their_cells() -> None:
    text = markdown(hostile_evaluation())
    assert "\x1b" not in text
    text.encode("utf-8")
    assert "out of memory" in text  # where the original did


# plots


@every_evaluation
def test_svg_is_xml_that_takes_the_pages_colours(name: str) -> None:
    found = re.findall(r"<svg.*?</svg>", page_of(name), flags=re.DOTALL)
    assert found
    ids: list[str] = []
    for text in found:
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("role") == "img"
        assert root[0].tag.endswith("title") and root[0].text and root[0].text == root.get("aria-label")
        assert "width" not in root.attrib and root.get("viewBox")
        assert "currentColor" in text and plots.INK not in text and "font-family" not in text
        assert "<style" not in text and "<metadata" not in text  # either would reach beyond the figure
        own = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
        referred = set(re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", text))
        assert {a or b for a, b in referred} <= set(own)
        ids += own
        labels = [element.text for element in root.iter() if element.tag.endswith("}text")]
        assert {"original", "output", "kept"} & set(labels)  # text stays text
    assert len(ids) == len(set(ids))


def test_everything_is_drawn_alike_twice_whatever_the_users_style() -> None:
    import matplotlib

    def picture() -> bytes:
        figure = plots.cache_by_context(full_evaluation())
        assert figure is not None
        return plots.picture(figure)

    before = picture()
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "lines.marker": "x", "svg.hashsalt": "z"}):
        assert picture() == before
        assert html(EVALUATIONS["full"], RECIPE) == page_of("full")
        assert matplotlib.rcParams["font.size"] == 30


def test_png_is_a_picture_on_white() -> None:
    from matplotlib.image import imread

    figure = plots.error_by_layer(full_evaluation())
    assert figure is not None
    picture = imread(io.BytesIO(plots.picture(figure)))
    assert picture.shape[0] > 600 and picture.shape[1] > 1000
    assert picture[0, 0, :3].tolist() == [1, 1, 1] and picture[..., :3].min() < 0.3


def test_what_was_not_measured_is_not_drawn() -> None:
    assert [figure(bare_evaluation()) is None for figure in FIGURES] == [False, True, True, True]
    assert [figure(full_evaluation()) is None for figure in FIGURES] == [False] * 4
    assert plots.loss_by_context(replace(bare_evaluation(), texts=())) is None


def test_lines_are_the_records() -> None:
    found = full_evaluation(texts=(text_result(), text_result("b", gap=0.1)))
    figure = plots.loss_by_context(found)
    assert figure is not None
    lines = figure.axes[0].get_lines()
    assert len(lines) == 4 and figure.axes[0].get_xscale() == "log"
    assert list(lines[3].get_ydata()) == list(found.texts[1].curve.converted)
    layers = plots.error_by_layer(found)
    assert layers is not None and len(layers.axes[0].get_lines()) == 4
    unpredicted = tuple(replace(layer, predicted=None) for layer in found.layers or ())
    layers = plots.error_by_layer(replace(found, layers=unpredicted))
    assert layers is not None and len(layers.axes[0].get_lines()) == 3
    speed = plots.speed_by_context(found)
    assert speed is not None
    decode = [list(line.get_ydata()) for line in speed.axes[1].get_lines()]
    assert math.isnan(decode[2][-1]) and not math.isnan(decode[3][-1])  # out of memory: a gap in the line


def test_speed_is_drawn_even_where_nothing_ran() -> None:
    nothing = SpeedPoint(512, 1, None, None, None, None, None, None)
    figure = plots.speed_by_context(full_evaluation(speed=(nothing,)))
    assert figure is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ElementTree.fromstring(plots.svg(figure))


def test_a_healing_goes_on_where_the_one_before_was_kept() -> None:
    figure = plots.healing_curve(HEALED.healing)
    assert figure is not None and plots.healing_curve(()) is None
    for axes, first in zip(figure.axes, (0.5367, 3.6269), strict=True):
        assert axes.get_xlabel() == "minutes of healing"
        (rest, to_kept, kept, _, further, kept_further) = axes.get_lines()
        assert to_kept.get_ydata()[0] == first and len(to_kept.get_xdata()) == 6
        end = recipes.HEALING.curve[5].seconds / 60
        assert list(kept.get_xdata()) == [end] == [rest.get_xdata()[0]] and rest.get_linestyle() == ":"
        assert list(further.get_xdata()) == pytest.approx([end, end + 200 / 60])
        assert list(kept_further.get_ydata()) == [further.get_ydata()[-1]]
    steps = plots.healing_curve([FURTHER, FURTHER])
    assert steps is not None and steps.axes[0].get_xlabel() == "steps of healing"
    assert [line.get_xdata()[-1] for line in steps.axes[0].get_lines()] == [50, 50, 50, 100, 100, 100]


@pytest.mark.parametrize("best", [0, 6], ids=["nothing gained", "all of it"])
def test_a_healing_is_drawn_whatever_it_kept_of_it(best: int) -> None:
    def drawn() -> bytes:
        figure = plots.healing_curve([replace(recipes.HEALING, best=best)])
        assert figure is not None
        return plots.picture(figure, "svg")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ElementTree.fromstring(drawn())
    assert drawn() == drawn()


@pytest.mark.parametrize("color", [plots.ORIGINAL, plots.CONVERTED, plots.SECOND, plots.THIRD])
@pytest.mark.parametrize("paper", ["#ffffff", "#14171a"])
def test_series_colours_are_legible_in_light_and_dark(color: str, paper: str) -> None:
    def luminance(code: str) -> float:
        channels = [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(color), luminance(paper)])
    assert (high + 0.05) / (low + 0.05) >= 3


# page


@every_evaluation
def test_page_is_well_formed_and_accessible(name: str) -> None:
    page = page_of(name)
    page.encode("utf-8")
    assert page.startswith("<!doctype html>")
    found = Page(page)
    names = [tag for tag, _ in found.tags]
    assert names.count("title") >= 1 and names.count("h1") == 1 and names.count("main") == 1
    assert ("html", {"lang": "en"}) in found.tags
    assert any(tag == "meta" and attributes.get("name") == "viewport" for tag, attributes in found.tags)
    levels = [int(tag[1]) for tag in names if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and all(b <= a + 1 for a, b in pairwise(levels))
    assert all("scope" in attributes for tag, attributes in found.tags if tag == "th")
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["aria-labelledby"] for _, a in found.tags if "aria-labelledby" in a} <= set(ids)
    assert "None" not in found.text


@every_evaluation
def test_page_loads_and_runs_nothing(name: str) -> None:
    page = page_of(name)
    for tag, attributes in Page(page).tags:
        assert tag not in ("script", "iframe", "object", "embed", "base", "form")
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert "@import" not in page and "url(http" not in page
    assert "\x1b" not in page


def test_page_shows_hostile_text_as_text() -> None:
    found = Page(page_of("hostile"))
    assert found.text.count("<script>alert('x')</script>") >= 8
    assert "&amp; " in found.text  # as given, not decoded on the way


@pytest.mark.parametrize("name", ["full", "bare", "several"])
def test_page_and_markdown_hold_every_number(name: str) -> None:
    e = EVALUATIONS[name]
    expected: list[str] = []
    for row in [e.overall, *(row for text in e.texts for row in (text.overall, *text.by_position))]:
        expected += [f"{row.original:.3f}", f"{row.converted:.3f}", f"{row.gap:+.3f}", ppl(row.converted)]
        expected += [] if row.gap_standard_error is None else [f"± {row.gap_standard_error:.3f}"]
    expected += [f"{e.agreement.kl:.3f}", *(f"{kl:.3f}" for kl in e.agreement.kl_quantiles.values())]
    expected += [f"{100 * e.agreement.top1:.1f} %"]
    expected += [f"{cache.counted:,.0f}" for cache in (e.cache_original, e.cache_converted)]
    expected += [size(value) for point in e.cache_by_context for value in (point.original, point.converted)]
    for layer in e.layers or ():
        expected += [f"{value:.3f}" for value in (layer.scores, layer.values, layer.output, layer.predicted) if value]
    for point in e.speed or ():
        expected += [f"{value:,.0f}" for value in (point.prefill_original, point.prefill_converted) if value]
        expected += [f"{point.decode_converted or 0:,.1f}"] if point.batch == 1 else []
    for task in e.tasks or ():
        expected += [score(task.original, task.original_standard_error)]
        expected += [score(task.converted, task.converted_standard_error)]
    page = Page(page_of(name)).text
    for text in (page, markdown(e)):
        assert [number for number in expected if number not in text] == []
    for text_record in e.texts:
        assert text_record.sha256 in page
    assert e.provenance["command"] in page


def test_page_tells_how_the_model_was_converted_as_far_as_known() -> None:
    found = dict(conversion_facts(RECIPE))
    assert found["Latent values (--kv-rank)"] == "96" and found["Seed"] == "0"
    assert found["Cached values per token and layer"] == "384 → 128"
    assert found["Calibration windows"] == "7 x 4,096 tokens" and "Source revision" not in found
    assert "134,515,008 → 166,700,160" in Page(page_of("full")).text


def test_page_leaves_out_what_was_not_measured() -> None:
    bare, full = Page(html(bare_evaluation())).text, Page(page_of("full")).text
    for absent in ("Speed", "Tasks", "Continuations", "layer by layer", "per token, measured", "Conversion"):
        assert absent not in bare and absent in full


def test_page_shows_every_healing() -> None:
    text = Page(page_of("healed")).text
    for part in (
        "130, kept",
        "266,240",
        "0.3193",
        "3.3468",
        "Healing 2",
        "50, kept",
        "Options of healing 1",
        "10 minutes",
    ):
        assert part in text
    assert "Healing" not in Page(page_of("full")).text


@every_evaluation
def test_only_a_healed_model_is_called_healed(name: str) -> None:
    """Page, tables and verdict say so of it, and of no other."""
    e = EVALUATIONS[name]
    for text in (Page(page_of(name)).text, markdown(e), verdict(e)):
        assert ("healed" in text) == (name == "healed")
    if name == "healed":
        assert markdown(e).startswith("`smollm2-mla`, healed 12 minutes, against")
        assert "NLL healed 12 minutes ↓" in markdown(e) and "NLL converted" not in markdown(e)
        assert "converted, then healed 12 minutes; compared with" in Page(page_of(name)).text


@pytest.mark.parametrize(
    ("original", "converted", "expected"),
    [
        ("the cat", "the dog", ("the ", "cat", "dog")),
        ("same", "same", ("same", "", "")),
        ("longer", "long", ("long", "er", "")),
        ("", "a", ("", "", "a")),
    ],
)
def test_continuations_part_where_they_differ(original: str, converted: str, expected: tuple[str, str, str]) -> None:
    assert parted(Continuation("p", original, converted, 1, 2)) == expected


# formats


def test_numbers_and_names() -> None:
    assert size(0) == "0 bytes" and size(1536) == "1.5 KiB" and size(3 * 1024**3) == "3.0 GiB"
    assert score(0.48612, 0.01027) == "0.486 ± 0.010" and score(29.13, 1.04) == "29.1 ± 1.0"
    assert score(0.61, None) == "0.61" and score(0.5, 0.0) == "0.5"
    assert ppl(0) == "1.00" and ppl(1000) == "inf" and ppl(math.nan) == "nan" and ppl(20) == "4.85e+08"
    assert [duration(s) for s in (0, 1, 59.4, 59.6, 100, 599, 6000, 72000)] == [
        *("1 second", "1 second", "59 seconds", "1 minute", "1.7 minutes", "10 minutes", "100 minutes", "1,200 minutes")
    ]
    assert converted_name({}) == converted_name({"healed": None}) == "converted"
    assert converted_name({"healed": {"tokens": 9, "minutes": 0.5}}) == "healed 30 seconds"
    assert listed([]) == "" and listed(["a"]) == "a" and listed(["a", "b", "c"]) == "a, b and c"
    assert shortened("a" * 30 + "end.txt", 11) == "aaaaa…d.txt" and shortened("short", 5) == "short"
    assert one_line(" a\n\tb\x00 ") == "a b\N{REPLACEMENT CHARACTER}"
    assert printable("é文\N{NO-BREAK SPACE}\n\t") == "é文\N{NO-BREAK SPACE}\n\t"
    json.dumps(printable(HOSTILE)).encode("utf-8")
