"""For programs that talk to a server: prepare prefixes, and see what answers were read from."""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from sgl_kvevict.cache_report import CacheReport
from sgl_kvevict.errors import ConfigError, KVEvictError, cut

__all__ = ["CacheReport", "WarmError", "warm"]

_HINTS: dict[int, str] = {
    HTTPStatus.NOT_FOUND: "; allowed as url: http://HOST:PORT, without /v1",
    HTTPStatus.UNAUTHORIZED: "; the key of the server's --api-key is needed, in SGL_KVEVICT_API_KEY or as api_key",
}
API_KEY_VAR = "SGL_KVEVICT_API_KEY"


class WarmError(KVEvictError):
    """The server refused the request, could not be reached, or did not answer in time."""


def warm(
    url: str,
    *,
    text: str | None = None,
    input_ids: Sequence[int] | None = None,
    messages: Sequence[dict[str, str]] | None = None,
    timeout: float = 600.0,
    api_key: str | None = None,
) -> CacheReport:
    """Have a prefix computed and compressed before it is asked about; return what of it the server had already.

    It is one request without an answer (``max_new_tokens: 0``; of a chat, with one token). On a GPU the prefix may be
    written in its compressed form only during the next steps.

    Args:
        url: of the server, for example ``http://127.0.0.1:30000``.
        text: the prefix as raw text; or
        input_ids: as token ids; or
        messages: as the beginning of a chat ({"role": ..., "content": ...}), with the server's chat template.
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
    if messages is not None:
        path = "/v1/chat/completions"
        # One token, because a chat has no request without an answer.
        body = {"model": "default", "messages": list(messages), "max_tokens": 1, "return_meta_info": True}
    else:
        path = "/generate"
        prompt = {"text": text} if text is not None else {"input_ids": list(input_ids or ())}
        body = {**prompt, "sampling_params": {"max_new_tokens": 0}}
    reply = _call(url, path, body, _headers(api_key), timeout)
    try:
        return CacheReport.of(reply["meta_info"] if messages is None else reply["choices"][0]["meta_info"])
    except (ConfigError, LookupError, TypeError) as error:
        raise WarmError(f"{url}{path}: not an answer of SGLang: {cut(json.dumps(reply))}") from error


def _headers(api_key: str | None) -> dict[str, str]:
    """Headers that carry the key; errors never quote it."""
    key = os.environ.get(API_KEY_VAR, "") if api_key is None else api_key
    # urllib refuses other characters, too, with a message that quotes the key.
    if not re.fullmatch(r"[!-~]*", key):
        raise ConfigError(f"{API_KEY_VAR if api_key is None else 'api_key'}: allowed: printable ASCII without spaces")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _call(url: str, path: str, body: dict[str, Any], headers: dict[str, str], timeout: float) -> dict[str, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data, {"Content-Type": "application/json"})
    for name, value in headers.items():
        request.add_unredirected_header(name, value)  # a redirection may lead to another host
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
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
        # urllib also opens files.
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unbalanced brackets, or a port that is not a number
        is_url = False
    if not is_url:
        raise ConfigError(f"url: got {url!r}; allowed: http://HOST:PORT")
