"""Hostile registry folders: links, pipes, broken files, names, and changes at the wrong moment."""

import contextlib
import itertools
import json
import os
import shutil
import stat as stat_module
import sys
import warnings
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from forge import limited

import adapterhub as ah
from adapterhub.cli import group
from adapterhub.errors import AdapterhubError, ConfigError, FileError, RegistryError
from adapterhub.files.native import Saved
from adapterhub.registry import local, lockfile
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.lockfile import pin, read_lock, sync, with_pins, write_lock
from adapterhub.registry.pull import pull
from adapterhub.registry.store import Publication, Query, parse_reference
from tests.kit import registries
from tests.kit.selection import long_table

BACKBONE = "acme--bert-small"


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry with two versions of `polite`, and one of `sound`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = LocalRegistry(tmp_path / "registry")
    for name, seed in (("polite", 0), ("polite", 1), ("sound", 2)):
        made = registries.write_sample(tmp_path / f"made-{seed}", seed)
        store.put(made, Publication(name))
    return store


def exchange(first: Path, second: Path) -> None:
    """Swap two folders."""
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


@pytest.mark.parametrize(("way", "module"), [("restored", lockfile), ("pulled", local)])
def test_a_version_swapped_after_the_check_is_not_restored_or_pulled(
    registry, tmp_path, monkeypatch, way, module
):
    other = registries.write_sample(tmp_path / "other", 9)
    name, pinned = pin("polite@v1", registry.root)
    entry, copy = registry.resolve("polite", "v1"), module.copy_adapter

    def swapped(source, *arguments):
        exchange(registry.root / BACKBONE / "polite" / "v1", other)
        return copy(source, *arguments)

    monkeypatch.setattr(module, "copy_adapter", swapped)
    ways = {
        "pulled": lambda: registry.get(entry, tmp_path / "mine" / "polite"),
        "restored": lambda: sync({name: pinned}, tmp_path / "mine", registry.root),
    }
    with pytest.raises(FileError, match="not what was published"):
        ways[way]()
    assert not (tmp_path / "mine" / "polite").exists()


SECRET = "the secret of another folder"
no_links = pytest.mark.skipif(os.name == "nt", reason="Windows has none, or needs permissions")


def listed(registry: LocalRegistry) -> list[str]:
    """The references that a search returns, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return [entry.reference for entry in registry.search(Query(all_versions=True))]


def everything(registry: LocalRegistry, target: Path) -> str:
    """Do all that only reads a registry; return the results and errors as text."""
    texts: list[object] = []

    def attempt(act, *arguments, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                texts.append(act(*arguments, **options))
            except AdapterhubError as error:
                texts.append(error)
        texts.extend(str(warning.message) for warning in caught)

    for text in ("", *SECRET.split()):
        attempt(registry.search, Query(text, all_versions=True))
    attempt(registry.verify)
    attempt(registry.index)
    attempt(ah.tag, "polite", registry=registry.root)
    for name in ("polite", "sound", "linked"):
        attempt(registry.versions, name)
        for version in (None, "v1", "v2", "v3", "best"):
            reference = f"{name}@{version}" if version else name
            attempt(pull, reference, registry=registry.root)
            attempt(pull, reference, target / f"{name}-{version}", registry=registry.root)
    shown = CliRunner().invoke(group, ["show", "polite", "--registry", str(registry.root)])
    texts.append(shown.output)
    copied = [path.read_bytes() for path in target.rglob("*") if path.is_file()]
    return " ".join(map(str, [*texts, *copied]))


# By name: the place in the registry, and where a link there leads in a private one.
LINKS = {
    "backbone": ("../x--linked", BACKBONE),
    "backbone in place": ("", BACKBONE),
    "backbone to /": ("../x--root", "/"),
    "name": ("linked", f"{BACKBONE}/polite"),
    "name in place": ("polite", f"{BACKBONE}/polite"),
    "version": ("polite/v3", f"{BACKBONE}/polite/v1"),
    "version in place": ("polite/v1", f"{BACKBONE}/polite/v1"),
    "manifest": ("polite/v1/adapter.json", f"{BACKBONE}/polite/v1/adapter.json"),
    "manifest to a text": ("polite/v1/adapter.json", "secret"),
    "tensors": ("polite/v1/adapter.safetensors", f"{BACKBONE}/polite/v1/adapter.safetensors"),
    "card": ("polite/v1/README.md", "secret"),
    "tags": ("polite/names.json", f"{BACKBONE}/polite/names.json"),
}


def replaced_by_link(path: Path, target: Path) -> None:
    """Put a link in place of a file or folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(target)


