"""Names of models on this machine: folders in the user's cache, where ``make model`` of a checkout puts them."""

from __future__ import annotations

from pathlib import Path

from sgl_kvevict.paths import cache_folder, expanded


def models_dir() -> Path:
    """Folder of named models."""
    return cache_folder("models")


def resolve_model(model: str) -> str:
    """Return SGLang's ``--model-path``: the folder of a named model ("demo"), else ``model`` itself, ``~`` replaced."""
    if model.startswith("~"):
        return str(expanded(model, "model"))
    # A slash is a hub name or a path, as in SGLang; a folder here cannot hide either.
    if not model or "/" in model or model.startswith("."):
        return model
    folder = models_dir() / model
    return str(folder.resolve()) if folder.is_dir() else model


def unknown_model(model: str) -> str | None:
    """Return why ``model`` cannot be one: neither a folder, nor a hub name, nor the name of one; None if it can."""
    is_hub_name = "/" in model and not model.startswith((".", "/", "~"))
    if is_hub_name or Path(resolve_model(model)).exists():
        return None
    names = ", ".join(sorted(folder.name for folder in models_dir().glob("[!.]*") if folder.is_dir()))
    return (
        f"model: got {model!r}, no such folder; allowed: a folder, a hub name (OWNER/NAME), or a name in "
        f"{models_dir()}, where `make model` of a checkout puts the demo model (now: {names or 'none'})"
    )
