"""For programs that talk to a server: prepare prefixes, and see what answers were read from."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from sgl_kvevict.cache_report import CacheReport
from sgl_kvevict.errors import ConfigError, KVEvictError, cut
from sgl_kvevict.request import REQUEST_KEY, ticket_digest

__all__ = ["CacheReport", "WarmError", "Warmed", "warm"]

POLL_SECONDS = 0.1
_HINTS: dict[int, str] = {
    HTTPStatus.NOT_FOUND: "; allowed as url: http://HOST:PORT, without /v1",
    HTTPStatus.UNAUTHORIZED: "; the key of the server's --api-key is needed, in SGL_KVEVICT_API_KEY or as api_key",
}
API_KEY_VAR = "SGL_KVEVICT_API_KEY"
_UNDER_WAY = "queued"


class WarmError(KVEvictError):
    """The server refused the request, could not be reached, or did not finish in time."""


@dataclass(frozen=True)
class Warmed:
    """A prefix that is in the server's cache.

    Attributes:
        tokens: length of the prompt (tokens).
        outcome: "compressed"; "in-use": scored, compressed once the last request that reads it ends; "too-short": its
            tokens that are not compressed yet are too few; "questions-too-late": it was compressed before, and the
            questions have changed nothing; "no-room" in the pool for a scoring pass; "no-memory" for its observations;
            "busy": too many prefixes wait; "dropped", "aborted" or "failed" before the end; "cached": the policy needs
            no passes; "unknown": the server has forgotten it, because the outcomes of 256 later requests are there.
        seconds: from the request to the outcome.
    """

    tokens: int
    outcome: str
    seconds: float


def warm(
    url: str,
    *,
    text: str | None = None,
    input_ids: Sequence[int] | None = None,
    messages: Sequence[dict[str, str]] | None = None,
    questions: Sequence[str] = (),
    timeout: float = 600.0,
    api_key: str | None = None,
) -> Warmed:
    """Prefill a prefix, have it scored, and return when it is compressed.

    Args:
        url: of the server, for example ``http://127.0.0.1:30000``.
        text: the prefix as raw text; or
        input_ids: as token ids; or
        messages: as the beginning of a chat ({"role": ..., "content": ...}), with the server's chat template.
        questions: texts that will follow the prefix: entries are kept by their attention. (): the server's policy.
        timeout: seconds to wait.
        api_key: of a server with ``--api-key``. None: that in the environment (``SGL_KVEVICT_API_KEY``), if any.

    Raises:
        ValueError: not exactly one of ``text``, ``input_ids`` and ``messages``.
        ConfigError: ``url`` is not an HTTP address, or the key cannot be sent in a header.
        WarmError: refused, unreachable, or not done in time.
    """
    if sum(given is not None for given in (text, input_ids, messages)) != 1:
        raise ValueError("give exactly one of text, input_ids and messages")
    _check_url(url)
    headers = _headers(api_key)
    ticket = secrets.token_urlsafe(24)
    options: dict[str, Any] = {"warm": True, "ticket": ticket, **({"questions": list(questions)} if questions else {})}
    deadline = time.monotonic() + timeout
    begin = time.monotonic()
    custom_params = {REQUEST_KEY: options}
    if messages is not None:
        body = {"model": "default", "messages": list(messages), "max_tokens": 1, "temperature": 0}
        path, counts, body = "/v1/chat/completions", "usage", body | {"custom_params": custom_params}
    else:
        prompt = {"text": text} if text is not None else {"input_ids": list(input_ids or ())}
        sampling = {"max_new_tokens": 0, "temperature": 0, "custom_params": custom_params}
        path, counts, body = "/generate", "meta_info", {**prompt, "sampling_params": sampling}
    reply = _call(url, path, body, headers, deadline)
    try:
        tokens = int(reply[counts]["prompt_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise WarmError(f"{url}{path}: not an answer of SGLang: {cut(json.dumps(reply))}") from error
    while (outcome := _outcome(url, ticket_digest(ticket), headers, deadline)) == _UNDER_WAY:
        if time.monotonic() > deadline:
            raise WarmError(f"{url}: the prefix is still being scored after {timeout:g} s")
        time.sleep(POLL_SECONDS)
    return Warmed(tokens, outcome, time.monotonic() - begin)


def _outcome(url: str, digest: str, headers: dict[str, str], deadline: float) -> str:
    states = _call(url, "/server_info", None, headers, deadline).get("internal_states", [])
    ours = [state["kvevict"] for state in states if "kvevict" in state]
    if not ours:
        raise WarmError(f"{url}: this server runs without sgl-kvevict (--radix-cache-backend kvevict)")
    told = [state["warm_outcomes"] for state in ours if "warm_outcomes" in state]
    return next((str(outcomes[digest]) for outcomes in told if digest in outcomes), "unknown" if told else "cached")


def _headers(api_key: str | None) -> dict[str, str]:
    """Headers that carry the key; errors never quote it."""
    key = os.environ.get(API_KEY_VAR, "") if api_key is None else api_key
    if not re.fullmatch(r"[!-~]*", key):
        raise ConfigError(f"{API_KEY_VAR if api_key is None else 'api_key'}: allowed: printable ASCII without spaces")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _call(url: str, path: str, body: dict[str, Any] | None, headers: dict[str, str], deadline: float) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data, {"Content-Type": "application/json"})
    for name, value in headers.items():
        request.add_unredirected_header(name, value)  # a redirection may lead to another host
    try:
        with urllib.request.urlopen(request, timeout=max(deadline - time.monotonic(), 1.0)) as reply:
            values = json.load(reply)
    except urllib.error.HTTPError as error:
        body_text = " ".join(error.read().decode(errors="replace").split())
        hint = _HINTS.get(error.code, "")
        raise WarmError(f"{url}{path}: status {error.code}: {body_text}{hint}") from error
    except urllib.error.URLError as error:  # no connection
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise WarmError(f"{url}{path}: no connection ({reason}); is a server running there?") from error
    except http.client.BadStatusLine as error:
        raise WarmError(f"{url}{path}: the answer is not HTTP; is this the port of SGLang's server?") from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: the answer is not JSON
        raise WarmError(f"{url}{path}: {' '.join(str(error).split()) or type(error).__name__}") from error
    if not isinstance(values, dict):
        raise WarmError(f"{url}{path}: not an answer of SGLang: {cut(json.dumps(values))}")
    return values


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unbalanced brackets, or a port that is not a number
        is_url = False
    if not is_url:
        raise ConfigError(f"url: got {url!r}; allowed: http://HOST:PORT")
