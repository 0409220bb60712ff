"""The folders of a user, with a home or without, and files that are kept there by a key."""

import os
from pathlib import Path

import pytest

from adapterhub.config import user_folders
from adapterhub.config.user_folders import KeyedFiles, state_folder, user_folder
from adapterhub.errors import ConfigError
from tests.kit import registries

HOMES = {"none": None, "empty": "", "relative": "home"}


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """Return a function that takes the home folder away, as in a container with another user id."""

    def nobody(user: object) -> None:
        raise KeyError(user)

    def take(home: str | None) -> Path:
        import pwd  # not on Windows

        for name in ("HOME", "USER", "LOGNAME", "ADAPTERHUB_STATE", "ADAPTERHUB_REGISTRY"):
            monkeypatch.delenv(name, raising=False)
        for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
            monkeypatch.delenv(f"XDG_{kind}_HOME", raising=False)
        if home is not None:
            monkeypatch.setenv("HOME", home)
        monkeypatch.setattr(pwd, "getpwuid", nobody)
        monkeypatch.setattr(pwd, "getpwnam", nobody)
        (tmp_path / "tmp").mkdir(exist_ok=True)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
        monkeypatch.chdir(tmp_path)
        user_folders._temporary_home.cache_clear()
        return tmp_path / "tmp" / f"adapterhub-{os.getuid()}"

    yield take
    user_folders._temporary_home.cache_clear()


@pytest.mark.skipif(os.name == "nt", reason="Windows finds a home without variables")
@pytest.mark.parametrize("home", HOMES)
def test_a_user_without_a_home_has_a_temporary_one(home, homeless):
    folder = homeless(HOMES[home])
    if home == "empty" and Path("~").expanduser() != Path("~"):
        pytest.skip("this release of platformdirs takes an empty HOME for the root folder")
    with pytest.warns(UserWarning, match="has no home folder: .* set HOME"):
        assert user_folder("cache") == folder / "cache"
    assert [user_folder(k) for k in ("config", "data")] == [folder / "config", folder / "data"]
    assert state_folder() == folder / "state"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert user_folders.expanded("~/x") in (Path("~/x"), Path(HOMES[home] or "/") / "x")
    assert user_folders.expanded("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")


@pytest.mark.skipif(os.name == "nt", reason="Windows finds a home without variables")
@pytest.mark.parametrize("other", ["file", "link", "writable"])
def test_a_temporary_home_that_others_may_write_to_is_refused(other, homeless, tmp_path):
    folder = homeless(None)
    if other == "file":
        folder.write_text("x")
    elif other == "link":
        (tmp_path / "theirs").mkdir()
        folder.symlink_to(tmp_path / "theirs")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(ConfigError, match="no home folder") as error:
        user_folder("config")
    assert "HOME" in error.value.hint


COMMANDS = ("methods", "tasks", "list", "trust list", "registry verify", "login --help",
            "publish made", "show made", "verify made", "pull made --to copy", "lock polite",
            "show ~/nothing", "suggest --help", "sync")  # fmt: skip


@pytest.mark.skipif(os.name == "nt", reason="Windows finds a home without variables")
@pytest.mark.filterwarnings("ignore:this user has no home folder")
def test_no_command_needs_a_home(homeless, adapterhub, train, tmp_path):
    homeless(None)
    for code, _, err in (train("train.max_steps=2"), adapterhub("predict", "run", "a good movie")):
        assert code == 0, err
    registries.write_sample(tmp_path / "made")
    for command in COMMANDS:
        code, out, err = adapterhub(*command.split())
        assert "Traceback" not in err, command
        assert code in (0, 1, 2), (command, out, err)
    assert not (tmp_path / "~").exists()


def numbered(files: KeyedFiles, number: int, size: int = 10) -> Path:
    """Make a file of some bytes, which was used `number` seconds after the others."""
    path = files.make(number, lambda file: file.write(bytes(size)))
    os.utime(path, (number, number))
    return path


def refused(file: object) -> None:
    """Fail, since nothing should be written."""
    raise AssertionError


def test_a_file_is_made_once(tmp_path):
    files = KeyedFiles(tmp_path / "a" / "b", 1, 100)
    with pytest.raises(AssertionError):
        files.make("x", refused)
    assert list(files.folder.iterdir()) == []
    assert files.find("x") is None
    path = files.make("x", lambda file: file.write(b"one"))
    assert path.read_bytes() == b"one"
    assert files.make("x", refused) == files.find("x") == path
    assert files.find("y") is None
    assert KeyedFiles(files.folder, 2, 100).find("x") is None


def test_a_damaged_file_is_made_again(tmp_path):
    files = KeyedFiles(tmp_path, 1, 100)
    path = numbered(files, 1)
    path.write_bytes(b"cut")
    assert files.find(1) is None
    assert numbered(files, 1).read_bytes() == bytes(10)
    assert list(tmp_path.iterdir()) == [path]


def test_the_files_used_longest_ago_are_deleted(tmp_path):
    files = KeyedFiles(tmp_path, 1, 30)
    first, second, third = (numbered(files, number) for number in (1, 2, 3))
    assert files.find(1) == first  # which is its last use
    fourth = numbered(files, 4)
    assert {*tmp_path.iterdir()} == {first, third, fourth}
    large = numbered(files, 5, size=1000)
    assert [*tmp_path.iterdir()] == [large], "the newest one stays"
    assert not second.exists()
    for draft, age in ((tmp_path / "a.new", 0), (tmp_path / "b.new", None)):
        draft.write_bytes(b"x" * 10)
        if age is not None:
            os.utime(draft, (age, age))  # of a killed process
    numbered(files, 6)
    assert [path.name for path in tmp_path.glob("*.new")] == ["b.new"], "it may be written now"
