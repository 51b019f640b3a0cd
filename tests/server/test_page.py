"""Tests of the page at `/` in headless Chromium over page_server.py, or only of its source.

The browser is driven through its debugging pipe: JSON messages, each ended by a zero byte.
"""

import base64
import fcntl
import itertools
import json
import os
import re
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn
from page_server import ANSWER, FAILED, PAGE, FakeClient, fake_info, fake_stats, make_app

from slotzero.server.messages import Stats

pytestmark = pytest.mark.slow

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine")
NONE = "\u2013"
PATIENCE = 120.0
PHONE, DESKTOP = (360, 740), (1280, 900)


class Browser:
    """One Chromium with one tab."""

    def __init__(self, folder: Path) -> None:
        # high numbers, because the browser's ends of the pipes must become 3 and 4
        pipes = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (*os.pipe(), *os.pipe())]
        their_in, self._to, self._from, their_out = pipes
        flags = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
            f" --remote-debugging-pipe --user-data-dir={folder}"
        ).split()
        launch = f'exec "$@" 3<&{their_in} 4>&{their_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", launch, "chromium", CHROMIUM, *flags],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self._ids = itertools.count(1)
        self._unread = bytearray()
        self._session: dict[str, str] = {}
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._listen(answer)

    def evaluate(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def text(self, element: str) -> str:
        return str(self.evaluate(f"document.getElementById('{element}').textContent"))

    def wait_for(self, expression: str) -> Any:
        end = time.monotonic() + PATIENCE
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"never: {expression}; {self.complaints}"
            time.sleep(0.1)
        return value

    def open(self, url: str, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=size[0], height=size[1], deviceScaleFactor=1, mobile=size == PHONE,
        )  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.complaints.clear()
        self.call("Page.navigate", url="about:blank")
        self.wait_for("location.href === 'about:blank'")
        self.call("Page.navigate", url=url)
        self.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")

    def type(self, element: str, text: str) -> None:
        self.evaluate(f"document.getElementById('{element}').focus()")
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter",
                      text="\r", windowsVirtualKeyCode=13)  # fmt: skip

    def click(self, element: str) -> None:
        x, y = self.evaluate(
            f"(() => {{ const r = document.getElementById('{element}').getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._session = {}
        self.call("Browser.close")
        self._process.wait(PATIENCE)
        os.close(self._to)
        os.close(self._from)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], PATIENCE)
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._unread += data
        message, _, rest = bytes(self._unread).partition(b"\0")
        self._unread = bytearray(rest)
        read: dict[str, Any] = json.loads(message)
        return read

    def _listen(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])


