"""Files with secrets or paths of this machine are not published, locally or on a hub."""

import base64
import json
import re
import string
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

import adapterhub as ah
from adapterhub.data import docstrings
from adapterhub.errors import FileError
from adapterhub.files.native import Saved, published_texts, write_adapter
from adapterhub.registry.secrets import findings, refuse_leaks
from tests.kit import registries

ALPHABET = string.ascii_letters + string.digits
HEX = "0123456789abcdef"


def key(length, letters=ALPHABET):
    """Return a text that looks random, and is the same in each run."""
    return "".join(letters[(i * i * 7 + i * 13 + 5) % len(letters)] for i in range(length))


def base64_of(text):
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


HF = "hf_" + key(34)
KEYS = {
    "Hugging Face": HF,
    "OpenAI": "sk-" + key(48),
    "OpenAI project": "sk-proj-" + key(60),
    "Anthropic": "sk-ant-api03-" + key(90),
    "OpenRouter": "sk-or-v1-" + key(64, HEX),
    "GitHub": "ghp_" + key(36),
    "GitHub fine-grained": "github_pat_" + key(60),
    "GitLab": "glpat-" + key(20),
    "AWS id": "AKIA" + key(16, string.ascii_uppercase + "234567"),
    "AWS secret": f"aws_secret_access_key = {key(40)}",
    "Azure storage": f"AccountKey={base64.b64encode(key(64).encode()).decode()}",
    "Azure SAS": f"https://x.blob.core.windows.net/y?sv=1&sig={key(43)}%3D",
    "Google": "AIza" + key(35),
    "Google OAuth": "ya29." + key(60),
    "Google client": "GOCSPX-" + key(28),
    "Slack": "xoxb-123456789012-123456789012-" + key(24),
    "Slack webhook": f"https://hooks.slack.com/services/T{key(8)}/B{key(8)}/{key(24)}",
    "Discord webhook": f"https://discord.com/api/webhooks/123456789012345678/{key(68)}",
    "Discord bot": f"M{key(23)}.{key(6)}.{key(27)}",
    "Telegram": f"123456789:{key(35)}",
    "W&B": f"WANDB_API_KEY={key(40, HEX)}",
    "Kaggle": f'{{"username": "me", "key": "{key(32, HEX)}"}}',
    "Stripe": "sk_live_" + key(24),
    "Stripe restricted": "rk_test_" + key(24),
    "SendGrid": f"SG.{key(22)}.{key(43)}",
    "Twilio": "SK" + key(32, HEX),
    "Mailchimp": f"{key(32, HEX)}-us12",
    "npm": "npm_" + key(36),
    "npmrc": f"//registry.npmjs.org/:_authToken={key(36, HEX)}",
    "PyPI": "pypi-AgEIcHlwaS5vcmc" + key(80),
    "Docker": "dckr_pat_" + key(27),
    "JWT": ".".join(base64_of(text) for text in ('{"alg":"HS256"}', '{"sub":"1234567"}', key(32))),
    "Groq": "gsk_" + key(52),
    "Replicate": "r8_" + key(37),
    "xAI": "xai-" + key(80),
    "NVIDIA": "nvapi-" + key(60),
    "Databricks": "dapi" + key(32, HEX),
    "DigitalOcean": "dop_v1_" + key(64, HEX),
    "Vault": "hvs." + key(24),
    "Supabase": "sbp_" + key(40, HEX),
    "Shopify": "shpat_" + key(32, HEX),
    "Grafana": "glsa_" + key(32) + "_" + key(8, HEX),
    "Notion": "ntn_" + key(43),
    "RSA key": "-----BEGIN RSA PRIVATE KEY-----",
    "OpenSSH key": "-----BEGIN OPENSSH PRIVATE KEY-----",
    "age key": "AGE-SECRET-KEY-1" + key(58, string.ascii_uppercase),
    "Postgres": "postgresql://me:hunter2@db.example.org:5432/x",
    "MongoDB": "mongodb+srv://me:s3cret@cluster0.example.net/db",
    "Redis": "redis://:hunter2@localhost:6379/0",
    "Bearer": f"Authorization: Bearer {key(40)}",
    "Basic": "Authorization: Basic " + base64.b64encode(b"me:hunter2").decode(),
    "curl": "curl -u me:hunter2 https://example.org",
    "an option": "adapterhub serve --api-key hunter22",
}  # fmt: skip
WORDS = (
    "password: hunter2", "Password = swordfish", "passwd='abc def'", 'api_key = "abcdefgh"',
    "my api key: a1b2c3d4e5", "DB_PASSWORD=correcthorse", "secret_key: Xk9#mPq2", "pwd:=letmein",
    '"client_secret": "abcdefgh12"', "the password is: `hunter2`, password: hunter2",
    "passphrase: tr0ub4dor&3", "access token = abcdefghijkl", "HF_TOKEN=abcdefgh",
    "Passwort: geheim1", "export OPENAI_API_KEY=abcdefgh",
)  # fmt: skip
ADMIN = "root"  # has a home folder of its own
PATHS = (
    "/home/someone/data", "see /home/someone/data.", "</home/someone>x", "`/home/someone/x`",
    "|/home/a/b|", "{/home/a/b}", "-I/home/someone/include", "--data=/home/someone/x",
    "@/home/someone/x", "a,/home/b/c", "text:/home/a/b", "file:///home/someone/x",
    "see file:///C:/Users/x", "file:/home/x", "(/data/someone/x)", "/Users/someone",
    "/Users/jane doe/x", f"/{ADMIN}", f"/{ADMIN}/x", "/mnt/c/Users/me", "/scratch/someone/x",
    "/tmp/pytest-of-me/x", "C:\\Users\\someone", "c:/Users/someone", "D:\\data\\x",
    "C:\\\\Users\\\\x", "\\\\server\\share\\x", "\\\\\\\\server\\\\share", "\\\\?\\C:\\x",
    "\\\\wsl$\\Ubuntu\\home", "~someone/x", "~/x", "'~/.ssh/id'",
    "/home/jos\u00e9/x", "a=/home/me:/opt/x", "[/home/me/x]",
    "\"/home/me\"", "/cygdrive/c/Users", "/Volumes/disk/x", ">/home/a/b",
)  # fmt: skip


