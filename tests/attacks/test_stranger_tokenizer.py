"""A stranger's tokens and chat template leave with the adapter, in any order, to the byte."""

import copy
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jinja2 import TemplateError
from tokenizers import AddedToken, NormalizedString, PreTokenizedString, Tokenizer, models
from tokenizers.pre_tokenizers import PreTokenizer

import adapterhub as ah
from adapterhub.adapters.state import find_state
from adapterhub.anatomy.backbone import Backbone
from adapterhub.errors import AdapterhubError, MismatchError
from adapterhub.files.manifest import NewToken
from adapterhub.files.native import Saved, write_adapter
from tests.kit import tiny_models
from tests.kit.compare import differences, observed, observed_tokenizer
from tests.kit.data import CHAT_TEMPLATE, word_tokenizer
from tests.kit.selection import cases_of, long_table

A, B, AB = ("<a>",), ("<b>",), ("<a>", "<b>")


def unigram_tokenizer() -> Any:
    """Make a tokenizer whose scores lose their last bit when they are read from text."""
    generator = random.Random(0)
    pieces = [("<unk>", 0.0), ("<pad>", 0.0), ("</s>", 0.0)]
    pieces += [(chr(97 + i), -20 * generator.random()) for i in range(26)]
    inner = Tokenizer(models.Unigram(pieces, unk_id=0))
    assert Tokenizer.from_str(inner.to_str()).to_str() != inner.to_str()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )


TOKENIZERS = {
    "words": lambda: word_tokenizer("<s>", ""),
    "unigram": unigram_tokenizer,
    "python": transformers.ByT5Tokenizer,
}


@dataclass
class Place:
    """A model and its tokenizer, and a folder with strangers' adapters."""

    kind: str
    folder: Path

    def __post_init__(self) -> None:
        self.tokenizer: Any = TOKENIZERS[self.kind]()
        self.model: Any = tiny_models.model(
            "llama", "causal-lm", vocab_size=len(self.tokenizer), num_hidden_layers=1
        )

    def save(self, name: str, tokens: tuple[str, ...] = (), template: str | None = None) -> Path:
        """Save a stranger's adapter, made in another process, so to speak."""
        place = Place(self.kind, self.folder)
        size = len(place.tokenizer)
        special = [AddedToken(t, normalized=False, special=t == "<b>") for t in tokens]
        ah.attach(place.model, "lora(rank=1)", tokenizer=place.tokenizer, name="other").detach()
        place.tokenizer.add_tokens(special)
        place.tokenizer.chat_template = template
        ah.attach(place.model, "lora(rank=1)", name=name, tokenizer=place.tokenizer).save(
            self.folder / name
        )
        assert [t.id for t in Saved.at(self.folder / name).manifest.tokens] == [
            *range(size, size + len(tokens))
        ]
        return self.folder / name

    def load(self, saved: str, **options: Any) -> Any:
        """Load one."""
        return ah.load(self.model, self.folder / saved, tokenizer=self.tokenizer, **options)

    def seen(self) -> dict[str, Any]:
        """Describe the model and the tokenizer."""
        return observed(self.model, self.tokenizer)


@pytest.fixture(params=TOKENIZERS)
def place(request, tmp_path) -> Place:
    return Place(request.param, tmp_path)


@pytest.fixture
def words(tmp_path) -> Place:
    return Place("words", tmp_path)


def files_of(tokenizer, folder: Path) -> dict[str, bytes]:
    tokenizer.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_detach_restores_the_tokenizer_to_the_byte(place, tmp_path):
    place.save("a", AB, "{{ 'a' }}")
    place.tokenizer.add_tokens([])
    before, files = place.seen(), files_of(place.tokenizer, tmp_path / "before")
    state = pickle.dumps(place.tokenizer)
    backend = getattr(place.tokenizer, "backend_tokenizer", None)
    place.load("a")
    assert place.tokenizer.convert_tokens_to_ids("<a>") in place.tokenizer("x<a>")["input_ids"]
    assert place.tokenizer.chat_template == "{{ 'a' }}"
    ah.detach(place.model)
    assert not differences(before, place.seen())
    assert files_of(place.tokenizer, tmp_path / "after") == files
    assert getattr(place.tokenizer, "backend_tokenizer", None) is backend
    copied, unpickled = copy.deepcopy(place.tokenizer), pickle.loads(state)
    for other in (copied, unpickled):
        assert differences(observed_tokenizer(unpickled), observed_tokenizer(other)) == []
    place.load("a")
    place.load("a", name="again")


