"""``sgl-kvevict store``: list, check, copy and remove the stored segments of prefixes."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from sgl_kvevict.cli.operate import Json, Long
from sgl_kvevict.errors import ConfigError, StoreError
from sgl_kvevict.paths import expanded

if TYPE_CHECKING:
    from sgl_kvevict.store.backend import Backend

store = typer.Typer(name="store", help="List, check, copy and remove stored prefixes.", no_args_is_help=True)

SHOWN_DIGITS = 12
SHOWN_NAME = 24

Url = Annotated[str, typer.Argument(metavar="STORE", help="Folder or URL, as in the configuration's field store.")]
Keys = Annotated[list[str], typer.Argument(metavar="KEY...", help="First digits of keys, at least 4.")]

_warn = partial(typer.echo, err=True)


@store.command("ls")
def list_all(url: Url, as_json: Json = False, is_long: Long = False) -> None:
    """List the segments, most recently used first."""
    from sgl_kvevict.cli.output import print_table, shorten
    from sgl_kvevict.store.segments import describe_identity, list_segments

    backend = _open(url)
    segments = sorted(list_segments(backend), key=lambda each: -each.item.used)
    if as_json:
        listed = [
            {"key": each.key, "identity": each.identity, "bytes": each.item.size, "used": each.item.used}
            | {"tokens": each.num_tokens}
            for each in segments
        ]
        typer.echo(json.dumps(listed))
        return
    # One read for each identity, of which there are few, and not for each segment.
    made_by = {identity: describe_identity(backend, identity) or {} for identity in {e.identity for e in segments}}
    rows = []
    now = time.time()
    for each in segments:
        age = f"{max(now - each.item.used, 0) / 3600:.1f} h ago"
        known = made_by[each.identity]
        key, architecture, model = each.key, str(known.get("architecture", "unknown")), str(known.get("model", ""))
        if not is_long:
            key, architecture, model = key[:SHOWN_DIGITS], shorten(architecture, SHOWN_NAME), model[:8]
        rows.append((key, f"{each.num_tokens:,}", f"{each.item.size:,}", age, f"{architecture} {model}"))
    caption = f"{len(segments):,} segments, {sum(each.item.size for each in segments):,} bytes"
    print_table(("key", "tokens", "bytes", "used", "model"), rows, caption)


@store.command("show")
def show(url: Url, keys: Keys) -> None:
    """Print number of tokens, shapes and origin of segments, without their token ids."""
    from sgl_kvevict.store.maintenance import find_segments
    from sgl_kvevict.store.segment_file import read_header
    from sgl_kvevict.store.segments import describe_identity

    backend = _open(url)
    for each in find_segments(backend, keys):
        data = backend.get(each.item.name)
        if data is None:
            raise ConfigError(f"key: got {each.key[:SHOWN_DIGITS]!r}, which was removed just now")
        header = read_header(data)
        header |= {"num_tokens": header["end"] - header["start"], "bytes": len(data), "used": each.item.used}
        typer.echo(json.dumps(header | {"made_by": describe_identity(backend, each.identity)}, indent=1))


@store.command("rm")
def remove(
    url: Url,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY...]", help="First digits of keys, at least 4.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove the whole store.")] = False,
) -> None:
    """Remove segments. Servers compute these prefixes again when requests need them."""
    from sgl_kvevict.store.maintenance import find_segments

    if bool(keys) == everything:
        raise ConfigError("store rm: give keys, or --all")
    backend = _open(url)
    items = list(backend.list()) if everything else [each.item for each in find_segments(backend, keys or [])]
    typer.echo(f"{sum(backend.delete(item.name) for item in items):,} removed")


@store.command("verify")
def verify(url: Url, delete: Annotated[bool, typer.Option("--delete", help="Remove corrupt files.")] = False) -> None:
    """Read every file and check its checksum; exit code 1 if one is corrupt."""
    from sgl_kvevict.store.maintenance import verify_store

    found = verify_store(_open(url), _warn, delete=delete)
    typer.echo(f"{found['segments']:,} segments and {found['prefixes']:,} files of the index are sound")
    _refuse_corrupt(found)


@store.command("push")
def push(source: Url, target: Annotated[str, typer.Argument(metavar="TARGET", help="Folder or URL.")]) -> None:
    """Copy files that TARGET lacks from STORE to TARGET, after checking them."""
    _copy(source, target, "STORE", "TARGET")


@store.command("pull")
def pull(target: Url, source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or URL.")]) -> None:
    """Copy files that STORE lacks from SOURCE to STORE, after checking them."""
    _copy(source, target, "SOURCE", "STORE")


def _place(url: str, name: str) -> str:
    if not url:
        raise ConfigError(f"{name}: got {url!r}; allowed: a folder or a URL")
    return url if "://" in url else str(expanded(url, name))


def _open(url: str, name: str = "STORE") -> Backend:
    """Open an existing store without creating it."""
    from sgl_kvevict.store.segments import open_backend

    place = _place(url, name)
    if "://" not in url and not os.path.isdir(place):
        raise ConfigError(f"{name}: got {url!r}, which is not a folder; allowed: the folder or URL of a server's store")
    return open_backend(place)


def _copy(source: str, target: str, source_name: str, target_name: str) -> None:
    from sgl_kvevict.store.maintenance import copy_store
    from sgl_kvevict.store.segments import open_backend

    copied_from = _open(source, source_name)
    # Most likely a mistyped name: copying nothing would look like success.
    if next(iter(copied_from.list()), None) is None:
        raise ConfigError(f"{source_name}: got {source!r}, where nothing is stored")
    copied_to = open_backend(_place(target, target_name))
    counts = copy_store(copied_from, copied_to, _warn)
    typer.echo(
        f"{counts['segments']:,} segments and {counts['prefixes']:,} files of the index copied to {copied_to.url}"
    )
    _refuse_corrupt(counts)


def _refuse_corrupt(counts: Counter[str]) -> None:
    if counts["corrupt"]:
        raise StoreError(f"{counts['corrupt']:,} are corrupt")
