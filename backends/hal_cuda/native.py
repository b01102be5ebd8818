# SPDX-License-Identifier: Apache-2.0
"""The kernel library's C interface (kernels_cuda/include/hal_cuda.h) for ctypes."""

from __future__ import annotations

import ctypes
import struct
import threading
from ctypes import (
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
    py_object,
)
from typing import Any

from hal.errors import BackendUnavailable, HalError
from hal_cuda import build, nccl

ABI = 5
SEND, RECV = 1, 2
PUT, SIGNAL, WAIT, QUIET, PUT_VALUE, ARRIVE, AWAIT = range(7)
MAX_OPS = 48
TIMEOUT, BAD_INPUT, MIXED_HANDLES = 1, 2, 3
BAD_ID, BAD_DUPLICATE = 1, 2
LOST_TWICE = -(1 << 31)
"""Added to the id of a lost rank's expert that a token names a second time."""
STAGES = (
    "none",
    "dispatch rows of the round before",
    "dispatch header",
    "this GPU's own blocks",
    "dispatch rows",
    "combine ready",
    "combine rows",
    "combine rows read",
    "wait",
    "barrier",
    "sources read by the network",
    "arrival at the peer",
    "dispatch room in the peer's ring",
    "dispatch rows of another host",
    "combine room in the peer's ring",
    "combine rows of another host",
)
ABORT_WORDS = struct.Struct("=IIQ")
"""A rank's abort words (hal_cuda.h): the failed rank, whether any closed, the mask of those."""
CLOSED_RANKS = 64
STAMPED_STAGES = (2, 3, 5)
"""Stages whose words carry the round in their upper half."""
STAGE_WAIT, STAGE_BARRIER = 8, 9


def _structure(name: str, *fields: tuple[Any, str]) -> Any:
    pairs = [(field, kind) for kind, fields_of in fields for field in fields_of.split()]
    return type(name, (ctypes.Structure,), {"_fields_": pairs})


Error: Any = _structure(
    "Error",
    (c_uint32, "claimed"),
    (c_int32, "kind rank stage queue detail token expert"),
    (c_uint64, "expected seen"),
)
Ep: Any = _structure(
    "Ep",
    (c_int32, "device unused"),
    (c_uint64, "peers peer_stride state scratch dirty error abort timeout_ns"),
    (c_uint64, "off_header off_arrive off_dispatch_flags off_ready off_done off_combine_flags"),
    (
        c_uint64,
        "off_slots slot_bytes slot_scales slot_idx slot_weights slot_counts slot_offsets slot_meta slot_back slot_own "
        "slot_tallies",
    ),
    (c_int32, "world rank experts local_experts topk max_tokens scale_dim"),
    (c_int32, "row_bytes combine_row_bytes combine_type"),
    (c_int32, "expert_layout fixed_slots alignment slots slot_rows"),
    (c_uint32, "owner_inverse"),
    (c_int32, "keep_source"),
)
HandleArrays: Any = _structure(
    "HandleArrays", (c_uint64, "pos idx weights source counts expert_counts expert_offsets lists")
)
"""A handle's addresses, which lie in the arguments of dispatch and of combine alike: worked out once, named as one."""
DispatchArgs: Any = _structure(
    "DispatchArgs",
    (c_uint64, "x topk_idx topk_weights scales"),
    (HandleArrays, "handle"),
    (c_uint64, "host_word"),
    (c_uint32, "sequence"),
    (c_int32, "tokens idx_is_64 cached slot next_slot phases pad_to_rows blocks threads push_warps"),
)
CombineArgs: Any = _structure(
    "CombineArgs",
    (c_uint64, "x out bias0 bias1 row_weights out_weights"),
    (HandleArrays, "handle"),
    (c_int64, "window_offset"),
    (c_int32, "tokens weighted carries_weights scratch_slot push phases late_done blocks threads push_blocks fly_ahead"),
)
SlotView: Any = _structure(
    "SlotView", (c_uint64, "offset"), (c_int64, "rows columns"), (c_int32, "code bits dims unused")
)
_PYTHON = "PyCapsule_New PyObject_CallFunctionObjArgs PyTuple_New PyTuple_SetItem Py_IncRef Py_DecRef PyErr_NoMemory"
Python: Any = _structure("Python", (c_void_p, _PYTHON), (py_object, "none from_dlpack"))
Window: Any = _structure("Window", (c_uint64, "ptr bytes peers peer_stride handle"))
LitmusOp: Any = _structure(
    "LitmusOp",
    (c_int32, "what thread peer queue order network line count source_line stage_line target_register value_register"),
    (c_int32, "set own_line own_set own_order"),
    (c_uint64, "value own_value"),
)
Litmus: Any = _structure(
    "Litmus",
    (c_uint64, "ops results"),
    (c_uint64 * 8, "peer"),
    (c_uint64, "window off_starts off_barriers off_lines seed pause_ns"),
    (c_uint32, "repetitions lines all_threads barrier_threads"),
    (c_int32 * 8, "rank_of_thread"),
    (c_int32, "ops_count registers ranks rank threads first_thread queues network"),
)
Op: Any = _structure(
    "Op",
    (c_int32, "kind peer order signal_op stage queue"),
    (c_uint64, "address source bytes value window source_window"),
    (c_int32, "network source_only"),
)
Gin: Any = _structure(
    "Gin",
    (c_uint64, "comm window words peers peer_stride state"),
    (c_int32, "world rank lsa_size lsa_rank queues signals strong rail slots unused"),
)
GinNeeds: Any = _structure("GinNeeds", (c_int32, "queues signals strong traffic_class slots"))
GinProperties: Any = _structure(
    "GinProperties",
    (c_int32, "type connection contexts connections signals strong va_signals traffic_class lsa_size rail_size"),
)
GinCheckArgs: Any = _structure(
    "GinCheckArgs",
    (c_int32, "kind rounds rows queue threads unused"),
    (c_uint64, "window base row_bytes before bad checked"),
)
GIN_TYPES = {0: "none", 2: "proxy", 3: "GDAKI", 4: "GPI", 100: "emulated"}
GIN_CONNECTIONS = {1: "full", 2: "rail"}


