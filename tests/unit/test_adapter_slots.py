"""Which LoRA adapters are loaded where, what a plan says of it, and what the scheduler lets run together."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import LoraRequest, RequestError
from headrace.engine.adapter_slots import AdapterSlots
from headrace.engine.kv_cache import KVCache
from headrace.engine.models.adapters import fingerprint, path_of
from headrace.engine.plan import StepPlan, decode_loads, encode_loads
from headrace.engine.scheduler import Scheduler
from headrace.lora import COMPUTED, AdapterConfig, read_adapter_config
from tests.memory_checkpoint import tiny_config


def slots_of(number: int) -> AdapterSlots:
    return AdapterSlots(tiny_config(), number, 8)


def names(*adapters: str) -> list[str]:
    """As ``fingerprint`` makes them."""
    return [f"/{adapter} 1:2:3 4:5:6" for adapter in adapters]


def test_the_one_longest_unused_gives_way_unless_it_is_pinned() -> None:
    slots = slots_of(2)
    a, b, c = names("a", "b", "c")
    assert slots.place([a, None, b, a], [a, b]) == ([0, -1, 1, 0], [(0, "/a"), (1, "/b")])
    assert slots.place([a], [a]) == ([0], [])
    assert slots.place([c], [c]) == ([1], [(1, "/c")]), "b was used before a"
    assert slots.place([b], [a, b]) == ([1], [(1, "/b")]), "a is older but a request runs with it"
    assert (len(slots), slots.num_loads) == (2, 4)
    with pytest.raises(RuntimeError, match="more than 2 LoRA adapters"):
        slots.place([c], [a, b, c])


def test_a_slot_whose_load_failed_is_free_again() -> None:
    slots = slots_of(1)
    (a,) = names("a")
    slots.place([a], [a])
    assert slots.forget(0) == a and len(slots) == 0
    assert slots.place([a], [a]) == ([0], [(0, "/a")])


@given(st.integers(1, 4), st.lists(st.lists(st.integers(0, 6), max_size=4), max_size=30))
def test_what_a_step_uses_is_loaded_and_nothing_twice(number: int, steps: list[list[int]]) -> None:
    """Against what a runner then holds."""
    slots, held = slots_of(number), dict[int, str]()
    for step in steps:
        wanted = names(*map(str, step[:number]))
        places, loads = slots.place(wanted, wanted)
        for slot, path in loads:
            assert 0 <= slot < number and path not in held.values()
            held[slot] = path
        assert [held[slot] for slot in places] == [path_of(name) for name in wanted]
    assert len(slots) == len(held) <= number


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20))))
def test_loads_cross_as_integers(loads: list[tuple[int, str]]) -> None:
    encoded = encode_loads(loads)
    assert encoded.dtype == np.int32 and list(decode_loads(encoded)) == loads


def test_a_plan_with_adapters_crosses() -> None:
    one = np.zeros(1, np.int32)
    plan = StepPlan(one, one, one + 1, one, one).with_adapters([3], [(3, "/a/ü")])
    other = StepPlan.from_arrays(plan.arrays())
    assert other.adapters.tolist() == [3] and list(decode_loads(other.loads)) == [(3, "/a/ü")]


def test_requests_with_more_adapters_than_places_wait_in_their_order_and_all_end() -> None:
    """A38: those behind wait as well, so that none is passed over."""
    scheduler = Scheduler(KVCache(32, 4), max_batch_size=8, max_num_tokens=32, max_seq_len=16, max_adapters=2)
    for request_id, adapter in enumerate(["a", None, "b", "a", "c", None, "a"]):
        scheduler.submit(request_id, array("i", [request_id, 1, 2]), 0.5, adapter=adapter)
    order = []
    while scheduler.has_work:
        chunks = scheduler.schedule()
        scheduler.check()
        order.append([chunk.sequence.request_id for chunk in chunks])
        assert len(scheduler.running_adapters()) <= 2
        for chunk in chunks:
            if chunk.sequence.request_id < 2 and chunk.sequence.generated < 2:
                scheduler.append(chunk.sequence, 5)
            else:
                scheduler.end(chunk.sequence.request_id)
    assert order == [[0, 1, 2, 3], [0, 1, 4, 5, 6], [0, 1]]


# --- the configuration -----------------------------------------------------------------------------------------------------------------


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapter")


def folder(path: Path, config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


PLAIN = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "bias": "none", "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [({}, 2.0), ({"use_rslora": True}, 8.0), ({"lora_alpha": 4}, 0.25), ({"init_lora_weights": "gaussian", "modules_to_save": None}, 2.0)],
)
def test_the_scaling_of_an_adapter(changes: dict[str, Any], scaling: float, tmp_path: Path) -> None:
    assert read_adapter_config(folder(tmp_path, PLAIN | changes)) == AdapterConfig(16, scaling)
    assert LoraRequest("mine", tmp_path).path == str(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "cannot read"),
        ("[]", "does not hold a JSON object"),
        (PLAIN | {"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        (PLAIN | {"bias": "lora_only"}, "bias is 'lora_only'"),
        (PLAIN | {"use_dora": True}, "use_dora is True"),
        (PLAIN | {"fan_in_fan_out": 1}, "fan_in_fan_out is 1"),
        (PLAIN | {"modules_to_save": ["embed_tokens"]}, r"modules_to_save is \['embed_tokens'\]"),
        (PLAIN | {"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
        (PLAIN | {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        (PLAIN | {"r": 0}, "r is 0"),
        (PLAIN | {"r": True}, "r is True"),
        (PLAIN | {"r": "16"}, "r is '16'"),
        (PLAIN | {"lora_alpha": "32"}, "lora_alpha must be a number"),
        (PLAIN | {"lora_alpha": 1e300}, "out of range"),
    ],
)
def test_an_adapter_that_would_be_computed_wrongly_is_refused_where_the_request_is_made(config: object, words: str, tmp_path: Path) -> None:
    """A34 for adapters."""
    with pytest.raises(RequestError, match=words) as caught:
        LoraRequest("mine", folder(tmp_path, config))
    assert str(tmp_path) in str(caught.value)


def test_a_fingerprint_tells_where_an_adapter_is_and_whether_it_is_the_same(tmp_path: Path) -> None:
    path = folder(tmp_path / "with a space", PLAIN)
    with pytest.raises(RequestError, match="cannot be read"):
        fingerprint(str(path))
    (path / "adapter_model.safetensors").write_bytes(b"1")
    first = fingerprint(str(path))
    assert path_of(first) == str(path) and fingerprint(str(path)) == first
    (path / "adapter_model.safetensors").write_bytes(b"12")
    assert fingerprint(str(path)) != first


@given(st.dictionaries(st.sampled_from([*COMPUTED, "r", "lora_alpha", "use_rslora"]), JSON, max_size=3))
def test_nonsense_in_a_configuration_is_refused_or_means_something(scratch: Path, changes: dict[str, Any]) -> None:
    try:
        found = read_adapter_config(folder(scratch, PLAIN | changes))
    except RequestError as error:
        assert str(scratch) in str(error)
    else:
        assert found.rank >= 1 and np.isfinite(found.scaling)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"holds no adapter_config\.json"):
        LoraRequest("mine", tmp_path)
