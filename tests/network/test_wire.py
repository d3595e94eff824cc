"""The wire format: what is packed comes back, and nothing that arrives does harm."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedstrata.engines.network.wire import DTYPES, HEADER_LIMIT, MAGIC, WireError, pack, unpack, value

plain = st.one_of(st.none(), st.booleans(), st.integers(-(2**62), 2**62), st.text(max_size=5))
headers = st.dictionaries(st.text(max_size=8).filter(lambda k: k != "arrays"), plain, max_size=4)
SMALL = sorted(name for name in DTYPES if name == "bfloat16" or name.startswith("float8"))  # not NumPy's own
leaves = st.lists(
    st.sampled_from(sorted(set(DTYPES) - set(SMALL))).flatmap(
        lambda name: arrays.arrays(name, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    ),
    max_size=4,
)


def raw(header, body=b""):
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return MAGIC + struct.pack("<I", len(head)) + head + body


@settings(max_examples=30)
@given(headers, leaves)
def test_what_is_packed_comes_back(header, arrays):
    head, found = unpack(pack(header, arrays))
    assert head == header
    assert [a.dtype for a in found] == [a.dtype for a in arrays]
    for a, b in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not a.flags.writeable


@pytest.mark.parametrize("name", SMALL)
def test_small_floats_come_back(name):
    array = np.asarray(jnp.arange(5, dtype=name))
    _, (found,) = unpack(pack({}, [array]))
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found.astype(float), array.astype(float))


@given(st.binary(max_size=300))
def test_noise_is_refused(noise):
    with pytest.raises(WireError):
        unpack(noise)


@given(st.binary(max_size=200))
def test_noise_behind_the_magic_is_refused_or_read(noise):
    try:
        unpack(MAGIC + noise)
    except WireError:
        return


@given(headers, leaves, st.data())
def test_a_damaged_message_is_refused_or_read_without_memory(header, arrays, data):
    message = bytearray(pack(header, arrays))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(message)
    tracemalloc.start()
    try:
        with contextlib.suppress(WireError):
            unpack(damaged)
        assert tracemalloc.get_traced_memory()[1] < 2**20  # whatever sizes it speaks of
    finally:
        tracemalloc.stop()


@given(headers, leaves, st.data())
def test_a_truncated_message_is_refused(header, arrays, data):
    message = pack(header, arrays)
    with pytest.raises(WireError):
        unpack(message[: data.draw(st.integers(0, len(message) - 1))])
    with pytest.raises(WireError):
        unpack(message + b"12345678")


json_values = st.recursive(
    st.one_of(plain, st.floats(), st.integers()), lambda inner: st.lists(inner, max_size=3), max_leaves=8
)


@given(json_values)
def test_any_description_of_arrays_is_refused_or_read(form):
    try:
        _, found = unpack(raw({"arrays": form}))
    except WireError:
        return
    assert all(a.size == 0 for a in found)


@pytest.mark.parametrize(
    "message",
    [
        raw({"arrays": [["f4", 2**40, 2**40]]}),
        raw({"arrays": [["f8", 10**9]]}, bytes(64)),
        raw({"arrays": [["f4", 0, 2**62, 2**62]]}),
        raw({"arrays": [["O8", 1]]}, bytes(8)),
        raw({"arrays": [["f4", -1]]}),
        raw({"arrays": [["f4", True]]}, bytes(8)),
        raw({"arrays": [["b1", 1]]}, b"\x07" + bytes(7)),
        raw(b"[" * HEADER_LIMIT),
        raw(b'{"a":' * 5000 + b"1" + b"}" * 5000),
        raw(b'{"arrays":[],"a":1e999}'),
        raw(b'{"arrays":[],"a":' + b"9" * 5000 + b"}"),
        raw(b"\xff\xfe{}"),
        MAGIC + struct.pack("<I", 2**32 - 1),
        MAGIC[:3] + b"\x63" + bytes(8),
    ],
)
def test_hostile_messages_are_refused_without_memory(message):
    tracemalloc.start()
    with pytest.raises(WireError):
        unpack(message)
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()


def test_the_limit_holds_both_ways():
    message = pack({}, [np.zeros(100)])
    with pytest.raises(WireError, match="limit"):
        unpack(message, limit=500)
    with pytest.raises(WireError, match="limit"):
        pack({}, [np.zeros(100)], limit=500)
    with pytest.raises(WireError, match="limit"):
        pack({"a": "x" * HEADER_LIMIT}, [])


def test_entries_of_a_header_are_checked():
    assert value({"k": 3}, "k", int) == 3
    for header in ({}, {"k": "3"}, {"k": True}, {"k": None}):
        with pytest.raises(WireError, match="'k'"):
            value(header, "k", int)
