"""The page in a real Chromium: filtering, folding, keys, no errors, and no script that a model
wrote.

Needs the packages chromium-headless-shell (or chromium) of the system and playwright of Python;
skipped where one is missing.
"""

from __future__ import annotations

import re
import shutil

import pytest

from rlkit.extras.report import charts, write_report

HOSTILE = (
    '<img src=x onerror="window.hacked=1"></script><script>window.hacked=1</script><svg'
    " onload=window.hacked=1> \u202e &amp; \ud800"
)
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, that of the system."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the PATH")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(make_runs):
    """2,000 conversations of two runs, one of them hostile in every text it can choose."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "STATIC", charts.STATIC[:1])
        make_runs("a", text=HOSTILE, title=HOSTILE.replace("\ud800", ""), steps=10, samples=99)
        folder = make_runs("b", seed=1, lr=1e-5, steps=10, samples=99)
        return write_report([folder.parent], limit=2000)


@pytest.fixture
def page(browser, report):
    """The page, opened; anything that the console says fails the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request",
        lambda request: said.append(request.url) if not request.url.startswith("file:") else None,
    )
    page.goto(report.as_uri())
    yield page
    assert said == []
    assert page.evaluate("window.hacked") is None, "a script of the model's ran"
    context.close()


def counted(page, text):
    """Waits for the count to begin so; the page's policy lets no predicate be evaluated in it."""
    from playwright.sync_api import expect

    expect(page.locator("#count")).to_have_text(re.compile(f"^{text}"))


def head(page, text):
    """Waits for the conversation whose head holds the text."""
    page.locator("#detail .head", has_text=text).wait_for()


def chosen(page):
    return page.locator('.row[aria-selected="true"]')


def test_the_list_holds_two_thousand_and_draws_a_few(page):
    counted(page, "2,000 of 2,000 conversations$")
    assert page.locator(".row").count() < 40
    page.locator("#list").evaluate("list => { list.scrollTop = list.scrollHeight }")
    page.locator("#row-1999").wait_for()
    assert page.locator(".row").count() < 40


def test_filters_narrow_and_reset_widens(page):
    assert page.locator("#component").is_hidden(), "the reward has one component"
    page.select_option("#tools", "none")
    counted(page, "20 of")
    assert "cut: length" in page.locator("#row-0").inner_text()
    page.click("#reset")
    counted(page, "2,000 of")
    page.fill("#step-low", "3")
    page.fill("#step-high", "4")
    page.select_option("#status", "terminated")
    counted(page, "396 of")
    page.fill("#reward-low", "2")
    counted(page, "0 of")
    page.locator("#detail", has_text="No conversation fits").wait_for()


def test_search_reads_thinking_and_sorting_puts_the_best_first(page):
    page.fill("#search", "LET ME SEE #### 4 7")
    counted(page, "99 of")
    page.click("#best")
    page.locator("#row-0 .reward", has_text="0.99").wait_for()
    page.click("#worst")
    assert page.locator("#row-0 .reward").inner_text() == "0.0"


def test_keys_move_fold_and_follow_a_problem(page):
    page.focus("#list")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("j")
    assert chosen(page).get_attribute("id") == "row-2"
    page.keyboard.press("End")
    assert chosen(page).get_attribute("id") == "row-1999"
    head(page, "row/9")
    page.keyboard.press("Home")
    head(page, "row/0")
    assert page.locator("details.thinking").first.get_attribute("open") is None
    page.keyboard.press("t")
    assert page.locator("details.thinking").first.get_attribute("open") is not None
    page.keyboard.press("n")
    head(page, "sample 1")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("j")
    assert page.input_value("#search") == "j", "letters in a field are letters"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "list"


def test_a_conversation_has_the_command_for_its_token(page):
    from playwright.sync_api import expect

    code = page.locator("#detail .why code").first
    expect(code).to_have_text(re.compile(r"^rlkit why \S+ step=1 rollout=0 token=0$"))
    page.locator("#detail .why input").first.fill("1")
    expect(code).to_have_text(re.compile("token=1$"))


def test_what_a_model_wrote_is_text(page):
    head(page, "row/0")
    page.keyboard.press("t")
    shown = page.locator("#detail").inner_text()
    assert '<img src=x onerror="window.hacked=1"></script>' in shown
    assert page.locator("#detail img, #detail script, #detail svg, #list img").count() == 0