class Hosts(ctypes.Structure):
    """What an ExpertParallel over several hosts has besides."""

    _fields_ = (
        ("gin", Gin),
        *((name, c_uint64) for name in ["window", "counts", "plan"]),
        *((name, c_uint64) for name in ["off_outbox", "off_inbox", "off_headers_came", "off_raised"]),
        *((name, c_uint64) for name in ["off_sending", "off_received", "off_combine_sending", "off_combine_received"]),
        *((name, c_int32) for name in ["hierarchical", "peers", "channels", "cells", "batch"]),
        *((name, c_int32) for name in ["cell_bytes", "combine_cell_bytes", "record_bytes"]),
    )


class Properties(ctypes.Structure):
    """What NCCL and the driver say of a communicator and its GPU."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in ["world", "rank", "lsa_size", "lsa_rank", "gin_type", "device", "nccl_version", "sms"]
        ),
        ("gpu", c_char * 64),
        ("rail_type", c_int32),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "load_nccl": (c_char_p, POINTER(c_int)),
    "unique_id": (c_void_p,),
    "comm_create": (c_void_p, c_int, c_int, c_int, POINTER(c_void_p)),
    "emulator_create": (c_void_p, c_int, c_int, c_int, c_int, c_double, POINTER(c_void_p)),
    "emulator_mutate": (c_int,),
    "emulator_mutate_network": (c_int,),
    "emulator_configure": (c_uint64, c_int),
    "emulator_limit": (c_double,),
    "emulator_count_loads": (c_uint64, c_uint64, POINTER(c_uint64)),
    "emulator_count_stores": (c_uint64, c_uint64, POINTER(c_uint64)),
    "emulator_begin_capture": (c_uint64, c_int),
    "emulator_end_capture": (c_uint64, POINTER(c_uint64)),
    "emulator_launch_graph": (c_uint64, c_uint64),
    "emulator_destroy_graph": (c_uint64,),
    "comm_adopt": (c_void_p, c_int, POINTER(c_void_p)),
    "comm_properties": (c_void_p, c_void_p),
    "comm_destroy": (c_void_p, c_int),
    "gin_create": (c_void_p, c_void_p, c_void_p, c_void_p),
    "window_create": (c_void_p, c_uint64, c_void_p),
    "window_destroy": (c_void_p, c_void_p),
    "window_free": (c_void_p, c_int, c_void_p),
    "dispatch": (c_void_p, c_void_p, c_uint64),
    "combine": (c_void_p, c_void_p, c_uint64),
    "hosts_dispatch": (c_void_p, c_void_p, c_void_p, c_uint64),
    "hosts_combine": (c_void_p, c_void_p, c_void_p, c_uint64),
    "renumber": (c_int, c_uint64, c_int, c_int64, c_int, c_uint64, c_int, c_uint64, c_uint64),
    "move_rows": (c_int, c_uint64, c_uint64, c_uint64, c_uint64, c_int64, c_uint64, c_uint64),
    "await_rows": (c_void_p, c_uint32, c_void_p, c_double, POINTER(c_uint32)),
    "ops": (c_void_p, c_void_p, c_int, c_uint64, c_uint64, c_uint64),
    "play": (c_void_p, c_void_p, c_void_p, c_uint64),
    "gin_check": (c_void_p, c_void_p, c_void_p, c_uint64, c_uint64),
    "gin_ops": (c_void_p, c_void_p, c_void_p, c_int, c_uint64, c_uint64, c_uint64),
    "device_count": (POINTER(c_int),),
    "malloc": (c_int, c_uint64, c_uint64, POINTER(c_uint64)),
    "free": (c_int, c_uint64, c_uint64),
    "host_alloc": (c_int, c_uint64, POINTER(c_void_p), POINTER(c_uint64)),
    "host_free": (c_void_p,),
    "memset": (c_int, c_uint64, c_int, c_uint64, c_uint64),
    "copy": (c_int, c_uint64, c_uint64, c_uint64, c_uint64),
    "stream_create": (c_int, POINTER(c_uint64)),
    "stream_destroy": (c_int, c_uint64),
    "stream_sync": (c_int, c_uint64),
    "stream_query": (c_int, c_uint64, POINTER(c_int)),
    "stream_capturing": (c_int, c_uint64, POINTER(c_int)),
    "stream_order": (c_int, c_uint64, c_uint64),
}


def python(from_dlpack: Any) -> Any:
    """This Python, for the library's ``tensors``."""
    addresses = [ctypes.cast(getattr(ctypes.pythonapi, name), c_void_p).value for name in _PYTHON.split()]
    return Python(*addresses, None, from_dlpack)


