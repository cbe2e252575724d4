"""`lserve-tools cache`: look into a cache, check it, and make it smaller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from lserve_tools.cli.options import CacheFolder, DryRun, Json, Quiet, Verbose, parse_bytes
from lserve_tools.cli.output import Output, print_error
from lserve_tools.text.numbers import show_bytes

if TYPE_CHECKING:
    from lserve_tools.schema import CacheFinding, CachePruning, CacheReport, CacheVerification, Manifest

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
_DEFAULT = Path(".lserve/cache")
_Globs = Annotated[
    list[str] | None, typer.Argument(metavar="DOCUMENTS", help="Paths or globs of documents, as `run` takes them.")
]


@app.callback()
def cache() -> None:
    """List what a cache holds, measure it, check every byte of it, make it smaller."""


@app.command("ls")
def ls(
    documents: _Globs = None,
    folder: CacheFolder = _DEFAULT,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """List the documents of a cache, with their tokens, chunks and bytes on disk."""
    out = Output.start(as_json=as_json, quiet=quiet, verbose=verbose)
    from lserve_tools.cache.inventory import list_documents
    from lserve_tools.schema import CacheListing

    found = list_documents(folder)
    if documents:
        chosen = set(_choose(documents, [d.path for d in found]))
        found = [d for d in found if d.path in chosen]
    rows = ((d.path, f"{d.tokens:,}", f"{d.chunks:,}", show_bytes(d.bytes)) for d in found)
    out.table(
        CacheListing(cache=str(folder), documents=tuple(found)), ("document", "tokens", "chunks", "on disk"), rows
    )


@app.command("stats")
def stats(
    folder: CacheFolder = _DEFAULT, as_json: Json = False, quiet: Quiet = False, verbose: Verbose = False
) -> None:
    """Tell what a cache was built with, and how large it is."""
    out = Output.start(as_json=as_json, quiet=quiet, verbose=verbose)
    from lserve_tools.cache.inventory import report

    found = report(folder)
    out.result(found, _stats_rows(found))


@app.command("verify")
def verify(
    folder: CacheFolder = _DEFAULT,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Make the index again from the shards, and drop what is damaged.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check every byte of a cache; nothing is changed without --rebuild.

    The exit code is 1 if something is damaged, and after --rebuild if documents must be built again.
    """
    out = Output.start(as_json=as_json, quiet=quiet, verbose=verbose)
    from tqdm import tqdm

    from lserve_tools.cache import rebuild as rebuilding
    from lserve_tools.cache import verify as verifying

    total = verifying.shard_bytes(folder)
    with tqdm(total=total, unit="B", unit_scale=True, desc="verify", disable=None, leave=False) as bar:
        found = (rebuilding.rebuild if rebuild else verifying.verify)(folder, bar.update)
    for finding in found.damaged:
        print_error(f"Damaged: {_show(folder, finding, with_cure=not found.rebuilt)}")
    for finding in found.notes if not found.rebuilt else ():
        out.talk(f"Note: {_show(folder, finding, with_cure=True)}")
    if found.build_again:
        from lserve_tools.cache.manifest import read_manifest

        names = ", ".join(found.build_again)
        print_error(f"Build again: {names}. Run `{_build_command(read_manifest(folder), folder)}`.")
    out.result(found, _verify_rows(found))
    if found.build_again or (found.damaged and not found.rebuilt):
        raise typer.Exit(1)


