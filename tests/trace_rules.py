"""The rules of the Trace Event Format that a viewer relies on, for a trace as it lies in its file."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read(path: str | Path) -> dict[str, Any]:
    """A trace file, in which every rule must hold."""
    document = json.loads(Path(path).read_text())
    assert broken(document["traceEvents"]) == []
    return document


def broken(events: list[Event]) -> list[str]:
    """One line for each rule that does not hold."""
    lines = []
    names = {(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
    tracks: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    flows: defaultdict[tuple[str, str], list[Event]] = defaultdict(list)
    stacks: defaultdict[tuple[str, str], list[Event]] = defaultdict(list)
    last: dict[tuple[str, str], float] = {}
    for event in events:
        phase = event["ph"]
        if phase not in ("M", "X", "s", "t", "f", "b", "e"):
            lines.append(f"unknown phase in {event}")
        if phase == "M":
            continue
        if event["ts"] < 0 or event.get("dur", 0) < 0:
            lines.append(f"negative time in {event}")
        if ("process_name", event["pid"], 0) not in names:
            lines.append(f"process {event['pid']} has no name")
        if phase == "X":
            tracks[event["pid"], event["tid"]].append(event)
            if ("thread_name", event["pid"], event["tid"]) not in names:
                lines.append(f"thread {event['tid']} of {event['pid']} has no name")
        key = (event["cat"], event.get("id", ""))
        if phase in "stf":
            flows[key].append(event)
        elif phase == "b":
            stacks[key].append(event)
        elif phase == "e" and (not stacks[key] or stacks[key].pop()["name"] != event["name"]):
            lines.append(f"{event} ends what has not begun")
        if phase in "be":
            if event["ts"] < last.get(key, 0.0):
                lines.append(f"{event} comes before the one before it")
            last[key] = event["ts"]
    lines += [f"{stack} has no end" for stack in stacks.values() if stack]
    for track in tracks.values():
        lines += _nesting(track)
    for flow in flows.values():
        lines += _flow(flow, tracks)
    return lines


def _nesting(track: list[Event]) -> list[str]:
    """Of one thread: in the order of their times, and each inside of those that it began in."""
    lines, open_until, before = [], [], -1.0
    for event in track:
        if event["ts"] < before:
            lines.append(f"{event} is out of order")
        before = event["ts"]
        end = event["ts"] + event["dur"]
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        # Sums of floats: a nanosecond.
        if open_until and end > open_until[-1] + 0.001:
            lines.append(f"{event} ends after what it began in")
        open_until.append(end)
    return lines


def _flow(flow: list[Event], tracks: dict[tuple[int, int], list[Event]]) -> list[str]:
    lines = []
    phases = "".join(event["ph"] for event in flow)
    if phases != "s" + "t" * (len(flow) - 2) + "f":
        lines.append(f"flow {flow[0]['id']} is {phases}")
    if sorted(flow, key=lambda event: event["ts"]) != flow:
        lines.append(f"flow {flow[0]['id']} goes back in time")
    for event in flow:
        inside = [span for span in tracks[event["pid"], event["tid"]] if span["ts"] <= event["ts"] <= span["ts"] + span["dur"]]
        if event.get("bp") != "e" or not inside:
            lines.append(f"{event} is bound to no span")
    return lines


def spans(document: dict[str, Any], process: str | None = None) -> list[Event]:
    """All of a process, by its name."""
    pids = {event["args"]["name"]: event["pid"] for event in document["traceEvents"] if event["name"] == "process_name"}
    return [event for event in document["traceEvents"] if event["ph"] == "X" and (process is None or event["pid"] == pids[process])]