def test_tokens_that_the_user_added_stay(place):
    size = len(place.tokenizer)
    place.save("a", A)
    ah.attach(place.model, "lora(rank=1)", name="own", tokenizer=place.tokenizer)
    place.load("a")
    place.tokenizer.add_tokens(["<own>"])
    ah.detach(place.model, "a")
    ids = place.tokenizer.convert_tokens_to_ids(["<a>", "<own>"])
    assert ids == [size, size + 1], "the user's keeps its id, so the one in front stays"
    ah.detach(place.model)
    assert place.tokenizer.convert_tokens_to_ids("<own>") == size + 1
    with pytest.raises(MismatchError, match="different ids"):
        place.save("b", B) and place.load("b")


def other_model(words):
    other = tiny_models.model("llama", "causal-lm", vocab_size=38, num_hidden_layers=1)
    ah.load(other, words.folder / "a", tokenizer=words.tokenizer)
    return other


@pytest.mark.parametrize("another", [other_model, lambda words: copy.deepcopy(words.model)])
def test_tokens_stay_while_another_model_uses_them(words, another):
    words.save("a", A)
    before = observed_tokenizer(words.tokenizer)
    words.load("a")
    other = another(words)
    ah.detach(words.model)
    assert "<a>" in words.tokenizer.get_vocab()
    ah.detach(other)
    assert not differences(before, observed_tokenizer(words.tokenizer))


OWN = CHAT_TEMPLATE
APPLIED = {
    ("a",): "A",
    ("b",): "B",
    (): OWN,
    ("plain",): OWN,
    ("a", "b"): "B",
    ("b", "a"): "A",
    ("b", "plain"): "B",
    (ah.Average(["a", "again"]),): "A",
    (ah.Average(["a", "b"]),): "'a', 'b'",
    (ah.Average(["a", "plain"]),): "'a', the backbone",
}


def in_route_of(model: Any, name: str, shown: Callable[[], str]) -> str:
    with ah.route(model, [name]):
        return shown()


@pytest.mark.parametrize("outside", [(), ("b",)])
def test_the_chat_template_is_that_of_what_applies(words, outside):
    chat = [{"role": "user", "content": "the movie"}]

    def shown() -> str:
        """Return the prompt, or what rendering says."""
        try:
            return words.tokenizer.apply_chat_template(chat, tokenize=False)
        except TemplateError as error:
            return str(error)

    words.save("a", (), "A")
    words.save("b", (), "B")
    words.save("plain", ())
    before, own = words.seen(), shown()
    templates = words.tokenizer.chat_template = {"default": OWN, "tools": "x"}
    for name in ("a", "b", "plain"):
        words.load(name)
    words.load("a", name="again")
    for composition, expected in APPLIED.items():
        expected = own if expected is OWN else expected
        ah.activate(words.model, *composition)
        assert expected in shown()
        ah.activate(words.model, *outside)
        left = shown()
        with ah.route(words.model, [composition or None] * 2):
            assert expected in shown()
            with ah.disabled(words.model):
                assert shown() == own
            assert expected in shown()
        assert shown() == left
        if composition:
            with ah.route(words.model, [composition, None]):
                mixed = shown()
            assert mixed == own if expected == own else "the backbone" in mixed
    with ah.route(words.model, ["a", "b"]):
        assert "chat_template=adapter.template" in shown()
        with ah.route(words.model, ["b", "b"]):
            assert shown() == "B"
            with ThreadPoolExecutor() as pool:
                found = pool.submit(in_route_of, words.model, "a", shown).result()
            assert "'b', 'a'" in found, "another thread's prompts would be wrong"
    ah.detach(words.model)
    assert words.tokenizer.chat_template is templates
    words.tokenizer.chat_template = OWN
    assert not differences(before, words.seen())


@long_table("names", [("a",), ("a", "plain"), ("a", "b"), ("plain",)], parts=2)
def test_a_merged_model_shows_the_template_of_its_adapters(words, names):
    for name, template in (("a", "A"), ("b", "B"), ("plain", None)):
        words.save(name, (), template) if template else words.save(name, ())
    before, own = words.seen(), words.tokenizer.chat_template
    for name in names:
        words.load(name)
    ah.activate(words.model, *names)
    shown = words.tokenizer.chat_template
    assert shown == (own if names == ("plain",) else "B" if "b" in names else "A")
    ah.merge(words.model)
    assert words.tokenizer.chat_template == shown
    ah.attach(words.model, "lora", name="above")
    ah.detach(words.model)
    assert words.tokenizer.chat_template == shown
    ah.unmerge(words.model)
    assert words.tokenizer.chat_template == shown
    ah.detach(words.model)
    assert not differences(before, words.seen())


def test_a_template_that_the_user_sets_meanwhile_stays(words):
    words.save("a", (), "A")
    words.save("b", (), "B")
    words.load("a")
    words.tokenizer.chat_template = "mine"
    words.load("b")
    assert words.tokenizer.chat_template == "B"
    ah.detach(words.model, "b")
    assert words.tokenizer.chat_template == "mine"
    ah.detach(words.model)
    assert words.tokenizer.chat_template == "mine"


