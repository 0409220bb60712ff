"""tagging: CoNLL columns, word pieces, entities, and published schemes, beside those of seqeval."""

import json
import random

import datasets
import pytest
import seqeval.metrics
import seqeval.scheme
import sklearn.metrics
from transformers import BertTokenizerFast

import adapterhub as ah
from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.batches import IGNORED
from adapterhub.tasks.common.tag_schemes import scheme_of, spans, written
from adapterhub.tasks.tagging import Sentence, Tags, entities
from tests.kit.data import words_of, write_json_lines
from tests.kit.session import succeeded

TAGGED = Sentence("New York is", ("New", "York", "is"), ("B-x", "I-x", "O"))


@pytest.mark.parametrize(
    "text",
    [
        "New\tB-x\nYork\tI-x\nis\tO\n\t\n",
        "-DOCSTART- -X- O\n\nNew NNP B-x\nYork NNP I-x\nis VB O\n\n",
        "New\tB-x\r\nYork\tI-x\r\nis\tO\r\n\t\r\n",
    ],
)
def test_conll_columns(tmp_path, text):
    (tmp_path / "a.conll").write_bytes((text + text).encode())
    task, source = parse_task("tagging"), str(tmp_path / "a.conll")
    assert task.read(source, DataOptions(), "train") == [TAGGED, TAGGED]
    assert task.read(source, DataOptions(), "eval", labelled=False)[1].tags is None


def test_lists_of_tokens_and_tags(tmp_path, monkeypatch):
    row = {"tokens": TAGGED.tokens, "tags": TAGGED.tags}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    options = DataOptions(text="tokens", label="tags")
    assert parse_task("tagging").read(str(tmp_path / "a.jsonl"), options, "train") == [TAGGED]
    texts, classes = datasets.Value("string"), datasets.ClassLabel(names=["O", "B-x", "I-x"])
    kinds = datasets.Features({"tokens": datasets.List(texts), "tags": datasets.List(classes)})
    table = datasets.Dataset.from_dict({"tokens": [TAGGED.tokens], "tags": [[1, 2, 0]]}, kinds)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: table)
    assert parse_task("tagging").read("acme/tags", options, "train") == [TAGGED]


@pytest.fixture
def pieces(tmp_path) -> BertTokenizerFast:
    """A tokenizer that cuts words into pieces."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "york", "##shire", "new", "in", "##er"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    return BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"))


def test_a_tag_is_on_the_first_piece_of_its_word(pieces):
    sentence = Sentence("in newer yorkshire", ("in", "newer", "yorkshire"), ("O", "B-x", "I-x"))
    task = parse_task("tagging")
    setting = Setting(pieces, 32, task.labels([sentence]))
    (row,) = task.encode([sentence], setting, labelled=True).rows
    assert words_of(pieces, row["input_ids"])[1:-1] == ["in", "new", "##er", "york", "##shire"]
    assert row["labels"] == [IGNORED, 0, 1, IGNORED, 2, IGNORED, IGNORED]
    assert task.labels([sentence]) == ("O", "B-x", "I-x")


def test_entities_are_spans_of_the_text():
    sentence = Sentence("New  York, new York", ("New", "York", ",", "new", "York"))
    found = entities(sentence, ["B-x", "I-x", "O", "B-x", "B-x"])
    places = {e.text: (e.kind, e.start, e.end) for e in found}
    assert places == {"New  York": ("x", 0, 9), "new": ("x", 11, 14), "York": ("x", 15, 19)}
    assert [e.kind for e in entities(sentence, ["I-x", "I-y", "O", "O", "I-y"])] == ["x", "y", "y"]
    scored = entities(sentence, ["B-x", "I-x", "O", "O", "B-x"], [0.5, 1.0, 0.9, 0.9, 0.7])
    assert [each.score for each in scored] == [0.75, 0.7], "the means of their tags"


def test_tags_that_training_lacks():
    task = parse_task("tagging")
    with pytest.raises(AdapterhubError, match="'B-x': 1 time"):
        task.check(("O", "B-y", "I-y"), [Sentence("a", ("a",), ("B-x",))])
    with pytest.raises(AdapterhubError, match="every tag is O"):
        task.check(("O",), [])


WORDS = ("New", "York", "Berlin", "is", "big")
IN = {  # New York and Berlin touch; "is" is another kind
    "bio": ("B-x", "I-x", "B-x", "B-y", "O"),
    "iob1": ("I-x", "I-x", "B-x", "I-y", "O"),
    "bioes": ("B-x", "E-x", "S-x", "S-y", "O"),
    "bilou": ("B-x", "L-x", "U-x", "U-y", "O"),
    "io": ("I-x", "I-x", "I-x", "I-y", "O"),
    "kinds": ("x", "x", "x", "y", "O"),
}
STRICT = {"bio": "IOB2", "iob1": "IOB1", "bioes": "IOBES", "bilou": "BILOU"}
CONLLU = """# sent_id = 1
# text = Du chat
1-2\tDu\t_\t_\t_\t_\t_\t_\t_\t_
1\tDe\tde\tADP\tP\t_\t3\tcase\t_\t_
2\tle\tle\tDET\tD\tDefinite=Def\t3\tdet\t_\t_
3\tchat\tchat\tNOUN\tN\tGender=Masc|Number=Sing\t0\troot\t_\tSpaceAfter=No
3.1\t_\t_\tVERB\t_\t_\t_\t_\t0:root\t_

