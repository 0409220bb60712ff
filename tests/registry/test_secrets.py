"""Files with secrets or paths of this machine are not published."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from adapterhub.errors import FileError
from adapterhub.registry.secrets import refuse_leaks


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("see /home/someone/data", "absolute path"),
        ("C:\\Users\\someone", "absolute path"),
        ("token hf_" + "a" * 34, "Hugging Face token"),
        ("sk-" + "a" * 24, "OpenAI key"),
        ("ghp_" + "a" * 36, "GitHub token"),
        ("AKIA" + "A" * 16, "AWS key"),
        ("-----BEGIN RSA PRIVATE KEY-----", "private key"),
        ("https://me:hunter2@h.org", "password"),
    ],
)
def test_each_kind_of_leak_is_refused_without_showing_it(text, kind):
    with pytest.raises(FileError) as caught:
        refuse_leaks({"README.md": f"# Polite\n\n{text}\n".encode()})
    assert f"README.md, line 3: a{'n' * (kind[0] in 'aAO')} {kind}" in str(caught.value)
    assert text not in str(caught.value)


def test_all_leaks_are_listed():
    files = {"a.md": b"/home/a/b", "b.json": b"x\n/home/a/b"}
    with pytest.raises(FileError) as caught:
        refuse_leaks(files)
    assert [leak.split(":")[0] for leak in caught.value.offenders] == [
        "a.md, line 1", "b.json, line 2",
    ]  # fmt: skip


def test_only_the_header_of_tensors_is_text():
    tensors = {"x": torch.frombuffer(bytearray(b" /home/someone/data "), dtype=torch.uint8)}
    refuse_leaks({"a.safetensors": safetensors.torch.save(tensors)})
    data = safetensors.torch.save(tensors, metadata={"from": "/home/someone/data"})
    with pytest.raises(FileError, match="private information"):
        refuse_leaks({"a.safetensors": data})


def test_ordinary_text_is_no_leak():
    refuse_leaks({"README.md": b"and/or 1/2, https://example.org/a/b, 10 km/h, `a/b`, 3.5/5"})
