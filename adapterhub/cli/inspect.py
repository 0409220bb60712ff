"""`adapterhub inspect`."""

from __future__ import annotations

from pathlib import Path

import click

from adapterhub.cli._format import (
    print_facts,
    print_json,
    print_table,
    say,
    say_text,
)
from adapterhub.cli._options import as_json_option, revision_option
from adapterhub.status import doing


@click.command("inspect")
@click.argument("backbone")
@revision_option
@as_json_option
@click.option("--family", metavar="FILE", help="Use the row of sites in a YAML file, and check it.")
@click.option("--draft-family", is_flag=True, help="Print a row as discovered, for --family.")
@click.option("--python", is_flag=True, help="With --draft-family: as Python, for families/.")
def command(
    backbone: str,
    revision: str | None,
    as_json: bool,
    family: str | None,
    draft_family: bool,
    python: bool,
) -> None:
    """Show the sites and parameters of a backbone and the methods that fit it.

    BACKBONE is a Hub id or a folder: of a model of transformers, or of a pipeline or a model of
    diffusers, whose weights are not needed. `print(adapterhub.inspect(module))` shows the same of
    any module in Python.
    """
    from adapterhub.backbones.torch_free_checks import (
        DIFFUSERS,
        check_backbone_options,
        holds_diffusers,
        require,
    )

    if holds_diffusers(Path(backbone)):
        require(*DIFFUSERS)
    else:
        check_backbone_options(backbone)
    with doing("loading torch"):
        from adapterhub.adapters.inspection import inspect
        from adapterhub.backbones.diffusers_folder import diffusers_folder, meta_diffusers
        from adapterhub.backbones.fingerprint import fingerprint
        from adapterhub.backbones.load import meta_model

    with doing(f"loading {backbone}"):
        if folder := diffusers_folder(backbone, revision):
            _refuse_family(family, draft_family)
            model, identity = meta_diffusers(folder), None
        elif draft_family:
            say_text(_draft(backbone, revision, python))
            return
        else:
            model = meta_model(backbone, revision=revision, family=family)
            identity = fingerprint(backbone, revision=revision)
    vectors = {} if identity is None else _vectors(backbone, revision)
    with doing("planning every method"):
        inspection = inspect(model)
    if as_json:
        own = {"backbone": backbone, "fingerprint": identity}
        print_json({**own, **vectors, **inspection.facts()}, indent=2)
        return
    summary = {"backbone": f"{backbone} ({inspection.kind})", **inspection.summary()}
    summary |= {"fingerprint": identity} if identity else {}
    print_facts(summary | {name: str(value) for name, value in vectors.items()}, width=11)
    for line in inspection.group_lines():
        say(line)
    for table in inspection.tables():
        print_table(table, optional=("first",))


def _vectors(backbone: str, revision: str | None) -> dict[str, str]:
    """Return the steps from tokens to vectors of a sentence-transformers encoder; {} for others."""
    from adapterhub.backbones.find import find_backbone
    from adapterhub.backbones.sentence_modules import read_modules
    from adapterhub.errors import BackboneError

    try:
        own = read_modules(find_backbone(backbone, revision)[0])
    except BackboneError as error:
        return {"vectors": f"{error.problem}: {', '.join(error.offenders)}"}
    if not own.recorded:
        return {}
    prompt = [f"each text begins with {own.prompt!r}"] if own.prompt else []
    return {"vectors": "; ".join([", ".join(own.shown), *prompt])}


def _refuse_family(family: str | None, draft_family: bool) -> None:
    """Reject the options of families for backbones outside transformers.

    Raises:
        ConfigError: one of the options is set.
    """
    from adapterhub.errors import ConfigError

    if family or draft_family:
        raise ConfigError(
            f"--{'family' if family else 'draft-family'} is for models of transformers: the sites "
            "of other modules are their paths",
            hint="adapterhub inspect FOLDER, without it",
        )


def _draft(backbone: str, revision: str | None, python: bool) -> str:
    """Return the row of a backbone as discovered from its configuration alone."""
    from adapterhub.anatomy.discovery import discover
    from adapterhub.anatomy.family_file import family_yaml, row_text
    from adapterhub.backbones.load import meta_model

    row = discover(meta_model(backbone, revision=revision))
    return row_text(row) if python else family_yaml(row).rstrip()
