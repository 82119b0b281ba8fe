"""Totals of the recorder, and the check that ranks agree on the order of their collectives."""

from __future__ import annotations

from mcore_parallel.traffic import Event, TrafficRecorder, order_conflicts


def _events(*operations, group=(0, 1), axis="tp"):
    return [Event(op, axis, 4, shape, group, order) for order, (op, shape) in enumerate(operations)]


AB = (("all_reduce", (2,)), ("all_gather", (4,)))


def test_totals_by_axis_and_operation():
    recorder = TrafficRecorder()
    recorder.record("send", axis="pp", num_bytes=8, shape=(2,), group=(0, 1))
    assert recorder.events == []
    recorder.enabled = True
    for axis, size in (("pp", 8), ("pp", 4), ("tp", 2)):
        recorder.record("send", axis=axis, num_bytes=size, shape=(2,), group=(0, 1))
    assert recorder.totals() == {("pp", "send"): 12, ("tp", "send"): 2}
    assert recorder.by_axis() == {"pp": 12, "tp": 2}
    assert [event.order for event in recorder.events] == [0, 1, 0]
    recorder.clear()
    assert recorder.totals() == {}


def test_equal_orders_agree_whatever_is_sent_between():
    first = _events(*AB)
    second = [*_events(("send", (9,))), *_events(*AB)]
    assert order_conflicts([first, second]) == []


def test_groups_are_compared_with_themselves_only():
    others = [_events(("all_reduce", (7,)), group=(2, 3)) for _ in range(2)]
    assert order_conflicts([_events(*AB), _events(*AB), *others]) == []


def test_another_order_shape_or_length_is_located():
    swapped = order_conflicts([_events(*AB), _events(*reversed(AB))])
    assert swapped == [
        "axis tp: operation 0 is all_reduce of (2,) on rank 0 but all_gather of (4,) on rank 1",
    ]
    assert (
        "operation 1 is all_gather of (4,) on rank 0 but nothing on rank 1"
        in order_conflicts([_events(*AB), _events(AB[0])])[0]
    )
    assert (
        "operation 0 is nothing on rank 0 but all_reduce of (2,) on rank 1" in order_conflicts([[], _events(AB[0])])[0]
    )
    assert order_conflicts([_events(("all_reduce", (2,))), _events(("all_reduce", (3,)))])
