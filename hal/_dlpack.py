# SPDX-License-Identifier: Apache-2.0
"""DLPack capsules read and made without a framework (https://dmlc.github.io/dlpack/latest/c_api.html, ABI 1.x and 0.x).

Frameworks disagree about which types and which capsule versions they take from each other (NumPy exports no bfloat16,
JAX reads no NumPy bfloat16), so HAL speaks the C structures itself.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hal.errors import ContractError

if TYPE_CHECKING:
    from hal.arrays import Buffer

# DLDeviceType -> the device's name; pinned host memory (3) is host memory.
_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 12: "npu", 13: "cuda"}
_DEVICE_CODES = {"cpu": 1, "cuda": 2, "npu": 12}
# (DLDataTypeCode, bits) -> NumPy's or ml_dtypes' name.
_DTYPES = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
}
_DTYPE_CODES = {name: code for code, name in _DTYPES.items()}
_READ_ONLY = 1
_OLD, _VERSIONED = b"dltensor", b"dltensor_versioned"


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


def _capsule_call(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_new = _capsule_call("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = _capsule_call("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_pointer = _capsule_call("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
# The same two by address: a capsule inside its own destructor must not be reference-counted again.
_is_valid_at = _capsule_call("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_pointer_at = _capsule_call("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)


@dataclass(frozen=True, slots=True)
class Imported:
    """What a capsule says. ``capsule`` is not consumed: while it lives, the memory does."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """In elements; None = C-contiguous."""
    dtype: str
    device: str
    readonly: bool
    capsule: Any


def read(obj: Any, stream: int | None = None) -> Imported:
    """Ask ``obj`` for a capsule and read it. ``stream`` is the consumer's, as the array API standard defines it."""
    options: dict[str, Any] = {"max_version": (1, 1)}
    if stream is not None:
        options["stream"] = stream
    try:
        capsule = obj.__dlpack__(**options)
    except TypeError:  # a producer from before DLPack 1.0 knows no max_version
        options.pop("max_version")
        capsule = obj.__dlpack__(**options)
    if _is_valid(capsule, _VERSIONED):
        versioned = _ManagedVersioned.from_address(_pointer(capsule, _VERSIONED))
        if versioned.major != 1:
            raise ContractError(f"DLPack capsule of major version {versioned.major}: HAL reads versions 0 and 1")
        return _describe(versioned.tensor, bool(versioned.flags & _READ_ONLY), capsule)
    return _describe(_Managed.from_address(_pointer(capsule, _OLD)).tensor, False, capsule)


def _describe(tensor: _Tensor, readonly: bool, capsule: Any) -> Imported:
    ndim, code = tensor.ndim, (tensor.dtype.code, tensor.dtype.bits)
    if code not in _DTYPES or tensor.dtype.lanes != 1:
        raise ContractError(
            f"DLPack type (code {code[0]}, {code[1]} bits, {tensor.dtype.lanes} lanes) is not one of HAL's: "
            f"{', '.join(_DTYPE_CODES)}"
        )
    family = _DEVICES.get(tensor.device.type)
    if family is None:
        raise ContractError(f"DLPack device type {tensor.device.type} is not one of HAL's: {', '.join(_DEVICE_CODES)}")
    return Imported(
        ptr=(tensor.data or 0) + tensor.byte_offset,
        shape=tuple(tensor.shape[i] for i in range(ndim)),
        strides=tuple(tensor.strides[i] for i in range(ndim)) if tensor.strides else None,
        dtype=_DTYPES[code],
        device=family if family == "cpu" else f"{family}:{tensor.device.index}",
        readonly=readonly,
        capsule=capsule,
    )


# Each exported structure by its address, with the buffer that it describes, until its consumer calls the deleter.
_exports: dict[int, tuple[Any, ...]] = {}


def _release(address: int, exports: dict[int, tuple[Any, ...]] = _exports) -> None:
    exports.pop(address, None)


def _drop_unused(capsule: int) -> None:
    """Destructor of a capsule. A consumer renames what it takes, so a name that is still ours means: never used."""
    for name in (_OLD, _VERSIONED):
        if _is_valid_at(capsule, name):
            _release(_pointer_at(capsule, name))


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_release)
_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_drop_unused)
# A framework may call them after this module's globals are gone, so they live as long as the process.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_deleter))
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_destructor))


class Exporter:
    """A :class:`~hal.arrays.Buffer` as a DLPack producer, for any framework's ``from_dlpack``."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def __dlpack_device__(self) -> tuple[int, int]:
        family, _, index = self.buffer.device.partition(":")
        return _DEVICE_CODES[family], int(index or 0)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The capsule. ``stream`` needs nothing here: HAL's results are ordered on the caller's stream already."""
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError(f"this buffer is on {self.buffer.device}; HAL exports views, never copies")
        versioned = max_version is not None and max_version[0] >= 1
        if self.buffer.readonly and not versioned:
            raise BufferError("a read-only buffer needs a consumer of DLPack 1.0 or newer")
        shape = (ctypes.c_int64 * len(self.buffer.shape))(*self.buffer.shape)
        strides = (ctypes.c_int64 * len(self.buffer.shape))(*contiguous_strides(self.buffer.shape))
        managed: _ManagedVersioned | _Managed
        if versioned:
            managed = _ManagedVersioned(major=1, minor=0, flags=_READ_ONLY if self.buffer.readonly else 0)
        else:
            managed = _Managed()
        code, bits = _DTYPE_CODES[self.buffer.dtype]
        managed.tensor = _Tensor(
            data=self.buffer.ptr,
            device=_Device(*self.__dlpack_device__()),
            ndim=len(self.buffer.shape),
            dtype=_DataType(code, bits, 1),
            shape=ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
            strides=ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)),
        )
        managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p).value
        address = ctypes.addressof(managed)
        _exports[address] = (managed, shape, strides, self.buffer)
        name = _VERSIONED if versioned else _OLD
        return _new(address, name, ctypes.cast(_destructor, ctypes.c_void_p))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """C-order strides in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
