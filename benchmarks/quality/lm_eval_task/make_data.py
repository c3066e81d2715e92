"""Write contexts and questions as a data set for lm-eval, one line per question, and one per context to warm.

Run: python benchmarks/quality/lm_eval_task/make_data.py
Writes questions.jsonl and context-N.txt to out/quality/lm_eval.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvevict_quality.rows import ROOT
from kvevict_quality.sample import Prompts
from kvevict_quality.tasks import make_sample

from kvevict_tools.models import ensure_model

FOLDER = ROOT / "out" / "quality" / "lm_eval"


def main() -> None:
    """Write the files."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="needle-multi-key")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts = Prompts(AutoTokenizer.from_pretrained(ensure_model()))
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "questions.jsonl").open("w", encoding="utf-8") as file:
        for index in range(args.contexts):
            sample = make_sample(args.task, args.tokens, args.seed, index, prompts.count)
            context = prompts.context_text(sample)
            (FOLDER / f"context-{index}.txt").write_text(context, encoding="utf-8")
            for question in sample.questions:
                prompt = context + prompts.question_text(sample, question)
                file.write(json.dumps({"prompt": prompt, "answer": question.answers[0]}) + "\n")
    print(FOLDER)


if __name__ == "__main__":
    main()