def refused(files, secret):
    with pytest.raises(FileError) as caught:
        refuse_leaks(files)
    assert secret not in str(caught.value)
    return str(caught.value)


def test_each_kind_is_refused_without_showing_it(subtests):
    for text in (*KEYS.values(), *WORDS, *PATHS):
        with subtests.test(ascii(text)):
            message = refused({"README.md": f"# Polite\n\nx {text}\n".encode()}, text)
            assert "README.md, line 3: a" in message
            tree = {"training": {"recipe": {"note": [text]}}}
            refused({"adapter.json": json.dumps(tree).encode()}, text)
            refused({"adapter.json": json.dumps({text: 1}).encode()}, text)


@pytest.mark.parametrize("name", ["password", "hf_token", "apiKey", "db-password", "client_secret"])
def test_a_value_is_refused_by_its_name(name):
    refused({"a.json": json.dumps({"data": {name: "swordfish"}}).encode()}, "swordfish")
    refuse_leaks({"a.json": json.dumps({"data": {name: "${TOKEN}"}}).encode()})


def test_all_leaks_are_listed_with_their_place():
    tree = {"training": {"recipe": {"note": "/home/a/b"}}}
    files = {"a.md": b"/home/a/b", "b.json": b"x\n/home/a/b", "c.json": json.dumps(tree).encode()}
    with pytest.raises(FileError) as caught:
        refuse_leaks(files)
    assert [re.sub(r" \(\w{8}\)", "", leak) for leak in caught.value.offenders] == [
        "a.md, line 1: an absolute path",
        "b.json, line 2: an absolute path",
        "c.json, at training.recipe.note: an absolute path",
    ]


def test_a_finding_can_be_allowed_and_only_that():
    files = {"a.md": f"/home/a/b\n{HF}\n".encode()}
    codes = [finding.code for finding in findings(files)]
    assert len(set(codes)) >= 2
    refuse_leaks(files, codes)
    for code in codes:
        others = [other for other in codes if other != code]
        with pytest.raises(FileError, match=f"--allow-finding {code}"):
            refuse_leaks(files, others)
    with pytest.raises(FileError):
        refuse_leaks({"a.md": files["a.md"] + b"\n"}, codes)


