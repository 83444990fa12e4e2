"""The page in a real browser: Chromium, as the system has it."""

import os
import shutil

import pytest
from msgspec.structs import replace
from webruns import STEPS, let_links_decide, step_record

from thinwire.report import EvaluationRecord, MetricsWriter
from thinwire.report.metrics import tell
from thinwire.settings import make_recipe
from thinwire.typed import to_toml
from thinwire.web.page import make_page
from thinwire.web.server import WebServer
from waiting import wait_until

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WAIT_MS = 60_000  # only ever reached by a test that fails

pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="there is no Chromium: install the system's package chromium to run these tests",
)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        # A sandbox needs rights that a container's root does not have.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        try:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        except playwright.Error as error:
            pytest.skip(f"Chromium does not start here: {error}")
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Open an address; a script that fails, and a request to elsewhere, fail the test."""
    contexts, wrong = [], list[str]()

    def open_it(address, width=1200, theme="light"):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=theme)
        contexts.append(context)
        if theme == "light":
            context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: wrong.append(str(error)))

        def look(request):
            if not request.url.startswith(("http://127.0.0.1:", "data:")):
                wrong.append(request.url)

        context.on("request", look)
        page.goto(address)
        page.wait_for_selector(".tile")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert wrong == []


def until(page, holds):
    """Wait until an expression holds; the page's policy forbids what polls by itself."""
    wait_until(lambda: page.evaluate(holds))


def test_the_curve_draws_points_as_steps_arrive(run_folder, serve, open_page):
    page = open_page(serve(run_folder).address)
    until(page, f"lossChart.plot && lossChart.plot.data[0].length >= {STEPS}")
    before = page.evaluate("lossChart.plot.data[0].length")
    assert page.locator("#loss canvas").count() == 1
    with MetricsWriter(run_folder, resume_step=STEPS) as writer:
        for step in range(STEPS + 1, STEPS + 4):
            writer.step(step_record(step, loss=3.25))
        until(page, f"lossChart.plot.data[0].length == {before + 3}")
        writer.evaluation(EvaluationRecord(STEPS + 3, 3.125))
        until(page, "[...document.querySelectorAll('.tile')][1].innerText.includes('3.125')")
    assert "3.25" in page.locator(".tile").nth(0).inner_text()
    assert page.title().startswith("3.25 · ")
    page.get_by_role("button", name="hours").click()
    until(page, "lossChart.plot.series[0].label == 'hours'")
    assert page.locator("#gantt svg rect.forward").count() >= 8
    assert page.locator("#shares .row").count() == 2


def test_a_peer_that_dies_turns_red_and_its_stage_moves(run_folder, serve, host, open_page):
    page = open_page(serve(run_folder).address)
    ben = page.locator("#pipeline .peer[data-peer=ben]")
    ben.wait_for()
    assert "good" in ben.get_attribute("class") and "stage 1" in ben.inner_text()
    assert "carl" in page.locator("#spares").inner_text()
    host.waiting_for = "a peer for stage 1"
    host.peers[1] = host.peer("ben", [1], is_away=True)
    page.locator("#pipeline .peer.away[data-peer=ben]").wait_for()
    red, green = page.evaluate(
        "['.peer.away', '.peer.good'].map((name) => "
        "getComputedStyle(document.querySelector(name + ' .dot')).backgroundColor)"
    )
    assert red == "rgb(220, 38, 38)" != green
    assert "a peer for stage 1" in page.locator("#waiting").inner_text()
    host.peers = [host.peer("ana", [0]), host.peer("ben", [], True), host.peer("carl", [1])]
    carl = page.locator("#pipeline .peer[data-peer=carl]")
    carl.wait_for()
    assert "stage 1" in carl.inner_text() and "moved" in carl.get_attribute("class")
    assert page.locator("#spares .peer.away").inner_text().startswith("ben")


def test_a_member_sees_the_whole_pipeline_and_may_do_nothing(run_folder, serve, host, open_page):
    host.role, host.peers[1] = "member", replace(host.peers[1], is_this_machine=True)
    page = open_page(serve(run_folder).address_with_token)
    page.locator("#pipeline .peer").nth(1).wait_for()
    assert "as the host tells" in page.locator("#pipeline-note").inner_text()
    ana, ben = (page.locator(f".peer[data-peer={name}]").inner_text() for name in ("ana", "ben"))
    assert "this machine" in ben and "this machine" not in ana
    assert "1.5 TFLOP/s" in ana and "30 ms to the host" in ana.replace("30.0", "30")
    link = page.locator("#pipeline .link").inner_text()
    assert "direct" in link and "round trip 31" in link and "fewer bytes" in link
    assert page.locator(".peer button").count() == 0
    assert not page.locator("#invite-card").is_visible()


