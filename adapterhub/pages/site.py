"""`adapterhub registry site`: the pages of a registry as static files.

    index.html, rows.js            browse and search; the rows that the search reads
    backbones/B/index.html         adapters of a backbone, newest and best
    adapters/B/NAME.html           an adapter
    leaderboards/B/TASK.html       scores of the same metric on the same rows
    compare/B/TASK.html            adapters side by side
    datasets/D/index.html          adapters trained on a data set
    studies/STUDY/TASK.html        the results of a study, with their intervals

The files work with any web server or without one. The folder appears in one step, and replaces only
files that this command wrote before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from adapterhub.errors import OutputError
from adapterhub.files.atomic import explained, put_in_place, staging
from adapterhub.files.manifest import Manifest
from adapterhub.files.schema import shorten
from adapterhub.files.shown_table import ShownTable, TableCell
from adapterhub.pages.card_html import check_card_libraries
from adapterhub.pages.leaderboards import Leaderboard, registry_boards
from adapterhub.pages.site_pages import (
    MOST_COMPARED,
    AdapterLinks,
    ListPart,
    SitePlace,
    adapter_page,
    backbone_path,
    compare_page,
    front_page,
    leaderboard_page,
    list_page,
    problems_page,
)
from adapterhub.pages.versions import (
    ListedVersion,
    PublishedName,
    PublishedVersion,
    adapter_page_path,
    datasets_of,
    file_part,
    listed_versions,
    listing,
    newest_first,
    read_published,
    rows_script,
)
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Entry, folder_of_id
from adapterhub.registry.version_files import Contents

_FRONT, _ROWS, _BOARDS, _DATASETS, _PROBLEMS = (
    "index.html",
    "rows.js",
    "leaderboards.html",
    "datasets.html",
    "problems.html",
)
# GitHub Pages would hide names with an underscore without this file.
_PLAIN = ".nojekyll"
_FOLDERS = ("adapters", "backbones", "compare", "datasets", "leaderboards", "studies")
_OWN = {_FRONT, _ROWS, _BOARDS, _DATASETS, _PROBLEMS, _PLAIN, *_FOLDERS}
_ON_A_PAGE = 150  # rows per list
_MOST_LINES = 300  # rows in other tables
_MOST_FRONT_BOARDS = 30
_MOST_LINKS = 60

Place = tuple[str, str]
"""A backbone's id and a task."""


@dataclass(frozen=True)
class StudyBoard:
    """The leaderboard of a task of a study, with the id of its backbone."""

    study: str
    task: str
    backbone: str
    board: Leaderboard

    @property
    def path(self) -> str:
        """The path of its page."""
        return f"studies/{file_part(self.study)}/{file_part(self.task)}.html"


@dataclass(frozen=True)
class SiteOptions:
    """The options of a site.

    Attributes:
        title: the name of the registry.
        address: the reader's value of `--registry`; None for their own registry.
        studies: the boards of studies.
        command_of: returns the command of a manifest's recipe, or None.
    """

    title: str = "Adapters"
    address: str | None = None
    studies: Sequence[StudyBoard] = ()
    command_of: Callable[[Manifest], str | None] = lambda manifest: None


@dataclass(frozen=True)
class WrittenSite:
    """The front page, and the numbers of adapters, backbones, pages and problems."""

    page: Path
    adapters: int
    backbones: int
    pages: int
    problems: int


def write_site(registry: Registry, output: Path, options: SiteOptions) -> WrittenSite:
    """Write the pages of a registry into a folder.

    Raises:
        ConfigError: markdown-it-py or nh3 is not installed.
        RegistryError: the registry cannot be read.
        OutputError: the folder contains other files, or cannot be written.
    """
    check_card_libraries()
    with _new_site(output) as folder:
        site = _Site(folder, options, registry.everything() if registry.exists() else {})
        site.write_adapters(registry)
        site.write_leaderboards()
        site.write_comparisons()
        site.write_backbones()
        site.write_datasets()
        site.write_problems()
        site.write_front()
    return site.written(output)


