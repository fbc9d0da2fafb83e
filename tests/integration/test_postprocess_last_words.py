"""What a world has sent before it died for good, where postprocess workers make the texts (A23; invariant 11)."""

from __future__ import annotations

import os
import signal

import pytest

from headrace.errors import EngineDeadError
from headrace.executor.texts.shard import Text
from tests.integration.test_postprocess import PROMPT, send, text_of, texting, worker
from tests.integration.worlds import LONG, answer, completion, eventually

pytestmark = pytest.mark.kill


@pytest.mark.parametrize("answers", [True, False])
def test_all_that_came_before_a_death_is_read_before_it(answers: bool) -> None:
    """Also if the worker has much of it to do yet, and if it does nothing more: then it is not waited for."""
    with texting(workers=1, step_time=0.002) as executor:
        (handle,) = send(executor, PROMPT, max_tokens=8000)
        stream = iter(handle)
        pieces = [completion(next(stream))]
        pid = worker(executor)
        os.kill(pid, signal.SIGSTOP)
        text = handle.mailboxes[0].elsewhere
        assert isinstance(text, Text)
        assert eventually(lambda: len(text.tokens) > text.answered + 50)
        os.kill(executor.processes()["rank0"], signal.SIGKILL)
        assert eventually(lambda: executor.counters()["dead"] == 1)
        if answers:
            os.kill(pid, signal.SIGCONT)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            pieces += map(completion, stream)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            handle.result(LONG)
    tokens = [token for piece in pieces for token in piece.token_ids_diff]
    whole = text_of(tokens)
    said = "".join(piece.text_diff for piece in pieces)
    # A character may have been cut off in its middle.
    assert whole.startswith(said) and len(whole) - len(said) <= 1
    assert tokens == answer(PROMPT, len(tokens))
    # Tokens of the cut character go with the part of it that there is.
    assert len(text.tokens) - len(tokens) <= 2
