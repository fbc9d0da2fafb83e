"""Calls of tools, found in what a model wrote. Pure.

Two forms are known, those that most open models are trained on: JSON between ``<tool_call>`` and ``</tool_call>`` (Hermes, Qwen), and a
text that is one JSON object (Llama 3). What has been found depends on the text so far alone, and not on the pieces that it came in.
"""

from __future__ import annotations

import json
from collections.abc import Container
from typing import NamedTuple

BEGIN, END = "<tool_call>", "</tool_call>"
#: of Llama 3, in front of a call; mostly a special token, which gives no text
PYTHON_TAG = "<|python_tag|>"


class Call(NamedTuple):
    """``arguments``: JSON text."""

    name: str
    arguments: str


class Pieces(NamedTuple):
    """Text to show, and calls."""

    text: str = ""
    calls: tuple[Call, ...] = ()


class CallFinder:
    """Of one choice: text in, text and calls out, as soon as it is certain which it is. Blanks around calls are no text."""

    def __init__(self, mode: str, known: Container[str] = (), name: str | None = None) -> None:
        """``mode``: "none": nothing is a call; "named": the whole text is the arguments of ``name``; "required": the whole text is one of
        ``known``; "auto": calls of ``known`` may stand in it.
        """
        self._mode = mode
        self._known = known
        self._name = name
        # What may still become part of a call.
        self._held = ""
        # Blanks that are text unless a call follows them.
        self._blanks = ""
        self._shown = False
        self._behind_call = False

    @property
    def held(self) -> int:
        """Characters that wait until it is known what they are."""
        return len(self._held)

    def feed(self, text: str) -> Pieces:
        """More of it."""
        if self._mode == "none":
            return Pieces(text)
        self._held += text
        if self._mode in ("required", "named") or (not self._shown and not self._behind_call and self._may_be_bare()):
            return Pieces()
        shown: list[str] = []
        calls: list[Call] = []
        while True:
            begin = self._held.find(BEGIN)
            if begin < 0:
                keep = _overlap(self._held, BEGIN)
                shown.append(self._show(self._held[: len(self._held) - keep]))
                self._held = self._held[len(self._held) - keep :]
                break
            end = self._held.find(END, begin)
            shown.append(self._show(self._held[:begin]))
            if end < 0:
                self._held = self._held[begin:]
                break
            call = self._parse(self._held[begin + len(BEGIN) : end])
            if call is None:
                shown.append(self._show(self._held[begin : end + len(END)]))
            else:
                self._blanks, self._behind_call = "", True
                calls.append(call)
            self._held = self._held[end + len(END) :]
        return Pieces("".join(shown), tuple(calls))

    def flush(self) -> Pieces:
        """Nothing follows."""
        held, self._held = self._held, ""
        if self._mode == "named":
            # Cut off at max_tokens it is no JSON; the client sees it all the same, with finish reason "length".
            return Pieces("", (Call(self._name or "", held),)) if held else Pieces()
        call = self._parse(held.strip().removeprefix(PYTHON_TAG).removeprefix(BEGIN).removesuffix(END))
        if call is not None:
            return Pieces("", (call,))
        text = self._show(held)
        return Pieces(text if self._behind_call else text + self._blanks)

    def _show(self, text: str) -> str:
        text = self._blanks + text
        if self._behind_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            self._shown, self._behind_call = True, False
        return shown

    def _may_be_bare(self) -> bool:
        start = self._held.lstrip()
        return start.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(start)

    def _parse(self, text: str) -> Call | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or value.get("name") not in self._known:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return Call(value["name"], arguments)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``tag``."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-size:])), 0)