@app.command("prune")
def prune(
    documents: _Globs = None,
    max_size: Annotated[
        int | None,
        typer.Option(
            "--max-size",
            parser=parse_bytes,
            metavar="SIZE",
            help="Drop documents too, those built first before the others, until all takes at most SIZE, such as 20G.",
        ),
    ] = None,
    folder: CacheFolder = _DEFAULT,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Drop documents from a cache, and everything that no document needs.

    Without documents and --max-size only the latter goes: what older versions of documents have left. When a document
    was last asked about is not recorded, since reading writes nothing. What is dropped is gone from the disk; the next
    build-cache builds documents again that are still in its folder.
    """
    out = Output.start(as_json=as_json, quiet=quiet, verbose=verbose)
    from lserve_tools.cache.prune import prune_folder

    def choose(paths: Sequence[str]) -> list[str]:
        return _choose(documents or [], paths)

    pruned = prune_folder(folder, choose, max_size, dry_run=dry_run)
    for path in pruned.dropped:
        out.detail(f"{'Would drop' if dry_run else 'Dropped'} {path}")
    out.result(pruned, _prune_rows(pruned))


def _choose(names: Iterable[str], paths: Sequence[str]) -> list[str]:
    """The documents that names and globs stand for.

    Raises:
        DocumentError: if one stands for none.
    """
    from lserve_tools.batch.library import is_glob, matches
    from lserve_tools.batch.lines import nearest
    from lserve_tools.errors import DocumentError

    chosen: dict[str, None] = {}
    for name in names:
        path = str(PurePosixPath(name))
        found = [path] if path in paths else []
        if not found and is_glob(path):
            found = [p for p in paths if matches(p.split("/"), path.split("/"))]
        if not found:
            why = "no document of the cache matches." if is_glob(path) else "no such document in the cache"
            raise DocumentError(name, why if is_glob(path) else why + (nearest(path, paths) or "."))
        chosen.update(dict.fromkeys(found))
    return list(chosen)


def _stats_rows(found: CacheReport) -> Iterable[tuple[str, str]]:
    revision = f" at {found.revision}" if found.revision else ""
    yield "model", f"{found.model}{revision}, {found.dtype}"
    yield "codec", found.codec
    if found.head_profile is None:
        yield "heads", f"all of {found.kv_heads} KV heads retrieve"
    else:
        windows = f"sink {found.sink}, recent {found.recent}, {found.streaming} stored"
        yield "heads", f"{found.streaming_heads} of {found.kv_heads} KV heads stream ({windows})"
    yield "documents", f"{found.documents:,}"
    yield "tokens", f"{found.tokens:,} in {found.chunks:,} chunks; {found.prefix_tokens} before each document"
    dead = f", {show_bytes(found.dead_bytes)} of them dead: run `lserve-tools cache prune`" if found.dead_bytes else ""
    yield "shards", f"{found.shards:,}, {show_bytes(found.bytes)}{dead}"
    yield "index", show_bytes(found.index_bytes)
    size = f"{found.bytes_per_token:,.0f} bytes/token, {found.ratio:.2f} x smaller than in memory"
    yield "density", size
    yield "cache", found.cache


def _verify_rows(found: CacheVerification) -> Iterable[tuple[str, str]]:
    yield "checked", f"{found.shards:,} shards, {found.chunks:,} chunks, {show_bytes(found.bytes)}"
    yield "documents", f"{found.documents:,}"
    yield "damaged", f"{len(found.damaged)}" if found.damaged else "nothing"
    if found.rebuilt:
        yield "index", "made again from the shards; what was damaged is dropped"
        yield "build again", f"{len(found.build_again)} documents" if found.build_again else "nothing"


def _prune_rows(found: CachePruning) -> Iterable[tuple[str, str]]:
    would = "would be " if found.dry_run else ""
    yield "documents", f"{len(found.dropped):,} {would}dropped, {found.documents:,} {would}left"
    most = "at most " if found.dry_run else ""
    yield "on disk", f"{show_bytes(found.bytes_before)} before, {most}{show_bytes(found.bytes_after)} after"
    yield "cache", found.cache


def _show(folder: Path, finding: CacheFinding, *, with_cure: bool) -> str:
    """A finding in one line."""
    place = f", {finding.place}" if finding.place else ""
    needed = f" Needed by {', '.join(finding.documents)}." if finding.documents else ""
    problem = finding.problem.rstrip(".")
    return f"{folder / finding.file}{place}: {problem}.{needed}{f' {finding.cure}' if with_cure else ''}"


def _build_command(manifest: Manifest, folder: Path) -> str:
    """The command that builds into a cache what it lacks."""
    import shlex

    words = ["lserve-tools", "build-cache", "DOCS", "--model", manifest.model, "-o", str(folder)]
    optional = {"--revision": manifest.revision, "--system": manifest.system, "--codec": manifest.codec}
    for name, value in optional.items():
        words += [name, value] if value is not None else []
    words += ["--streaming-heads", "full"] if manifest.streaming == "full" else []
    return shlex.join(words)
