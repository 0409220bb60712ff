"""The Hub's own client and libraries, as they are released, against a hub of ours."""

import io
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    constants,
    snapshot_download,
)
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._runtime import is_package_available, is_xet_available
from safetensors.numpy import save, save_file

from adapterhub.hub.upload_endpoints import TOO_LARGE
from tests.kit import real_hub
from tests.kit.selection import ALL

pytestmark = [
    pytest.mark.usefixtures("online"),
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),  # of the client
]


# Where the hub is, and whether its clients have Xet.
CASES = [("/a/prefix", True), *([("", False), ("", True), ("/a/prefix", False)] if ALL else [])]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0] or '/'}-{case[1]}")
def hub(request, tmp_path_factory):
    prefix, has_xet = request.param
    folder = tmp_path_factory.mktemp("hub") / "hub"
    with (
        pytest.MonkeyPatch.context() as patch,
        real_hub.serving(folder, prefix, regular_max=4 << 20) as running,
    ):
        patch.setattr(constants, "HF_HUB_DISABLE_XET", not has_xet)
        running.org("acme")
        running.user("ada", "admin", acme="admin")
        yield running


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.address, token=hub.tokens["ada"])


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "made"
    (made / "sub").mkdir(parents=True)
    save_file({"a": np.zeros(600_000, "float32")}, made / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "acme/bert", "r": 4}
    (made / "adapter_config.json").write_text(json.dumps(config))
    (made / "README.md").write_text("---\nlibrary_name: transformers\ntags: []\n---\n# Polite\n")
    (made / "sub/notes.txt").write_text("notes")
    (made / ".env").write_text("a=b")
    (made / ".gitignore").write_text(".env\n")
    return made


def test_a_folder_is_uploaded_described_and_downloaded(hub, api, folder, tmp_path):
    who = api.whoami()
    assert (who["name"], [org["name"] for org in who["orgs"]]) == ("ada", ["acme"])
    url = api.create_repo("acme/polite", private=True)
    assert str(url) == f"{hub.address}/acme/polite"
    assert str(api.create_repo("acme/polite", exist_ok=True)) == str(url)
    first = api.upload_folder(repo_id="acme/polite", folder_path=folder)
    assert first.commit_url == f"{hub.address}/acme/polite/commit/{first.oid}"
    assert api.upload_folder(repo_id="acme/polite", folder_path=folder).oid == first.oid
    info = api.model_info("acme/polite", files_metadata=True)
    assert info.sha == first.oid
    assert info.private
    assert {"peft", "lora", "base_model:acme/bert", "base_model:adapter:acme/bert"} <= {*info.tags}
    assert (info.library_name, info.author) == ("peft", "acme")
    names = {each.rfilename for each in info.siblings}
    assert ".env" not in names  # what .gitignore says is for the server to follow
    (large,) = (each for each in info.siblings if each.lfs)
    assert large.rfilename == "adapter_model.safetensors"
    assert large.lfs.size == (folder / "adapter_model.safetensors").stat().st_size
    tree = [*api.list_repo_tree("acme/polite", recursive=True, expand=True)]
    assert {each.path for each in tree} == names | {"sub"}
    assert api.get_paths_info("acme/polite", ["sub", "no", "README.md"])[1].path == "README.md"
    got = snapshot_download("acme/polite", endpoint=hub.address, token=hub.tokens["ada"])
    for path in ("adapter_model.safetensors", "sub/notes.txt"):
        assert (folder / path).read_bytes() == Path(got, path).read_bytes()
    (listed,) = api.list_models(filter="base_model:adapter:acme/bert")
    assert listed.id == "acme/polite"
    assert [each.id for each in api.list_models(author="acme", search="poli", full=True)]
    assert [*api.list_models(filter=["peft", "nothing"])] == []
    api.verify_repo_checksums("acme/polite", local_dir=got)


def tensors(size):
    return save({"a": np.zeros(size, "uint8")})


