"""Parameters that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

ModelName = Annotated[str, typer.Argument(help="Model folder, hub name, or a model of 'make model' (demo).")]
SGLangFlags = Annotated[
    list[str] | None, typer.Argument(metavar="-- SGLANG_FLAGS", help="SGLang's own flags, passed on unchanged.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Long = Annotated[bool, typer.Option("--long", help="Show long names and digests in full.")]