def test_only_the_header_of_tensors_is_text(tmp_path):
    tensors = {"x": torch.frombuffer(bytearray(b" /home/someone/data "), dtype=torch.uint8)}
    data = safetensors.torch.save(tensors)
    refuse_leaks({"a.safetensors": data})
    (tmp_path / "a.safetensors").write_bytes(data)
    (texts,) = published_texts(tmp_path, ("a.safetensors", "missing")).values()
    assert texts == data[: -len(bytes(tensors["x"]))]
    with pytest.raises(FileError, match="private information"):
        refuse_leaks({"a.safetensors": safetensors.torch.save(tensors, metadata={"from": HF})})
    named = {HF: tensors["x"]}
    with pytest.raises(FileError, match="Hugging Face token"):
        refuse_leaks({"a.safetensors": safetensors.torch.save(named)})


def write(folder, **changes):
    manifest, tensors = Saved.at(registries.write_sample(folder.with_name("sample"))).read()
    write_adapter(folder, replace(manifest, **changes), tensors)
    return folder


@pytest.mark.parametrize(
    "changes",
    [{"description": f"Use {HF}."}, {"labels": ("no", HF)}, {"tags": (f"a {HF}",)},
     {"training": {"recipe": {"data": {"token": HF}}}}, {"chat_template": f"{{{{ '{HF}' }}}}"},
     {"training": {"recipe": {"data": {"password": "swordfish"}}}}],
    ids=str,
)  # fmt: skip
def test_local_publishing_and_pushing_are_searched(changes, tmp_path, hub):
    folder = write(tmp_path / "made", **changes)
    registry = tmp_path / "registry"
    with pytest.raises(FileError, match="private information") as caught:
        ah.publish(folder, registry=registry)
    assert not list(registry.rglob("v1"))
    with pytest.raises(FileError, match="private information"):
        ah.push(folder, f"{hub.address}/acme/polite", peft=False)
    assert {line.partition(" ")[0] for line in hub.requests} == {"GET"}
    assert hub.repositories == {}
    codes = re.findall(r"\(([0-9a-f]{8})\)", str(caught.value))
    assert ah.publish(folder, registry=registry, allow_findings=tuple(codes)).version == "v1"


def test_what_the_publisher_adds_is_searched(tmp_path):
    folder = registries.write_sample(tmp_path / "made")
    listing = ah.Listing(description=f"Made with {HF}.")
    with pytest.raises(FileError, match="Hugging Face token"):
        ah.publish(folder, registry=tmp_path / "registry", listing=listing)


COMMIT = key(40, HEX)
ORDINARY = (
    "and/or 1/2, https://example.org/a/b, 10 km/h, `a/b`, 3.5/5, ~5/7 of the data, w/o, 24/7, n/a",
    f"sha256 {key(64, HEX)}", f"bf16-{key(64, HEX)}", f"commit {key(40, HEX)}",
    "v1.2.3-rc.1+build", "http://localhost:8080/owner/name@v1", "hf:someone/sst2-lora@v1",
    "https://h.org/o/n@best", "sentence-transformers/all-MiniLM-L6-v2",
    "meta-llama/Llama-3.1-8B-Instruct", "task-specific-thing-x",
    "The token: it is a piece of text. tokens: 512, pad_token: [PAD], eos_token: </s>, token: <s>",
    "Enter your password: it is required. A secret: nobody reads. Passwords: never share.",
    'api_key = os.environ["KEY"]', "password=$PASSWORD", "api_key: <your key>",
    "secret: ${SECRET}", "set HF_TOKEN=... first", "token=None, password: null",
    "--token $HF_TOKEN", "Bearer of bad news", "</details> <br/> <a></b></c>",
    "{'text': '{text}\\n', 'answer': '#### (.*)'}", "2020/01/02 10:20:30",
    "POST /v1/chat/completions, /api/models, /dev/null, #!/usr/bin/env python",
    "a ~ b, x~=y, ~ x/y", "\\alpha\\beta \\\\ \\frac{a}{b}", "re: x:\\d+ or a:\\w",
    "one/two/three four/five", "C: 3, D:/, A:\\",
    "skilearn sk-learn risk-management desk-based task-oriented-dialogue-systems",
    "key: value, primary key: id, keyboard: qwerty1, monkey: d1",
    "secretary: J0hn, tokenizer: bert2",
    "The pass/fail ratio; passing: 3; password-like strings; compass: N12",
    f"acme/bert at {COMMIT}", f"hf:acme/polite@{COMMIT}", f"commit {COMMIT}", f"sha1 {COMMIT}",
    f"https://hf.co/acme/x/resolve/{COMMIT}/config.json", key(64, HEX), "a" * 40, "1" * 40,
    "https://git.example.org/x.git", "ssh://git@git.example.org/x.git", "git@git.example.org:x.git",
    "http://localhost:8080/acme/name@v1", "the machine has a login and a password field",
    "login or password incorrect", "task-v2-classification-of-sst2-data-with-lora",
    "lora_r8_alpha16_dropout0_1_and_more_words_2", "ask-me-anything-about-2-adapters-and-3-heads",
    "multi-task-lora-rank-8-on-sst2-and-mnli", "the method is\nhf_ and more text in this line",
)  # fmt: skip
ROOT = Path(__file__).parents[2]


