"""Box arithmetic and the grid: properties over random shapes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.grid import (
    Box,
    GridRule,
    boxes_of_range,
    cell_box,
    cell_shape,
    cells_touching,
    intersect,
    remainder,
    subtract,
    whole,
)

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    spans = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(b for b, _ in spans), tuple(e - b for b, e in spans))


@st.composite
def two_boxes(draw):
    shape = draw(SHAPES)
    return shape, draw(boxes(shape)), draw(boxes(shape))


def mask(shape, *parts):
    count = np.zeros(shape, dtype=int)
    for part in parts:
        count[part.within(whole(shape))] += 1
    return count


@settings(deadline=None)
@given(two_boxes())
def test_intersection_and_difference_split_a_box(case):
    shape, a, b = case
    common = intersect(a, b)
    expected = (mask(shape, a) == 1) & (mask(shape, b) == 1)
    assert np.array_equal(mask(shape, common) if common else np.zeros(shape, int), expected)
    rest = subtract(a, b)
    assert len(rest) <= 2 * max(1, len(shape))
    assert np.array_equal(mask(shape, *rest), (mask(shape, a) == 1) & (mask(shape, b) == 0))


@settings(deadline=None)
@given(st.data(), SHAPES)
def test_remainder_is_what_no_box_covers(data, shape):
    holes = data.draw(st.lists(boxes(shape), max_size=5))
    rest = remainder(whole(shape), holes)
    assert np.array_equal(mask(shape, *rest), mask(shape, *holes) == 0)
    assert rest == sorted(rest)


@settings(deadline=None)
@given(st.data(), SHAPES)
def test_a_flat_range_is_few_boxes_in_element_order(data, shape):
    total = math.prod(shape)
    begin, end = sorted((data.draw(st.integers(0, total)), data.draw(st.integers(0, total))))
    parts = boxes_of_range(shape, begin, end)
    assert len(parts) <= max(1, 2 * len(shape) - 1)
    numbers = np.arange(total).reshape(shape)
    found = [number for part in parts for number in numbers[part.within(whole(shape))].ravel().tolist()]
    assert found == list(range(begin, end))


@settings(deadline=None)
@given(SHAPES, st.integers(0, 3), st.sampled_from([1, 2, 4, 8]))
def test_cells_partition_the_array(shape, cut, itemsize):
    cut_dims = (cut,) if cut < len(shape) else ()
    rule = GridRule(parts=4, smallest=8, largest=64)
    cell = cell_shape(shape, cut_dims, itemsize, rule)
    assert cell == cell_shape(shape, cut_dims, itemsize, rule)
    assert math.prod(cell) * itemsize <= rule.largest
    indices = list(cells_touching(whole(shape), cell))
    assert indices == sorted(set(indices))
    assert (mask(shape, *(cell_box(i, cell, shape) for i in indices)) == 1).all()


@pytest.mark.parametrize("degree", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("shape", "cut"), [((4096, 1024), 0), ((1024, 4096), 1), ((14336, 4096), 0), ((128, 8192), 0)])
def test_any_degree_that_divides_sixteen_meets_whole_cells(shape, cut, degree):
    """No cell of a matrix that is large enough to be cut has elements of two tensor-parallel ranks."""
    cell = cell_shape(shape, (cut,), 4, GridRule())
    extent = shape[cut] // degree
    if math.prod(shape) * 4 // degree >= GridRule().smallest:
        assert extent % cell[cut] == 0
    assert all(n % c == 0 for n, c in zip(shape, cell, strict=True)), "a padded cell although a divisor exists"


@pytest.mark.parametrize("shape", [(), (1,), (7,), (101, 32), (128, 1024), (0, 4)])
def test_small_arrays_are_one_cell(shape):
    assert cell_shape(shape, tuple(range(len(shape)))[:1], 4, GridRule()) == tuple(max(1, n) for n in shape)


def test_cells_stay_between_the_limits():
    rule = GridRule()
    for shape in [(50257, 768), (128256, 4096), (100003, 3000), (1 << 26,), (3, 1 << 24)]:
        size = math.prod(cell_shape(shape, (0,), 4, rule)) * 4
        assert rule.largest // 8 <= size <= rule.largest, (shape, size)


def test_a_box_prints_as_a_slice():
    assert str(Box((1, 0), (2, 5))) == "[1:3, 0:5]"