def test_commits_branches_and_tags(api):
    name = api.create_repo("acme/commits").repo_id
    start = api.model_info(name).sha

    def change(title, *operations, **options):
        return api.create_commit(name, [*operations], commit_message=title, **options)

    large = CommitOperationAdd("big.safetensors", io.BytesIO(tensors(1 << 20)))
    done = change("two", CommitOperationAdd("a.md", b"a"), large, parent_commit=start)
    with pytest.raises(HfHubHTTPError) as error:
        change("x", CommitOperationAdd("c.md", b"c"), parent_commit=start)
    assert error.value.response.status_code == 412
    copy = CommitOperationCopy("big.safetensors", "copy.safetensors")
    change("copy", copy, CommitOperationDelete("a.md"))
    assert {each.path for each in api.list_repo_tree(name)} >= {"copy.safetensors"}
    with pytest.raises(EntryNotFoundError, match="doesn't exist"):
        change("x", CommitOperationDelete("no.md"))
    api.create_tag(name, tag="v1", revision=done.oid)
    with pytest.raises(HfHubHTTPError):
        api.create_tag(name, tag="v1")
    api.create_branch(name, branch="feat/x")
    refs = api.list_repo_refs(name)
    assert [(each.name, each.target_commit) for each in refs.tags] == [("v1", done.oid)]
    assert [each.name for each in refs.branches] == ["feat/x", "main"]
    assert [each.title for each in api.list_repo_commits(name)][:2] == ["copy", "two"]
    assert api.revision_exists(name, "v1")
    assert not api.revision_exists(name, "v2")
    with pytest.raises(RevisionNotFoundError):
        api.model_info(name, revision="nothing")
    api.delete_branch(name, branch="feat/x")


def test_what_is_missing_or_refused_is_said_as_clients_expect(hub, api):
    name = api.create_repo("acme/missing", private=True).repo_id
    assert not api.repo_exists("acme/nothing")
    assert not api.file_exists(name, "nothing.md")
    assert api.file_exists(name, ".gitattributes")
    assert api.list_repo_files(name) == [".gitattributes"]
    for other, shown in (
        ("gpt2", "HF_ENDPOINT"),
        ("x/y", r"--upstream .*adapterhub pull https://"),
    ):
        with pytest.raises(RepositoryNotFoundError, match=shown):
            api.model_info(other)
    for token in (False, "ah_" + "x" * 43, "hf_" + "x" * 34):
        with pytest.raises(HfHubHTTPError) as error:
            HfApi(endpoint=hub.address, token=token).model_info(name)
        assert error.value.response.status_code == 401
        assert isinstance(error.value, RepositoryNotFoundError) == (token is False)
    with pytest.raises(BadRequestError, match="safetensors cannot"):
        api.upload_file(path_or_fileobj=b"x", path_in_repo="a.bin", repo_id=name)
    for text in (b"---\ntags: [a\n---\n", b"---\na: 1\n b: 2\n---\n", b"---\n- a\n---\n"):
        with pytest.raises(ValueError, match=r"Invalid metadata in README.md"):
            api.upload_file(path_or_fileobj=text, path_in_repo="README.md", repo_id=name)
    lacking = (
        lambda: api.super_squash_history(name),
        lambda: [*api.list_pending_access_requests(name)],
        lambda: api.list_webhooks(),
        lambda: [*api.list_collections(owner="acme")],
        lambda: api.get_user_overview("ada"),
        lambda: api.get_organization_overview("acme"),
        lambda: [*api.list_papers(query="x")],
        lambda: api.get_space_runtime(name),
    )
    for call in lacking:
        with pytest.raises(HfHubHTTPError, match="not supported here") as caught:
            call()
        assert not isinstance(caught.value, RepositoryNotFoundError)


def test_a_file_object_goes_through_lfs_and_a_path_shows_what_to_do(hub, api, tmp_path):
    name = api.create_repo("acme/large").repo_id
    path = tmp_path / "large.safetensors"
    path.write_bytes(tensors(5 << 20))
    with open(path, "rb") as file:
        api.upload_file(path_or_fileobj=file, path_in_repo=path.name, repo_id=name)
    got = api.hf_hub_download(name, path.name)
    assert Path(got).read_bytes() == path.read_bytes()
    refused = pytest.raises(Exception, match=TOO_LARGE.rpartition(":")[2])
    with refused if is_xet_available() else nullcontext():
        api.upload_file(path_or_fileobj=str(path), path_in_repo="b.safetensors", repo_id=name)
    assert api.file_exists(name, "b.safetensors") is not is_xet_available()


