"""Judge many answers against one source: each verdict is a choice, and all verdicts share the source as their prefix.

The judge never generates. `sgl.gen(choices=...)` asks the server how likely each candidate is after the question and
takes the likeliest, so every verdict costs one short prefill per candidate behind a prefix that is already cached.

    make serve                        # in another terminal
    .venv/bin/python examples/judge.py [URL]
"""

from __future__ import annotations

from typing import Any

import sglang as sgl
from station import API_KEY, HANDBOOK, TASK, cache_line, cache_of, server_url

# A claim to complete, and what three systems said.
CASES = (
    ("The name of the supply boat is the", ("Grey Heron", "Blue Whale", "Lantern Nine")),
    ("The call sign of the station is", ("Grey Heron", "Skerrin Two", "Lantern Nine")),
    ("The only animal that lives at the station is a goat named", ("Balthasar", "Clover", "Heather")),
    ("The jar has a name, which is", ("Balthasar", "Clover", "Solberg")),
    ("The meeting point in case of fire is the", ("kitchen", "flagpole", "lighthouse")),
)


@sgl.function
def judge(s: Any) -> list[tuple[str, list[float]]]:
    """Return each case's verdict and the mean log-probability of the tokens of each candidate."""
    s += sgl.system(TASK + HANDBOOK)
    s.sync()
    branches = s.fork(len(CASES))
    try:
        for branch, (claim, candidates) in zip(branches, CASES, strict=True):
            branch += sgl.user("Complete the sentence.")
            branch += sgl.assistant(claim + " " + sgl.gen("verdict", choices=list(candidates)))
        return [(b["verdict"], b.get_meta_info("verdict")["normalized_prompt_logprobs"]) for b in branches]
    finally:
        branches.join()


def main(url: str) -> None:
    """Print each verdict with the candidates' log-probabilities."""
    sgl.set_default_backend(sgl.RuntimeEndpoint(url, api_key=API_KEY, chat_template_name="chatml"))
    for (claim, candidates), (verdict, logprobs) in zip(CASES, judge.run().ret_value, strict=True):
        scores = ", ".join(f"{name} {value:.2f}" for name, value in zip(candidates, logprobs, strict=True))
        print(f"{claim} ... {verdict}  [{scores}]")
    print(cache_line(cache_of(url)))


if __name__ == "__main__":
    main(server_url())