class Library:
    """The loaded library; every function raises HalError with its reason. ctypes releases the GIL during each call."""

    def __init__(self, path: str) -> None:
        self.nccl_path, self.nccl_was_open = "", False
        """The NCCL opened, and whether somebody else in this process had opened it before HAL did."""
        self._cdll = ctypes.CDLL(path)
        self._cdll.hal_cuda_last_error.restype = c_char_p
        if self._cdll.hal_cuda_abi() != ABI:
            raise BackendUnavailable(
                "cuda", f"{path} has ABI {self._cdll.hal_cuda_abi()}, not {ABI}", "install moe-hal again"
            )
        self.leases = self._cdll.hal_cuda_leases
        self.leases.argtypes, self.leases.restype = (c_int,), POINTER(c_int64)
        # By PyDLL: it calls Python, so the GIL stays.
        self.tensors = ctypes.PyDLL(path, handle=self._cdll._handle).hal_cuda_tensors
        self.tensors.argtypes = (c_void_p, c_void_p, c_int, c_uint64, c_int64, c_int, c_void_p)
        self.tensors.restype = py_object
        check_bytes = self._cdll.hal_cuda_gin_check_bytes
        check_bytes.argtypes, check_bytes.restype = (c_void_p, c_void_p), c_uint64
        self.gin_check_bytes = check_bytes
        self.state_bytes = int(self._cdll.hal_cuda_state_bytes())
        for name, arguments in _SIGNATURES.items():
            if name.startswith("emulator_") and not hasattr(self._cdll, f"hal_cuda_{name}"):
                continue
            function = getattr(self._cdll, f"hal_cuda_{name}")
            function.argtypes, function.restype = arguments, c_int
            setattr(self, f"raw_{name}", function)

    def __getattr__(self, name: str) -> Any:
        raw = self.__dict__.get(f"raw_{name}")
        if raw is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> None:
            if raw(*arguments) != 0:
                raise self.error()

        self.__dict__[name] = call
        return call

    def error(self) -> HalError:
        """That the last call of this thread failed."""
        return HalError(f"cuda: {self.reason()}")

    def reason(self) -> str:
        """Why the last call of this thread failed."""
        return str(self._cdll.hal_cuda_last_error().decode(errors="replace"))

    def value(self, name: str, kind: Any, *arguments: Any) -> Any:
        """A function whose last argument is where its result goes."""
        out = kind()
        getattr(self, name)(*arguments, byref(out))
        return out.value


_lock = threading.Lock()
_loaded: Library | None = None
_emulated: Library | None = None


def load_emulated() -> Library:
    """The library of emulated GPUs; once in a process."""
    global _emulated  # noqa: PLW0603 (one library for each process)
    with _lock:
        if _emulated is None:
            path = build.shipped(build.EMULATED)
            if path is None:
                raise BackendUnavailable(
                    "cuda", f"{build.EMULATED} was not built", "install moe-hal with a C++20 compiler"
                )
            _emulated = Library(str(path))
        return _emulated


def load() -> Library:
    """The library for the NCCL found here, with that NCCL opened; once in a process."""
    global _loaded  # noqa: PLW0603 (one library for each process)
    with _lock:
        if _loaded is None:
            found = nccl.installed()
            if not found:
                raise BackendUnavailable("cuda", "NCCL is not installed", nccl.FIX)
            library = Library(str(build.library(found[0])))
            library.nccl_path, library.nccl_was_open = str(found[0].library), nccl.is_open(found[0].library)
            version = c_int()
            if library.raw_load_nccl(str(found[0].library).encode(), byref(version)) != 0:
                raise BackendUnavailable("cuda", library.reason(), "install NCCL 2.30.7 or newer")
            _loaded = library
        return _loaded
