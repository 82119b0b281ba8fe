"""From local memory to boxes: views of fused, padded and flat parameters."""

from __future__ import annotations

import pytest
import torch

from mcore_ckpt.errors import CheckpointError, ShapeMismatch
from mcore_ckpt.layout import LocalArray, as_bytes, flat_range_arrays, parameter_arrays
from mcore_parallel.placement import Init, Piece, Placement, columns, replicated, rows, shared

INIT = Init()


def fused():
    """Rows 0-3 of a [gate] and rows 0-3 of an [up], each [8, 3], stacked, and two rows of padding."""
    gate = rows("gate", (8, 3), begin=4, end=8, init=INIT)
    up = rows("up", (8, 3), begin=4, end=8, init=INIT, start=4)
    return Placement((gate, up)), torch.arange(30.0).view(10, 3)


def test_a_fused_parameter_is_one_view_per_logical_array():
    placement, tensor = fused()
    gate, up = parameter_arrays("model", tensor, placement)
    assert (gate.key, gate.offset, gate.shape) == ("model/gate", (4, 0), (4, 3))
    assert torch.equal(up.tensor, tensor[4:8])
    up.tensor.fill_(-1)
    assert (tensor[4:8] == -1).all()
    assert (tensor[8:] >= 24).all(), "padding belongs to nobody"


def test_parameters_give_up_their_gradient_history():
    tensor = torch.nn.Parameter(torch.zeros(4))
    (array,) = parameter_arrays("model", tensor, replicated("w", (4,), init=INIT))
    array.tensor.fill_(1)
    assert not array.tensor.requires_grad
    assert (tensor == 1).all()


@pytest.mark.parametrize("cuts", [(0, 30), (0, 7, 13, 30), (0, 1, 2, 11, 25, 29, 30)])
def test_flat_ranges_hold_the_same_elements_as_the_parameter(cuts):
    placement, tensor = fused()
    want = {a.key.removeprefix("model/"): a for a in parameter_arrays("model", tensor, placement)}
    got = {name: torch.full((8, 3), float("nan")) for name in want}
    for begin, end in zip(cuts, cuts[1:], strict=False):
        flat = tensor.reshape(-1)[begin:end].clone()
        arrays = flat_range_arrays("optimizer/m", flat, placement, local_shape=(10, 3), begin=begin)
        assert len(arrays) <= 6
        for array in arrays:
            name = array.key.removeprefix("optimizer/m/")
            got[name][tuple(slice(o, e) for o, e in zip(array.box.offset, array.box.end, strict=True))] = array.tensor
            assert array.tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    for name, array in want.items():
        assert torch.equal(got[name][4:8], array.tensor)
        assert got[name][:4].isnan().all()


def test_columns_scalars_and_vectors_flatten_too():
    placement = Placement((columns("w", (4, 6), begin=3, end=6, init=INIT),))
    flat = torch.arange(5.0)
    boxes = flat_range_arrays("o/m", flat, placement, local_shape=(4, 3), begin=2)
    assert [str(array.box) for array in boxes] == ["[0:1, 5:6]", "[1:2, 3:6]", "[2:3, 3:4]"]
    (scalar,) = flat_range_arrays("o/m", flat[:1], replicated("s", (), init=INIT), local_shape=(), begin=0)
    assert scalar.tensor.shape == ()
    assert flat_range_arrays("o/m", flat[:2], replicated("v", (9,), init=INIT), local_shape=(9,), begin=9) == []


def test_a_piece_without_rows_is_an_empty_box():
    piece = rows("w", (6, 2), begin=8, end=10, init=INIT)
    (array,) = parameter_arrays("model", torch.zeros(2, 2), Placement((piece,)))
    assert (array.offset, array.shape) == ((6, 0), (0, 2))
    assert flat_range_arrays("o/m", torch.zeros(4), Placement((piece,)), local_shape=(2, 2), begin=0) == []


def test_copies_along_model_axes_are_marked_shared():
    piece = rows("w", (6, 2), begin=0, end=6, init=INIT)
    tensor = torch.zeros(6, 2)
    plain, tied = Placement((piece,)), Placement((shared(piece, partial_over=("embedding",)),))
    assert not parameter_arrays("model", tensor, plain)[0].shared
    assert parameter_arrays("model", tensor, tied)[0].shared


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": "model/../w"}, "no valid path"),
        ({"key": "/model/w"}, "no valid path"),
        ({"key": "model//w"}, "no valid path"),
        ({"key": "model/zarr.json"}, "no valid path"),
        ({"shape": (3, 2)}, r"local tensor has shape \[2, 2\], its box \[3, 2\]"),
        ({"offset": (3, 0)}, r"\[3:5, 0:2\] reaches beyond the global shape \[4, 2\]"),
        ({"offset": (-1, 0)}, "reaches beyond"),
        ({"global_shape": (4,)}, "as many dims"),
        ({"tensor": torch.zeros(2, 2, dtype=torch.complex64)}, "'complex64' cannot be stored"),
    ],
)
def test_boxes_that_do_not_fit_are_refused(change, message):
    right = {"key": "model/w", "global_shape": (4, 2), "offset": (2, 0), "shape": (2, 2), "tensor": torch.zeros(2, 2)}
    LocalArray(**right)
    with pytest.raises(CheckpointError, match=message):
        LocalArray(**{**right, **change})


def test_pieces_outside_the_tensor_are_refused():
    placement = Placement((Piece("w", (4, 2), (0, 0), (4, 2), start=1),))
    with pytest.raises(ShapeMismatch, match=r"at row 1 does not lie inside the local parameter of shape \[4, 2\]"):
        parameter_arrays("model", torch.zeros(4, 2), placement)
    with pytest.raises(ShapeMismatch, match="does not lie inside"):
        flat_range_arrays("o/m", torch.zeros(8), placement, local_shape=(4, 2), begin=0)
    with pytest.raises(ShapeMismatch, match="must be flat"):
        flat_range_arrays("o/m", torch.zeros(4, 2), replicated("w", (4, 2), init=INIT), local_shape=(4, 2), begin=0)


def test_bytes_are_row_major_and_shared_when_contiguous():
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)
    assert as_bytes(tensor).ctypes.data == tensor.data_ptr()
    assert as_bytes(tensor.t()).tobytes() == tensor.t().contiguous().numpy().tobytes()
    assert as_bytes(torch.tensor(1.0)).nbytes == 4
    assert as_bytes(torch.tensor([True])).tolist() == [1]
