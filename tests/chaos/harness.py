"""Runs episodes: builds the world, starts the clients, does what the plan says when it says so, and holds the end against the promises."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import EchoConfig, EngineConfig, Runner
from headrace.engine.echo import echo_token
from headrace.errors import EngineDeadError, StartupError
from headrace.executor import session
from headrace.executor.admission import QueueLimits
from headrace.executor.launchers.mpi import MpiLauncher, find_mpi
from headrace.executor.lifecycle import FAIL, RestartPolicy, WorldState
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.world import World
from tests.chaos import strangers
from tests.chaos.clients import Crowd, Rig
from tests.chaos.judge import LOST, judge, outcomes
from tests.chaos.plan import Ending, Episode, Fault, draw
from tests.chaos.processes import MARK, Marked, send
from tests.conftest import SETTLE, Resources
from tests.integration.worlds import LONG, eventually

ROOT = Path(__file__).resolve().parents[2]

#: What the user process may hold more than after its first episodes, in bytes: far above what allocators keep, far below what one request
#: leaked in each episode would be after an hour.
GROWTH = 64 << 20
WARM_UP = 5

#: seconds that are promised from the end of a world until everybody was told, and until everything is gone, on a machine that has time
TOLD = 1.0
GONE = 2.0

#: violations that a summary lists
SHOWN = 20

VOCABULARY = EchoConfig().vocab_size

#: prompts and answers, in the folder of a tiny model
ANSWERS = "answers.json"


def draw_echo(rng: random.Random) -> tuple[list[int], int]:
    """A prompt of 1 to 8 tokens, and mostly few, sometimes up to 150 tokens to answer with."""
    prompt = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 8))]
    return prompt, rng.randint(1, 20 if rng.random() < 0.9 else 150)


ECHO = Rig("echo", "echo", draw_echo, lambda prompt, count: [echo_token(prompt, index, VOCABULARY) for index in range(count)])


def smollm2() -> Rig:
    """SmolLM2-135M, and greedy answers of an independent implementation. Raises ModelError when the model is not installed."""
    from headrace.checkpoint import resolve_model

    results = json.loads((ROOT / "tests/data/smollm2_greedy.json").read_text())["results"]
    answers = {tuple(result["prompt_ids"]): result["output_ids_ignore_eos"] for result in results}
    prompts = [list(prompt) for prompt in answers]
    return Rig(
        str(resolve_model("smollm2-135m")),
        "torch",
        lambda rng: (rng.choice(prompts), rng.randint(1, 8 if rng.random() < 0.9 else 40)),
        lambda prompt, count: answers[tuple(prompt)][:count],
        most=1,
        pace=8.0,
    )


def write_tiny(folder: Path, oracle: Runner = "torch", count: int = 24, length: int = 40) -> None:
    """A tiny random Llama, and what ``oracle`` on one rank answers to some prompts, for ``tiny``."""
    from headrace.engine.base import EngineRequest, SingleRank
    from headrace.engine.model_engine import ModelEngine, load_runner
    from headrace.params import SamplingParams
    from tests.memory_checkpoint import random_model, tiny_config, write_folder

    shape = {"hidden_size": 64, "head_dim": 16, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 96, "num_layers": 4}
    write_folder(random_model(tiny_config(max_seq_len=512, **shape), seed=13), folder)
    config = EngineConfig(model=str(folder), runner=oracle, num_threads=1, kv_cache_tokens=4096)
    engine = ModelEngine(config, load_runner(config, SingleRank(), lambda stage, done, total: None))
    rng = random.Random(5)
    start = [rng.randrange(200) for _ in range(20)]
    prompts = [start[: rng.choice((0, 3, 12, 20))] + [rng.randrange(200) for _ in range(rng.randint(1, 30))] for _ in range(count)]
    answers: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        engine.submit(EngineRequest(index, np.array(prompt, np.int32), params, length, seed=0))
    while engine.has_work:
        outputs = engine.step()
        place = 0
        for index, number in zip(outputs.request_ids, outputs.counts, strict=True):
            answers[index] += outputs.token_ids[place : place + number]
            place += number
    engine.close()
    (folder / ANSWERS).write_text(json.dumps([prompts, answers]))


def tiny(folder: Path, runner: Runner) -> Rig:
    """The model of ``write_tiny``, in a KV cache that few requests fill."""
    prompts, texts = json.loads((folder / ANSWERS).read_text())
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, texts, strict=True)}
    return Rig(
        str(folder),
        runner,
        lambda rng: (rng.choice(prompts), rng.randint(1, 8 if rng.random() < 0.8 else 40)),
        lambda prompt, count: answers[tuple(prompt)][:count],
        most=30,
        pace=8.0 if runner == "torch" else 4.0,
        settings={"kv_cache_tokens": 512, "max_num_tokens": 48, "tokens_per_block": 4, "max_batch_size": 16, "max_seq_len": 128},
        staged=True,
    )


@dataclass
class Report:
    """What happened in one episode or in many of them."""

    violations: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    worlds: int = 0
    restarts: int = 0
    replayed: int = 0
    # From the signal that ended a world: until its last request had ended, and until its last process was gone; the longest, in seconds.
    worst_told: float = 0.0
    worst_gone: float = 0.0
    # Endings for which one of the two took longer than is promised.
    slow: list[str] = field(default_factory=list)
    peak_rss: int = 0

    def add(self, other: Report) -> None:
        """Sums and maxima."""
        self.violations += other.violations
        self.slow += other.slow
        for name in ("faults", "outcomes", "refused", "endings"):
            getattr(self, name).update(getattr(other, name))
        for name in ("worlds", "restarts", "replayed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("worst_told", "worst_gone", "peak_rss"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    def summary(self) -> str:
        """As lines to print."""

        def listed(counts: Counter[str]) -> str:
            return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "none"

        lines = [
            f"faults injected   {self.faults.total()}: {listed(self.faults)}",
            f"worlds built      {self.worlds}; ended by: {listed(self.endings)}",
            f"worlds restarted  {self.restarts}, with {self.replayed} requests that went on",
            f"requests          {self.outcomes.total()}: {listed(self.outcomes)}",
            f"submits refused   {listed(self.refused)}",
            f"losses            {self.outcomes[LOST]}",
            f"after the end     all told within {self.worst_told:.2f} s, all gone within {self.worst_gone:.2f} s",
            *(f"SLOW              {line}" for line in self.slow),
            f"peak memory       {self.peak_rss >> 20} MiB",
            *(f"VIOLATION         {line}" for line in self.violations[:SHOWN]),
            *([f"                  and {len(self.violations) - SHOWN} more"] if len(self.violations) > SHOWN else []),
        ]
        return "\n".join(lines)


def run(seed: int, go_on: Callable[[int], bool], *, first: int = 0, rig: Rig = ECHO, restart: bool = False) -> Report:
    """Episodes ``first`` and on, as long as ``go_on(number)``, up to the first with a violation. All share this process,
    whose memory must stay flat.
    """
    total = Report()
    calm = 0
    number = first
    while go_on(number) and not total.violations:
        report = Run(draw(seed, number, restart), rig).run()
        gc.collect()
        report.peak_rss = rss = resident()
        if number - first < WARM_UP:
            calm = max(calm, rss)
        elif rss > calm + GROWTH:
            report.violations.append(f"seed {seed}, episode {number}: memory grew from {calm >> 20} to {rss >> 20} MiB")
        total.add(report)
        number += 1
    return total


def resident() -> int:
    """Bytes of memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Run:
    """One episode."""

    def __init__(self, episode: Episode, rig: Rig) -> None:
        self.report = Report()
        self._episode = episode.slowed(rig.pace)
        # Worlds that got a deadly signal and are followed by another.
        self._struck: list[World] = []
        self._rig = rig

    def run(self) -> Report:
        """All of it; what went wrong is in the report, with how to run it again."""
        before = Resources.now()
        wrong: list[str] = []
        try:
            with Marked.by_us() as marked:
                wrong += self._user(marked) if self._episode.ending.kind == "user" else self._here(marked)
                if survivors := marked.wait_gone(LONG):
                    wrong.append(f"processes live on: {marked.describe(survivors)}")
        except Exception as error:
            wrong.append(f"the harness met {type(error).__name__}: {error}")
        self._struck.clear()  # they keep descriptors
        wrong += _left_behind(before)
        self.report.endings[self._episode.ending.kind] += 1
        self.report.violations = [f"{self._episode.name}: {line}" for line in wrong]
        return self.report

    def _build(self) -> GenerationExecutorProxy:
        episode = self._episode
        echo = EchoConfig(step_time=episode.step_time, max_batch_size=episode.max_batch_size, load_time=0.05)
        rig = self._rig
        tp, pp = (1, episode.ranks) if rig.staged and episode.number % 2 else (episode.ranks, 1)
        ranks: dict[str, Any] = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "num_threads": 1}
        config = EngineConfig(model=rig.model, runner=rig.runner, echo=echo, **ranks, **rig.settings)
        self.report.worlds += 1
        return GenerationExecutorProxy(
            config,
            MpiLauncher(find_mpi()),
            start_timeout=10 * LONG,
            on_engine_death=RestartPolicy(attempts=1000) if episode.restart else FAIL,
            limits=QueueLimits(requests=episode.queue),
        )

    # --- a world of this process

    def _here(self, marked: Marked) -> Iterator[str]:
        executor = self._build()
        try:
            executor.launch()
            if self._episode.ending.kind == "start":
                yield from self._end_at_start(executor, marked)
            else:
                executor.wait_ready()
                yield from self._at_work(executor, marked)
        finally:
            executor.close(timeout=LONG)
        if executor.state is not WorldState.CLOSED:
            yield f"after close it is {executor!r}"
        counters = executor.counters()
        if counters["live"] or counters["admitted"] != sum(
            counters[name] for name in ("finished", "aborted", "failed", "timed_out", "dead")
        ):
            yield f"the ledger does not balance: {counters}"

    def _end_at_start(self, executor: GenerationExecutorProxy, marked: Marked) -> Iterator[str]:
        ending = self._episode.ending
        until(time.monotonic() + ending.at)
        # A process that is not there yet cannot be hit; the one that will start it can.
        hit = next((name for name in (ending.target, "mpiexec", "janitor") if marked.send(name, ending.signal)), None)
        struck = time.monotonic()
        self.report.faults[f"{signal.Signals(ending.signal).name} at start"] += hit is not None
        try:
            executor.wait_ready()
        except StartupError:
            self._note_gone(marked, struck)
            return
        # It was ready before the signal came, or the signal was caught by a process that was about to become another.
        if hit is not None and not eventually(lambda: executor.state is not WorldState.READY):
            yield f"{hit} got signal {ending.signal} and the world is {executor!r}"

    def _at_work(self, executor: GenerationExecutorProxy, marked: Marked) -> Iterator[str]:
        ending = self._episode.ending
        crowd = Crowd(executor, self._rig, self._episode.clients)
        closer = threading.Thread(target=executor.close, kwargs={"drain": ending.drain, "timeout": 2 * LONG}, name="closer", daemon=True)
        crowd.start()
        try:
            self._disturb(executor, marked)
            if ending.kind == "death":
                yield from self._end_by_death(executor, marked, crowd)
            else:
                if not (self._episode.restart and ending.hurried):
                    # Closed before its death is noticed, a world does not come back.
                    if not eventually(lambda: executor._dispatcher.world not in self._struck, 2 * LONG):
                        yield f"another world does not follow: {executor!r}"
                    if not answers(executor):
                        yield f"the world does not answer: {executor!r}"
                closer.start()
                crowd.over.set()
                if ending.kind == "closing":
                    until(time.monotonic() + ending.then)
                    self._strike(ending.target, ending.signal, marked, "while closing")
                closer.join(3 * LONG)
        finally:
            crowd.over.set()
            executor.close(timeout=LONG)
            crowd.join()
        self.report.outcomes += outcomes(crowd)
        self.report.refused += crowd.refused
        counters = executor.counters()
        self.report.restarts += counters["restarts"]
        self.report.replayed += counters["replayed"]
        yield from judge(crowd, self._rig, counters, self._allowed)
        # Where rank 0 is dead, its place on the result channel is free for a stranger.
        world = executor._dispatcher.world
        if world not in self._struck and world.results is not None and (world.results.stats.refused or world.results.stats.gaps):
            yield f"frames of rank 0 were lost or refused: {world.results.stats}"

    @property
    def _allowed(self) -> frozenset[str]:
        """Endings, beside ``length``, that the ending of the world explains."""
        ending = self._episode.ending
        dead = {"EngineDeadError"} if ending.kind in ("death", "closing") else set()
        aborted = {"abort"} if ending.kind in ("close", "closing") and not ending.drain else set()
        # A close does not wait for a world that is being restarted, nor restarts one whose death is noticed after it.
        closed = {"ClosedError", "EngineDeadError"} if self._episode.restart and ending.hurried else set()
        return frozenset(dead | aborted | closed)

    def _disturb(self, executor: GenerationExecutorProxy, marked: Marked) -> None:
        """All faults up to the ending, each at its time. Whoever is still stopped then goes on."""
        began, ends = time.monotonic(), self._episode.ending.at
        stopped: list[int] = []
        moments = [(fault.at, fault) for fault in self._episode.faults]
        moments += [(fault.at + fault.lasts, None) for fault in self._episode.faults if fault.kind == "pause"]
        try:
            for at, fault in sorted(moments, key=lambda moment: moment[0]):
                until(began + min(at, ends))
                if at > ends or fault is None:
                    _continue(stopped)
                elif fault.kind == "pause":
                    self._pause(fault.target, marked, stopped)
                elif fault.kind == "death":
                    world = executor._dispatcher.world
                    if self._strike(fault.target, fault.signal, marked, "at work"):
                        self._struck.append(world)
                else:
                    self._send_frames(fault, executor)
            until(began + ends)
        finally:
            _continue(stopped)

    def _pause(self, target: str, marked: Marked, stopped: list[int]) -> None:
        fd = marked.open(target)
        if fd is not None:
            stopped.append(fd)
            self.report.faults["SIGSTOP, SIGCONT"] += send(fd, signal.SIGSTOP)

    def _send_frames(self, fault: Fault, executor: GenerationExecutorProxy) -> None:
        world = executor._dispatcher.world
        # A world that starts is left in peace: of a pair, ZMQ takes the first who connects, whoever it is.
        if executor.state is WorldState.READY and world.bootstrap is not None and world.session is not None:
            rng = random.Random(fault.seed)
            self.report.faults[f"{fault.kind} frames"] += strangers.attack(fault.kind, world.session.path, world.bootstrap.key, rng)

    def _strike(self, target: str, number: int, marked: Marked, when: str) -> bool:
        """A signal that ends the world; whether there was somebody to get it."""
        struck = marked.send(target, number)
        self.report.faults[f"{signal.Signals(number).name} {when}"] += struck
        return struck

    def _end_by_death(self, executor: GenerationExecutorProxy, marked: Marked, crowd: Crowd) -> Iterator[str]:
        ending = self._episode.ending
        struck = time.monotonic()
        self._strike(ending.target, ending.signal, marked, "at work")
        crowd.over.set()
        if not eventually(lambda: executor.state is not WorldState.READY and executor.counters()["live"] == 0):
            yield f"requests outlive their world: {executor!r}"
        told = time.monotonic() - struck
        self.report.worst_told = max(self.report.worst_told, told)
        if told > TOLD:
            self._note_slow(f"told after {told:.2f} s")
        self._note_gone(marked, struck)

    def _note_gone(self, marked: Marked, struck: float) -> None:
        marked.wait_gone(LONG)
        gone = time.monotonic() - struck
        self.report.worst_gone = max(self.report.worst_gone, gone)
        if gone > GONE:
            self._note_slow(f"gone after {gone:.2f} s")

    def _note_slow(self, what: str) -> None:
        self.report.slow.append(f"{self._episode.name}: {what} ({self._episode.ending}), load {os.getloadavg()[0]:.1f}")

    # --- a user process of its own

    def _user(self, marked: Marked) -> Iterator[str]:
        ending = self._episode.ending
        base = Path(tempfile.mkdtemp(prefix="hr", dir=session._base_folder()))
        script = "import sys; from tests.chaos.harness import act; act(*sys.argv[1:])"
        command = [
            sys.executable,
            "-c",
            script,
            str(base),
            str(self._episode.seed),
            str(self._episode.number),
            self._rig.model,
            self._rig.runner,
        ]
        command += ["restart"] * self._episode.restart
        began = time.monotonic()
        self.report.worlds += 1
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL) as process:
            until(began + ending.at)
            process.kill()
        struck = time.monotonic()
        if process.returncode != -signal.SIGKILL:
            yield f"the user process ended by itself, with {process.returncode}"
        self.report.faults["SIGKILL of the user process"] += 1
        self._note_gone(marked, struck)
        # With restarts the plan may have killed the janitor just before, and with both dead the folder is left to the next start.
        if self._episode.restart:
            session.sweep(base)
        yield from (f"left behind: {path}" for path in base.iterdir())
        shutil.rmtree(base)