def test_each_path_has_the_last_commit_that_changed_it(api):
    name = "acme/last"
    api.create_repo(name)

    def change(title, *operations):
        return api.create_commit(name, [*operations], commit_message=title).oid

    def add(path, data):
        return CommitOperationAdd(path, data)

    first = change("<one> & two", add("a.md", b"1"), add("in/b.md", b"1"), add("in/c.md", b"1"))
    second = change("second", add("in/b.md", b"2"))
    third = change("third", add("a.md", b"3"), add("d.md", b"3"))
    fourth = change("fourth", CommitOperationDelete("d.md"))
    expected = {"a.md": third, "in/b.md": second, "in/c.md": first, "in": second}
    listed = {e.path: e for e in api.list_repo_tree(name, expand=True, recursive=True)}
    listed |= {e.path: e for e in api.list_repo_tree(name, expand=True)}
    assert {path: listed[path].last_commit.oid for path in expected} == expected
    infos = api.get_paths_info(name, [*expected], expand=True)
    assert {each.path: each.last_commit.oid for each in infos} == expected
    at_second = api.get_paths_info(name, ["a.md"], expand=True, revision=second)
    assert at_second[0].last_commit.oid == first
    commits = {each.commit_id: each for each in api.list_repo_commits(name, formatted=True)}
    assert commits[first].formatted_title == "&lt;one&gt; &amp; two"
    assert api.list_repo_commits(name)[0].formatted_title is None
    for length in (7, 12, 39):
        assert api.model_info(name, revision=fourth[:length]).sha == fourth
    for revision in (fourth[:6], "f" * 12):
        with pytest.raises(RevisionNotFoundError):
            api.model_info(name, revision=revision)


def test_names_of_files_are_not_read_as_addresses(hub, api, tmp_path):
    name = api.create_repo("acme/odd-names").repo_id
    for path in ("a#b.md", "a?b.md", "100%.md", "a b.md", "ä ö.md", "in #1/b&c=d+e.md", "%23.md",
                 "日本.md"):  # fmt: skip
        api.upload_file(path_or_fileobj=path.encode(), path_in_repo=path, repo_id=name)
        assert path in api.list_repo_files(name)
        assert [each.path for each in api.get_paths_info(name, [path])] == [path]
        got = api.hf_hub_download(name, path, local_dir=tmp_path)
        assert Path(got).read_bytes() == path.encode()
        api.delete_file(path, name)
        assert path not in api.list_repo_files(name)


def test_a_renamed_repository_is_found_by_its_earlier_name(hub, api, tmp_path):
    api.create_repo("acme/before", private=True)
    api.upload_file(path_or_fileobj=b"1", path_in_repo="a.md", repo_id="acme/before")
    api.move_repo("acme/before", "acme/between")
    api.move_repo("acme/between", "acme/after")
    for old in ("acme/before", "acme/between"):
        assert api.model_info(old).id == "acme/after"
        assert api.list_repo_files(old)[:2] == [".gitattributes", "a.md"]
        got = api.hf_hub_download(old, "a.md", local_dir=tmp_path / old)
        assert Path(got).read_bytes() == b"1"
        api.upload_file(path_or_fileobj=old.encode(), path_in_repo="b.md", repo_id=old)
        with pytest.raises(RepositoryNotFoundError):
            api.delete_repo(old)
    for own in ("before", "nothing"):
        assert hub.as_user(None).get(f"/api/models/acme/{own}").status_code == 401
    answer = hub.as_user("ada").get("/api/models/acme/before?blobs=true", follow_redirects=False)
    assert answer.status_code == 307
    assert answer.headers["location"].endswith("/api/models/acme/after?blobs=true")
    api.create_repo("acme/before")
    assert api.model_info("acme/before").id == "acme/before"
    api.update_repo_settings("acme/after", private=False)
    assert not api.model_info("acme/between").private
    api.delete_repo("acme/after")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("acme/between")