def test_an_own_adapter_is_saved_with_the_users_template(words, tmp_path):
    words.save("a", A, "A")
    words.load("a")
    own = ah.attach(words.model, "lora(rank=1)", name="own")
    own.save(tmp_path / "while")
    ah.detach(words.model, "a")
    own.save(tmp_path / "after")
    for folder in ("while", "after"):
        assert Saved.at(tmp_path / folder).manifest.chat_template == CHAT_TEMPLATE


def forged(folder: Path, into: str, **changes: Any) -> str:
    manifest, tensors = Saved.at(folder / "a").read()
    if changes.pop("tensors", False):
        tensors = {key: torch.cat([value, value]) for key, value in tensors.items()}
    backbone = replace(manifest.backbone, **changes.pop("backbone", {}))
    write_adapter(folder / into, replace(manifest, backbone=backbone, **changes), tensors)
    return into


REFUSED = {
    "backbone": {"backbone": {"fingerprint": "v1-" + "0" * 64}},
    "tokenizer": {"tokenizer": "0" * 64},
    "tensors": {"tensors": True},
    "ids": {"tokens": (NewToken("<pad>", 38), NewToken("<b>", 39))},
    "one id too high": {"tokens": (NewToken("<a>", 38), NewToken("<b>", 40))},
    "an id of a word": {"tokens": (NewToken("<a>", 5), NewToken("<b>", 6))},
    "a name": {"name": "taken"},
}


@long_table("reason", REFUSED, parts=3)
def test_a_refused_adapter_leaves_nothing(words, reason):
    """No ids stay bound, and a sound adapter loads afterwards."""
    words.save("a", AB, "A")
    words.save("sound", B, "B")
    name = forged(words.folder, "forged", **REFUSED[reason])
    pristine = words.seen()
    ah.attach(words.model, "lora(rank=1)", name="taken")
    before = words.seen()
    with pytest.raises(AdapterhubError):
        words.load(name)
    assert not differences(before, words.seen())
    assert Backbone.of(words.model).tokenizer is None
    words.load("sound")
    ah.detach(words.model)
    assert not differences(pristine, words.seen())


def test_a_tokenizer_that_cannot_be_restored_gets_no_tokens(words):
    class Letters:
        def pre_tokenize(self, pretok: PreTokenizedString) -> None:
            pretok.split(self.split)

        def split(self, i: int, text: NormalizedString) -> list[NormalizedString]:
            return [text]

    words.save("a", A)
    words.tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Letters())
    with pytest.raises(MismatchError, match="could not be removed"):
        words.load("a", any_tokenizer=True)
    assert "<a>" not in words.tokenizer.get_vocab()
    assert find_state(words.model) is None
    words.tokenizer.add_tokens([AddedToken("<a>", normalized=False)])
    words.load("a", any_tokenizer=True)


def random_sequence(place: Place, seed: int) -> list[str]:
    """Load, refuse, attach, activate and detach in a random order, and detach all at the end."""
    generator, done = random.Random(seed), []
    for number in range(generator.randint(3, 9)):
        state = find_state(place.model)
        attached = list(state.adapters) if state else []
        action = generator.choice(["load"] * 2 + ["refused", "own"] + ["detach"] * 2 + ["activate"])
        name = generator.choice(["a", "b", "ab", "plain"])
        done.append(f"{action} {name} {attached}")
        try:
            if action == "load":
                place.load(name, name=f"{name}{number}")
            elif action == "refused":
                place.load("forged")
            elif action == "own":
                ah.attach(place.model, "lora(rank=1)", name=f"own{number}")
            elif attached and action == "detach":
                ah.detach(place.model, generator.choice(attached))
            elif attached:
                ah.activate(place.model, generator.choice(attached))
        except AdapterhubError as error:
            done.append(str(error))
        names, state = place.tokenizer.get_vocab(), find_state(place.model)
        for adapter in state.adapters.values() if state else ():
            for token in adapter.new_tokens.tokens if adapter.new_tokens else ():
                assert names[token.content] == token.id, done
    if find_state(place.model):
        ah.detach(place.model)
    return done


@pytest.mark.parametrize("kind", ["words", "python"])
def test_any_sequence_restores_model_and_tokenizer(kind, tmp_path):
    place = Place(kind, tmp_path)
    saved = ("a", A, "A"), ("b", B, "B"), ("ab", AB, "AB"), ("plain", (), None)
    for name, tokens, template in saved:
        place.save(name, tokens, template)
    forged(tmp_path, "forged", backbone={"fingerprint": "v1-" + "0" * 64})
    pristine = place.seen()
    for seed in range(200) if tiny_models.FULL_MATRIX else cases_of(range(18), 3):
        done = random_sequence(place, seed)
        found = differences(pristine, place.seen())
        assert not found, (seed, done, found)
