"""Parameters that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Long = Annotated[bool, typer.Option("--long", help="Show long names and digests in full.")]
