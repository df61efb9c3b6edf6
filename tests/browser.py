"""Real JupyterLab on loopback, driven through Debian's chromium. Used by test_browser.py."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
import uuid
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

from book.copy import copy_chapters

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "token-of-a-test-run"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NAMES = ("chromium", "chromium-browser", "google-chrome")  # Debian's name first
EXECUTABLE = next(filter(None, map(shutil.which, NAMES)), None)
ROLES = {"button", "combobox", "radio", "radiogroup", "slider", "spinbutton", "textbox"}
PICTURES_SHOWN = """[...document.querySelectorAll('.jp-OutputArea img')]
    .filter(image => image.complete && image.naturalWidth > 0).length"""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
LOCAL = ("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:")


@contextmanager
def jupyterlab(folder: Path):
    """Serve readers' copies of the chapters from `folder`; yields the base URL.

    Settings and extension are the course's as they lie here, and nothing is the user's.
    """
    chapters = folder / "my_chapters"
    copy_chapters(ROOT / "chapters", chapters)
    extension = folder / "data" / "labextensions" / "training-measured"
    shutil.copytree(ROOT / "jupyter" / "labextension", extension)
    settings = folder / "config" / "labconfig"
    settings.mkdir(parents=True)
    kept = ROOT / "jupyter" / "labconfig" / "default_setting_overrides.json"
    overrides = json.loads(kept.read_text(encoding="utf-8"))
    overrides["@jupyterlab/notebook-extension:tracker"] = {"windowingMode": "none"}
    (settings / "default_setting_overrides.json").write_text(
        json.dumps(overrides), encoding="utf-8"
    )
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0"]
    command += ["--ip=127.0.0.1", f"--IdentityProvider.token={TOKEN}", "--expose-app-in-browser"]
    with open(folder / "server.log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(
            command, cwd=chapters, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield _address(folder, server)
        finally:
            server.terminate()
            server.wait(timeout=30)


def _address(folder: Path, server: subprocess.Popen) -> str:
    """The URL from the file that the server writes once it listens."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        for file in (folder / "runtime").glob("jpserver-*.json"):
            try:
                url = json.loads(file.read_text(encoding="utf-8"))["url"]
            except ValueError:
                continue  # half written
            with DIRECT.open(f"{url}api?token={TOKEN}", timeout=10):
                return url
        time.sleep(0.2)
    raise RuntimeError(
        f"JupyterLab didn't start: {(folder / 'server.log').read_text('utf-8')[-2000:]}"
    )


@contextmanager
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=EXECUTABLE, args=FLAGS, timeout=60_000)
        yield browser
        browser.close()


class Chapter:
    """One notebook, open in a page. It remembers requests to the outside and console errors."""

    def __init__(self, browser, base: str, name: str, width: int = 1280):
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.page.set_default_timeout(60_000)
        self.outside: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", self._request)
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        # A workspace of its own: JupyterLab would open the notebooks of earlier pages again.
        workspace = f"lab/workspaces/{uuid.uuid4().hex}/tree"
        self.page.goto(f"{base}{workspace}/{name}?token={TOKEN}")
        self.page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.context")
        self.page.evaluate(
            """async () => {
                const panel = window.jupyterapp.shell.currentWidget;
                await panel.context.ready;
                await panel.revealed;
                await panel.sessionContext.ready;
            }"""
        )

    def _request(self, request) -> None:
        if not request.url.startswith(LOCAL):
            self.outside.append(request.url)

    def run_all(self, *left_out: str, seconds: float = 300) -> None:
        """Run the cells and wait until each has a count and the kernel rests.

        Cells with one of the texts `left_out` do nothing: they take long, nbval runs them too, and
        no cell with a control needs them.
        """
        found = self.page.evaluate(
            """leftOut => {
                const panel = window.jupyterapp.shell.currentWidget, found = [];
                for (const cell of panel.content.widgets) {
                    if (cell.model.type !== 'code') continue;
                    const source = cell.model.sharedModel;
                    const texts = leftOut.filter(text => source.getSource().includes(text));
                    if (texts.length) source.setSource('pass');
                    found.push(...texts);
                    cell.model.executionCount = null;
                }
                window.jupyterapp.commands.execute('notebook:run-all-cells');
                return found;
            }""",
            left_out,
        )
        assert sorted(found) == sorted(left_out), "each text is in one cell"
        self.page.wait_for_function(
            """() => window.jupyterapp.shell.currentWidget.content.widgets.every(
                cell => cell.model.type !== 'code' || cell.model.executionCount)""",
            timeout=1000 * seconds,
        )
        self.settle()

    def settle(self) -> None:
        """Wait until the kernel has been idle for 0.4 s."""
        self.page.evaluate(
            """() => new Promise(done => {
                const session = window.jupyterapp.shell.currentWidget.sessionContext;
                let since = Date.now();
                const watch = setInterval(() => {
                    if (session.session?.kernel?.status !== 'idle') since = Date.now();
                    if (Date.now() - since > 400) { clearInterval(watch); done(); }
                }, 50);
            })"""
        )

    def error_outputs(self) -> list[str]:
        return self.page.evaluate(
            """() => window.jupyterapp.shell.currentWidget.content.widgets
                .filter(cell => cell.model.type === 'code')
                .flatMap(cell => cell.model.outputs.toJSON())
                .filter(output => output.output_type === 'error' || output.name === 'stderr')
                .map(output => output.ename || output.text)"""
        )

    def cells(self) -> tuple[str, int]:
        """The first letter of each cell's type, in order, and the number of the active cell."""
        return tuple(
            self.page.evaluate(
                """() => {
                    const notebook = window.jupyterapp.shell.currentWidget.content;
                    const kinds = notebook.widgets.map(cell => cell.model.type[0]).join('');
                    return [kinds, notebook.activeCellIndex];
                }"""
            )
        )

    def names(self) -> list[tuple[str, str]]:
        """Role and name of every control, as Chromium tells them to a screen reader."""
        session = self.page.context.new_cdp_session(self.page)
        boxes = self.page.locator(".course-controls").count()
        found = []
        for box in range(boxes):
            element = session.send(
                "Runtime.evaluate",
                {"expression": f"document.querySelectorAll('.course-controls')[{box}]"},
            )["result"]
            tree = session.send("Accessibility.queryAXTree", {"objectId": element["objectId"]})
            nodes = [node for node in tree["nodes"] if not node["ignored"]]
            found += [(node["role"]["value"], node["name"].get("value", "")) for node in nodes]
        session.detach()
        return [(role, name) for role, name in found if role in ROLES]

    def cell(self, source: str):
        """The code cell that contains this text."""
        return self.page.locator(".jp-CodeCell").filter(has_text=source).first

    def run_again(self, source: str) -> None:
        """Run the code cell that contains `source` once more, and wait."""
        self.run_with(source, None)

    def run_with(self, source: str, change_to: str | None) -> None:
        """Change the code cell that contains `source`, run it, and wait."""
        self.page.evaluate(
            """async ([source, changed]) => {
                const panel = window.jupyterapp.shell.currentWidget;
                const index = panel.content.widgets.findIndex(
                    c => c.model.type === 'code' && c.model.sharedModel.source.includes(source));
                panel.content.activeCellIndex = index;
                if (changed !== null)
                    panel.content.widgets[index].model.sharedModel.setSource(changed);
                await window.jupyterapp.commands.execute('notebook:run-cell');
            }""",
            [source, change_to],
        )
        self.settle()
