"""Render the Markdown of a card as HTML that shows text and loads nothing.

Cards are untrusted. markdown-it parses the card with HTML disabled. Links and images become text
followed by their address. nh3 then allows only the tags below, without attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from markupsafe import Markup

from adapterhub.errors import ConfigError, printable
from adapterhub.files.card import without_comments

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

_MOST = 30_000  # characters of a card shown on a page
_TOP = 3  # level of the card's first heading on the page
_TAGS = {
    *("p", "br", "hr", "blockquote", "pre", "code", "em", "strong", "s", "ul", "ol", "li"),
    *("h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"),
}


def card_html(text: str) -> Markup:
    """Return a card's text as HTML without links or images.

    Raises:
        ConfigError: markdown-it-py or nh3 is not installed.
    """
    import nh3

    reader = _reader()
    cut = text if len(text) <= _MOST else f"{text[:_MOST]}\n\n..."
    shown = printable(without_comments(cut))
    tokens = reader.parse(shown)
    _place_headings(tokens)
    for token in tokens:
        token.children = [*_without_links(token.children or ())]
    html = reader.renderer.render(tokens, reader.options, {})
    clean = nh3.clean(html, tags=_TAGS, attributes={}, link_rel=None)
    # A wide table scrolls within its box, instead of breaking its words.
    clean = clean.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    return Markup(clean.replace("</table>", "</table></div>"))


def check_card_libraries() -> None:
    """Check that the libraries for cards are installed.

    Raises:
        ConfigError: markdown-it-py or nh3 is not installed.
    """
    _reader()


@cache
def _reader() -> MarkdownIt:
    try:
        import nh3  # noqa: F401
        from markdown_it import MarkdownIt
    except ImportError as error:
        raise ConfigError(
            f"the pages of a registry need {error.name}, which is not installed",
            hint='pip install "adapterhub[site]"',
        ) from None
    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


def _place_headings(tokens: Sequence[Token]) -> None:
    """Move headings below those of the page, without gaps between their levels."""
    last = _TOP - 1
    for token in tokens:
        if token.type == "heading_open":
            last = min(max(int(token.tag[1:]) + 1, _TOP), last + 1, 6)
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{last}"


def _without_links(tokens: Sequence[Token]) -> Iterator[Token]:
    """Replace links and images by their text, followed by the address."""
    from markdown_it.token import Token

    addresses: list[str] = []
    written = ""
    for token in tokens:
        if token.type == "link_open":
            addresses.append(str(token.attrs.get("href", "")))
            written = ""
        elif token.type == "link_close":
            address = addresses.pop()
            if address and address != written:
                yield Token("text", "", 0, content=f" ({address})")
        elif token.type == "image":
            address = str(token.attrs.get("src", ""))
            yield Token("text", "", 0, content=f"{token.content} ({address})")
        else:
            written += token.content
            yield token
