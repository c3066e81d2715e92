"""Many questions about one document at once, in SGLang's frontend language.

`fork` has the server cache the shared prefix once; all branches read that one copy. A prefix cached this way is
compressed as soon as it is complete. The second round reads the compressed copy.

    make serve                        # in another terminal
    .venv/bin/python examples/fork.py [URL]
"""

from __future__ import annotations

from typing import Any

import sglang as sgl
from station import API_KEY, HANDBOOK, TASK, cache_line, cache_of, server_url

# A question, and the words that the answer begins with: they show a very small model what kind of answer is wanted.
QUESTIONS = (
    ("Who is the keeper of the station?", "Five people live at Skerrin Point. The keeper of the station is"),
    ("Where does the drinking water come from?", "Drinking water comes from a spring on the"),
    ("What do three long blasts mean?", "Three long blasts mean that everybody must"),
    ("What is the name of the jar?", "The jar has a name, which is"),
    ("Where do we meet in case of fire?", "The meeting point in case of fire is"),
    ("What is the first recipe?", "The first recipe in the brown book is for"),
)


@sgl.function
def ask_all(s: Any) -> list[tuple[str, int]]:
    """Return each branch's answer and how many tokens of its prompt were found in the cache."""
    s += sgl.system(TASK + HANDBOOK)
    s.sync()  # fork caches what is there when it is called
    branches = s.fork(len(QUESTIONS))
    try:
        for branch, (question, lead) in zip(branches, QUESTIONS, strict=True):
            branch += sgl.user(question)
            branch += sgl.assistant(lead + sgl.gen("answer", max_tokens=12, temperature=0, stop=["\n", ". "]))
        return [(b["answer"].strip(), b.get_meta_info("answer")["cached_tokens"]) for b in branches]
    finally:
        branches.join()  # ends the threads of the branches


def main(url: str) -> None:
    """Ask everything twice: while the prefix is being compressed, and once it is."""
    sgl.set_default_backend(sgl.RuntimeEndpoint(url, api_key=API_KEY, chat_template_name="chatml"))
    for title in ("Just cached", "Compressed"):
        print(f"{title}:")
        for (question, lead), (answer, cached) in zip(QUESTIONS, ask_all.run().ret_value, strict=True):
            print(f"  {question} {lead} {answer}  [{cached:,} tokens from the cache]")
        print(cache_line(cache_of(url)))


if __name__ == "__main__":
    main(server_url())