@no_links
@long_table("place", LINKS, parts=4)
def test_a_link_never_leads_out_of_the_registry(registry, tmp_path, place):
    out = tmp_path / "out"
    private = LocalRegistry(out)
    made = registries.write_sample(tmp_path / "private", 5, task="secret", card=SECRET)
    entry = private.put(made, Publication("polite", tags=("best",)))
    private.yank(entry, SECRET)
    (out / "secret").write_text(SECRET)
    link, target = LINKS[place]
    replaced_by_link((registry.root / BACKBONE / link).resolve(), out / target)
    text = everything(registry, tmp_path / "mine")
    assert SECRET not in text
    assert "task='secret'" not in text
    assert Saved.at(made).digest not in text
    assert private.resolve("polite", "v1").digest == Saved.at(made).digest
    assert registry.verify(), "it is reported"


@no_links
@pytest.mark.parametrize(
    "place", [".lock", ".names.json.new", ".adapterhub-0123", "v1/x", "v1", "", ".."]
)
def test_writing_never_follows_a_link(registry, tmp_path, place):
    """Publishing, deleting, tags, yanks and gc change nothing behind a link in the registry."""
    home = registry.root / BACKBONE / "polite"
    entry, out = registry.resolve("polite", "v1"), tmp_path / "out"
    shutil.copytree(registry.root, out)
    (out / "file").write_text(SECRET)
    behind = {"": "polite", "..": "", "v1": "polite/v1"}
    target = out / BACKBONE / behind[place] if place in behind else out
    replaced_by_link((home / place).resolve(), out / "file" if "n" in place else target)
    before = sorted((str(p), p.lstat().st_mtime_ns) for p in out.rglob("*"))
    made = registries.write_sample(tmp_path / "made", 7)
    for act in (
        lambda: registry.put(made, Publication("polite", tags=("best",))),
        lambda: registry.tag(entry, "best"),
        lambda: registry.yank(entry, "wrong"),
        lambda: registry.delete("polite", "v1"),
        registry.gc,
    ):
        with contextlib.suppress(AdapterhubError):
            act()
    assert sorted((str(p), p.lstat().st_mtime_ns) for p in out.rglob("*")) == before
    assert (out / "file").read_text() == SECRET


SPECIAL = {
    "pipe": os.mkfifo if hasattr(os, "mkfifo") else Path.mkdir,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "folder": Path.mkdir,
    "empty": Path.touch,
    "10 GB": lambda path: sparse(path, 10 << 30),
    "random bytes": lambda path: path.write_bytes(bytes(range(256)) * 9),
}


PLACES = ("polite/names.json", "polite/v2/adapter.json", "polite/v2/adapter.safetensors",
          "polite/v2/README.md", "polite/v2/.published", "polite/v2", "polite/v3", "polite",
          "other", ".lock")  # fmt: skip


def sparse(path: Path, size: int) -> None:
    """Write a file of holes."""
    with open(path, "wb") as file:
        file.truncate(size)


@no_links
@long_table(("kind", "place"), itertools.product(SPECIAL, PLACES), nightly=2)
def test_no_special_file_blocks_or_denies_the_others(registry, tmp_path, place, kind):
    path = registry.root / BACKBONE / place
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    SPECIAL[kind](path)
    with limited():
        text = everything(registry, tmp_path / "mine")
        assert "sound@v1" in listed(registry)
        assert registry.resolve("sound").version == "v1"
    assert "Traceback" not in text