@dataclass
class _Site:
    """The pages being written to a folder, and the content of the registry read so far."""

    folder: Path
    options: SiteOptions
    contents: Mapping[str, Contents]
    listed: list[ListedVersion] = field(default_factory=list)
    withdrawn: dict[str, list[PublishedName]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    compared: dict[Place, list[PublishedVersion]] = field(default_factory=dict)
    boards: dict[Place, list[Leaderboard]] = field(default_factory=dict)
    pages: int = 0

    def write_adapters(self, registry: Registry) -> None:
        """Write a page for each name, and collect the rows of the lists."""
        by_digest = {e.digest: e for c in self.contents.values() for e in c.entries}
        places = Counter(
            (each[-1].backbone, each[-1].task or "")
            for each in map(_available, self._all())
            if each
        )
        for name in read_published(registry, self.contents):
            self.broken |= {f"{name.folder}/{name.name}/{v}": e for v, e in name.broken.items()}
            if not name.versions:
                continue
            current = name.current
            links = [*self._around(current, places)]
            for below in (by_digest.get(ref.digest) for ref in current.manifest.on):
                if below is not None:
                    links.append((f"on top of {below.name}", adapter_page_path(below)))
            about = AdapterLinks(links, self.options.command_of(current.manifest))
            path = adapter_page_path(current.entry)
            self._write(path, adapter_page(self._place(path), name, about))
            rows = listed_versions(name)
            self.listed += rows
            if rows:
                self._compare(current)
            else:
                self.withdrawn.setdefault(backbone_path(current.entry.backbone), []).append(name)

    def write_leaderboards(self) -> None:
        """Write a page for each backbone and task, one for each task of a study, and a list."""
        self.boards = registry_boards(each for each in self.listed if each.is_current)
        for (backbone, task), boards in self.boards.items():
            path = _board_path(backbone, task)
            place = self._place(path)
            rooted = [board.rooted(place.root) for board in boards]
            links = [(backbone, backbone_path(backbone))]
            self._write(path, leaderboard_page(place, task or "no task", backbone, rooted, links))
        for study in self.options.studies:
            subtitle = f"study {study.study} · {study.backbone}"
            known = any(each.entry.backbone == study.backbone for each in self.listed)
            links = [(study.backbone, backbone_path(study.backbone))] if known else []
            place = self._place(study.path)
            self._write(
                study.path, leaderboard_page(place, study.task, subtitle, [study.board], links)
            )
        self._write_board_list()

    def write_comparisons(self) -> None:
        """Write the pages that compare the adapters of a backbone and task."""
        for (backbone, task), versions in self.compared.items():
            if len(versions) > 1:
                path = _compare_path(backbone, task)
                chosen = _best_or_newest(versions)
                title = f"Compare {len(chosen)} adapters"
                subtitle = " · ".join(filter(None, (backbone, task)))
                self._write(path, compare_page(self._place(path), title, subtitle, chosen))

    def write_backbones(self) -> None:
        """Write the pages of each backbone."""
        links = self._links_of_backbones()
        boards: dict[str, list[tuple[Leaderboard, Place]]] = defaultdict(list)
        for at, own in self.boards.items():
            boards[at[0]] += ((board, at) for board in own)
        for backbone, versions in _grouped(self.listed, lambda v: [v.entry.backbone]).items():
            current = newest_first(each for each in versions if each.is_current)
            subtitle = f"{len(current):,} adapter{'s' * (len(current) != 1)}"
            path = backbone_path(backbone)
            self._write_list(path, backbone, subtitle, current, links[backbone], boards[backbone])

    def _links_of_backbones(self) -> dict[str, list[tuple[str, str]]]:
        """Return the studies, leaderboards and comparisons of each backbone."""
        links: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for study in self.options.studies:
            links[study.backbone].append((f"study {study.study}: {study.task}", study.path))
        for backbone, task in self.boards:
            title = f"leaderboard: {task or 'no task'}"
            links[backbone].append((title, _board_path(backbone, task)))
        for (backbone, task), own in self.compared.items():
            if len(own) > 1:
                title = f"compare: {task or 'no task'}"
                links[backbone].append((title, _compare_path(backbone, task)))
        return links

    def write_datasets(self) -> None:
        """Write the pages of each data set, and a list of them."""
        datasets = _grouped(self.listed, lambda v: datasets_of(v.entry) if v.is_current else ())
        rows = []
        for dataset, versions in sorted(datasets.items()):
            path = f"datasets/{file_part(dataset)}/index.html"
            rows.append(
                (TableCell(dataset, link=path), TableCell(f"{len(versions):,}", len(versions)))
            )
            names = {each.entry.digest for each in versions}
            leaders = [
                (board, at)
                for at, own in self.boards.items()
                for board in own
                if board.scores and board.scores[0].key in names
            ]
            subtitle = f"{len(versions):,} adapter{'s' * (len(versions) != 1)} trained on it"
            self._write_list(path, dataset, subtitle, newest_first(versions), [], leaders)
        if rows:
            table = ShownTable(("data set", "adapters"), rows[:_MOST_LINES], numbers=True)
            parts = [ListPart("Data sets", table, is_sortable=True)]
            place = self._place(_DATASETS)
            self._write(
                _DATASETS, list_page(place, "Datasets", "Datasets", f"{len(rows):,}", parts)
            )

    def write_problems(self) -> None:
        """Write the page of unreadable versions."""
        if self.broken:
            self._write(_PROBLEMS, problems_page(self._place(_PROBLEMS), self.broken))

    def write_front(self) -> None:
        """Write the front page for browsing and searching, and its rows."""
        counts = Counter(each.entry.backbone for each in self.listed if each.is_current)
        ordered = newest_first(self.listed)
        page = front_page(
            self._place(_FRONT),
            self.options.title,
            ordered,
            counts,
            self._front_boards(),
            rows=_ROWS,
        )
        self._write(_FRONT, page)
        self._write(_ROWS, rows_script(self.listed))
        self._write(_PLAIN, "")

    def written(self, output: Path) -> WrittenSite:
        """Return a summary of the written files."""
        current = [each.entry.backbone for each in self.listed if each.is_current]
        broken = len(self.broken)
        return WrittenSite(output / _FRONT, len(current), len({*current}), self.pages, broken)

    def _all(self) -> Iterable[Contents]:
        return self.contents.values()

    @cached_property
    def _has_datasets(self) -> bool:
        return any(datasets_of(each[-1]) for each in map(_available, self._all()) if each)

    @cached_property
    def _has_broken(self) -> bool:
        return any(name.broken for name in self._all())

    def _place(self, path: str) -> SitePlace:
        pages = [("Adapters", _FRONT), ("Leaderboards", _BOARDS)]
        if self._has_datasets:
            pages.append(("Datasets", _DATASETS))
        if self.broken or self._has_broken:
            pages.append(("Problems", _PROBLEMS))
        return SitePlace("../" * path.count("/"), pages, self.options.address)

    def _write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode("utf-8", "replace"))
        self.pages += path.endswith(".html")

    def _around(
        self, version: PublishedVersion, places: Mapping[Place, int]
    ) -> Iterator[tuple[str, str]]:
        """Yield the pages linked from an adapter's page."""
        entry = version.entry
        at = entry.backbone, entry.task or ""
        if places[at]:
            yield entry.backbone, backbone_path(entry.backbone)
            if version.score and entry.yanked is None:
                yield "leaderboard", _board_path(*at)
        if places[at] > 1 and entry.yanked is None:
            yield "compare", f"{_compare_path(*at)}#{entry.name}"
        for dataset in datasets_of(entry) if entry.yanked is None else ():
            yield f"data set {dataset}", f"datasets/{file_part(dataset)}/index.html"

    def _compare(self, version: PublishedVersion) -> None:
        """Keep a version for the comparison page, up to a limit."""
        at = version.entry.backbone, version.entry.task or ""
        kept = self.compared.setdefault(at, [])
        kept.append(version)
        if len(kept) > 4 * MOST_COMPARED:
            kept[:] = _best_or_newest(kept)

    def _front_boards(self) -> list[tuple[str, str, str]]:
        rows = [
            (study.task, study.path, f"study {study.study}, {len(study.board.scores)} methods")
            for study in self.options.studies
        ]
        largest = sorted(self.boards, key=lambda at: -sum(len(b.scores) for b in self.boards[at]))
        for backbone, task in largest[:_MOST_FRONT_BOARDS]:
            count = sum(len(board.scores) for board in self.boards[backbone, task])
            rows.append(
                (
                    f"{backbone}: {task or 'no task'}",
                    _board_path(backbone, task),
                    f"{count:,} adapters",
                )
            )
        return rows

    def _write_board_list(self) -> None:
        """Write the list of all leaderboards."""
        studies = [
            (TableCell(s.task, link=s.path), s.study, s.board.metric, s.backbone)
            for s in self.options.studies
        ]
        boards = [
            (
                TableCell(task or "no task", link=_board_path(backbone, task)),
                backbone,
                TableCell(f"{sum(len(b.scores) for b in own):,}"),
                TableCell(f"{sum(b.is_ranked for b in own):,}"),
            )
            for (backbone, task), own in self.boards.items()
        ]
        parts = [
            ListPart(
                "Studies",
                ShownTable(("task", "study", "metric", "backbone"), studies),
                "Each method was trained several times on the same rows; scores have intervals.",
                is_sortable=True,
            ),
            ListPart(
                "Published adapters",
                ShownTable(("task", "backbone", "adapters", "rankings"), boards[:_MOST_LINES]),
                "Only scores of the same metric on the same evaluation rows are ranked together.",
                is_sortable=True,
            ),
        ]
        shown = [part for part in parts if part.table.rows]
        count = f"{len(studies) + len(boards):,} pages"
        page = list_page(self._place(_BOARDS), "Leaderboards", "Leaderboards", count, shown)
        self._write(_BOARDS, page)

    def _write_list(
        self,
        path: str,
        title: str,
        subtitle: str,
        versions: Sequence[ListedVersion],
        links: Sequence[tuple[str, str]],
        leaders: Sequence[tuple[Leaderboard, Place]],
    ) -> None:
        """Write the pages of a list, a fixed number of rows each; the best are on the first."""
        place = self._place(path)
        chunks = [versions[i : i + _ON_A_PAGE] for i in range(0, len(versions), _ON_A_PAGE)]
        files = ["index.html", *(f"{number}.html" for number in range(2, len(chunks) + 1))]
        best = _leaders(leaders, place.root)
        for number, (chunk, file) in enumerate(zip(chunks, files, strict=True), 1):
            numbers = [(str(i), "" if i == number else other) for i, other in enumerate(files, 1)]
            first = number == 1
            parts = [ListPart("The best on the same rows", best)] if best.rows and first else []
            parts.append(_newest(chunk, place.root, is_short=path.startswith("backbones/")))
            gone = self.withdrawn.get(path, [])
            if gone and first:
                parts.append(ListPart("Withdrawn", _withdrawn(gone, place.root)))
            page = list_page(
                place,
                "",
                title,
                subtitle,
                parts,
                links=links[:_MOST_LINKS] if first else (),
                numbers=_near(numbers, number),
            )
            self._write(path.replace("index.html", file), page)


