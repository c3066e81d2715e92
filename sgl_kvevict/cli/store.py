"""``sgl-kvevict store``: look at a store of prefixes, check it, move it, remove from it."""

from __future__ import annotations

import json
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sgl_kvevict.errors import ConfigError, CorruptSegmentError, StoreError, cut
from sgl_kvevict.store import Backend, describe_identity, list_segments, open_backend
from sgl_kvevict.store.manifest import decode_manifest, merge_manifest
from sgl_kvevict.store.segment_file import decode_segment, read_header
from sgl_kvevict.store.segments import StoredSegment, segment_name

store = typer.Typer(name="store", help="Look at a store of prefixes, check it, move it.", no_args_is_help=True)

SHOWN_DIGITS = 16

Url = Annotated[str, typer.Argument(metavar="STORE", help="Folder or URL, as in the configuration's field store.")]
Keys = Annotated[list[str], typer.Argument(metavar="KEY...", help="First digits of segments' names, at least 4.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@store.command("ls")
def list_all(url: Url, as_json: Json = False) -> None:
    """List the segments, the ones used last first."""
    backend = _open(url)
    segments = sorted(list_segments(backend), key=lambda each: -each.item.used)
    names = {identity: _model_of(backend, identity) for identity in {each.identity for each in segments}}
    if as_json:
        rows = [
            {"key": each.key, "identity": each.identity, "bytes": each.item.size, "used": each.item.used}
            for each in segments
        ]
        typer.echo(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("key", "bytes", "used", "model", box=None, pad_edge=False)
    now = time.time()
    for each in segments:
        age = f"{max(now - each.item.used, 0) / 3600:.1f} h ago"
        table.add_row(each.key[:SHOWN_DIGITS], f"{each.item.size:,}", age, names[each.identity])
    table.caption = f"{len(segments):,} segments, {sum(each.item.size for each in segments):,} bytes"
    Console().print(table)


@store.command("show")
def show(url: Url, keys: Keys) -> None:
    """Print what is known of segments: tokens, shapes, who made them. The tokens themselves are not shown."""
    backend = _open(url)
    for each in _named(backend, keys):
        data = backend.get(each.item.name)
        if data is None:
            raise ConfigError(f"key: got {each.key[:SHOWN_DIGITS]!r}, which was removed just now")
        header = read_header(data)
        header |= {"num_tokens": header["end"] - header["start"], "bytes": len(data), "used": each.item.used}
        typer.echo(json.dumps(header | {"made_by": describe_identity(backend, each.identity)}, indent=1))


@store.command("rm")
def remove(
    url: Url,
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY...]", help="First digits of names.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all that is stored.")] = False,
) -> None:
    """Remove segments. Servers compute them again when they are asked for."""
    if bool(keys) == everything:
        raise ConfigError("store rm: give keys, or --all")
    backend = _open(url)
    names = [item.name for item in backend.list()] if everything else [e.item.name for e in _named(backend, keys or [])]
    typer.echo(f"{sum(backend.delete(name) for name in names):,} removed")


@store.command("verify")
def verify(url: Url, delete: Annotated[bool, typer.Option("--delete", help="Remove what is corrupt.")] = False) -> None:
    """Read everything and check every checksum; exit code 1 if something is corrupt."""
    backend = _open(url)
    found: Counter[str] = Counter()
    for item in list(backend.list()):
        parts = item.name.split("/")
        kind = parts[2] if len(parts) == 5 else "other"
        data = backend.get(item.name)
        if data is None or kind not in ("segments", "manifests"):
            continue
        try:
            if kind == "segments":
                _check_place(decode_segment(data, parts[4]).identity, parts[1])
            else:
                decode_manifest(data)
            found[kind] += 1
        except CorruptSegmentError as error:
            found["corrupt"] += 1
            typer.echo(f"{item.name}: {cut(str(error))}{' (removed)' if delete else ''}", err=True)
            if delete:
                backend.delete(item.name)
    typer.echo(f"{found['segments']:,} segments and {found['manifests']:,} manifests are sound")
    if found["corrupt"]:
        raise StoreError(f"{found['corrupt']:,} are corrupt")


@store.command("push")
def push(source: Url, target: Annotated[str, typer.Argument(metavar="TARGET", help="Folder or URL.")]) -> None:
    """Copy what TARGET lacks from STORE to it, checked on the way."""
    _copy(_open(source), open_backend(target))


@store.command("pull")
def pull(target: Url, source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or URL.")]) -> None:
    """Copy what STORE lacks from SOURCE to it, checked on the way."""
    _copy(_open(source), open_backend(target))


def _open(url: str) -> Backend:
    """A store that is there: looking at one does not make it."""
    if "://" not in url and not Path(url).expanduser().is_dir():
        raise ConfigError(f"STORE: got {url!r}, which is not a folder")
    return open_backend(url)


def _named(backend: Backend, keys: list[str]) -> list[StoredSegment]:
    segments = list(list_segments(backend))
    named = []
    for key in keys:
        found = [each for each in segments if len(key) >= 4 and each.key.startswith(key)]
        if len(found) != 1:
            raise ConfigError(
                f"key: got {key!r}, which names {len(found)} segments; allowed: the beginning of one name"
            )
        named += found
    return named


def _model_of(backend: Backend, identity: str) -> str:
    made_by: dict[str, Any] = describe_identity(backend, identity) or {}
    return f"{made_by.get('architecture', 'unknown')} {str(made_by.get('model', ''))[:8]}"


def _check_place(identity: str, folder: str) -> None:
    if identity != folder:
        raise CorruptSegmentError(f"identity: got {identity[:SHOWN_DIGITS]!r}; expected {folder[:SHOWN_DIGITS]!r}")


def _copy(source: Backend, target: Backend) -> None:
    """Segments first, then what lists them: nobody finds what is not there yet."""
    counts: Counter[str] = Counter()
    items = sorted(source.list(), key=lambda item: "/segments/" not in item.name)
    for item in items:
        parts = item.name.split("/")
        kind = parts[2] if len(parts) == 5 else "other"
        if kind == "segments" and target.exists(segment_name(parts[1], parts[4])):
            continue
        data = source.get(item.name)
        if data is None:
            continue
        try:
            if kind == "segments":
                _check_place(decode_segment(data, parts[4]).identity, parts[1])
                target.put(item.name, data)
            elif kind == "manifests":
                target.update(item.name, partial(merge_manifest, entries=decode_manifest(data)))
            elif not target.exists(item.name):
                target.put(item.name, data)
            counts[kind] += 1
        except CorruptSegmentError as error:
            counts["corrupt"] += 1
            typer.echo(f"{item.name}: {cut(str(error))} (not copied)", err=True)
    typer.echo(f"{counts['segments']:,} segments and {counts['manifests']:,} manifests copied to {target.url}")
    if counts["corrupt"]:
        raise StoreError(f"{counts['corrupt']:,} are corrupt")