def act(base: str, seed: str, number: str, model: str, runner: Runner, restart: str = "") -> None:
    """In a user process that is going to be killed: the episode, without its end."""
    os.environ[session.VARIABLE] = base
    episode = draw(int(seed), int(number), bool(restart))
    rig = ECHO if runner == "echo" else tiny(Path(model), runner) if Path(model).is_dir() else smollm2()
    run = Run(replace(episode, ending=Ending("close", 1000.0)), rig)
    for line in run._here(Marked(os.environ[MARK])):
        print(line, file=sys.stderr)


def until(moment: float) -> None:
    """The plan's next moment, on the monotonic clock."""
    if (left := moment - time.monotonic()) > 0:
        time.sleep(left)


def answers(executor: GenerationExecutorProxy) -> bool:
    """Whether the control channel serves its owner, whatever strangers did to it; by the next world, if the last is dying just now."""
    deadline = time.monotonic() + 2 * LONG
    while time.monotonic() < deadline:
        try:
            executor.ping()
            return True
        except (TimeoutError, EngineDeadError):
            until(time.monotonic() + 0.01)
    return False


def _continue(stopped: list[int]) -> None:
    while stopped:
        fd = stopped.pop()
        send(fd, signal.SIGCONT)
        os.close(fd)


def _left_behind(before: Resources) -> list[str]:
    gc.collect()  # what only a reference cycle holds is not leaked
    deadline = time.monotonic() + SETTLE
    while (lines := Resources.now().leaked_since(before, True)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [f"left behind: {line}" for line in lines]