NAMES = {
    "a list": "[]",
    "tags in a list": '{"tags": ["best"], "yanked": {}}',
    "null": '{"tags": null, "yanked": null}',
    "a reason of an object": '{"tags": {}, "yanked": {"v1": {"a": 1}}}',
    "a version that is a path": '{"tags": {"best": "../../x"}, "yanked": {}}',
    "a tag of control characters": '{"tags": {"\\u001b[2J": "v1"}, "yanked": {}}',
    "a tag that is a version": '{"tags": {"v1": "v2"}, "yanked": {}}',
    "a lone surrogate": '{"tags": {}, "yanked": {"v1": "\\ud800"}}',
    "not a number": '{"tags": {}, "yanked": {}, "x": NaN}',
    "a large number": '{"tags": {}, "yanked": {}, "highest": 1' + "0" * 400 + "}",
    "a negative number": '{"tags": {}, "yanked": {}, "highest": -1}',
    "100,000 tags": json.dumps({"tags": {f"t{i}": "v1" for i in range(100_000)}, "yanked": {}}),
    "deep": '{"tags": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a key twice": '{"tags": {}, "tags": {}, "yanked": {}}',
    "an unknown field": '{"tags": {}, "yanked": {}, "signers": ["x"]}',
    "not UTF-8": b'{"tags": {}, "yanked": {"v1": "\xff"}}',
    "a long reason": json.dumps({"tags": {}, "yanked": {"v1": "x" * 1_000_000}}),
}


@long_table("attack", NAMES)
def test_a_hostile_file_of_tags_is_refused_and_denies_no_other_name(registry, tmp_path, attack):
    text = NAMES[attack]
    path = registry.root / BACKBONE / "polite" / "names.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with limited():
        with pytest.raises(FileError, match=r"names\.json"):
            registry.resolve("polite")
        with pytest.warns(UserWarning, match="polite/names.json") as caught:
            assert [e.reference for e in registry.search(Query())] == ["sound@v1"]
        assert len(caught) == 1
        assert registry.resolve("sound").version == "v1"
        assert any("names.json" in problem for problem in registry.verify())
        made = registries.write_sample(tmp_path / "made", 8)
        with pytest.raises(FileError, match=r"names\.json"):
            registry.put(made, Publication("polite"))
        assert registry.put(made, Publication("sound")).version == "v2"


def damage(registry: LocalRegistry, version: str) -> None:
    """Make the manifest of a version of `polite` unreadable."""
    (registry.root / BACKBONE / "polite" / version / "adapter.json").write_bytes(b"{}")


def test_a_broken_version_denies_no_other(registry):
    registry.tag(registry.resolve("polite", "v1"), "best")
    registry.tag(registry.resolve("polite", "v2"), "last")
    fingerprint = registry.resolve("polite").fingerprint
    damage(registry, "v2")
    with pytest.warns(UserWarning, match=r"polite/v2(.|\n)*registry verify") as caught:
        found = [e.reference for e in registry.search(Query())]
    assert (found, len(caught)) == (["polite@v1", "sound@v1"], 1)
    with pytest.warns(UserWarning, match="polite/v2"):  # also if nothing was indexed anew
        registry.search(Query("sound"))
    with pytest.warns(UserWarning, match="polite/v2"):
        assert [e.version for e in registry.versions("polite")] == ["v1"]
    for good in ("v1", "best"):
        assert registry.resolve("polite", good).version == "v1"
    # The newest version is not silently an older one.
    for broken in ("v2", "2", "last", None):
        with pytest.raises(FileError, match="v2"):
            registry.resolve("polite", broken)
    assert len([p for p in registry.verify() if p.startswith(f"{BACKBONE}/polite/v2: ")]) == 1
    made = registries.write_sample(registry.root.parent / "made", 8)
    assert registry.put(made, Publication("polite")).version == "v3"
    assert registry.resolve("polite").version == "v3"
    for version in ("v1", "v3"):  # now all are broken, and none is missing
        damage(registry, version)
    for backbone in (None, fingerprint, registries.SAMPLE_BACKBONE):
        with pytest.raises(FileError, match="polite@v3, cannot be read"):
            registry.resolve("polite", backbone=backbone)


