# SPDX-License-Identifier: Apache-2.0
"""Arrays of any framework as plain buffers, and back in the caller's kind, without importing a framework.

A framework is looked up in ``sys.modules``: whoever passes one of its arrays has imported it (a kind asked for by its
name is imported). Nothing is copied on the
way in (an array that would need a copy is refused) nor on the way out, but where :func:`to_kind` says so.
"""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from hal import _dlpack
from hal.errors import ContractError

_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_DTYPES},
    **{name: np.dtype(name) for name in ("float16", "float32", "float64", *_INTEGERS, "bool")},
}
"""Every dtype name that HAL knows, as a NumPy dtype."""
ITEMSIZE = {name: dtype.itemsize for name, dtype in NUMPY_DTYPES.items()}
"""Bytes of one element, by dtype name."""
_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
# What NumPy's and CUDA's array interfaces and torch.from_numpy can say; the type proper is put back by a view.
_CARRIER = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


@dataclass(frozen=True, slots=True)
class Buffer:
    """C-contiguous memory with a shape. ``owner`` keeps it alive; dtype names are NumPy's and ml_dtypes'."""

    ptr: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    """``cpu``, ``cuda:0``, ``npu:0``."""
    owner: Any = None
    readonly: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes from ``ptr`` that belong to the array."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def dtype_name(dtype: Any) -> str:
    """The name of a dtype given as a name or as NumPy's, ml_dtypes', JAX's, CuPy's or torch's object."""
    text = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else np.dtype(dtype).name
    if text not in NUMPY_DTYPES:
        raise ContractError(f"dtype {dtype!r} is not one of HAL's: {', '.join(NUMPY_DTYPES)}")
    return text


def rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """``values`` in HAL's type ``dtype``, to nearest; integer types saturate."""
    kind = NUMPY_DTYPES[dtype]
    if kind.kind in "iu":
        info = np.iinfo(kind)
        values = np.clip(np.rint(values), info.min, info.max)
    return values.astype(kind)


# --- in ------------------------------------------------------------------------------------------------------------


def as_buffer(obj: Any, *, writable: bool = False, stream: int | None = None) -> Buffer:
    """``obj``'s own memory as a :class:`Buffer`; never a copy. The buffer keeps ``obj`` alive.

    ``obj`` may be a NumPy (with ml_dtypes), torch, JAX or CuPy array, anything with ``__dlpack__`` or
    ``__cuda_array_interface__``, or bytes-like (uint8). ``stream`` is the consumer's stream for device arrays whose
    framework hides its own (see ``__dlpack__`` in the array API standard). Device memory is not looked at.

    Raises ContractError if it is not C-contiguous, has a type that HAL does not know, is read-only although
    ``writable``, is a torch tensor on an autograd graph, or is no array at all.
    """
    kind = kind_of(obj)
    try:
        buffer = obj if kind == "buffer" else _READERS[kind](obj, stream)
    except ContractError:
        raise
    except Exception as error:  # deleted, without storage, or a producer that breaks its protocol
        raise ContractError(
            f"{kind} array gives no memory ({type(error).__name__}: {error}): pass a dense array that holds its data"
        ) from error
    if writable and buffer.readonly:
        raise ContractError(f"read-only {kind} array of shape {buffer.shape} where HAL writes: pass a writable copy")
    return buffer