class Serve:
    """Starts fake servers, and stops them."""

    def __init__(self) -> None:
        self._running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def __call__(self, client: Any, **options: Any) -> str:
        """Start a server and return its address."""
        config = uvicorn.Config(
            make_app(client, **options),
            port=0,
            log_level="error",
            lifespan="off",
            timeout_graceful_shutdown=0,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        end = time.monotonic() + PATIENCE
        while not server.started:
            assert time.monotonic() < end, "the fake server does not start"
            time.sleep(0.02)
        self._running.append((server, thread))
        port = server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/"

    def end(self) -> None:
        for server, thread in self._running:
            server.should_exit = server.force_exit = True
            thread.join(PATIENCE)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    made = Serve()
    yield made
    made.end()


class StillClient:
    """An engine whose numbers are set by the test."""

    def __init__(self, stats: Stats | None, info: dict[str, Any] | None, state: str) -> None:
        self.stats, self.info, self.state = stats, info, state
        self.failure = ""
        self.progress: dict[str, Any] | None = None
        self.generation = 0
        self.replicas = [self]


def ask(browser: Browser, prompt: str) -> None:
    browser.type("chat-input", prompt)
    browser.press_enter()


LAST = "[...document.querySelectorAll('.message.assistant')].at(-1)"
SENT = "!document.getElementById('chat-send').hidden"


@needs_chromium
def test_an_answer_streams(browser: Browser, serve: Serve) -> None:
    browser.open(serve(FakeClient(has_gpu=False), delay=0.05))
    ask(browser, "What is a padded row?")
    part = browser.wait_for(f"{LAST}?.querySelector('.text').textContent")
    assert ANSWER.startswith(part)
    assert len(part) < len(ANSWER), "the answer should arrive in parts"
    browser.wait_for(SENT)
    assert browser.evaluate(f"{LAST}.querySelector('.text').innerText") == ANSWER
    note = browser.evaluate(f"{LAST}.querySelector('.note').textContent")
    tokens = len(ANSWER.split(" "))
    assert re.fullmatch(rf"[\d.]+ m?s to first token · [\d.]+ tokens/s · {tokens} tokens", note)
    assert browser.text("model-name") == "smollm2"
    assert browser.complaints == []


@needs_chromium
def test_settings_and_history_are_sent(browser: Browser, serve: Serve) -> None:
    browser.open(serve(FakeClient(has_gpu=False), delay=0.001))
    browser.click("settings-toggle")
    browser.type("system-prompt", "Be brief.")
    browser.evaluate("document.getElementById('temperature').value = '0.3'")
    browser.evaluate("document.getElementById('max-tokens').value = '4'")
    ask(browser, "first")
    browser.wait_for(
        f"{LAST}?.querySelector('.note').textContent.includes('cut off at max tokens')"
    )
    ask(browser, "echo")
    asked = json.loads(browser.wait_for(f"{SENT} && {LAST}.querySelector('.text').textContent"))
    first = " ".join(ANSWER.split(" ")[:4])
    assert asked == {
        "model": "smollm2",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "echo"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.3,
        "max_tokens": 4,
    }
    browser.click("chat-clear")
    assert browser.evaluate("document.querySelectorAll('.message').length") == 0


@needs_chromium
def test_reasoning_markdown_calls_and_another_answer(browser: Browser, serve: Serve) -> None:
    browser.open(serve(FakeClient(has_gpu=False), delay=0.001))
    ask(browser, "think")
    browser.wait_for(SENT)
    thought = f"{LAST}.querySelector('details.thought')"
    assert browser.evaluate(f"[{thought}.open, {thought}.lastChild.textContent]") == [
        False,
        "First, then.",
    ]
    browser.evaluate(f"{LAST}.querySelector('.again').click()")
    browser.wait_for(f"{SENT} && document.querySelectorAll('.message').length === 2")
    assert browser.evaluate("messages.map((m) => m.role)") == ["user", "assistant"]
    ask(browser, "mark")
    browser.wait_for(f"{SENT} && !!{LAST}.querySelector('pre.code')")
    assert browser.evaluate(
        f"[...{LAST}.querySelectorAll('.heading, strong, code, a')].map((n) => n.textContent)"
    ) == ["Title", "bold", "a < b", "this", "<b>1</b>"]
    assert browser.evaluate(f"{LAST}.querySelectorAll('b').length") == 0
    ask(browser, "call")
    browser.wait_for(f"{SENT} && !!{LAST}.querySelector('.call')")
    card = browser.evaluate(f"{LAST}.querySelector('.call pre').textContent")
    assert json.loads(card) == {"city": "Paris"}
    browser.evaluate(f"{LAST}.querySelector('.call textarea').value = 'echo'")
    browser.evaluate(f"{LAST}.querySelector('.results button').click()")
    sent = f"{SENT} && messages.at(-1).role === 'assistant' && messages.at(-1).content"
    asked = json.loads(browser.wait_for(sent))
    assert [message["role"] for message in asked["messages"][-3:]] == ["user", "assistant", "tool"]
    assert asked["messages"][-1] == {"role": "tool", "tool_call_id": "call_1", "content": "echo"}
    (call,) = asked["messages"][-2]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert browser.complaints == []


@needs_chromium
def test_what_follows_an_answer_is_in_sight(browser: Browser, serve: Serve) -> None:
    browser.open(serve(FakeClient(has_gpu=False), delay=0.001), size=PHONE)
    for question, button in (("mark", ".again"), ("call", ".results button")):
        ask(browser, question)
        browser.wait_for(f"{SENT} && !!{LAST}?.querySelector('{button}')")
        below = browser.evaluate(
            f"{LAST}.querySelector('{button}').getBoundingClientRect().bottom"
            " - document.getElementById('chat-log').getBoundingClientRect().bottom"
        )
        assert below <= 0, f"{button} is {below} pixels below the chat's edge"


@needs_chromium
def test_an_answer_that_is_only_reasoning_can_be_regenerated(
    browser: Browser, serve: Serve
) -> None:
    browser.open(serve(FakeClient(has_gpu=False), delay=0.001))
    ask(browser, "muse")
    browser.wait_for(f"{SENT} && !!{LAST}?.querySelector('.again')")
    assert browser.evaluate("messages.map((m) => m.role)") == ["user", "assistant"]
    browser.evaluate(f"{LAST}.querySelector('.again').click()")
    browser.wait_for(f"{SENT} && messages.length === 2")
    assert browser.complaints == []


@needs_chromium
def test_stop_keeps_the_partial_answer(browser: Browser, serve: Serve) -> None:
    browser.open(serve(FakeClient(has_gpu=False), delay=0.2))
    ask(browser, "Tell me all.")
    browser.wait_for(f"{LAST}?.querySelector('.text').textContent")
    browser.click("chat-stop")
    browser.wait_for(SENT)
    assert browser.evaluate(f"{LAST}.querySelector('.note').textContent").endswith("stopped")
    assert ANSWER.startswith(browser.evaluate(f"{LAST}.querySelector('.text').textContent"))


@needs_chromium
def test_a_new_chat_begins_at_once_while_an_answer_streams(browser: Browser, serve: Serve) -> None:
    browser.open(serve(FakeClient(has_gpu=False), delay=0.2))
    ask(browser, "Tell me all.")
    browser.wait_for(f"{LAST}?.querySelector('.text').textContent")
    browser.click("chat-clear")
    assert browser.evaluate("document.querySelectorAll('.message').length") == 0
    assert browser.evaluate(SENT)
    ask(browser, "echo")
    asked = json.loads(browser.wait_for(f"{SENT} && {LAST}?.querySelector('.text').textContent"))
    assert asked["messages"] == [{"role": "user", "content": "echo"}], (
        "the old chat must not be sent"
    )
    assert browser.evaluate("document.querySelectorAll('.message').length") == 2


@needs_chromium
def test_an_error_is_shown_and_the_prompt_comes_back(browser: Browser, serve: Serve) -> None:
    browser.open(serve(FakeClient(has_gpu=False)))
    ask(browser, "fail")
    note = browser.wait_for(f"{LAST}?.querySelector('.note').textContent")
    assert note == "the engine is restarting: try again later"
    assert browser.evaluate("document.getElementById('chat-input').value") == "fail"


@needs_chromium
def test_a_key_opens_the_page(browser: Browser, serve: Serve) -> None:
    browser.open(serve(FakeClient(has_gpu=False), key="secret", delay=0.001))
    browser.wait_for("document.getElementById('engine-state').textContent === 'needs an API key'")
    assert "Settings" in browser.text("notice")
    ask(browser, "hello")
    browser.wait_for("document.activeElement.id === 'api-key'")
    assert "API key" in browser.evaluate(f"{LAST}.querySelector('.note').textContent")
    browser.type("api-key", "secret")
    browser.evaluate("document.getElementById('api-key').blur()")
    browser.wait_for("document.getElementById('engine-state').textContent === 'ready'")
    browser.click("chat-send")  # the prompt is still there
    browser.wait_for(f"{SENT} && {LAST}.querySelector('.text').textContent.length > 100")
    assert browser.evaluate("sessionStorage.getItem('slotzero-api-key')") == "secret"


@needs_chromium
def test_live_numbers_move(browser: Browser, serve: Serve) -> None:
    browser.open(serve(FakeClient(has_gpu=False)))
    browser.wait_for(f"document.getElementById('stat-tokens-per-second').textContent !== '{NONE}'")
    steps = browser.text("stat-steps-per-second")
    # The fake engine makes 40 steps a second, and fewer if other tests slow it down.
    assert 0 < float(steps) <= 80
    total = "document.querySelector('[data-size=\"decode[16]\"]').lastChild.textContent"
    before = browser.evaluate(total)
    browser.wait_for(f"{total} !== '{before}'")
    assert re.fullmatch(r"\d+ of 32", browser.text("slots-text"))
    assert re.search(r"[\d.]+ % now · [\d.]+ % overall", browser.text("padding-decode"))
    assert "prefill is not recorded on a CPU" in browser.text("eager-list")
    ask(browser, "What is a padded row?")
    browser.wait_for(f"document.getElementById('ttft-p50').textContent !== '{NONE}'")
    assert browser.complaints == []


@needs_chromium
def test_certification_shows_every_size(browser: Browser, serve: Serve) -> None:
    client = FakeClient(has_gpu=True)
    browser.open(serve(client))
    browser.wait_for("document.querySelectorAll('#certification .cell').length")
    cells = browser.evaluate(
        "[...document.querySelectorAll('#certification .cell')]"
        ".map((cell) => [cell.dataset.size, cell.dataset.state])"
    )
    sizes = [record["key"] for records in client.info["sizes"].values() for record in records]
    assert sorted(size for size, _ in cells) == sorted(sizes)
    assert [size for size, state in cells if state != "certified"] == ["decode[24]"]
    assert browser.text("failures") == f"decode[24] {FAILED}"


@needs_chromium
def test_a_loading_and_a_restarted_engine(browser: Browser, serve: Serve) -> None:
    client = StillClient(None, None, "loading")
    browser.open(serve(client))
    browser.wait_for("document.getElementById('engine-state').textContent === 'loading'")
    assert browser.text("stat-running") == NONE
    client.info, client.stats, client.state = fake_info(False), fake_stats(500, False), "ready"
    browser.wait_for("document.getElementById('engine-state').textContent === 'ready'")
    for age in (10, 11):  # a new process counts from 0
        client.stats = msgspec.structs.replace(fake_stats(age, False), running=age)
        browser.wait_for(f"document.getElementById('stat-running').textContent === '{age}'")
    assert browser.text("stat-steps-per-second") != NONE
    assert browser.complaints == []


@needs_chromium
def test_the_page_says_why_there_is_no_engine(browser: Browser, serve: Serve) -> None:
    client = StillClient(None, None, "loading")
    browser.open(serve(client))

    def notice(state: str) -> str:
        browser.wait_for(f"document.getElementById('engine-state').textContent === '{state}'")
        is_seen = browser.evaluate("document.getElementById('notice').offsetHeight > 0")
        return browser.text("notice") if is_seen else ""

    assert "loading" in notice("loading")
    client.info, client.stats, client.state = fake_info(False), fake_stats(500, False), "ready"
    assert notice("ready") == ""
    client.stats, client.state, client.failure = None, "restarting", "signal 9"
    assert notice("restarting").endswith("is being restarted. Why: signal 9")
    assert browser.evaluate("document.querySelectorAll('.size').length") == 0, (
        "the sizes are counted again"
    )
    client.state = "stopping"
    assert notice("stopping").endswith("new ones are refused."), "not an older reason"
    client.state, client.failure = "unresponsive", "no heartbeat for 30 s"
    assert notice("unresponsive").endswith("Why: no heartbeat for 30 s")
    client.state, client.failure = "failed", "<b>no memory</b> is left"
    assert notice("failed").endswith("Why: <b>no memory</b> is left")
    serve.end()
    assert notice("no connection").endswith("Why: <b>no memory</b> is left")


@needs_chromium
def test_an_old_failure_does_not_explain_a_lost_connection(browser: Browser, serve: Serve) -> None:
    client = StillClient(None, None, "restarting")
    client.failure = "signal 9"
    browser.open(serve(client))
    browser.wait_for("document.getElementById('notice').textContent.endsWith('signal 9')")
    serve.end()
    browser.wait_for("document.getElementById('engine-state').textContent === 'no connection'")
    assert "signal 9" not in browser.text("notice")


@needs_chromium
def test_the_page_shows_loading_progress(browser: Browser, serve: Serve) -> None:
    client = StillClient(None, None, "loading")
    browser.open(serve(client))
    for stage, done, total, text in (
        ("kernels", 0, 0, "Preparing kernels."),
        ("weights", 430, 1000, "Weights: 43.0 %."),
        ("recording", 3, 1650, "Recorded: 3 of 1,650 sizes."),
    ):
        client.progress = {"stage": stage, "done": done, "total": total}
        browser.wait_for(f"document.getElementById('notice').textContent.endsWith('{text}')")
    client.info, client.stats, client.state = fake_info(False), fake_stats(500, False), "ready"
    client.progress = None
    browser.wait_for("document.getElementById('notice').offsetHeight === 0")
    assert browser.complaints == []


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_nothing_is_wider_than_the_screen(
    browser: Browser, serve: Serve, size: tuple[int, int], scheme: str
) -> None:
    browser.open(serve(FakeClient(has_gpu=True)), size, scheme)
    browser.wait_for(f"document.getElementById('stat-tokens-per-second').textContent !== '{NONE}'")
    for tab in ("chat", "engine"):
        browser.evaluate(f"document.getElementById('tab-{tab}').click()")
        for element in ("document.documentElement", f"document.getElementById('{tab}')"):
            assert browser.evaluate(f"{element}.scrollWidth <= {element}.clientWidth"), (
                tab,
                element,
            )
        whole = "document.documentElement.scrollHeight <= innerHeight"
        assert browser.evaluate(whole), "only the log and the engine scroll"
    ink = "getComputedStyle(document.body).color"
    assert (browser.evaluate(ink) == "rgb(23, 27, 33)") == (scheme == "light")


@needs_chromium
def test_panels_do_not_jump(browser: Browser, serve: Serve) -> None:
    """From an idle to a busy engine, everything above the certification keeps its place."""
    client = StillClient(None, None, "loading")
    browser.open(serve(client))
    browser.wait_for("document.getElementById('engine-state').textContent === 'loading'")
    places = (
        "[...document.querySelectorAll('.panel')].slice(0, 7)"
        ".map((panel) => panel.getBoundingClientRect().y)"
    )
    before = browser.evaluate(places)
    client.info, client.stats, client.state = fake_info(True), fake_stats(500, True), "ready"
    browser.wait_for(f"document.getElementById('stat-running').textContent !== '{NONE}'")
    assert browser.evaluate(places) == before


def test_the_page_loads_nothing_from_other_hosts() -> None:
    page = PAGE.read_text()
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|data:[a-z]+/", page)


def test_every_control_has_an_id_and_a_name() -> None:
    page = PAGE.read_text()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    controls = re.findall(r"<(button|input|textarea)\b([^>]*)>", page)
    assert len(controls) >= 11
    for _, attributes in controls:
        assert re.search(r'\bid="', attributes)
    for wanted in re.findall(r'\$\("([a-z0-9-]+)"\)', page):
        assert wanted in ids or f"tab-{wanted}" in ids, wanted