# sent_id = 2
1\tOui\toui\tINTJ\tI\t_\t0\troot\t_\t_
"""


def fitted(file, rows, spec="tagging"):
    """Return the task for rows of a file, what is said of them, and its examples."""
    write_json_lines(file, [{"tokens": list(t), "tags": list(g)} for t, g in rows])
    task, choice = parse_task(spec).fitted(str(file), DataOptions(), "train")
    return task, choice.notes, task.read(str(file), choice.options, "train")


def random_entities(rng):
    """Return entities of three kinds in eight words; some touch."""
    found, n = [], rng.randrange(3)
    while n < 8:
        end = min(n + rng.randint(1, 3), 8)
        found.append((rng.choice("xyz"), n, end))
        n = end + rng.choice([0, 0, 1, 2])
    return found


@pytest.mark.parametrize("scheme", IN)
def test_each_scheme_is_read_as_the_same_entities(scheme, tmp_path):
    spec = "tagging(scheme=kinds)" if scheme == "kinds" else "tagging"
    task, notes, (sentence,) = fitted(tmp_path / "a.jsonl", [(WORDS, IN[scheme])], spec)
    apart = scheme not in ("io", "kinds")
    assert sentence.tags == (IN["bio"] if apart else ("B-x", "I-x", "I-x", "B-y", "O"))
    assert task.scheme == scheme
    assert task.labels([sentence]) == ("O", "B-x", "I-x", "B-y", "I-y")
    said = [note for note in notes if note.startswith("the tags are")]
    assert bool(said) == (scheme not in ("bio", "kinds"))
    texts = [e.text for e in entities(sentence, IN[scheme], scheme=scheme)]
    assert texts == (["New York", "Berlin", "is"] if apart else ["New York Berlin", "is"])


@pytest.mark.parametrize("scheme", IN)
def test_scores_are_those_of_seqeval(scheme, tmp_path):
    """The scores of tags in a scheme, of which predictions may be wrong and out of order.

    seqeval has no scheme for tags without B: there its default mode counts.
    """
    rng = random.Random(len(scheme))
    if scheme in STRICT:  # tags are written as they were read
        for found in [random_entities(rng) for _ in range(50)]:
            assert spans(written(found, 8, scheme), scheme) == found
        assert scheme_of([IN[scheme]]) == scheme
    words = [f"w{i}" for i in range(8)]
    gold = [written(random_entities(rng), 8, scheme) for _ in range(60)]
    spec = "tagging(scheme=kinds)" if scheme == "kinds" else "tagging"
    task, _, examples = fitted(tmp_path / "a.jsonl", [(words, tags) for tags in gold], spec)
    assert task.scheme == scheme
    classes = task.labels(examples)
    learned = [[t if rng.random() < 0.7 else rng.choice(classes) for t in e.tags] for e in examples]
    predicted = [task._as_in_data(tags) for tags in learned]
    scores = task.metrics(examples, [Tags(tuple(tags), ()) for tags in predicted])
    both = gold, predicted
    if scheme == "kinds":  # as seqeval reads IO
        both = [[[t if t == "O" else f"I-{t}" for t in row] for row in rows] for rows in both]
    strict = {"mode": "strict", "scheme": getattr(seqeval.scheme, STRICT.get(scheme, "IOB2"))}
    how = strict if scheme in STRICT else {}
    for name in ("f1", "precision", "recall"):
        theirs = getattr(seqeval.metrics, f"{name}_score")(*both, **how)
        assert scores[name] == pytest.approx(theirs)
    assert 0.2 < scores["f1"] < 0.9
    assert scores["accuracy"] == pytest.approx(seqeval.metrics.accuracy_score(*both))


def test_recorded_schemes_read_data_of_another_one(tmp_path):
    """An adapter of BIO is evaluated on BIOES; one of IOB1 on a file in which nothing touches."""
    _, _, (sentence,) = fitted(tmp_path / "a.jsonl", [(WORDS, IN["bioes"])], "tagging(scheme=bio)")
    assert sentence.tags == IN["bio"]
    task, notes, _ = fitted(tmp_path / "b.jsonl", [(("a",), ("I-x",))], "tagging(scheme=iob1)")
    assert task.scheme == "iob1"
    assert not [note for note in notes if note.startswith("the tags are")]


def test_conllu(tmp_path):
    source = tmp_path / "a.conllu"
    source.write_text(CONLLU, encoding="utf-8")
    task, choice = parse_task("tagging").fitted(str(source), DataOptions(), "train")
    assert task.scheme == "plain"
    first, second = task.read(str(source), choice.options, "train")
    assert first == Sentence("De le chat", ("De", "le", "chat"), ("ADP", "DET", "NOUN"))
    assert second == Sentence("Oui", ("Oui",), ("INTJ",))
    others = task.read(str(source), DataOptions(label="deprel"), "eval")
    assert others[0].tags == ("case", "det", "root")


def test_plain_tags_are_scored_by_accuracy_and_macro_f1():
    task = parse_task("tagging(scheme=plain)")
    rng = random.Random(1)
    gold = [tuple(rng.choice("NVD") for _ in range(5)) for _ in range(9)]
    predicted = [tuple(rng.choice(t + t + t + "NVDX") for t in row) for row in gold]
    examples = [Sentence("a b c d e", tuple("abcde"), tags) for tags in gold]
    scores = task.metrics(examples, [Tags(tags, ()) for tags in predicted])
    flat = [[t for row in rows for t in row] for rows in (gold, predicted)]
    assert scores == {
        "accuracy": pytest.approx(sklearn.metrics.accuracy_score(*flat)),
        "macro_f1": pytest.approx(sklearn.metrics.f1_score(*flat, average="macro")),
    }
    assert (*scores,) == task.metric_names(examples)
    assert task.main_metric == "accuracy"
    cut = task.metrics(examples[:1], [Tags((*gold[0][:4], ""), ())])
    assert cut["accuracy"] == 0.8


def test_a_run_says_the_scheme_once_and_records_it(train, adapterhub, tmp_path):
    """Predictions have the tags of the data."""
    text, tags, run = "the movie was very good", "O S-film O B-mood E-mood", tmp_path / "run"
    rows = [{"tokens": text.split(), "tags": tags.split()}] * 16
    file = write_json_lines(tmp_path / "a.jsonl", rows)
    options = ("--epochs", 20, "--lr", 0.02, "--batch-size", 8)
    code, out, err = train("--task", "tagging", *options, file=file)
    assert code == 0, err
    assert (out + err).count("the tags are BIOES") == 1
    assert ah.open(run).task.scheme == "bioes"
    printed = json.loads(succeeded(adapterhub("predict", run, text, "--json")))
    assert printed["tags"] == tags.split()
