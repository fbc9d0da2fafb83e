"""Text on the user's side of the boundary: tokenizer, chat template, incremental detokenising, stop strings."""

from __future__ import annotations

from headrace.text.detokenizer import Detokenizer
from headrace.text.stops import StopMatcher
from headrace.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Detokenizer", "StopMatcher", "Tokenizer", "load_tokenizer"]
