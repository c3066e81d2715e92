"""Commands for a running server (``top``, ``inspect``, ``warm``) and for planning one (``size``, ``check``)."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from sgl_kvevict.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Long = Annotated[bool, typer.Option("--long", help="Show long names and digests in full.")]
Endpoint = Annotated[
    str, typer.Argument(metavar="ENDPOINT", help="The server's event socket (events.endpoint), HOST:PORT.")
]


def top(
    endpoint: Endpoint = "127.0.0.1:5659",
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between reports.")] = 1.0,
    sort: Annotated[
        Literal["slots", "tokens", "readers"], typer.Option(help="Order of the prefixes shown, largest first.")
    ] = "slots",
    rows: Annotated[int, typer.Option(min=0, max=1000, help="Prefixes wanted.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a report.")] = False,
    count: Annotated[int, typer.Option(min=0, help="Stop after so many reports; 0: never.")] = 0,
    web: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Show the tree in a browser, at http://127.0.0.1:WEB.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.05, help="Seconds to wait for an answer.")] = 5.0,
    is_long: Long = False,
) -> None:
    """Watch the cache of a running server."""
    if web is not None:
        if as_json or count:
            raise ConfigError("--web: got --json or --count too; allowed: neither")
        from sgl_kvevict.cli.web import WebServer

        with WebServer(endpoint, web, interval, timeout) as server, contextlib.suppress(KeyboardInterrupt):
            typer.echo(f"http://127.0.0.1:{server.server_port} shows the cache of {server.endpoint}; Ctrl-C ends it")
            server.serve_forever()
        return
    from sgl_kvevict.cli.top import TopState, run_top
    from sgl_kvevict.events.client import check_endpoint

    state = TopState(check_endpoint(endpoint), sort, is_long=is_long)
    run_top(state, as_json=as_json, interval_s=interval, rows=rows, timeout_s=timeout, count=count)


def inspect(
    endpoint: Endpoint = "127.0.0.1:5659",
    as_json: Json = False,
    node: Annotated[
        int | None,
        typer.Option(
            min=1, max=2**63 - 1, help="Show what each layer and head keeps of one node, and in how many bits."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=20_000, help="Nodes at most, root side first.")] = 5000,
    timeout: Annotated[float, typer.Option(min=0.05, help="Seconds to wait for each answer.")] = 10.0,
    is_long: Long = False,
) -> None:
    """Take one look at the tree of a running server."""
    from sgl_kvevict.cli import inspect as inspection

    if node is not None:
        about, kept, _ = inspection.asked(endpoint, timeout, lambda client: inspection.ask_node(client, node, bins=1))
        if kept is None:
            raise ConfigError(f"--node: got {node}; allowed: the number of a compressed node of the tree")
        if as_json:
            typer.echo(inspection.heads_as_json(about, kept))
            return
        from sgl_kvevict.cli.output import print_table

        print_table(inspection.HEAD_COLUMNS, inspection.head_rows(about, kept))
        return
    snapshot = inspection.asked(
        endpoint, timeout, lambda client: inspection.ask_snapshot(client, limit=limit, with_tokens=as_json)
    )
    if as_json:
        typer.echo(inspection.as_json(snapshot))
        return
    from sgl_kvevict.cli.output import print_shaped

    print_shaped(inspection.as_text(snapshot, is_long=is_long))


def warm(
    url: Annotated[str, typer.Argument(help="Address of the server, http://HOST:PORT.")],
    text_file: Annotated[Path | None, typer.Option(help="The prefix, exactly as prompts will begin.")] = None,
    messages_file: Annotated[
        Path | None, typer.Option(help="Or the beginning of a chat: a JSON list of messages.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait.")] = 600.0,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the key of a server with --api-key; default: the variable SGL_KVEVICT_API_KEY."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Have a prefix computed and compressed before it is asked about; say what of it the server had already."""
    from sgl_kvevict import client

    if (text_file is None) == (messages_file is None):
        raise ConfigError("--text-file and --messages-file: give one of them")
    report = client.warm(
        url,
        text=None if text_file is None else _read(text_file),
        messages=None if messages_file is None else _read_messages(messages_file),
        timeout=timeout,
        api_key=None if api_key_file is None else _read(api_key_file).strip(),
    )
    if as_json:
        typer.echo(json.dumps(asdict(report)))
    else:
        found = f"{report.device:,} in the pool, {report.host:,} in the host's memory, {report.storage:,} in the store"
        typer.echo(f"computed; tokens that were cached before: {found}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _read_messages(path: Path) -> list[dict[str, str]]:
    try:
        messages = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f"{path}: got {str(messages)[:80]!r}; allowed: a list of messages with role and content")
    return messages