def test_a_version_of_another_backbone_is_not_listed_and_stray_files_are_reported(
    registry, tmp_path
):
    """A yank or tag of it would change the folder of the other backbone."""
    home = registry.root / BACKBONE / "polite"
    (home / "v1" / "adapter.bin").write_bytes(b"x")
    (home / "v02").mkdir()
    (home / "setup.py").write_text("x")
    (home / ".hidden").write_text("x")
    other = registries.write_sample(tmp_path / "other", 7, backbone="other/gpt")
    shutil.copytree(other, home / "v3")
    reported = {problem.partition(": ")[0] for problem in registry.verify()}
    strays = ("setup.py", "v02", "v1/adapter.bin", "v3")
    found = {f"{BACKBONE}/polite/{name}" for name in strays}
    assert reported == found | {f"{BACKBONE}/index.json"}  # polite has changed
    assert listed(registry) == ["polite@v1", "polite@v2", "sound@v1"]
    with pytest.raises(FileError, match="backbone 'other/gpt'"):
        registry.resolve("polite", "v3")


@no_links
def test_hostile_folder_names_in_a_root_that_is_a_link(registry, tmp_path):
    (tmp_path / "link").symlink_to(registry.root)
    linked = LocalRegistry(tmp_path / "link")
    assert linked.verify() == []
    for name in ("\x1b[2J", "a\nb", os.fsdecode(b"\xff\xfe"), "x" * 200, " ", "~", "%s", "..x"):
        shutil.copytree(registry.root / BACKBONE / "sound", registry.root / BACKBONE / name)
        shutil.copytree(registry.root / BACKBONE, registry.root / f"{name}--x")
    assert listed(linked) == ["polite@v1", "polite@v2", "sound@v1"]
    with pytest.raises(RegistryError):
        linked.resolve("souund")
    linked.verify()
    linked.gc()
    made = registries.write_sample(tmp_path / "made", 8)
    assert linked.put(made, Publication("polite")).version == "v3"


@contextlib.contextmanager
def coarse_clock(monkeypatch):
    """Make file times as coarse as those of FAT, and all inodes and sizes of folders equal."""
    real = os.stat

    def stat(path, *arguments, **options):
        status = real(path, *arguments, **options)
        ticks = {
            name: getattr(status, name) // 2_000_000_000 * 2_000_000_000
            for name in ("st_mtime_ns", "st_ctime_ns")
        }
        size = 0 if stat_module.S_ISDIR(status.st_mode) else status.st_size
        return SimpleNamespace(st_mode=status.st_mode, st_ino=1, st_size=size, **ticks)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        yield


def rewrite_tags(registry: LocalRegistry) -> None:
    """Replace the file of tags in place by one with the same size and time."""
    path = registry.root / BACKBONE / "polite" / "names.json"
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"best": "v1"', b'"best": "v2"'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def restore_folder(registry: LocalRegistry) -> None:
    """Add a version as git does at a checkout, and give the folder its old time."""
    home = registry.root / BACKBONE / "polite"
    status = home.stat()
    shutil.copytree(registry.root.parent / "made-2", home / "v3")
    os.utime(home, ns=(status.st_atime_ns, status.st_mtime_ns))


CHANGES = {
    "publish": lambda r: r.put(r.root.parent / "made-2", Publication("polite")),
    "publish another name": lambda r: r.put(r.root.parent / "made-0", Publication("new")),
    "yank": lambda r: r.yank(r.resolve("polite", "v2"), "wrong"),
    "tag": lambda r: r.tag(r.resolve("polite", "v2"), "best"),
    "tag in place": rewrite_tags,
    "add by hand": restore_folder,
    "delete a version": lambda r: shutil.rmtree(r.root / BACKBONE / "polite" / "v2"),
    "delete a name": lambda r: shutil.rmtree(r.root / BACKBONE / "polite"),
    "delete a backbone": lambda r: shutil.rmtree(r.root / BACKBONE),
    "rename a version": lambda r: (r.root / BACKBONE / "polite" / "v2").rename(
        r.root / BACKBONE / "polite" / "v3"
    ),
    "exchange versions": lambda r: exchange(
        r.root / BACKBONE / "polite" / "v1", r.root / BACKBONE / "polite" / "v2"
    ),
    "delete the tags": lambda r: (r.root / BACKBONE / "polite" / "names.json").unlink(),
}


