"""`adapterhub train --sweep`."""

from tests.kit.session import refused, succeeded

SHORT = ("train.max_steps=2", "train.tensorboard=false", "dtype=fp32")


def test_a_sweep_trains_every_combination_and_ranks_them(train, tmp_path):
    sweep = ("--sweep", "method=lora(rank=2),head", "--sweep", "seed=0,1")
    code, out, err = train(*sweep, *SHORT)
    assert code == 0, err
    names = ["lora-rank=2,seed=0", "lora-rank=2,seed=1", "head,seed=0", "head,seed=1"]
    assert {path.name for path in (tmp_path / "run").iterdir()} == set(names)
    assert [f"run {n} of 4: {name}" in err for n, name in enumerate(names, 1)] == [True] * 4
    rows = [line.split() for line in out.splitlines() if "seed=" in line and "next" not in line]
    table = [row for row in rows if row[0] in names]
    assert sorted(row[0] for row in table) == sorted(names)
    scores = [float(row[1]) for row in table]
    assert scores == sorted(scores, reverse=True)
    best = tmp_path / "run" / table[0][0]
    assert f"adapterhub publish {best}" in out
    assert all((tmp_path / "run" / name / "recipe.yaml").is_file() for name in names)


def test_a_run_of_a_sweep_is_resumed_alone_or_with_all(train, adapterhub, tmp_path):
    assert train("--sweep", "seed=0,1", *SHORT)[0] == 0
    adapter = tmp_path / "run" / "seed=0" / "adapter" / "adapter.safetensors"
    before = adapter.read_bytes()
    refused(train("--sweep", "seed=0,1", *SHORT), "seed=0 exists", "--resume")
    succeeded(train("--sweep", "seed=0,1,2", *SHORT, "--resume"))
    assert adapter.read_bytes() == before
    assert (tmp_path / "run" / "seed=2" / "adapter").is_dir()
    succeeded(adapterhub("train", "--output", tmp_path / "run" / "seed=1", "--resume"))


def test_runs_that_fail_are_listed_after_the_others_are_done(train, tmp_path):
    words = ("--sweep", "method=head,full", "lr=1e30", *SHORT[1:], "--steps", "4")
    refused(train(*words), "of 2 runs failed", "full: training stopped")
    assert not (tmp_path / "run" / "full" / "adapter").exists()
    for folder in (tmp_path / "run" / "full" / "checkpoints").glob("*"):
        assert (folder / "tensors.safetensors").is_file(), "the last good one is kept"


def test_a_dry_run_lists_the_runs(train, tmp_path):
    out = succeeded(train("--sweep", "method=lora,mam", *SHORT, "--dry-run"))
    assert out.splitlines() == ["2 runs", *(str(tmp_path / "run" / m) for m in ("lora", "mam"))]
    assert not (tmp_path / "run").exists()