def test_ordinary_text_is_no_leak(subtests):
    for text in ORDINARY:
        with subtests.test(ascii(text)):
            assert findings({"README.md": f"# Polite\n\n{text}\n\nend\n".encode()}) == []
            assert findings({"a.json": json.dumps({"note": text}).encode()}) == []


def test_what_this_project_writes_is_no_leak(monkeypatch):
    """Its recipes, golden adapters and licence, and 400 docstrings of a third of the library."""
    parts = {label: " ".join(names.split()[::3]) for label, names in docstrings.PARTS.items()}
    monkeypatch.setattr(docstrings, "PARTS", parts)
    monkeypatch.setattr(docstrings, "_corpus", docstrings._corpus.__wrapped__)
    paths = [*ROOT.glob("recipes/**/*.yaml"), ROOT / "LICENSE", ROOT / "docs/reference/support.md"]
    paths += [p for p in (ROOT / "tests" / "golden").rglob("*") if p.suffix in (".json", ".md")]
    paths += [*(ROOT / "registry").rglob("README.md"), *(ROOT / "registry").rglob("*.json")]
    files = {str(p.relative_to(ROOT)): p.read_bytes() for p in paths if p.is_file()}
    assert len(files) > 30
    assert findings(files) == []
    splits = docstrings.load_docstrings(limit_per_class=50)
    texts = [example.text for split in splits for example in split]
    found = findings({"docstrings": "\n".join(texts).encode()})
    assert len(texts) >= 300
    assert len(found) == 0, [texts[int(f.place[5:]) - 1] for f in found]


ACCIDENTS = {
    "remote with a password": "origin  https://me:s3cret@git.example.org/x.git (fetch)",
    "remote with a token": f"url = https://{key(24)}1@git.example.org/x.git",
    "netrc": "machine git.example.org login me password swordfish",
    "netrc without a login": "machine git.example.org password swordfish",
    "netrc, default": "default login me password swordfish",
    "netrc in lines": "machine git.example.org\n  login me\n  password swordfish",
    "40 digits": f"the key is {COMMIT}, as always",
    **{f"a letter in front of {name}": f"x{KEYS[name]}" for name in
       ("Hugging Face", "OpenAI", "GitHub", "GitLab", "npm", "Groq", "NVIDIA", "AWS id", "Slack")},
    **{f"after a word, {name}": f"TOKEN_{KEYS[name]}" for name in ("Hugging Face", "GitHub")},
    **{f"{name} over two lines": f"{KEYS[name][:13]}\n{KEYS[name][13:]}" for name in
       ("Hugging Face", "OpenAI", "GitHub", "GitLab", "npm", "Groq", "NVIDIA", "AWS id", "Slack")},
    "two lines of a shell": f"{HF[:20]}\\\n  {HF[20:]}",
    "two lines of a quote": f"> {HF[:20]}\n> {HF[20:]}",
}  # fmt: skip


@pytest.mark.parametrize("name", ACCIDENTS)
def test_what_happens_by_accident_is_found(name):
    text = ACCIDENTS[name]
    assert findings({"README.md": f"# Polite\n\n{text}\n\nend\n".encode()})
    assert findings({"adapter.json": json.dumps({"training": {"note": text}}).encode()})


def test_a_commit_is_no_key_and_a_signature_that_looks_like_one_is_none():
    tree = {"backbone": {"revision": COMMIT}, "on": [{"reference": f"hf:a/b@{COMMIT}"}]}
    refuse_leaks({"adapter.json": json.dumps(tree).encode()})
    signature = {"signature": f"sk-{'a1B2' * 12}", "note": f"sk-{'a1B2' * 12}"}
    found = findings({"adapter.sig": json.dumps({"signatures": [signature]}).encode()})
    assert [each.place for each in found] == ["at signatures.0.note"]