@long_table(("clock", "change"), itertools.product(["fine", "coarse"], CHANGES))
def test_a_search_sees_every_change_at_once(registry, monkeypatch, change, clock):
    """Also one within the same tick of the clock, and in a registry of any size."""
    monkeypatch.setattr(local, "_FEW", 0, raising=False)
    registry.tag(registry.resolve("polite", "v1"), "best")
    before = registry.search(Query(all_versions=True))
    shutil.rmtree(registry.root.parent / "cache")
    clocked = coarse_clock if clock == "coarse" else contextlib.nullcontext
    with clocked(monkeypatch):
        assert registry.search(Query(all_versions=True)) == before
    CHANGES[change](registry)
    with clocked(monkeypatch):
        after = registry.search(Query(all_versions=True))
    # Of an empty registry there is none.
    shutil.rmtree(registry.root.parent / "cache", ignore_errors=True)
    assert after == registry.search(Query(all_versions=True)) != before


def test_a_lock_that_is_a_hard_link_is_not_opened(registry, tmp_path):
    (tmp_path / "file").write_text(SECRET)
    lock = registry.root / BACKBONE / "polite" / ".lock"
    lock.unlink(missing_ok=True)
    os.link(tmp_path / "file", lock)
    with pytest.raises(FileError, match="link"):
        registry.tag(registry.resolve("polite", "v1"), "best")
    assert (tmp_path / "file").read_text() == SECRET


DEVICES = ("con", "CON", "nul.txt", "Aux.json", "com1", "LPT9.x", "prn", "a.", "a-.", "com0")


@long_table("name", DEVICES, parts=4)
def test_names_that_a_file_system_changes_are_refused(registry, tmp_path, name):
    made = registries.write_sample(tmp_path / "made", 7)
    with pytest.raises(ConfigError, match="invalid adapter name"):
        registry.put(made, Publication(name))
    with pytest.raises(ConfigError, match="not a valid adapter name"):
        parse_reference(f"{name}@v1")
    with pytest.raises(ConfigError, match="invalid tags"):
        registry.put(made, Publication("fine", tags=(name,)))
    with pytest.raises(ConfigError, match="invalid adapter name"):
        pin("polite", registry.root, name=name)
    lock = tmp_path / "adapterhub.lock"
    write_lock(lock, {name: pin("polite", registry.root)[1]})
    with pytest.raises(FileError, match="not a lock file"):
        read_lock(lock)
    assert not (registry.root / BACKBONE / name).exists()
    assert not (registry.root / BACKBONE / "fine").exists()


def test_names_in_a_lock_file_differ_in_more_than_case(registry, tmp_path):
    pins = {name: pin("polite", registry.root)[1] for name in ("polite", "Polite")}
    write_lock(tmp_path / "adapterhub.lock", pins)
    with pytest.raises(FileError, match="not a lock file"):
        read_lock(tmp_path / "adapterhub.lock")
    with pytest.raises(ConfigError, match="same name"):
        with_pins({"polite": pins["polite"]}, [("Polite", pins["Polite"])])


def test_a_local_backbone_keeps_its_folder(registry, tmp_path):
    """The folders of existing registries are found."""
    names = ("bert--0123456789ab", "a--b--0123456789ab", "x--no-weights")
    for number, backbone in enumerate(names):
        made = registries.write_sample(tmp_path / f"made-{number}-local", 7, backbone=backbone)
        entry = registry.put(made, Publication("local"))
        assert (registry.root / backbone / "local" / "v1").is_dir()
        assert registry.resolve("local", backbone=backbone) == entry
    made = registries.write_sample(tmp_path / "old", 7, backbone="my--model")
    shutil.copytree(made, registry.root / "my--model" / "old" / "v1")  # by an earlier release
    assert registry.resolve("old").backbone == "my--model"
    assert registry.index() > 0
    assert registry.verify() == []