def _from_numpy(array: NDArray[Any], stream: int | None) -> Buffer:
    name = _NAMES.get(array.dtype)
    if name is None:
        raise ContractError(f"NumPy dtype {array.dtype} is not one of HAL's: {', '.join(NUMPY_DTYPES)}")
    flags = array.flags
    if not flags.c_contiguous or not flags.aligned:
        strides = tuple(step // array.itemsize for step in array.strides)
        raise _not_contiguous("numpy", array.shape, strides, "np.ascontiguousarray(x)")
    return Buffer(array.__array_interface__["data"][0], array.shape, name, "cpu", array, not flags.writeable)


def _from_torch(tensor: Any, stream: int | None) -> Buffer:
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise ContractError(f"torch tensor of layout {tensor.layout}: HAL takes dense tensors, call .to_dense()")
    if not tensor.is_contiguous():
        raise _not_contiguous("torch", tuple(tensor.shape), tensor.stride(), ".contiguous()")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ContractError(
            "torch tensor that requires a gradient, which this call would lose: use hal.torch.dispatch and "
            "hal.torch.combine, or pass x.detach()"
        )
    name = _torch_names(torch).get(tensor.dtype)
    if name is None:
        raise ContractError(f"{tensor.dtype} is not one of HAL's types: {', '.join(NUMPY_DTYPES)}")
    device = tensor.device
    where = "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"
    return Buffer(tensor.data_ptr(), tuple(tensor.shape), name, where, tensor)


def _from_jax(array: Any, stream: int | None) -> Buffer:
    jax = sys.modules["jax"]
    if isinstance(array, jax.core.Tracer):
        raise ContractError("a JAX tracer has no memory: call HAL outside jit, or through jax.pure_callback")
    if not array.is_fully_addressable or len(array.devices()) != 1:
        raise ContractError(
            f"JAX array of shape {array.shape} on {len(array.devices())} devices: pass this rank's shard "
            "(array.addressable_data(0))"
        )
    array.block_until_ready()
    # JAX arrays are immutable, which its capsules do not say.
    return _from_dlpack(array, stream, "jax", readonly=True)


def _from_dlpack(obj: Any, stream: int | None, kind: str = "dlpack", readonly: bool = False) -> Buffer:
    told = _dlpack.read(obj, stream)
    if not _is_contiguous(told.shape, told.strides):
        raise _not_contiguous(kind, told.shape, told.strides or (), ".contiguous() or a copy")
    return Buffer(told.ptr, told.shape, told.dtype, told.device, (obj, told.capsule), told.readonly or readonly)


def _from_cuda_interface(obj: Any, stream: int | None) -> Buffer:
    told = obj.__cuda_array_interface__
    shape, strides = tuple(told["shape"]), told.get("strides")
    # The interface has no name for bfloat16 and fp8; CuPy's dtype has.
    name = dtype_name(getattr(obj, "dtype", None) or np.dtype(told["typestr"]))
    if strides is not None:
        strides = tuple(step // ITEMSIZE[name] for step in strides)
        if not _is_contiguous(shape, strides):
            raise _not_contiguous("CUDA", shape, strides, "cupy.ascontiguousarray(x)")
    pointer, readonly = told["data"]
    index = getattr(getattr(obj, "device", None), "id", None)
    if index is None and hasattr(obj, "__dlpack_device__"):
        index = obj.__dlpack_device__()[1]
    return Buffer(pointer or 0, shape, name, f"cuda:{index or 0}", obj, bool(readonly))


def _from_bytes(obj: Any, stream: int | None) -> Buffer:
    view = memoryview(obj)
    if not view.c_contiguous:
        steps = tuple(step // view.itemsize for step in view.strides or ())
        raise _not_contiguous("memoryview", view.shape or (), steps, "bytes(x)")
    return _from_numpy(np.asarray(view), stream)


_READERS = {
    "numpy": _from_numpy,
    "torch": _from_torch,
    "jax": _from_jax,
    "cupy": _from_cuda_interface,
    "cuda": _from_cuda_interface,
    "dlpack": _from_dlpack,
    "bytes": _from_bytes,
}


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    """C order; the stride of an axis of one element, and all strides of an empty array, mean nothing."""
    if strides is None or 0 in shape:
        return True
    expected = _dlpack.contiguous_strides(shape)
    return all(size == 1 or have == want for size, have, want in zip(shape, strides, expected, strict=True))


def _not_contiguous(kind: str, shape: tuple[int, ...], strides: tuple[int, ...], fix: str) -> ContractError:
    return ContractError(
        f"{kind} array of shape {tuple(shape)} has strides {tuple(strides)} elements, which is not C-contiguous "
        f"(or not aligned), and HAL makes no hidden copy: call {fix}"
    )


# --- out -----------------------------------------------------------------------------------------------------------


def to_kind(buffer: Buffer, like: Any) -> Any:
    """``buffer`` as an array of the kind of ``like`` (an array, or a name from :func:`kind_of`), without a copy.

    The array keeps ``buffer.owner`` alive. An owner that already is such an array is returned itself. Kinds that cannot
    be built (bytes, a stranger's DLPack array) give NumPy on CPUs and a DLPack producer elsewhere. Copies are made only
    where a framework needs one: JAX of memory that is not aligned to XLA's liking and of 64-bit types unless
    ``jax_enable_x64`` is set (they become 32-bit ones, as everywhere in JAX), and torch of read-only memory.
    """
    kind = like if isinstance(like, str) else kind_of(like)
    if kind == "buffer":
        return buffer
    owner = buffer.owner
    if owner is not None and _is_whole(owner, kind, buffer):
        return owner[0] if kind == "jax" else owner
    return _WRITERS.get(kind, _to_other)(buffer)


def _is_whole(owner: Any, kind: str, buffer: Buffer) -> bool:
    """Whether ``owner`` is an array of this kind over exactly this buffer."""
    if kind == "numpy":
        return (
            type(owner) is np.ndarray
            and owner.shape == buffer.shape
            and owner.dtype == NUMPY_DTYPES[buffer.dtype]
            and owner.__array_interface__["data"][0] == buffer.ptr
        )
    if kind == "torch":
        torch = importlib.import_module("torch")
        return (
            isinstance(owner, torch.Tensor)
            and owner.shape == buffer.shape
            and owner.dtype is getattr(torch, buffer.dtype)
            and owner.data_ptr() == buffer.ptr
        )
    if kind == "jax" and isinstance(owner, tuple) and kind_of(owner[0]) == "jax":
        array = owner[0]
        return bool(
            array.shape == buffer.shape
            and array.dtype == NUMPY_DTYPES[buffer.dtype]
            and array.unsafe_buffer_pointer() == buffer.ptr
        )
    return False


class _Interface:
    """Carries NumPy's or CUDA's array interface, and with it the buffer's owner."""

    def __init__(self, buffer: Buffer) -> None:
        carrier = NUMPY_DTYPES[_CARRIER.get(buffer.dtype, buffer.dtype)].str
        name = "__array_interface__" if buffer.device == "cpu" else "__cuda_array_interface__"
        data = (buffer.ptr, buffer.readonly)
        self.buffer = buffer
        setattr(self, name, {"data": data, "shape": buffer.shape, "typestr": carrier, "version": 3})


def as_numpy(buffer: Buffer) -> NDArray[Any]:
    """A CPU buffer as a NumPy array over the same memory, which it keeps alive."""
    if buffer.device != "cpu":
        raise ContractError(f"a buffer on {buffer.device} cannot be a NumPy array without a copy: copy it to the CPU")
    return _carrier(buffer).view(NUMPY_DTYPES[buffer.dtype])


def _carrier(buffer: Buffer) -> NDArray[Any]:
    if 0 in buffer.shape:  # no memory to keep alive, and a null pointer is no array interface
        return np.empty(buffer.shape, NUMPY_DTYPES[_CARRIER.get(buffer.dtype, buffer.dtype)])
    return np.asarray(_Interface(buffer))


def _to_torch(buffer: Buffer) -> Any:
    torch = importlib.import_module("torch")
    dtype = getattr(torch, buffer.dtype)
    if 0 in buffer.shape:
        return torch.empty(buffer.shape, dtype=dtype, device=buffer.device)
    if buffer.device == "cpu":
        array = _carrier(buffer)
        carrier = torch.from_numpy(array.copy() if buffer.readonly else array)
    elif buffer.device.startswith("cuda"):
        carrier = torch.as_tensor(_Interface(buffer), device=buffer.device)
    else:
        return torch.from_dlpack(_dlpack.Exporter(buffer))
    if carrier.dtype is dtype:
        return carrier
    # Not carrier.view(dtype): autograd would treat the result as a view and refuse to let it be changed in place.
    return torch.empty(0, dtype=dtype, device=buffer.device).set_(carrier.untyped_storage(), 0, buffer.shape)


def _to_jax(buffer: Buffer) -> Any:
    jax = importlib.import_module("jax")
    if 0 in buffer.shape:
        return jax.numpy.empty(buffer.shape, NUMPY_DTYPES[buffer.dtype])
    # JAX never writes to an imported array, and its importer has no word for read-only.
    return jax.dlpack.from_dlpack(_dlpack.Exporter(replace(buffer, readonly=False)))


def _to_cupy(buffer: Buffer) -> Any:
    if buffer.device == "cpu":  # counts may be host memory beside device rows
        return as_numpy(buffer)
    cupy = importlib.import_module("cupy")
    dtype = NUMPY_DTYPES[buffer.dtype]
    if 0 in buffer.shape:
        return cupy.empty(buffer.shape, dtype)
    memory = cupy.cuda.UnownedMemory(buffer.ptr, buffer.nbytes, buffer, int(buffer.device.partition(":")[2]))
    return cupy.ndarray(buffer.shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def _to_other(buffer: Buffer) -> Any:
    return as_numpy(buffer) if buffer.device == "cpu" else _dlpack.Exporter(buffer)


_WRITERS = {"torch": _to_torch, "jax": _to_jax, "cupy": _to_cupy}

# --- kinds ---------------------------------------------------------------------------------------------------------

_kinds: dict[type, str] = {np.ndarray: "numpy", Buffer: "buffer"}
_torch_dtypes: dict[Any, str] = {}


def kind_of(obj: Any) -> str:
    """``numpy``, ``torch``, ``jax``, ``cupy``, ``cuda`` (array interface), ``dlpack``, ``bytes`` or ``buffer``.

    Raises ContractError for anything else.
    """
    cls = type(obj)
    kind = _kinds.get(cls)
    if kind is None:
        kind = _kinds[cls] = _look_at(obj, cls)
    return kind


def _look_at(obj: Any, cls: type) -> str:
    if isinstance(obj, np.ndarray):
        return "numpy"
    for name, base in (("torch", "Tensor"), ("jax", "Array"), ("cupy", "ndarray")):
        module = sys.modules.get(name)
        if module is not None and isinstance(obj, getattr(module, base, ())):
            return name
    if hasattr(obj, "__cuda_array_interface__"):
        return "cuda"
    if hasattr(obj, "__dlpack__"):
        return "dlpack"
    try:
        memoryview(obj)
    except TypeError:
        raise ContractError(
            f"{cls.__module__}.{cls.__qualname__} is no array: pass a NumPy, torch, JAX or CuPy array, or anything "
            "with __dlpack__"
        ) from None
    return "bytes"


def _torch_names(torch: Any) -> dict[Any, str]:
    if not _torch_dtypes:
        _torch_dtypes.update((getattr(torch, name), name) for name in NUMPY_DTYPES if hasattr(torch, name))
    return _torch_dtypes


def current_stream(buffer: Buffer, kind: str) -> int | None:
    """The stream on which the caller's framework would run now on ``buffer``'s device; None where there is none."""
    if buffer.device == "cpu":
        return None
    if kind == "torch":
        family, _, index = buffer.device.partition(":")
        stream = getattr(sys.modules["torch"], family).current_stream(int(index))
        return int(getattr(stream, f"{family}_stream"))
    if kind == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return None