def test_the_policy_stops_a_script_that_got_into_the_page(page, browser, report):
    """The second wall: markup that did get in has no effect."""
    other = browser.new_context().new_page()
    other.goto(report.as_uri())
    other.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=data:x"
        ' onerror="window.hacked=1">\')'
    )
    other.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.hacked=1';"
        " document.body.append(s) }"
    )
    assert (
        other.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() =>"
            " done(window.hacked))))"
        )
        is None
    )


def plot(page):
    """The chart of the training reward."""
    own = page.locator("figure.chart", has_text="Training reward")
    own.evaluate("own => own.scrollIntoView({ block: 'center' })")
    own.locator("path.line").first.wait_for(state="attached")
    return own


def ticks(own):
    return own.locator("text.tick.x").all_text_contents()


def test_a_chart_answers_the_pointer_and_the_keys(page):
    own = plot(page)
    box = own.locator("svg").bounding_box()
    own.locator("svg").hover(position={"x": box["width"] * 0.9, "y": 60})
    own.locator(".tip").wait_for()
    assert (
        re.search(r"step (8|9|10)", own.locator(".tip").inner_text())
        and own.locator(".tip-row").count() == 2
    )
    assert page.locator("line.cross[visibility=visible]").count() > 1, (
        "the same step is marked in every chart"
    )
    own.locator("svg").focus()
    page.keyboard.press("ArrowLeft")
    assert own.locator(".tip").is_visible()
    page.mouse.move(5, 5)
    own.locator("svg").blur()
    assert own.locator(".tip").is_hidden()


def test_dragging_zooms_all_charts_and_a_button_goes_back(page):
    from playwright.sync_api import expect

    own = plot(page)
    before, box = ticks(own), own.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 60)
    page.mouse.up()
    expect(page.locator("#whole")).to_be_enabled()
    expect(own.locator("text.tick.x")).not_to_have_text(before)
    page.click("#whole")
    expect(own.locator("text.tick.x")).to_have_text(before)


def test_lines_axes_and_scales_are_chosen(page):
    from playwright.sync_api import expect

    own = plot(page)
    page.click("#legend button >> nth=0")
    expect(own.locator("path.line.c0")).to_have_count(0)
    assert (
        own.locator("path.line.c1").count() > 0
        and page.get_attribute("#legend button >> nth=0", "aria-pressed") == "false"
    )
    page.click("#legend button >> nth=1")
    expect(own.locator("text.none")).to_have_text("no line is shown")
    page.click("#legend button >> nth=0")
    page.click("#legend button >> nth=1")
    page.select_option("#axis", "seconds")
    expect(own.locator("text.tick.x").last).to_have_text("30")
    assert page.locator("#axis option[value=tokens]").is_disabled(), (
        "these runs do not tell of tokens"
    )
    before = own.locator("text.tick.y").all_text_contents()
    page.check("#log")
    expect(own.locator("text.tick.y")).not_to_have_text(before)
    links = own.locator("a.file").evaluate_all("all => all.map((one) => one.getAttribute('href'))")
    assert links == ["report/reward.svg", "report/reward.pdf"]


def test_one_problem_under_two_runs_stands_side_by_side(page):
    head(page, "row/0")
    page.keyboard.press("c")
    page.locator(".sides > div").nth(1).wait_for()
    left, right = (
        page.locator(".sides > div").nth(i).locator(".head").inner_text() for i in (0, 1)
    )
    assert "seed 0 · a" in left and "seed 1 · b" in right and "row/0" in left and "row/0" in right
    page.select_option("#beside", "")
    page.locator(".sides").wait_for(state="detached")


def test_light_dark_and_phone(page):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("#theme")
    assert page.evaluate(ground) != light
    for width in (375, 400, 1400):
        page.set_viewport_size({"width": width, "height": 700})
        page.keyboard.press("c")
        assert page.evaluate("document.documentElement.scrollWidth") == width, (
            "the page itself never scrolls sideways"
        )


def test_moving_through_the_list_is_fast(page):
    """A step of the selection draws a few rows: far below a tenth of a second even on a slow
    machine."""
    page.focus("#list")
    spent = page.evaluate(
        """() => { const list = document.getElementById('list'), start = performance.now();
        const down = { key: 'ArrowDown', bubbles: true };
        for (let i = 0; i < 200; i++) list.dispatchEvent(new KeyboardEvent('keydown', down));
        return (performance.now() - start) / 200 }"""
    )
    assert chosen(page).get_attribute("id") == "row-200"
    assert spent < 100
