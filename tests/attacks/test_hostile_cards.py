"""Texts of strangers in a card: no HTML, links, headings or fences, and the same metadata.

By a Markdown parser, a card with hostile values has the same blocks as one with harmless values,
and only the HTML that adapterhub writes.
"""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from adapterhub.errors import printable
from adapterhub.files.card import InPeft, card, export_card, split_card
from adapterhub.files.manifest import BackboneRef, Manifest, TaskHead, TensorInfo, to_json
from adapterhub.registry.hub_writer import hub_card
from adapterhub.registry.version_files import entry_of
from tests.kit.registries import IDENTITY
from tests.kit.selection import ALL, long_table

HARMLESS = Manifest(
    name="polite",
    methods=({"lora": {"rank": 8}},),
    backbone=BackboneRef("acme/bert", "a" * 40, f"bf16-{'0' * 64}", "bert", identity=IDENTITY),
    task="classification",
    labels=("no", "yes"),
    head=TaskHead("classification", "single_label_classification"),
    tensors={"encoder.0.attn.q.lora.A": TensorInfo("F32", (8, 4))},
    metrics={"accuracy": 0.75},
    training={"recipe": {"note": "plain"}, "seed": 3, "steps": 9, "data": {"train": 1, "eval": 2}},
    versions={"torch": "2.6.0"},
    description="plain",
    license="mit",
    language=("en",),
    tags=("t",),
)
ATTACKS = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "```\n<script>\n```",
    "  ```\n# x", "a\n---\nb: c", "---\nlicense: gpl\n---\n", "<!-- /adapterhub -->\n# x",
    "<!-- adapterhub -->", "a | b | c\n|---|---|", "[x](javascript:alert(1))",
    "![x](https://x/y.png)", "<https://evil>", "[x]: https://evil\n\n[x]", "# heading",
    "1. a\n2. b", "- a\n- b", "> quote", "\tcode", "    code", "a\n===", "***", "~~~\nx",
    "a  \nb", "&lt;script&gt; &#60;b&#62;", "\\<b>", "\\`a`", "**b** _c_ __d__", "</details>",
    "<![CDATA[x]]>", "<?php ?>", "`", "``", "````", "%0a", "'''\"\"\"", "'); import os; ('",
    "\x1b[2J\u202e\x00\x85\u2028", "{{ x }}", "!!python/object:x", "&a *a", "a: b", "@x #y", "\\",
    "\\|", "https://evil.example/x", "www.evil.example", "<b", "<!-- x", "\n\n\n", " ",
)  # fmt: skip
MARKDOWN = MarkdownIt("gfm-like", {"linkify": False, "html": True})


def shape(text: str) -> list[tuple[str, str, str]]:
    """Return the blocks and inline elements of a card, without the values of texts and code."""
    _, body = split_card(text)
    tokens = [t for block in MARKDOWN.parse(body) for t in (block, *(block.children or ()))]
    kept = ("html_block", "html_inline")
    return [
        (t.type, t.tag, t.content if t.type in kept else str(sorted(t.attrs.items())))
        for t in tokens if t.type not in ("text", "softbreak", "text_special")
    ]  # fmt: skip


def planted(text: str) -> Manifest:
    """Put `text` into each field that has a free text."""
    return dataclasses.replace(
        HARMLESS,
        labels=(text, "yes"),
        description=text[:2000] or "x",
        training={
            "recipe": {"note": text, f"k{text}": [text, {text: text}]},
            "seed": text, "steps": [text],
            "data": {"train": text, "eval": {"a": text}, "sha256": text},
        },
    )  # fmt: skip


def same_shape(text: str) -> None:
    manifest = planted(text)
    peft = InPeft("classification", (text,))
    for reference in ("hf:me/polite", "THIS FOLDER"):
        made = card(manifest, reference=reference, peft=peft)
        harmless = card(
            planted("plain"), reference=reference, peft=InPeft("classification", ("p",))
        )
        assert shape(made) == shape(harmless), made
        front = metadata_of(made)
        assert front == metadata_of(harmless)
        assert card(manifest, made, reference=reference, peft=peft) == made, "not idempotent"
        assert printable(made) == made
        (block,) = [t for t in MARKDOWN.parse(split_card(made)[1]) if t.info == "python"]
        calls = [n for n in ast.walk(ast.parse(block.content)) if isinstance(n, ast.keyword)]
        (labels,) = [ast.literal_eval(k.value) for k in calls if k.arg == "labels"]
        assert labels == [text, "yes"]
        (code,) = [t for t in MARKDOWN.parse(split_card(made)[1]) if t.info == "yaml"]
        assert yaml.safe_load(code.content)["note"] == text


pieces = st.sampled_from([*ATTACKS, "\n", " ", "a", "_", "*", "<", ">", "`", "|", "-", "#", "\\"])
texts = st.one_of(st.lists(pieces, max_size=6).map("".join), st.text(max_size=40))


@settings(max_examples=25 if ALL else 10)
@given(texts)
@example("a_b*c`d")
@example("=")
@example("no")
@example("12:30")
def test_no_text_changes_a_block_of_a_card(text) -> None:
    same_shape(text)


@settings(max_examples=25 if ALL else 10)
@given(st.lists(texts, min_size=1, max_size=3, unique=True), st.sampled_from(ATTACKS))
def test_an_exported_card_is_inert(labels, name) -> None:
    plain = [f"l{i}" for i in range(len(labels))]
    assert shape(export_card(name, ["lora"], labels)) == shape(export_card("n", ["lora"], plain))


def metadata_of(text: str) -> Any:
    block = REGEX_YAML_BLOCK.search(text)
    assert block
    assert yaml.safe_load(block[2]) == split_card(text)[0], "the Hub reads it as adapterhub does"
    return yaml.safe_load(block[2])


@long_table("text", ATTACKS, ids=ascii)
def test_a_hostile_text_changes_no_block_of_a_card_nor_its_metadata(text) -> None:
    same_shape(text)
    manifest = dataclasses.replace(planted(text), files={"adapter.safetensors": "0" * 64})
    entry = entry_of(to_json(manifest), reference="hf:me/polite@v1", name="me/polite", version="v1")
    made = hub_card(card(manifest, reference="hf:me/polite").encode(), entry).decode()
    front = metadata_of(made)
    assert front["adapterhub"]["description"] == manifest.description
    assert front["adapterhub"]["digest"] == entry.digest
    assert front["license"] == "mit"
    assert shape(made) == shape(card(planted("plain"), reference="hf:me/polite"))