def test_the_number_of_a_version_deleted_by_hand_is_not_used_again(registry, tmp_path):
    home = registry.root / BACKBONE / "polite"
    third, fourth = (registries.write_sample(tmp_path / f"new-{n}", n) for n in (13, 14))
    assert registry.put(third, Publication("polite")).version == "v3"
    for version in home.glob("v*"):
        shutil.rmtree(version)
    for taken in ("v3", "v1"):
        with pytest.raises(RegistryError, match="v4"):
            registry.put(fourth, Publication("polite", taken))
    assert registry.put(fourth, Publication("polite")).version == "v4"
    assert registry.put(third, Publication("polite", "v9")).version == "v9"
    shutil.copytree(home / "v9", home / "v999999999")
    with pytest.raises(RegistryError, match="no version number is left"):
        registry.put(registries.write_sample(tmp_path / "made", 8), Publication("polite"))


# Deletions and tags


def state(registry):
    """The versions that can be read, and the tags, of polite."""
    found = registry.versions("polite")
    return [e.version for e in found], {tag: e.version for e in found for tag in e.tags}


class Killed(BaseException):
    """Stands for a SIGKILL: nothing of ours catches it."""


@long_table("action", ["delete", "delete the last", "tag", "move", "untag"], parts=2)
def test_a_kill_between_two_steps_leaves_the_state_before_or_after(
    registry, tmp_path, action, monkeypatch
):
    """Before each call that changes a file: the versions and tags are old or new, never a mix."""
    registry.tag(registry.resolve("polite", "v2"), "best")
    actions = {
        "delete": lambda r: r.delete("polite", "v2"),
        "delete the last": lambda r: r.delete("polite", "v1"),
        "tag": lambda r: r.tag(r.resolve("polite", "v1"), "good"),
        "move": lambda r: r.tag(r.resolve("polite", "v1"), "best"),
        "untag": lambda r: r.untag(r.resolve("polite", "v1"), "best"),
    }
    original = Path(shutil.copytree(registry.root, tmp_path / "original"))
    before = state(registry)
    actions[action](registry)
    after = state(registry)
    assert before != after
    changing = ["rename", "replace", "unlink", "rmdir", "mkdir", "fsync"]
    kills, point = 0, 0
    while True:
        root = Path(shutil.copytree(original, tmp_path / f"copy-{point}"))
        with monkeypatch.context() as patch:
            left = [point]
            for name in changing:
                patch.setattr(os, name, killed_after(getattr(os, name), left))
            try:
                actions[action](LocalRegistry(root))
            except Killed:
                kills += 1
            else:
                break
        copy = LocalRegistry(root)
        assert state(copy) in (before, after), point
        with contextlib.suppress(RegistryError):
            actions[action](copy)  # again: it is completed, or was
        assert state(copy) == after
        copy.gc()
        assert not [path for path in root.rglob(".adapterhub-*")]
        made = registries.write_sample(tmp_path / f"new-{point}", 50)
        assert copy.put(made, Publication("polite")).version == "v3", "no number is used again"
        point += 1
    assert kills >= 3


def killed_after(real, left):
    """Return a function that raises when `left` calls have been made."""

    def call(*arguments, **options):
        if left[0] <= 0:
            raise Killed
        left[0] -= 1
        return real(*arguments, **options)

    return call


def delete_all(root):
    """Delete the versions 1 to 6, and return those that this process deleted."""
    deleted = []
    for number in range(1, 7):
        with contextlib.suppress(RegistryError):
            LocalRegistry(root).delete("polite", f"v{number}")
            deleted.append(number)
    return deleted


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_two_processes_delete_each_version_once(registry, tmp_path):
    for number in range(3, 8):
        made = registries.write_sample(tmp_path / f"more-{number}", number)
        registry.put(made, Publication("polite"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads at a fork
        pool = get_context("fork").Pool(2)
    with pool:
        deleted = pool.map(delete_all, [registry.root] * 2, chunksize=1)
    assert sorted(number for numbers in deleted for number in numbers) == [*range(1, 7)]
    assert [entry.version for entry in registry.versions("polite")] == ["v7"]