def size(
    model: Annotated[str, typer.Option(help="Model folder, hub name, or a model of 'make model' (demo).")],
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one prefix.")],
    budget: Annotated[float, typer.Option(help="Share of the bytes to keep.")] = 0.2,
    bits: Annotated[
        Literal["auto", "16"], typer.Option(help="Bits of a number in compressed rows, as of 'serve'.")
    ] = "auto",
    pool_tokens: Annotated[int | None, typer.Option(min=1, help="Token slots of the pool.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="Or the memory of the pool: 40GB, 512MiB.")] = None,
    reserve_tokens: Annotated[int, typer.Option(min=0, help="Slots left to running requests.")] = 0,
    host_memory: Annotated[
        str | None, typer.Option(help="For what the pool drops: 40GB, 0 for none; default: twice the pool.")
    ] = None,
    tail_tokens: Annotated[int | None, typer.Option(min=1, help="As of 'serve'.")] = None,
    min_prefix_tokens: Annotated[int | None, typer.Option(min=1, help="As of 'serve'.")] = None,
    as_json: Json = False,
) -> None:
    """Work out how many prefixes fit into a KV pool."""
    from sgl_kvevict.cli import size as sizing
    from sgl_kvevict.config import HOST_PER_POOL, parse_config

    if (pool_tokens is None) == (kv_memory is None):
        raise ConfigError("--pool-tokens and --kv-memory: give one of them")
    given: dict[str, object] = {
        "budget": budget,
        "bits": bits if bits == "auto" else int(bits),
        "tail_tokens": tail_tokens,
        "min_prefix_tokens": min_prefix_tokens,
    }
    config = parse_config({name: value for name, value in given.items() if value is not None}, "the command line")
    sizes = sizing.read_model_sizes(model)
    config, why_16_bits = sizing.with_bits_of(config, sizes)
    pool_slots = pool_tokens or sizing.parse_bytes(kv_memory or "") // sizes.slot_bytes
    default = HOST_PER_POOL * pool_slots * sizes.slot_bytes
    host_bytes = default if host_memory is None else sizing.parse_bytes(host_memory, "--host-memory", least=0)
    rows = sizing.fits(config, sizes, prefix_tokens, pool_slots, reserve_tokens, host_bytes)
    longest = sizing.longest_prompt(config, pool_slots - reserve_tokens)
    if as_json:
        fields = "num_layers", "num_kv_heads", "head_dim", "is_latent", "slot_bytes"
        about = {name: getattr(sizes, name) for name in fields} | {"dtype_bytes": sizes.itemsize}
        figures = {"model": about, "pool_slots": pool_slots}
        figures |= {"longest_prompt": longest, "bits": config.bits, "shares": [asdict(row) for row in rows]}
        typer.echo(json.dumps(figures))
        return
    from sgl_kvevict.cli.output import mean_bits, print_table

    heads = f"{sizes.num_layers} layers x {sizes.num_kv_heads} KV heads x {sizes.head_dim}"
    typer.echo(f"{model}: {heads}, {sizing.show_bytes(sizes.slot_bytes)} a token slot")
    memory = sizing.show_bytes(pool_slots * sizes.slot_bytes)
    typer.echo(f"pool: {pool_slots:,} token slots ({memory}), {reserve_tokens:,} of them left to running requests")
    typer.echo(f"host: {sizing.show_bytes(host_bytes)} for what the pool drops (host_bytes)")
    if why_16_bits:
        typer.echo(f"rows of compressed prefixes have 16 bits, because {'; '.join(why_16_bits)}")
    names = ["", "share", "slots a prefix", "memory a prefix", "beside the pool", "entries", "bits"]
    names += ["tokens a slot", "fit the pool", "fit the host", "a load"]
    lines = []
    for row in rows:
        of_one = row.prefix_bytes, row.beside_bytes
        sizes_of_one = f"{row.prefix_slots:,}", *map(sizing.show_bytes, of_one)
        rows_of_one = f"{row.kept:.0%}", f"{mean_bits(row.entries):.1f}"
        fitting = f"{row.prefixes:,}", f"{row.host_prefixes:,}", sizing.show_bytes(row.load_bytes)
        lines.append((row.name, str(row.share), *sizes_of_one, *rows_of_one, f"{row.tokens_per_slot:.2f}", *fitting))
    print_table(names, lines)
    if prefix_tokens > longest:
        typer.echo(f"A prefix of {prefix_tokens:,} tokens is refused with status 400: it is too long for the pool.")
    elif sizing.is_longer_than(pool_slots - reserve_tokens, prefix_tokens):
        typer.echo(
            f"A prefix of {prefix_tokens:,} tokens is longer than the pool: its chunks are compressed while it is "
            "prefilled, and the room of the last one is counted. It is refused without chunked prefill, with other "
            "policies than distilled, with speculative decoding, --allow-auto-truncate, sliding windows or recurrent "
            "layers."
        )
    else:
        typer.echo(f"A prefix needs all its {prefix_tokens:,} slots while it is prefilled; that room is counted.")
    typer.echo(f"The longest prompt that is answered has {longest:,} tokens.")


def check(
    device: Annotated[
        Literal["auto", "cuda", "cpu"], typer.Option(help="Of the server; auto: cuda where torch sees a GPU.")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Say what this machine has and lacks; exit code 1: a server could not start."""
    from sgl_kvevict.machine import check_environment, check_machine, check_packages, read_machine
    from sgl_kvevict.support import MACHINE, reasons

    machine = read_machine()
    chosen = device if device != "auto" else "cuda" if machine.gpus else "cpu"
    common = check_packages(machine) + check_environment(machine)
    checks = {name: common + check_machine(machine, name) for name in ("cuda", "cpu")}
    can_start = {name: not any(reasons(MACHINE, line) for line in lines) for name, lines in checks.items()}
    if as_json:
        found = {name: [asdict(line) for line in lines] for name, lines in checks.items()}
        typer.echo(json.dumps({"device": chosen, "can_start": can_start[chosen], "checks": found}))
        raise typer.Exit(0 if can_start[chosen] else 1)
    for name, lines in checks.items():
        if name != chosen and device != "auto":
            continue
        verdict = "a server could start" if can_start[name] else "a server could not start"
        typer.echo(f"{'GPU' if name == 'cuda' else 'CPU'}: {verdict}")
        for line in lines:
            typer.echo(f"  {line.state:8} {line.name:14} {line.found}")
            if line.mend:
                typer.echo(f"{'':26}-> {line.mend}")
    raise typer.Exit(0 if can_start[chosen] else 1)
