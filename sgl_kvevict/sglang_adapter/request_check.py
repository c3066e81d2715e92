"""Refuses requests that ask something impossible of the compressed cache, before they are queued."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies.observation import Readers
from sgl_kvevict.request import REQUEST_KEY, parse_request_options

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler


def before_queueing(scheduler: Scheduler, req: Req, *_args: object, **_kwargs: object) -> None:
    """Hook before SGLang queues a request: one with bad options is answered with status 400 and a reason."""
    scoring = getattr(scheduler.tree_cache, "scoring", None)
    try:
        options = parse_request_options(req.sampling_params.custom_params)
        if options is not None and options.questions and scoring is None:
            raise ConfigError(
                f"custom_params.{REQUEST_KEY}.questions: got {len(options.questions)} questions; allowed: none, "
                "because the server's policy does not learn from readers"
            )
        if options is not None and options.questions and scheduler.tokenizer is None:
            raise ConfigError(
                f"custom_params.{REQUEST_KEY}.questions: got {len(options.questions)} questions; allowed: none, "
                "because the server runs without a tokenizer (--skip-tokenizer-init)"
            )
        asks = scoring is not None and scoring.readers is Readers.QUESTIONS
        if options is not None and options.warm and asks and not options.questions:
            raise ConfigError(
                f"custom_params.{REQUEST_KEY}.questions: got none; allowed: at least one, "
                "because the server's policy is 'questions'"
            )
    except ConfigError as error:
        req.sampling_params.custom_params = None  # SGLang still runs one token of a refused request
        req.set_finish_with_abort(str(error))
