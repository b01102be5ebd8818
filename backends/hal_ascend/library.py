# SPDX-License-Identifier: Apache-2.0
"""libhal_ascend.so through ctypes (kernels_ascend/device/c_abi.h), its errors as those of hal.errors."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from hal.errors import CapacityError, ContractError, HalError, PeerTimeout
from hal_ascend.probe import KERNELS


class _Error(ctypes.Structure):
    _fields_ = (
        ("text", ctypes.c_char * 512), ("stage", ctypes.c_char * 64), ("fix", ctypes.c_char * 256),
        ("rank", ctypes.c_int64), ("queue", ctypes.c_int64), ("expected", ctypes.c_int64), ("seen", ctypes.c_int64),
    )  # fmt: skip


_I, _U, _U32, _D, _P = ctypes.c_int, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_double, ctypes.c_void_p
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "unique_id": (_P, ctypes.c_size_t),
    "init": (_I, _I, _I, _P, ctypes.c_size_t, _U, _U32, _D),
    "finalize": (),
    "allocate": (_U, _P),
    "free": (_U,),
    "write": (_U, _P, _U),
    "read": (_P, _U, _U),
    "primitive": (_U32, _U, _U, _U, _I, _I, _U32, _U, _U, _D, _P, _P),
    "ep_bytes": (_P, _P),
    "ep_create": (_P, _I, _U, _D, _P),
    "dispatch_send": (_P, _U32, _U, ctypes.c_int32, _U, _I, _U, _U, _P, _P, _P),
    "rows": (_P, _P, _P, _P),
    "dispatch_recv": (_P, _P, _P, _P),
    "combine_send": (_P, _U, _P, _U, _I, _I, _P, _P),
    "combine_recv": (_P, _P, _U, _U, _U, _U, _P),
}
RELEASES = ("ep_destroy", "round_free", "combine_free")
_TIMEOUT, _CONTRACT, _CAPACITY = 1, 2, 3


class Library:
    """The loaded library. ``call(name, ...)`` raises what the library reports."""

    def __init__(self, path: Path | None = None) -> None:
        self._library = ctypes.CDLL(str(path or Path(__file__).parent / KERNELS))
        self._error = self._library.hal_ascend_error
        self._error.restype = ctypes.POINTER(_Error)
        for name, arguments in SIGNATURES.items():
            getattr(self._library, f"hal_ascend_{name}").argtypes = arguments
        for name in RELEASES:
            function = getattr(self._library, f"hal_ascend_{name}")
            function.argtypes, function.restype = (_P,), None

    def call(self, name: str, *arguments: Any, seconds: float = 0.0) -> None:
        kind = getattr(self._library, f"hal_ascend_{name}")(*arguments)
        if kind:
            raise self._exception(kind, seconds)

    def release(self, name: str, handle: int) -> None:
        getattr(self._library, f"hal_ascend_{name}")(handle)

    def _exception(self, kind: int, seconds: float) -> HalError:
        error = self._error().contents
        text = error.text.decode(errors="replace")
        if kind == _TIMEOUT:
            return PeerTimeout(
                error.rank, error.stage.decode(), queue=error.queue, expected=error.expected, seen=error.seen,
                seconds=seconds, reason=text,
            )  # fmt: skip
        if kind == _CONTRACT:
            return ContractError(text)
        if kind == _CAPACITY:
            return CapacityError(text, error.expected, error.seen, error.fix.decode())
        return HalError(f"the Ascend library failed: {text}")


class Handle:
    """A pointer that the library made and takes back."""

    def __init__(self, library: Library, release: str) -> None:
        self._library, self._release = library, release
        self.pointer = ctypes.c_void_p()

    @property
    def value(self) -> int:
        assert self.pointer.value is not None
        return self.pointer.value

    def __del__(self) -> None:
        if self.pointer.value:
            self._library.release(self._release, self.pointer.value)
