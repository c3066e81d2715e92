"""Offline inference: `sgl.Engine` with the plugin, no server. A batch of prompts shares one compressed document.

`sgl.Engine` takes both backends as keywords; the plugin's configuration is in KVEVICT_CONFIG, as for a server. A prompt
without an answer (`max_new_tokens: 0`) has its prefix compressed, then the batch reads the compressed copy.

    .venv/bin/python examples/engine.py [MODEL]
"""

from __future__ import annotations

import sys

from station import HANDBOOK, TASK, cache_line, engine_settings

from sgl_kvevict.cli.model_names import resolve_model

CHAPTERS = HANDBOOK[HANDBOOK.index("\n5. ") : HANDBOOK.index("\n8. ")]
QUESTIONS = (  # and how the answers begin
    ("Where does the drinking water come from?", "Drinking water comes from"),
    ("What is the name of the supply boat?", "The supply boat is called the"),
    ("Where do we meet in case of fire?", "The meeting point in case of fire is"),
)


def message(role: str, content: str) -> dict[str, str]:
    """One message of a chat."""
    return {"role": role, "content": content}


def main(model: str = "demo") -> None:
    """Cache the document, answer in one batch."""
    settings = engine_settings() | {"model_path": resolve_model(model)}
    import sglang as sgl  # after the settings, which choose its platform

    engine = sgl.Engine(radix_cache_backend="kvevict", attention_backend="kvevict", **settings)
    system = message("system", TASK + CHAPTERS)
    template = engine.tokenizer_manager.tokenizer.apply_chat_template
    try:
        engine.generate(template([system], tokenize=False), {"max_new_tokens": 0})
        print(cache_line(engine.get_server_info()["internal_states"][0]["kvevict"]))
        chats = [[system, message("user", q), message("assistant", lead)] for q, lead in QUESTIONS]
        prompts = [template(chat, tokenize=False, continue_final_message=True) for chat in chats]
        replies = engine.generate(prompts, {"temperature": 0, "max_new_tokens": 12, "stop": ["\n", ". "]})
        for (_, lead), reply in zip(QUESTIONS, replies, strict=True):
            found, length = reply["meta_info"]["cached_tokens"], reply["meta_info"]["prompt_tokens"]
            print(f"{lead} ... {reply['text'].strip()}  [{found:,} of {length:,} tokens from the cache]")
    finally:
        engine.shutdown()


if __name__ == "__main__":  # the engine starts processes that import this file again
    main(*sys.argv[1:])
