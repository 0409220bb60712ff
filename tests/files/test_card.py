"""Cards are generated from the manifest and preserve the author's text; tables in cards and pages.

tests/cli/test_init.py prints tables, tests/attacks/test_hostile_pages.py attacks whole cards.
"""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from adapterhub.config.yaml import parse_mapping
from adapterhub.files.card import InPeft, card, model_kind
from adapterhub.files.manifest import BackboneRef
from adapterhub.files.shown_table import ShownTable, TableCell, code_block, literal
from tests.kit.registries import CLASSIFIER, IDENTITY

MANIFEST = dataclasses.replace(
    CLASSIFIER,
    labels=("no", "a|b\nc"),
    training={"recipe": {"seed": 3, "train": {"epochs": 2}}, "seed": 3, "steps": 9},
)


def metadata(text):
    return parse_mapping(text.split("---\n")[1], "card")


def test_it_contains_the_facts_of_the_manifest():
    text = card(MANIFEST, reference="hf:me/polite", peft=InPeft("classification"))
    for words in (
        "# polite", "steps 9", "[acme/bert](https://huggingface.co/acme/bert) at aaaa", 
        "| method | lora |",
        "32 parameters", "| accuracy | 0.7500 |", "not stated",
        "no, a\\|b c |", "ah.load(model, 'hf:m",
        "PeftModel.from_pretrained(backbone, 'me/polite')", "num_labels=2", "epochs: 2",
    ):  # fmt: skip
        assert words in text
    assert metadata(text) == {
        "base_model": "acme/bert",
        "base_model_relation": "adapter",
        "library_name": "adapterhub",
        "tags": ["adapterhub", "peft", "lora", "classification"],
    }


@pytest.mark.parametrize("old", ["", "# Mine\n\nBy me.\n", "---\nlicense: mit\n---\n# Mine\r\n"])
def test_regenerating_is_idempotent(old):
    once = card(MANIFEST, old)
    assert card(MANIFEST, once) == once
    other = card(dataclasses.replace(MANIFEST, name="x"), once, reference="x")
    assert "ah.load(model, 'x')" in other
    assert "THIS FOLDER" not in other
    assert card(MANIFEST, other) == once


def test_the_authors_text_is_preserved():
    old = "---\nlicense: mit\nthumbnail: a.png\ntags: [mine]\n---\n\n# Mine\n\nBy me.\n"
    text = card(MANIFEST, old)
    assert "# Mine\n\nBy me.\n" in text
    assert "# polite" not in text
    own = {"license": "mit", "thumbnail": "a.png", "tags": 0}
    assert metadata(text) | {"tags": 0} == metadata(card(MANIFEST)) | own
    assert metadata(text)["tags"][:2] == ["mine", "adapterhub"]
    licensed = dataclasses.replace(MANIFEST, license="apache-2.0")
    assert metadata(card(licensed, text))["license"] == "apache-2.0"
    edited = text.replace("By me.", "By you.") + "\n## After\n"
    again = card(MANIFEST, edited)
    assert "By you." in again
    assert "## After" in again
    assert again.count("## How to load it") == 1


@pytest.mark.parametrize("front", ["a: [", "&a b", "- list", "x: !!python/object:os.system 1"])
def test_unreadable_metadata_is_dropped(front):
    text = card(MANIFEST, f"---\n{front}\n---\n# Mine\n")
    assert "# Mine" in text
    assert metadata(text)["library_name"] == "adapterhub"


def test_a_local_backbone_is_not_linked():
    local = dataclasses.replace(
        MANIFEST, backbone=BackboneRef("mine", None, "x", "bert", identity=IDENTITY)
    )
    text = card(local)
    assert "base_model" not in metadata(text)
    assert "huggingface.co" not in text


