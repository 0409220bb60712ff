"""Chromium without a screen, for tests of pages.

AXE=path/to/axe.min.js    or npm install --no-save --prefix build axe-core
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

MISSING = [
    *(name for name in ("chromedriver", "chromium") if shutil.which(name) is None),
    *(["selenium"] if importlib.util.find_spec("selenium") is None else []),
]
ROOT = Path(__file__).parents[2]
AXE = Path(os.environ.get("AXE", ROOT / "build/node_modules/axe-core/axe.min.js"))
FOCUSED = "return document.activeElement.outerHTML.slice(0, 200)"


def browser(*, scripts: bool = True) -> Any:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    if not scripts:
        setting = "profile.managed_default_content_settings.javascript"
        options.add_experimental_option("prefs", {setting: 2})
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def shown_as(driver: Any, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def overflow(driver: Any) -> int:
    metrics = driver.execute_cdp_cmd("Page.getLayoutMetrics", {})
    return metrics["cssContentSize"]["width"] - metrics["cssLayoutViewport"]["clientWidth"]


def axe_findings(driver: Any) -> list[Any]:
    """What axe-core finds on the page that is shown."""
    # By the debugger's protocol: the page's policy allows no further script.
    driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text(encoding="utf-8")})
    return driver.execute_async_script(
        "const done = arguments[0]; axe.run().then((r) => done(r.violations.map("
        "(v) => [v.id, v.nodes.map((n) => n.html.slice(0, 160)).slice(0, 3)])))"
    )


def press(driver: Any, *keys: str) -> None:
    """Press keys, wherever the focus is."""
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


def tab_to(driver: Any, text: str) -> None:
    """Press Tab until the focus is on an element with this text; it must be seen to be there."""
    from selenium.webdriver.common.keys import Keys

    for _ in range(60):
        press(driver, Keys.TAB)
        if text in driver.execute_script(FOCUSED):
            style = "return getComputedStyle(document.activeElement).outlineStyle"
            assert driver.execute_script(style) != "none"
            return
    raise AssertionError(f"{text} cannot be reached")
