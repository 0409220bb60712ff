"""benchmarks/studies/claims.py on planted studies, in which it is known whether a claim holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import claims
import numpy as np
import pytest
from checks import Check, claim, over_groups, rank_correlation

from adapterhub.bench.cells import Cell
from adapterhub.bench.records import RecordFolder
from adapterhub.bench.study import RECORDS, STUDY, read_study
from tests.kit.studies import made_record

PREFIX, UNFREEZE = "prefix(length=5)", "unfreeze(size=2)"
MAM, LONG = "mam(length=30, size=64)", "prefix(length=95)"
BACKBONE = 10**7  # parameters, as in `made_record`
MANY, FEW = 1200, 60  # test rows
Accuracy = dict[str, float]


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checks.RESAMPLES", 999)


def attn(name: str) -> str:
    return f"{name}(size=94, sites=[attn])"


def ffn(name: str) -> str:
    return f"{name}(size=94)"


@cache
def study_of(*methods: str) -> str:
    """Return the text of a study of methods, of which the first is the baseline."""
    flags = {"backbone": "sentence-transformers/all-MiniLM-L6-v2", "data": {"train": "sst2.tsv"},
             "train": {"batch_size": 16}}  # fmt: skip
    peers = [method for method in methods if method.startswith("peft ")]
    own = [method for method in methods if method not in peers]
    bench = {"methods": own, "recorded": peers, "baseline": methods[0], "steps": 120}
    return read_study(None, (), flags, bench).to_yaml()


def planted(
    folder: Path,
    accuracy: dict[int, Accuracy],
    test_rows: int = MANY,
    trained: dict[str, int] | None = None,
    fit: Callable[[str], float] = lambda method: 0.95,
    selected: Callable[[str, float], float] | None = None,
) -> Path:
    """Write a study: the accuracy of each method by the number of training rows."""
    methods = list(dict.fromkeys(method for each in accuracy.values() for method in each))
    folder.mkdir(parents=True)
    (folder / STUDY).write_text(study_of(*methods), encoding="utf-8")
    records = RecordFolder(folder / RECORDS)
    for rows, values in accuracy.items():
        for number, (method, value) in enumerate(values.items()):
            cells = [Cell("sst2", method, rows, 120, 1e-3, seed, "final") for seed in (1, 2, 3, 4)]
            rates = (1e-4, 3e-4, 1e-3, 3e-3) if selected else ()
            cells += [Cell("sst2", method, rows, 30, rate, 0, "search") for rate in rates]
            for cell in cells:
                made = made_record(cell, 100 * rows + number, value, test_rows)
                costs = replace(made.costs, trained=(trained or {}).get(method, 10**4), head=0,
                                backbone=BACKBONE)  # fmt: skip
                chosen = {"accuracy": selected(method, cell.rate)} if selected else made.selected
                fitted = {"accuracy": fit(method)} if made.trained else {}
                records.write(replace(made, costs=costs, trained=fitted, selected=chosen))
    return folder


def verdict_of(name: str, *paths: Path) -> str:
    (found,) = [each for each in claims.check_claims(paths) if each.name == name]
    return found.verdict if found.checks else "not checked"


ONE_STUDY = {
    "small prefix": ({PREFIX: 0.90, "full": 0.90}, {PREFIX: 0.80, "full": 0.90}),
    "gradual unfreezing": (
        {UNFREEZE: 0.90, "freeze": 0.80, "full": 0.80},
        {UNFREEZE: 0.90, "freeze": 0.80, "full": 0.95},
    ),
    "he2022: mam": (
        {MAM: 0.90, LONG: 0.80, ffn("scaled-parallel"): 0.82},
        {MAM: 0.80, LONG: 0.85, ffn("scaled-parallel"): 0.70},
    ),
    "he2022: ffn": (
        {ffn("pfeiffer"): 0.9, attn("pfeiffer"): 0.8, ffn("parallel"): 0.9, attn("parallel"): 0.8},
        {ffn("pfeiffer"): 0.9, attn("pfeiffer"): 0.8, ffn("parallel"): 0.8, attn("parallel"): 0.9},
    ),
    "he2022: parallel": (
        {ffn("parallel"): 0.90, ffn("pfeiffer"): 0.80},
        {ffn("parallel"): 0.80, ffn("pfeiffer"): 0.90},
    ),
    "he2022: scaled": (
        {attn("scaled-parallel"): 0.90, attn("parallel"): 0.80},
        {attn("scaled-parallel"): 0.80, attn("parallel"): 0.90},
    ),
    "peers": (
        {"lora": 0.86, "prefix": 0.90, "peft lora": 0.86, "peft prefix": 0.85},
        {"lora": 0.80, "prefix": 0.90, "peft lora": 0.90, "peft prefix": 0.90},
    ),
}


@pytest.mark.parametrize("name", ONE_STUDY)
def test_a_claim_on_one_study_holds_fails_or_cannot_be_told(name: str, tmp_path: Path) -> None:
    holds, fails = ONE_STUDY[name]
    equal = dict.fromkeys(holds, 0.85)
    assert verdict_of(name, planted(tmp_path / "holds", {100: holds})) == "holds"
    assert verdict_of(name, planted(tmp_path / "fails", {100: fails})) == "does not hold"
    assert verdict_of(name, planted(tmp_path / "few", {100: equal}, FEW)) == "cannot be told"


def test_the_small_prefix_with_little_data(tmp_path: Path) -> None:
    name = "small prefix, little data"
    near, far = {PREFIX: 0.88, "full": 0.88}, {PREFIX: 0.80, "full": 0.90}
    assert verdict_of(name, planted(tmp_path / "holds", {50: near, 2000: far})) == "holds"
    assert verdict_of(name, planted(tmp_path / "fails", {50: far, 2000: near})) == "does not hold"
    same = planted(tmp_path / "open", {50: near, 2000: near}, FEW)
    assert verdict_of(name, same) == "cannot be told"
    assert verdict_of(name, planted(tmp_path / "one", {50: near})) == "not checked"


def test_a_large_prefix_is_not_a_small_one(tmp_path: Path) -> None:
    large = planted(tmp_path / "s", {50: {PREFIX: 0.9, "full": 0.9}}, trained={PREFIX: 60_000})
    assert verdict_of("small prefix", large) == "not checked"


def test_unfreezing_is_not_judged_where_its_stages_do_not_begin(tmp_path: Path) -> None:
    accuracy = {UNFREEZE: 0.9, "freeze": 0.8, "full": 0.8}
    folder = planted(tmp_path / "s", {500: accuracy, 2000: accuracy})
    assert verdict_of("gradual unfreezing", folder) == "holds"  # 120 steps are 3.75 epochs
    file = folder / STUDY
    file.write_text(file.read_text("utf-8").replace("batch_size: 16", "batch_size: 8"), "utf-8")
    (found,) = [c for c in claims.check_claims([folder]) if c.name == "gradual unfreezing"]
    assert {c.why_open for c in found.checks} == {"its 4 stages do not begin in 1.9 epochs"}
    assert {c.where for c in found.checks} == {"sst2, 500 rows"}


def test_equal_stages_begin_in_any_run(tmp_path: Path) -> None:
    equal = "unfreeze(size=2, every=equal)"
    folder = planted(tmp_path / "s", {500: {equal: 0.9, "freeze": 0.8, "full": 0.8}})
    file = folder / STUDY
    file.write_text(file.read_text("utf-8").replace("batch_size: 16", "batch_size: 1"), "utf-8")
    assert verdict_of("gradual unfreezing", folder) == "holds"


def test_methods_of_other_sizes_are_not_compared(tmp_path: Path) -> None:
    accuracy = {ffn("parallel"): 0.90, ffn("pfeiffer"): 0.80}
    sizes = {ffn("parallel"): 30_000, ffn("pfeiffer"): 10_000}
    folder = planted(tmp_path / "s", {100: accuracy}, trained=sizes)
    assert verdict_of("he2022: parallel", folder) == "not checked"


@pytest.mark.parametrize(
    ("wide", "verdict"), [("lora", "holds"), (PREFIX, "does not hold"), ("", "cannot be told")]
)
def test_the_range_of_good_rates_and_the_spread_over_seeds(
    wide: str, verdict: str, tmp_path: Path
) -> None:
    def selected(method: str, rate: float) -> float:
        return 0.9 if rate > 5e-4 or method == wide else 0.7

    groups = {rows: {"lora": 0.9, PREFIX: 0.9} for rows in range(50, 450, 50)}
    folder = planted(tmp_path / "s", groups, FEW, selected=selected)
    (found,) = [c for c in claims.check_claims([folder]) if c.name == "easier to train"]
    rates, seeds = found.checks
    assert rates.where == seeds.where == "8 groups"
    assert rates.verdict == verdict
    assert seeds.verdict == "cannot be told"  # the seeds of both are equally spread


@pytest.mark.parametrize("sign", [1, -1, 0])
def test_the_fit_gap_by_trained_parameters(sign: int, tmp_path: Path) -> None:
    methods = {f"lora(rank={rank})": 0.8 for rank in range(1, 13)}
    sizes = {method: 1000 * (n + 1) for n, method in enumerate(methods)}
    fit = {m: 0.9 + 0.08 * sign * n / 12 + 0.02 * (n % 2) for n, m in enumerate(methods)}
    folder = planted(tmp_path / "s", {50: methods}, 800, trained=sizes, fit=fit.__getitem__)
    found = claims.few_parameters_overfit_less(claims.read_tasks([folder]))
    expected = {1: "holds", -1: "does not hold", 0: "cannot be told"}
    assert found.verdict == expected[sign]


def test_the_fit_gap_is_not_judged_where_rows_are_seen_once(tmp_path: Path) -> None:
    folder = planted(tmp_path / "s", {1500: {"lora": 0.8, PREFIX: 0.8}}, FEW)
    (check,) = claims.few_parameters_overfit_less(claims.read_tasks([folder])).checks
    assert check.why_open == "rows are seen 1.3 times: nothing to overfit"
    assert check.verdict == "cannot be told"


def forgetting(tmp_path: Path, after: float, changed: bool = False) -> Path:
    draw = np.random.default_rng(0)

    def digits(share: float) -> str:
        return "".join(str(int(x)) for x in draw.random(900) < share)

    kept = [digits(0.9) for _ in range(3)]
    alone = [{"before": each, "after": each} for each in kept]
    if changed:
        alone[0]["after"] = alone[0]["after"][:-1] + str(1 - int(alone[0]["after"][-1]))
    runs = [{"before": digits(0.9), "after": digits(after)} for _ in range(3)]
    record = {"first": "sst2", "second": "mrpc",
              "approaches": {"full": runs, "lora, one per task": alone}}  # fmt: skip
    path = tmp_path / "forgetting.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("after", "verdict"), [(0.7, "holds"), (0.98, "does not hold"), (0.9, "cannot be told")]
)
def test_forgetting(after: float, verdict: str, tmp_path: Path) -> None:
    assert verdict_of("forgetting", forgetting(tmp_path, after)) == verdict


def test_an_adapter_per_task_is_checked_exactly(tmp_path: Path) -> None:
    assert verdict_of("forgetting, adapters", forgetting(tmp_path, 0.7)) == "holds"
    changed = forgetting(tmp_path, 0.7, changed=True)
    assert verdict_of("forgetting, adapters", changed) == "does not hold"
    assert "1 of 2,700 answers changed" in claims.as_text(claims.check_claims([changed]))


def test_a_claim_holds_only_if_all_checks_do_after_correction() -> None:
    def check(value: float, p: float) -> Check:
        return Check("here", "a - b", value=value, p=p)

    assert claim("x", "", [check(1, 0.03)]).verdict == "holds"
    assert claim("x", "", [check(1, 0.03), check(1, 0.03)]).verdict == "cannot be told"
    assert claim("x", "", [check(1, 0.001), check(1, 0.01)]).verdict == "holds"
    assert claim("x", "", [check(1, 0.001), check(1, 0.9)]).verdict == "cannot be told"
    assert claim("x", "", [check(1, 0.001), check(-1, 0.001)]).verdict == "does not hold"


def test_few_groups_and_few_methods_give_no_verdict() -> None:
    here = Check("here", "x")
    assert over_groups(here, [1.0] * 5).why_open == "5 groups, 6 are needed"
    assert over_groups(here, [1.0] * 6).p == pytest.approx(2 / 64)
    assert rank_correlation(here, [1, 2, 3], [1, 2, 3]).why_open == "3 methods, 6 are needed"
    assert rank_correlation(here, range(7), range(7)).value == pytest.approx(1.0)


def test_false_claims_are_rare_among_equal_methods(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    false = 0
    for _ in range(100):
        checks = [over_groups(Check("x", "x"), random.normal(size=6)) for _ in range(2)]
        false += any(check.verdict != "cannot be told" for check in claim("x", "", checks).checks)
    assert false <= 12  # 5 % are expected, with a standard error of 2.2


def test_the_table_is_narrow_and_the_markdown_has_every_check(tmp_path: Path) -> None:
    folder = planted(tmp_path / "s", {100: ONE_STUDY["he2022: ffn"][0]})
    found = claims.check_claims([folder, forgetting(tmp_path, 0.7)])
    assert max(map(len, claims.as_text(found).splitlines())) <= 100
    markdown = claims.as_markdown(found)
    for each in found:
        assert f"## {each.text}" in markdown
        for check in each.checks:
            assert f"| {check.what} | {check.numbers} | {check.verdict} |" in markdown
