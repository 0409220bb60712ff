"""The folder of one name: versions appear atomically, tags move, leftovers are removed."""

from __future__ import annotations

import pytest
import sample_adapters

from adapterhub.errors import ConfigError, FileError, OutputError
from adapterhub.files import native
from adapterhub.registry import local_versions
from adapterhub.registry.local_versions import NameFolder, folder_stamp
from adapterhub.registry.published_files import digest_of


@pytest.fixture
def name_folder(tmp_path):
    return NameFolder(tmp_path / "acme--bert-small" / "polite")


def test_equal_bytes_keep_their_version(name_folder, tmp_path):
    made = [sample_adapters.write(tmp_path / str(seed), seed) for seed in (0, 1)]
    assert [name_folder.add(folder, None, ()).version for folder in made] == ["v1", "v2"]
    assert name_folder.add(made[0], "v7", ("best",)).version == "v1"
    assert [(e.version, e.tags) for e in name_folder.read().entries] == [
        ("v1", ("best",)),
        ("v2", ()),
    ]


def test_the_stamp_changes_with_versions_tags_and_yanks(name_folder, tmp_path):
    stamps = [folder_stamp(str(name_folder.path))]
    name_folder.add(sample_adapters.write(tmp_path / "made"), None, ())
    stamps.append(folder_stamp(str(name_folder.path)))
    name_folder.change(tags={"best": "v1"})
    stamps.append(folder_stamp(str(name_folder.path)))
    name_folder.change(yanked={"v1": "wrong"})
    stamps.append(folder_stamp(str(name_folder.path)))
    name_folder.change(yanked={"v1": "wrong"})
    assert len(set(stamps)) == 4
    assert folder_stamp(str(name_folder.path)) == stamps[-1]


def test_an_interrupted_writer_leaves_no_version(name_folder, tmp_path, monkeypatch):
    folder = sample_adapters.write(tmp_path / "made")

    def interrupted(staged, payload):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(native, "write_files", interrupted)
        with pytest.raises(OutputError):
            name_folder.add(folder, None, ())
    assert name_folder.read().entries == []
    assert name_folder.add(folder, None, ()).digest == digest_of(folder)


@pytest.mark.parametrize("tags", [("v1",), ("1",), ("a b",), ("ok", "")])
def test_invalid_tags_are_listed(tags):
    with pytest.raises(ConfigError) as caught:
        local_versions.check_tags(tags)
    assert caught.value.offenders == tuple(repr(tag) for tag in tags if tag != "ok")


def test_leftovers_of_writers_are_removed(name_folder, tmp_path):
    name_folder.add(sample_adapters.write(tmp_path / "made"), None, ("best",))
    assert name_folder.clean() == []
    (name_folder.path / ".names.json.0a1b2c3d.new").write_text("{")
    (name_folder.path / ".adapterhub-0").mkdir()
    (name_folder.path / ".adapterhub-1").symlink_to(tmp_path)
    assert len(name_folder.clean()) == 3
    assert name_folder.read().names.tags == {"best": "v1"}
    assert (tmp_path / "made").is_dir()


def test_a_broken_version_is_listed_with_its_error(name_folder, tmp_path):
    for seed in (0, 1):
        name_folder.add(sample_adapters.write(tmp_path / str(seed), seed), None, ())
    (name_folder.path / "v2" / "adapter.json").unlink()
    contents = name_folder.read()
    assert [entry.version for entry in contents.entries] == ["v1"]
    assert list(contents.broken) == ["v2"]
    contents.raise_broken("polite", "v1")
    with pytest.raises(FileError, match="missing"):
        contents.raise_broken("polite", "2")
    with pytest.raises(FileError, match="the newest version, polite@v2, cannot be read"):
        contents.raise_broken("polite", None)
    name_folder.change(yanked={"v2": "broken"})
    name_folder.read().raise_broken("polite", None)
