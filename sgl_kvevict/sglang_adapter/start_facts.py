"""What is known before anything is loaded, for the table in ``sgl_kvevict/support.py``.

Used by ``sgl-kvevict serve`` and by the process that starts SGLang's servers; imports neither SGLang nor torch.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import KVEvictError
from sgl_kvevict.machine import NO_DRAFTS_ON_CPU, version_of
from sgl_kvevict.paths import cache_folder, write_error
from sgl_kvevict.support import MODELS, BeforeLoad


def before_load(
    value_of: Callable[[str], object],
    config: KVEvictConfig,
    *,
    folder: Path | None = None,
    address: tuple[str, object] | None = None,
) -> BeforeLoad:
    """Gather the facts: look at files, folders, port and socket; ``folder``: of the model, if it is on this machine.

    Other arguments as in :class:`BeforeLoad`.
    """
    errors = {name: error for name, error in _errors(config, address).items() if error is not None}
    traits = frozenset() if folder is None else file_traits(folder)
    return BeforeLoad(value_of, config, address, errors, traits=traits)


def file_traits(folder: Path) -> frozenset[str]:
    """Keys of :data:`MODELS` that have a value in a model's ``config.json``; none if it is not JSON."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return frozenset()
    # Models that also see images keep the language model's fields one level down.
    parts = (config, config.get("text_config")) if isinstance(config, dict) else ()
    keys = MODELS.keys() - {"v_head_dim"}  # the same as head_dim, or of latents, in models that are served
    return frozenset(key for part in parts if isinstance(part, dict) for key in keys if part.get(key))


def _errors(config: KVEvictConfig, address: tuple[str, object] | None) -> dict[str, str | None]:
    """:attr:`BeforeLoad.errors`, and None for what can be used."""
    found = version_of("sglang")
    errors: dict[str, str | None] = {"drafts": found if found == NO_DRAFTS_ON_CPU else None}
    if config.store is not None and "://" in config.store:
        from sgl_kvevict.store.segments import open_backend

        errors["store URL"] = _refusal(partial(open_backend, config.store))
    elif config.store is not None:
        errors["store"] = write_error(Path(config.store))
    if config.score_weights == "auto":
        errors["score_weights file"] = _refusal(partial(cache_folder, "score-weights"))
    elif config.score_weights is not None:
        path = Path(config.score_weights)
        if path.exists():
            from sgl_kvevict.distill.files import check_format  # imports torch

            errors["score_weights file"] = _refusal(partial(check_format, path))
        else:  # they are learned, and written there
            errors["score_weights"] = write_error(path.parent)
    if config.score_texts is not None and Path(config.score_texts).is_dir():
        from sgl_kvevict.distill.texts import passages_of

        errors["score_texts"] = _refusal(partial(passages_of, config.score_texts))
    elif config.score_texts is not None:
        errors["score_texts folder"] = "it is not there"
    if config.events is not None:
        errors["events.endpoint"] = _socket_error(config.events.endpoint)
    if address is not None and str(address[1]).isdecimal() and 1 <= int(str(address[1])) <= 65535:
        errors["port"] = bind_error(address[0], int(str(address[1])))
    return errors


def _refusal(use: Callable[[], object]) -> str | None:
    """What is wrong with something, as the first use of it says; None: nothing."""
    try:
        use()
    except KVEvictError as error:
        return str(error)
    return None


def _socket_error(address: str) -> str | None:
    if address.startswith("ipc:"):
        return write_error(Path(address.removeprefix("ipc://")).parent)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return bind_error("" if host == "*" else host.strip("[]"), int(port))


def bind_error(host: str, port: int) -> str | None:
    """Return why a TCP port cannot be bound; None if it can. Connections in TIME_WAIT do not count."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As SGLang binds it: a server that was just stopped leaves connections in TIME_WAIT, which are no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return None
