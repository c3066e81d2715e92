"""The command ``sgl-kvevict``: serve a model, watch its cache, list policies.

Exit codes: 0 success, 1 a failure on the way (a dead server), 2 bad input.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sgl_kvevict.cli import operate
from sgl_kvevict.cli.store import store
from sgl_kvevict.errors import ConfigError, KVEvictError, printable
from sgl_kvevict.machine import version_of

app = typer.Typer(
    name="sgl-kvevict",
    help="Serve models with stock SGLang and compressed prefixes in its radix cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_UsageError: Any = typer.BadParameter.__bases__[0]
"""Base class of usage errors, which typer does not export by name."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (``arguments`` without the program's name); ends in ``SystemExit``.

    Errors of this package, of system and network (``OSError``), and of usage are printed as ``sgl-kvevict: error:
    ...``. Anything else is a bug and shows its traceback.
    """
    try:
        code = app(args=arguments, prog_name="sgl-kvevict", standalone_mode=False) or 0
        # Flushed here: at the interpreter's end a broken pipe would be reported as an ignored exception.
        sys.stdout.flush()
    except BrokenPipeError:  # the pipe's reader has ended: sgl-kvevict policies | head
        # Else the interpreter would try to write the rest at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except typer.Abort:  # Ctrl-C, in some versions of typer
        code = 130
    except (KVEvictError, OSError) as error:
        _say(f"error: {_one_line(error)}")
        code = 2 if isinstance(error, ConfigError) else 1
    except _UsageError as error:
        message = error.format_message()
        if "\n" in message:  # a command without arguments: its help
            typer.echo(message, err=True)
        else:
            takes_flags = error.ctx is not None and error.ctx.info_name == "serve"
            hint = "; SGLang's own flags follow --" if takes_flags and message.startswith("No such option") else ""
            _say(f"error: {message.rstrip('.')} (-h shows what is allowed{hint})")
        code = 2
    sys.exit(code)


def _one_line(error: Exception) -> str:
    """An error's message; a list of one problem loses its bullet, and a system error names its file."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return printable(f"{error.filename}: {error.strerror}")
    heading, *problems = map(printable, str(error).splitlines() or [type(error).__name__])
    return f"{heading} {problems[0].removeprefix('  - ')}" if len(problems) == 1 else "\n".join([heading, *problems])


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sgl-kvevict {version_of('sgl-kvevict')}")
        typer.echo(f"sglang {version_of('sglang') or '(not installed)'}")
        raise typer.Exit


@app.callback()
def common(
    is_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of this package and of SGLang.",
        ),
    ] = False,
) -> None:
    """Serve models with stock SGLang and compressed prefixes in its radix cache."""


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Model folder, hub name, or a model of 'make model' (demo).")],
    sglang_flags: Annotated[
        list[str] | None, typer.Argument(metavar="-- SGLANG_FLAGS", help="SGLang's own flags, passed on unchanged.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Which entries to keep: 'sgl-kvevict policies'.")] = None,
    budget: Annotated[float | None, typer.Option(help="Share of the bytes to keep.")] = None,
    tail_tokens: Annotated[int | None, typer.Option(help="Last tokens of a prompt that every head keeps.")] = None,
    sink_tokens: Annotated[int | None, typer.Option(help="First tokens that every KV head keeps.")] = None,
    min_prefix_tokens: Annotated[int | None, typer.Option(help="Shorter ranges stay uncompressed.")] = None,
    policy_option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the policy; may be repeated.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="JSON file with the same fields; options above win.")] = None,
    events: Annotated[
        bool, typer.Option("--events", help="Open the socket of 'top' and 'inspect' on this machine.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and stop.")] = False,
) -> None:
    """Start stock SGLang with compressed prefixes."""
    # Imported in the command, so that `--version` and the other commands start without them.
    from sgl_kvevict.cli.server_plan import parse_policy_options, plan_serve, resolve_config
    from sgl_kvevict.config import EventsConfig

    given: dict[str, Any] = {
        "policy": policy,
        "budget": budget,
        "tail_tokens": tail_tokens,
        "sink_tokens": sink_tokens,
        "min_prefix_tokens": min_prefix_tokens,
        "policy_options": parse_policy_options(policy_option) if policy_option else None,
    }
    resolved = resolve_config(config, {name: value for name, value in given.items() if value is not None})
    if events and resolved.events is None:
        resolved = resolved.model_copy(update={"events": EventsConfig()})
    plan = plan_serve(model, resolved, sglang_flags or [])
    _say(plan.summary)
    if dry_run:
        typer.echo(plan.as_shell())
    else:
        plan.execute()


@app.command()
def policies(
    name: Annotated[str | None, typer.Argument(help="Show the options of this policy.")] = None,
) -> None:
    """List the policies, or the options of one."""
    from sgl_kvevict.cli.output import print_table
    from sgl_kvevict.policies.by_name import find_policy, list_policies
    from sgl_kvevict.policies.options import BudgetOptions

    if name is None:
        common = tuple(BudgetOptions.model_fields)
        rows = []
        for policy in list_policies():
            own = [f"{option.name}={option.default}" for option in policy.describe() if option.name not in common]
            rows.append((policy.name, policy.summary, " ".join(own)))
        caption = (
            f"All but none also take {', '.join(common)}.\n"
            "'sgl-kvevict policies NAME' explains the options of one; 'package.module:factory' loads your own."
        )
        print_table(("policy", "keeps", "own options"), rows, caption)
        return
    described = [
        (option.name, str(option.default), option.meaning, option.allowed) for option in find_policy(name).describe()
    ]
    print_table(("option", "default", "meaning", "allowed"), described)


for command in (operate.top, operate.inspect, operate.warm, operate.size, operate.check):
    app.command()(command)
app.add_typer(store)


def _say(line: str) -> None:
    typer.echo(f"sgl-kvevict: {line}", err=True)
