"""Errors and their copies: every waiter gets its own, and so does another process."""

from __future__ import annotations

import pickle

import pytest

from headrace import errors
from headrace.errors import ChannelFullError, EngineDeadError, FrameError, HeadraceError, QueueFullError, RequestError, StartupError

ALL = [
    RequestError("wrong"),
    QueueFullError("full", 3.0),
    EngineDeadError("died", rank=1, pid=77, signal=9, exit_code=137, remote_cause="Traceback"),
    StartupError("never ready", rank=0),
    ChannelFullError("full"),
    FrameError("mac", "not ours"),
]


@pytest.mark.parametrize("copied", [HeadraceError.fresh, lambda error: pickle.loads(pickle.dumps(error))], ids=["fresh", "pickled"])
@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_a_copy_is_of_one_kind_with_its_original_and_has_no_traceback(error, copied):
    try:
        raise error
    except HeadraceError:
        copy = copied(error)
    assert copy is not error and type(copy) is type(error)
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error)) and copy.__traceback__ is None


def test_every_class_can_be_copied():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HeadraceError)]
    for kind in kinds:
        error = kind("mac", "text") if kind is FrameError else kind("text")
        assert type(error.fresh()) is kind and str(error.fresh()) == "text"