@contextmanager
def _new_site(output: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces the site at the end; an error keeps the old site."""
    if output.is_dir():
        others = sorted(path.name for path in output.iterdir() if path.name not in _OWN)
    else:
        others = [output.name] if output.exists() else []
    if others:
        raise OutputError(
            f"{output} has files that are not part of a registry's site, and is not replaced",
            expected="a new or empty folder, or one that this command wrote",
            offenders=shorten(others),
        )
    with explained(output), staging(output) as staged:
        yield staged
        put_in_place(staged, output, overwrite=output.exists())


def _available(contents: Contents) -> list[Entry]:
    return [entry for entry in contents.entries if entry.yanked is None]


def _grouped(
    versions: Iterable[ListedVersion], keys: Callable[[ListedVersion], Iterable[str]]
) -> dict[str, list[ListedVersion]]:
    groups = defaultdict(list)
    for version in versions:
        for key in keys(version):
            groups[key].append(version)
    return groups


def _best_or_newest(versions: Sequence[PublishedVersion]) -> list[PublishedVersion]:
    """Choose the newest versions to compare, in the order of their names."""
    newest = sorted(versions, key=lambda v: v.entry.published or "", reverse=True)[:MOST_COMPARED]
    return sorted(newest, key=lambda version: version.entry.name)


def _leaders(boards: Sequence[tuple[Leaderboard, Place]], root: str) -> ShownTable:
    rows = [
        (
            TableCell(board.title, link=f"{root}{_board_path(*at)}"),
            at[1] or "-",
            TableCell(board.scores[0].name, link=f"{root}{board.scores[0].link}"),
            f"{board.metric} {board.scores[0].text}",
        )
        for board, at in boards
        if board.is_ranked and board.scores
    ]
    return ShownTable(("rows", "task", "best", "score"), rows[:_MOST_LINKS])


def _newest(versions: Sequence[ListedVersion], root: str, *, is_short: bool) -> ListPart:
    """Return a list of versions; a short list has one backbone and omits its column."""
    table = listing(versions, root)
    if is_short:
        table = table.without("backbone")
    kind = "listing short" if is_short else "listing"
    return ListPart("The newest first", table, is_sortable=True, kind=kind)


def _withdrawn(names: Sequence[PublishedName], root: str) -> ShownTable:
    rows = [
        (
            TableCell(n.name, link=root + adapter_page_path(n.current.entry)),
            n.current.entry.yanked or "",
        )
        for n in names[:_MOST_LINKS]
    ]
    return ShownTable(("adapter", "reason"), rows)


def _near(numbers: Sequence[tuple[str, str]], current: int, most: int = 9) -> list[tuple[str, str]]:
    """Return the first and the last page, and the pages near the current one."""
    half = most // 2
    return [
        each
        for i, each in enumerate(numbers, 1)
        if i in (1, len(numbers)) or abs(i - current) <= half
    ]


def _board_path(backbone: str, task: str) -> str:
    return f"leaderboards/{folder_of_id(backbone)}/{file_part(task)}.html"


def _compare_path(backbone: str, task: str) -> str:
    return f"compare/{folder_of_id(backbone)}/{file_part(task)}.html"
