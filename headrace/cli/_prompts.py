"""Where ``headrace generate`` takes its prompts from."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts, at least one. Errors of usage exit; a file that cannot be read raises OSError."""
    parser: argparse.ArgumentParser = arguments.parser
    if arguments.prompt_file is not None:
        if arguments.prompt is not None:
            parser.error("give a prompt or --prompt-file, not both")
        source = arguments.prompt_file
        try:
            text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
            prompts = parse_prompts(text)
        except ValueError as error:  # a line that is no JSON, or bytes that are no UTF-8
            parser.error(f"{source}: {error}")
        if not prompts:
            parser.error(f"{source}: no prompt in it")
        return prompts
    if arguments.prompt is None and sys.stdin.isatty():
        parser.error("give a prompt, --prompt-file, or text on standard input")
    if arguments.prompt in (None, "-"):
        # The line end of the last line belongs to the file, not to the prompt.
        return [sys.stdin.read().removesuffix("\n")]
    return [arguments.prompt]


def parse_prompts(text: str) -> list[str]:
    """One prompt a line; or JSON Lines, when the first line that is not blank is a JSON object: each then has a string ``prompt``.

    Blank lines count for nothing. Raises ValueError with the number of the line.
    """
    # Not splitlines(): that also splits at form feeds and other characters that belong to a prompt.
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines or _json_object(lines[0][1]) is None:
        return [line for _, line in lines]
    prompts = []
    for number, line in lines:
        record = _json_object(line)
        prompt = None if record is None else record.get("prompt")
        if not isinstance(prompt, str):
            raise ValueError(f'line {number} is not a JSON object with a string "prompt"')
        prompts.append(prompt)
    return prompts


def _json_object(line: str) -> dict[str, object] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
