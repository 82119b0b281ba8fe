"""A checkpoint's arrays through zarr-python, which is taught the registered data type ``bfloat16`` that it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import zarr
from zarr.dtype import DataTypeValidationError, Float16, data_type_registry


@dataclass(frozen=True, kw_only=True)
class BFloat16(Float16):
    """The 16-bit float with the exponent of float32. Scalars go through JSON as ordinary floats."""

    dtype_cls = type(np.dtype(ml_dtypes.bfloat16))
    _zarr_v3_name = "bfloat16"
    _zarr_v2_names: ClassVar[tuple[str, ...]] = ()  # type: ignore[assignment]

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> BFloat16:
        """The zarr type of ``ml_dtypes.bfloat16``.

        Raises:
            DataTypeValidationError: any other numpy dtype.
        """
        if dtype != np.dtype(ml_dtypes.bfloat16):
            raise DataTypeValidationError(f"Invalid data type: {dtype}. Expected bfloat16")
        return cls()

    def to_native_dtype(self) -> Any:
        """The numpy dtype; it exists in the machine's byte order only."""
        return np.dtype(ml_dtypes.bfloat16)


def open_group(path: str | Path) -> zarr.Group:
    """The checkpoint folder ``path`` as a read-only zarr group; bfloat16 arrays come as ``ml_dtypes.bfloat16``.

    zarr-python itself checks checksums but takes a lost chunk file for fill values (NaN here);
    :func:`mcore_ckpt.inspect.verify` tells them apart.
    """
    data_type_registry.register("bfloat16", BFloat16)
    return zarr.open_group(str(path), mode="r")
