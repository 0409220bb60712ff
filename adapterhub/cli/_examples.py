"""The end of a help text: examples, if the command's file has none, and where to go on."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "publish": (
        "adapterhub publish runs/sst2",
        "adapterhub publish runs/sst2 --name polite --tag best --license mit",
    ),
    "push": (
        "adapterhub push runs/sst2 hf:acme/sst2 --private",
        "adapterhub push runs/sst2 https://hub.example.org/acme/sst2 --tag v1",
    ),
    "pull": (
        "adapterhub pull sst2@best",
        "adapterhub pull hf:acme/sst2 --to adapters/sst2",
    ),
    "list": (
        "adapterhub list",
        "adapterhub list reviews --method lora --sort accuracy",
        "adapterhub list --hub sentiment",
    ),
    "show": ("adapterhub show sst2", "adapterhub show runs/sst2 --json"),
    "key": ("adapterhub key new acme.key", "adapterhub key show acme.pub"),
    "verify": ("adapterhub verify sst2@v1", "adapterhub verify runs/sst2"),
    "yank": ("adapterhub yank sst2@v1 --reason 'trained on the test set'",),
    "lock": ("adapterhub lock sst2@v1", "adapterhub lock hf:acme/sst2 --name sentiment"),
    "sync": ("adapterhub sync", "adapterhub sync --to models/adapters"),
    "login": ("adapterhub login https://hub.example.org",),
    "logout": ("adapterhub logout https://hub.example.org",),
    "registry": ("adapterhub registry verify", "adapterhub registry gc"),
    "merge": ("adapterhub merge runs/sst2 --output merged",),
    "combine": (
        "adapterhub combine runs/a runs/b --output both --weights 0.7,0.3",
        "adapterhub combine runs/a runs/b --output both --how ties --density 0.3",
    ),
    "methods": ("adapterhub methods", "adapterhub methods lora"),
    "tasks": ("adapterhub tasks", "adapterhub tasks seq2seq"),
    "inspect": ("adapterhub inspect sentence-transformers/all-MiniLM-L6-v2",),
    "quickstart": ("adapterhub quickstart --output runs/first",),
}

# Below the examples: where to go on.
SEE_ALSO: dict[str, str] = {
    "quickstart": "train, with your own data; recipe, for all options",
    "train": "options, which lists all; recipe, which writes them to a file; report, predict",
    "report": "compare, eval",
    "compare": "report, diff",
    "eval": "predict, compare, publish",
    "predict": "eval, publish, merge",
    "merge": "export, for peft; combine",
    "combine": "merge, eval",
    "recipe": "options, which explains one; train",
    "options": "recipe, methods, tasks",
    "methods": "options METHOD; inspect, for what fits a backbone",
    "tasks": "options TASK; train --show 3, for what the model gets",
    "inspect": "methods; options METHOD",
    "publish": "list, show, tag; push, to a hub",
    "list": "show, pull",
    "show": "pull, diff, verify",
    "diff": "show, compare",
    "tag": "publish, show, yank",
    "yank": "tag, delete",
    "delete": "yank; registry gc, which frees the space",
    "registry": "list, publish, delete",
    "push": "publish, login, sign",
    "pull": "show, verify, lock",
    "login": "push, pull, logout",
    "logout": "login",
    "import": "eval, publish, export",
    "export": "import, merge",
    "lock": "sync, pull",
    "sync": "lock",
    "key": "sign, trust",
    "sign": "verify, push",
    "verify": "trust, sign",
    "cache": "train",
    "trust": "verify, key show",
}
