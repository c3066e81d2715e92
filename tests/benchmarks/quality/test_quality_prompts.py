from __future__ import annotations

import pytest
from kvevict_quality.sample import Prompts, Question, Sample


@pytest.fixture
def question():
    return Question("What colour is it?", "It is", ("deep red",), 4)


def test_context_and_question_together_are_the_chat_template(prompts, question):
    sample = Sample("The door is deep red.", (question,))
    text = prompts.decode(prompts.context_ids(sample) + prompts.question_ids(sample, question))
    expected = "<system> Be brief. <end> <user> The door is deep red. \n \n What colour is it? <end> <assistant> It is"
    assert text == expected


def test_messages_of_a_base_model_are_paragraphs_behind_bos(question):
    class Letters:
        chat_template, bos_token = None, "^"

        def encode(self, text, add_special_tokens):
            return [ord(letter) for letter in text]

        def decode(self, ids, skip_special_tokens):
            return "".join(map(chr, ids))

    prompts, sample = Prompts(Letters()), Sample("The door is deep red.", (question, question), turns=2)
    context = prompts.decode(prompts.context_ids(sample))
    first, second = (prompts.decode(prompts.question_ids(sample, question, turn)) for turn in (0, 1))
    assert context + first == "^The door is deep red.\n\nWhat colour is it?\n\nIt is"
    assert second == "\n\nWhat colour is it?\n\nIt is"
    told = Sample("", (question,), (("Hello.", "Noted."),))
    assert prompts.decode(prompts.context_ids(told)) == "^Hello.\n\nNoted.\n\n"


def test_a_history_is_a_prefix_without_the_last_question(prompts, question):
    sample = Sample("", (question,), (("The door is deep red.", "Noted."),), turns=1)
    text = prompts.decode(prompts.context_ids(sample))
    assert text.endswith("<user> The door is deep red. <end> <assistant> Noted. <end> <user>")


def test_later_turns_follow_the_answer_before(prompts, question):
    sample = Sample("The door is deep red.", (question, question), turns=2)
    follow_up = prompts.decode(prompts.question_ids(sample, question, turn=1))
    assert follow_up == "<end> <user> What colour is it? <end> <assistant> It is"
    assert sample.conversations == [(question, question)]
