"""What users give, made requests (A34, A40): bad strings, and arguments for one prompt or for each; a tokenizer that is written here."""

from __future__ import annotations

import pytest

from headrace.errors import ModelError, RequestError
from headrace.params import SamplingParams
from headrace.requests import RequestMaker, is_one_prompt


class Words:
    """A token for each character, but one of its own for "bad" behind a space. Counts how often it is asked."""

    def __init__(self):
        self.asked = 0

    def encode(self, text, add_special_tokens=True):
        self.asked += 1
        return [1] * add_special_tokens + ([99] if text == " bad" else list(map(ord, text)))

    def detokenizer(self, skip_special_tokens=True):
        return object()


def test_a_bad_string_is_forbidden_with_and_without_a_space_before_it():
    """A40."""
    maker = RequestMaker(Words())
    params = SamplingParams(bad=["bad", "x"], bad_token_ids=[7])
    request = maker.one([1], params, False)
    assert request.params.bad == () and set(request.params.bad_token_ids) == {7, (98, 97, 100), 99, 120, (32, 120)}
    assert params.bad == ("bad", "x"), "what the user holds is as it was"


def test_parameters_of_a_list_are_resolved_once():
    words = Words()
    requests = RequestMaker(words).many([[1], [2], [3]], SamplingParams(bad="bad"))
    assert words.asked == 2 and len({id(request.params) for request in requests}) == 1


def test_bad_strings_and_texts_need_a_tokenizer():
    maker = RequestMaker(None)
    for prompt, params in (("text", None), ([1], SamplingParams(bad="x"))):
        with pytest.raises(ModelError, match="no tokenizer"):
            maker.one(prompt, params, False)
    assert maker.one([1], None, False).new_stage is None


def test_each_choice_gets_a_stage_of_its_own():
    """A39: a detokenizer holds the beginning of a character, and a matcher that of a stop string."""
    request = RequestMaker(Words()).one([1], SamplingParams(n=2, stop="x", temperature=1.0), True)
    first, second = request.new_stage(), request.new_stage()
    assert first is not second and first._matcher is not second._matcher and first.finds_stops
    assert not RequestMaker(Words()).one([1], None, True).new_stage().finds_stops
    assert RequestMaker(Words()).one([1], SamplingParams(detokenize=False), True).new_stage is None


def test_arguments_are_for_all_or_one_for_each():
    maker, other = RequestMaker(None), SamplingParams(max_tokens=3)
    first, second = maker.many([[1], [2]], [SamplingParams(), other], None, ["a", None])
    assert second.params is other and (first.cache_salt, second.cache_salt) == ("a", None)
    assert [request.cache_salt for request in maker.many([[1], [2]], None, None, "ab")] == ["ab", "ab"]
    for arguments in (([other],), (None, None, ["a"] * 3)):
        with pytest.raises(RequestError, match="2 prompts came with"):
            maker.many([[1], [2]], *arguments)


@pytest.mark.parametrize("prompt", [{"text": "x"}, {"prompt": "x", "prompt_token_ids": [1]}, 5, None])
def test_what_is_no_prompt_is_refused(prompt):
    """A34."""
    with pytest.raises(RequestError, match="prompt"):
        RequestMaker(Words()).one(prompt, None, False)
    with pytest.raises(RequestError, match="SamplingParams"):
        RequestMaker(None).one([1], "greedy", False)


def test_lists_of_prompts_are_told_from_one_prompt():
    assert all(map(is_one_prompt, ("text", [1, 2], {"prompt": "x"}, (1,))))
    assert not any(map(is_one_prompt, ([], ["text"], [[1], [2]], [{"prompt": "x"}])))
    with pytest.raises(RequestError):
        is_one_prompt(5)
