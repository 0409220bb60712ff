"""`adapterhub show`."""

import json

import adapterhub as ah
from adapterhub.registry.trust import trust_key
from tests.kit import registries


def test_the_card_is_one_screen(typed, trained, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    manifest = json.loads((trained / "adapter" / "adapter.json").read_bytes())
    typed("publish ./run --name mine --license mit --topic films --description " + "word" * 9)
    shown = typed("show mine")
    lines = shown.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert [line[:11].strip() for line in lines if line[:1].strip()][1:] == [
        "versions", "about", "task", "method", "backbone", "scores", "trained on", "size", "signed",
        "licence", "topics", "use it",
    ]  # fmt: skip
    assert f"task        {manifest['task']}: {', '.join(manifest['labels'])}" in shown
    assert "method      lora\n" in shown, "only what differs from the defaults"
    assert "scores      accuracy " in shown, "the main metric comes first"
    assert "64 examples, evaluated on 22, 2 epochs," in shown
    assert "signed      no" in shown
    assert 'adapterhub predict mine "a text"' in shown


def test_the_use_names_the_registry_that_was_given(typed, tmp_path):
    registries.write_sample(tmp_path / "made")
    typed("publish ./made --name polite --registry other")
    shown = typed("show polite --registry other")
    assert 'adapterhub predict polite --registry other "a text"' in shown
    assert 'ah.load(model, "polite", registry="other")' in shown


def test_who_signed_is_shown(typed, tmp_path):
    key = registries.new_key()
    ah.publish(registries.write_sample(tmp_path / "made"), sign=key)
    assert f"signed      key {key.public.id} for polite v1: valid, not trusted" in typed(
        "show polite"
    )
    trust_key(key.public)
    assert "valid, trusted" in typed("show polite")


def test_only_the_authors_own_text_is_shown_and_it_is_cut(typed, tmp_path):
    text = "# Polite\n\nIt is\npolite.\n\n" + "".join(f"- item {n}\n" for n in range(20))
    registries.write_sample(tmp_path / "made", card=text)
    typed("publish ./made --name polite --description D")  # adds the generated block
    shown = typed("show polite")
    assert "\n  It is polite.\n  - item 0\n" in shown
    assert "- item 6" in shown
    assert "- item 7" not in shown
    assert "and 13 more lines: adapterhub show polite --card" in shown
    assert "How to load it" not in shown
    assert "How to load it" in typed("show polite --card")


def test_many_versions_are_shortened(typed, tmp_path):
    for seed in range(10):
        ah.publish(registries.write_sample(tmp_path / str(seed), seed))
    ah.yank("polite@v9", "no")
    shown = typed("show polite").split("task ")[0]
    assert "v10 (20" in shown
    assert "v9 (yanked, 20" in shown
    assert " and 2 more" in shown