def test_recipe_samples_and_what_dense_would_cost_are_shown(run_folder, serve, open_page):
    (run_folder / "config.toml").write_text(
        to_toml(make_recipe("dense", ["pipeline.stages=2", "run.name=first"]).asked)
    )
    with MetricsWriter(run_folder, resume_step=STEPS) as writer:
        for step in range(STEPS + 1, STEPS + 3):
            writer.step(step_record(step * 100_000, steps=10**7))
    words = "<b>def</b> of a stage"
    tell(run_folder, "sample", f"step 2: {words}")
    tell(run_folder, "sample", f"step 3: {words}, later")
    let_links_decide(run_folder)
    page = open_page(serve(run_folder).address)
    until(page, "document.getElementById('recipe').innerText == 'recipe dense'")
    until(page, "document.querySelectorAll('.sample').length == 2")
    newest, first = (page.locator(".sample").nth(n).inner_text() for n in (0, 1))
    assert newest == f"step 3\n{words}, later"
    assert first.startswith("step 2, validation ") and first.endswith(words)
    until(page, "!document.getElementById('saved').hidden")
    saved = page.locator("#saved").inner_text()
    assert saved.startswith("Saved so far against dense cuts, simulated: ")
    assert "emulated" in page.locator("#pipeline .link").inner_text()


def test_the_owner_copies_the_invite_and_kicks_after_a_question(run_folder, serve, host, open_page):
    server = serve(run_folder)
    page = open_page(server.address_with_token)
    assert "token" not in page.url
    until(page, "document.getElementById('invite-line').innerText != ''")
    page.locator("#copy").click()
    until(page, "document.getElementById('toast').innerText.startsWith('copied')")
    assert page.evaluate("navigator.clipboard.readText()") == "thinwire join abc-secret"
    page.locator("summary", has_text="QR").click()
    until(page, "document.getElementById('qr').naturalWidth > 50")
    ben = page.locator(".peer[data-peer=ben] button")
    ben.click()
    page.get_by_role("button", name="cancel").click()
    ben.click()
    page.locator("#yes").click()
    until(page, "document.getElementById('toast').innerText.includes('was removed')")
    assert host.asked == [{"ask": "kick", "peer": "ben"}]
    guest = open_page(server.address)
    guest.locator(".peer[data-peer=ben]").wait_for()
    assert guest.locator(".peer button").count() == 0
    assert not guest.locator("#invite-card").is_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_has_no_sideways_scroll(run_folder, serve, host, open_page, theme):
    tell(run_folder, "note", "a-word-that-never-ends-" * 20)
    host.peers[0] = host.peer("a" * 63, [0])
    page = open_page(serve(run_folder).address_with_token, width=360, theme=theme)
    page.locator("#gantt svg").wait_for()
    page.locator("#settings-card summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(14, 17, 22)") == (theme == "dark")


def test_what_others_wrote_is_text(run_folder, serve, host, open_page):
    script = "<img src=x onerror=alert(1)><script>window.hit = 1</script>"
    tell(run_folder, "note", script)
    host.peers[1] = host.peer(script, [1])
    (run_folder / "config.toml").write_text(f"# {script}\n")
    page = open_page(serve(run_folder).address_with_token)
    until(page, "document.getElementById('story').innerText.includes('<script>')")
    until(page, "document.getElementById('pipeline').innerText.includes('<img src=x')")
    assert page.evaluate("window.hit === undefined && !document.querySelector('main img:not(#qr)')")
    blocked = page.evaluate("fetch('https://example.org/').then(() => false, () => true)")
    assert blocked, "its own policy lets the page ask nobody else"


def test_the_page_goes_on_when_its_host_is_started_again(run_folder, open_page):
    """On a port that nobody gets meanwhile who asks for any."""
    server = WebServer(lambda: make_page([run_folder]), "127.0.0.1:4660", "t", True).start()
    page = open_page(server.address)
    server.close()
    page.locator("#chip", has_text="no connection").wait_for()
    with WebServer(lambda: make_page([run_folder]), f"127.0.0.1:{server.port}", "t"):
        page.locator("#chip", has_text="complete").wait_for()