def test_one_object_of_a_batch_does_not_refuse_the_others(hub):
    good = {"oid": "a" * 64, "size": 3}
    wrong = [
        {"oid": "a", "size": 3}, {"oid": "b" * 64}, {"oid": "c" * 64, "size": -1},
        {"oid": "d" * 64, "size": 10**18}, {"oid": "e" * 64, "size": "3"}, "f", {},
    ]  # fmt: skip
    name = real_hub.create(hub.as_user("ada"), "acme/batch")
    answer = real_hub.batch(hub.as_user("ada"), name, objects=[*wrong, good])
    assert answer.status_code == 200, answer.text
    found = answer.json()["objects"]
    assert len(found) == len(wrong) + 1
    assert [each.get("oid") for each in found if "actions" in each] == [good["oid"]]
    assert {each["error"]["code"] for each in found if "error" in each} == {413, 422}


def run(hub, home, *words, **environment):
    """Run Python in a process that knows the hub by its environment alone."""
    environment = {
        **os.environ, "HF_ENDPOINT": hub.address, "HF_TOKEN": hub.tokens["ada"],
        "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", **environment,
    }  # fmt: skip
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


# peft, transformers and datasets, as they are released.


MODELS = """
import torch
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification as Auto, BertConfig
from transformers import BertForSequenceClassification

sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
config = BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
BertForSequenceClassification(config).push_to_hub("acme/bert", private=True)
backbone = Auto.from_pretrained("acme/bert")
model = get_peft_model(backbone, LoraConfig(task_type="SEQ_CLS", init_lora_weights=False)).eval()
rows = torch.tensor([[1, 2, 3], [4, 5, 6]])
expected = model(rows).logits
model.push_to_hub("acme/lora", private=True)
found = PeftModel.from_pretrained(Auto.from_pretrained("acme/bert"), "acme/lora").eval()
assert torch.equal(found(rows).logits, expected)
found = AutoPeftModelForSequenceClassification.from_pretrained("acme/lora").eval()
assert torch.equal(found(rows).logits, expected)
assert torch.equal(Auto.from_pretrained("acme/lora").eval()(rows).logits, expected)
"""

OFFLINE = """
from transformers import AutoModelForSequenceClassification as Auto
Auto.from_pretrained("acme/lora")
"""

DATASETS = """
from datasets import Dataset, load_dataset
Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}).push_to_hub("acme/rows", private=True)
assert load_dataset("acme/rows")["train"]["text"][:] == ["a", "b"]
"""


@pytest.fixture(scope="module", params=["root", "prefix", "processes"])
def of_libraries(request, tmp_path_factory):
    place, bucket = tmp_path_factory.mktemp("hub") / "hub", None
    if request.param == "processes":
        place, bucket = request.getfixturevalue("new_state")()
    prefix = "/below" if request.param == "prefix" else ""
    with real_hub.serving(place, prefix, bucket) as running:
        running.org("acme")
        running.user("ada", acme="write")
        yield running


whole = pytest.mark.skipif(not ALL, reason="ADAPTERHUB_TESTS=all")


@whole  # What the client does with Xet is the same for each kind of hub.
@pytest.mark.parametrize(
    ("of_libraries", "xet"),
    [("prefix", "1")],
    indirect=["of_libraries"],
)
def test_models_and_adapters_give_equal_logits(of_libraries, tmp_path, xet):
    for program, environment in (
        (MODELS, {"HF_HUB_DISABLE_XET": xet}),
        (OFFLINE, {"HF_HUB_OFFLINE": "1"}),
    ):
        done = run(of_libraries, tmp_path, "-c", program, **environment)
        assert done.returncode == 0, done.stderr


@whole
def test_a_data_set_is_pushed_without_xet_and_says_so_with_it(of_libraries, tmp_path):
    done = run(of_libraries, tmp_path, "-c", DATASETS, HF_HUB_DISABLE_XET="1")
    assert done.returncode == 0, done.stderr
    done = run(of_libraries, tmp_path, "-c", DATASETS.replace("acme/rows", "acme/more"))
    has_xet = is_package_available("hf_xet")  # this process may be told that it has not
    assert (done.returncode != 0) is has_xet, done.stderr
    assert (TOO_LARGE in done.stderr) is has_xet
