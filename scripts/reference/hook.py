"""Add the generated pages to the site: mkdocs calls these functions.

Each module of this folder that mkdocs.yml names in `generated: NAME` has a function `pages()` that
returns the pages' paths and texts, in the order of the navigation. It may have a function
`groups()` that returns headings with the paths below each, for the navigation, and a function
`assets()` that returns the paths of further files and where these are. Nothing is written to docs/.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[2]
_FETCHED = re.compile(
    r"<(?:script|link(?! rel=.canonical)|img|iframe)[^>]*(?:src|href)=\"(https?://[^\"]*)\""
)
_log = logging.getLogger("mkdocs.hooks.reference")  # its warnings are errors, as those of mkdocs
_pages: dict[str, str] = {}
_assets: dict[str, Path] = {}
_rendered: list[str] = []
_EVERY = 20  # pages between two lines of progress


def on_config(config: MkDocsConfig) -> None:
    """Generate the pages and put them into the navigation."""
    sys.path[:0] = [str(_ROOT / "scripts"), str(_ROOT)]
    _pages.clear()
    _assets.clear()
    config.nav = _with_generated(config.nav)


def _with_generated(nav: Any) -> Any:
    """Replace each `generated: NAME` of a navigation by the paths of its pages."""
    if isinstance(nav, dict):
        return {title: _with_generated(entry) for title, entry in nav.items()}
    if not isinstance(nav, list):
        return nav
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict) and "generated" in entry:
            entries += _generated(entry["generated"])
        else:
            entries.append(_with_generated(entry))
    return entries


def _generated(name: str) -> list[Any]:
    """Generate the pages of a module, and return their part of the navigation."""
    _log.info("generating %s", name)
    start = time.monotonic()
    module = importlib.import_module(f"reference.{name}")
    new = module.pages()
    _pages.update(new)
    _assets.update(getattr(module, "assets", dict)())
    _log.info("generated %s: pages %s, %.0f s", name, len(new), time.monotonic() - start)
    groups = getattr(module, "groups", dict)()
    grouped = {path for paths in groups.values() for path in paths}
    alone = [path for path in new if path not in grouped]
    return [*alone, *({heading: paths} for heading, paths in groups.items())]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the files of the site."""
    for path, text in _pages.items():
        files.append(File.generated(config, path, content=text))
    for path, source in _assets.items():
        files.append(File.generated(config, path, abs_src_path=str(source)))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Say how many pages there are: rendering them takes most of the time."""
    _log.info("rendering %s pages", len(nav.pages))
    _rendered.clear()


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Say how far it is."""
    _rendered.append(page.file.src_uri)
    if len(_rendered) % _EVERY == 0:
        _log.info("rendered %s pages, up to %s", len(_rendered), _rendered[-1])


def on_post_template(output_content: str, *, template_name: str, config: MkDocsConfig) -> str:
    """Let the links of 404.html work from a file, and at any path of a server.

    A server sends this page for missing paths of any depth, so its links need the path of the site.
    """
    if template_name != "404.html":
        return output_content
    root = urlsplit(config.site_url or "").path.rstrip("/") + "/"
    page = re.sub(rf'((?:href|src)="){re.escape(root)}', r"\1", output_content)
    page = page.replace('href=""', 'href="."')
    base = f"location.protocol === 'file:' ? '.' : {json.dumps(root)}"
    script = (
        "<script>document.head.appendChild(Object.assign(document.createElement('base'), "
        f"{{href: new URL({base}, location.href).href}}))</script>"
    )
    config_of = re.compile(
        r'(<script id="__config" type="application/json">.*?</script>)', re.DOTALL
    )
    relative = (
        "<script>{const c = document.getElementById('__config'); c.textContent = JSON.stringify("
        "{...JSON.parse(c.textContent), base: document.baseURI})}</script>"
    )
    return config_of.sub(rf"\1{relative}", page.replace("<head>", f"<head>{script}", 1))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> None:
    """Warn of what a page would fetch from elsewhere: the site works offline."""
    for address in _FETCHED.findall(output):
        _log.warning("%s fetches %s", page.file.src_uri, address)
