"""Tags as they are published: their schemes, beside seqeval's, and CoNLL-U."""

from __future__ import annotations

import json
import random

import pytest
import seqeval.metrics
import seqeval.scheme
import sklearn.metrics

import adapterhub as ah
from adapterhub.data.options import DataOptions
from adapterhub.tasks import parse_task
from adapterhub.tasks.common.tag_schemes import scheme_of, spans, written
from adapterhub.tasks.tagging import Sentence, Tags, entities
from tests.kit.data import write_json_lines

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


def random_entities(rng, words=8):
    """Return entities of three kinds; some touch."""
    found, n = [], rng.randrange(3)
    while n < words:
        end = min(n + rng.randint(1, 3), words)
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


@pytest.mark.parametrize("scheme", ["bio", "iob1", "bioes", "bilou"])
def test_tags_are_written_as_they_were_read(scheme):
    rng = random.Random(7)
    for _ in range(50):
        found = random_entities(rng)
        tags = written(found, 8, scheme)
        assert spans(tags, scheme) == found
    assert scheme_of([IN[scheme]]) == scheme


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
    assert task.read(str(source), choice.options, "train") == [
        Sentence("De le chat", ("De", "le", "chat"), ("ADP", "DET", "NOUN")),
        Sentence("Oui", ("Oui",), ("INTJ",)),
    ]
    options = DataOptions(label="deprel")
    assert task.read(str(source), options, "eval")[0].tags == ("case", "det", "root")


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


def trained(adapterhub, backbone, file, output):
    """Train a tagger until it knows its rows; return what is printed."""
    words = ("--backbone", backbone, "--epochs", 20, "--lr", 0.02, "--batch-size", 8)
    options = ("--output", output, "train.tensorboard=false", "train.report=false")
    code, out, err = adapterhub(
        "train", file, "--task", "tagging", "--eval", file, *words, *options
    )
    assert code == 0, err
    return out + err


def test_a_run_says_the_scheme_once_and_records_it(adapterhub, backbone, tmp_path):
    """Predictions have the tags of the data; words without entities are tagged, too."""
    rows = [
        ("the movie was very good", ("O", "S-film", "O", "B-mood", "E-mood")),
        ("the plot was bad", ("O", "S-film", "O", "S-mood")),
    ]
    tagged = [{"tokens": text.split(), "tags": tags} for text, tags in rows * 12]
    file = write_json_lines(tmp_path / "a.jsonl", tagged)
    assert trained(adapterhub, backbone, file, tmp_path / "run").count("the tags are BIOES") == 1
    opened = ah.open(tmp_path / "run")
    assert opened.task.scheme == "bioes"
    _, out, _ = adapterhub("predict", tmp_path / "run", rows[0][0], "--json")
    printed = json.loads(out)
    assert printed["tags"] == list(rows[0][1])
    assert [(e["kind"], e["text"]) for e in printed["entities"]] == [
        ("film", "movie"), ("mood", "very good"),
    ]  # fmt: skip
    _, out, _ = adapterhub("eval", tmp_path / "run", "--data", file, "--json")
    assert json.loads(out)["f1"] == 1.0


def test_a_run_on_parts_of_speech(adapterhub, backbone, tmp_path):
    words = "1\tthe\t_\tDET\n2\tmovie\t_\tNOUN\n3\twas\t_\tAUX\n4\tgood\t_\tADJ\n"
    text = words.replace("\n", "\t_\t_\t_\t_\t_\t_\n") + "\n"
    file = tmp_path / "a.conllu"
    file.write_text(text * 8 + text.replace("movie", "plot") * 8, encoding="utf-8")
    assert trained(adapterhub, backbone, file, tmp_path / "run").count("the tags are of words") == 1
    _, out, _ = adapterhub("predict", tmp_path / "run", "the plot was good")
    assert "DET: the; NOUN: plot; AUX: was; ADJ: good" in out
    _, out, _ = adapterhub("eval", tmp_path / "run", "--data", file, "--json")
    assert json.loads(out)["macro_f1"] == json.loads(out)["accuracy"] == 1.0