def test_the_model_kind_comes_from_the_head_or_the_run():
    assert model_kind(MANIFEST) == "classification"
    bare = dataclasses.replace(MANIFEST, head=None, task="instructions")
    assert model_kind(bare) is None
    assert model_kind(dataclasses.replace(bare, training={"kind": "causal-lm"})) == "causal-lm"
    assert model_kind(dataclasses.replace(bare, training={"kind": ["x"]})) is None
    assert "load_backbone('acme/bert')" not in card(bare, peft=InPeft("causal-lm"))


@pytest.mark.parametrize(("model_type", "auto"), [("whisper", "SpeechSeq2Seq"), ("hubert", "CTC")])
def test_the_class_is_that_of_the_architecture(model_type, auto):
    backbone = dataclasses.replace(MANIFEST.backbone, model_type=model_type)
    spoken = dataclasses.replace(MANIFEST, backbone=backbone, head=None)
    text = card(spoken, reference="hf:me/x", peft=InPeft("speech-recognition"))
    assert f"backbone = AutoModelFor{auto}" in text


# A table that is shown, and Markdown around texts of others.


TABLE = ShownTable(
    ("run", "score"),
    [("a_1 | <b>", TableCell("-0.5", -0.5)), ("b", "\u202e1")],
    numbers=True,
    meanings=("", 'a "number"'),
    taken=[1],
)


def test_markdown_has_rules_and_is_rendered_as_the_texts():
    plain = ShownTable(("a", "b"), [("c", "d")])
    assert plain.markdown() == "| a | b |\n| --- | --- |\n| c | d |"
    assert "| --- | ---: |" in TABLE.markdown()
    html = MarkdownIt("gfm-like", {"linkify": False}).render(TABLE.markdown())
    assert "<td>a_1 | &lt;b&gt;</td>" in html
    assert ">-0.5</td>" in html
    assert "\u202e" not in html
    table = ShownTable(("a",), [(TableCell("x", markdown="[x](https://example.org)"),)])
    assert table.markdown().endswith("| [x](https://example.org) |")
    assert table.texts() == [["x"]]


def test_html_is_escaped_and_has_the_numbers_if_it_is_sortable():
    html = TABLE.html()
    assert '<th scope="row"><bdi>a_1 | &lt;b&gt;</bdi></th><td><bdi>-0.5</bdi></td>' in html
    assert '<th scope="col" title="a &quot;number&quot;"><bdi>score</bdi></th>' in html
    assert "\u202e" not in html
    assert html.count("<tr class=taken>") == 1
    for value in ("-0.5", ""):
        assert f'<td data-value="{value}">' in TABLE.html(sortable=True)


def test_plain_text_has_columns_and_one_line_for_each_row():
    table = ShownTable(["name", "n"], [("a\nb", "1"), ("long name", "22")], title="numbers")
    assert table.text() == "numbers\nname       n\na\\nb       1\nlong name  22"


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("snake_case, 10 km/h (a+b)", "snake_case, 10 km/h (a+b)"),
        ("<b>", r"\<b\>"), ("a | b", r"a \| b"), ("# x", r"\# x"), ("1. x", r"1\. x"),
        ("_x_ `y`", r"\_x\_ \`y\`"), ("a\n\n b", "a b"), ("\x1b[2J", r"\\u001b\[2J"),
    ],
)  # fmt: skip
def test_markup_is_escaped_and_plain_text_is_not(text, escaped):
    assert literal(text) == escaped


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30))
def test_a_literal_is_rendered_as_its_text(text):
    html = MarkdownIt("gfm-like", {"linkify": False}).render(literal(text) or "x")
    shown = html.removeprefix("<p>").removesuffix("</p>\n")
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        shown = shown.replace(entity, character)
    assert shown == (" ".join(text.split()) or "x")


def test_a_fence_is_longer_than_what_it_encloses():
    assert code_block("python", ["a", "````"]) == "`````python\na\n````\n`````"
    assert code_block("yaml", ["a"]) == "```yaml\na\n```"
