# SPDX-License-Identifier: Apache-2.0
"""Arrays in and out: every library × dtype, the same memory, nothing written behind it, and lifetimes."""

import array
import ctypes
import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest

from hal import _dlpack
from hal.arrays import ITEMSIZE, NUMPY_DTYPES, Buffer, as_buffer, as_numpy, dtype_name, kind_of, to_kind
from hal.errors import ContractError

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moe-hal[torch]'")
jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'moe-hal[jax]'")
jnp = jax.numpy


@pytest.fixture(autouse=True)
def _wide_types():
    """int64 has no zero-copy form in JAX without them."""
    with jax.enable_x64(True):
        yield


DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "int64", "uint8"]
LIBRARIES = ["numpy", "torch", "jax"]
SHAPE = (3, 16)
SENTINEL = 0xA5


def raw(buffer: Buffer) -> bytes:
    return ctypes.string_at(buffer.ptr, buffer.nbytes)


class Arena:
    """Memory with 64 sentinel bytes behind the array: nobody may write there."""

    def __init__(self, dtype: str, shape: tuple[int, ...] = SHAPE) -> None:
        nbytes = int(np.prod(shape)) * ITEMSIZE[dtype]
        self.memory = np.full(nbytes + 192, SENTINEL, np.uint8)
        start = -self.memory.ctypes.data % 64  # XLA takes aligned memory without a copy
        self.body, self.behind = self.memory[start : start + nbytes], self.memory[start + nbytes :]
        self.body[:] = np.random.default_rng(0).integers(0, 64, nbytes)  # no NaN in any of the types
        self.buffer = Buffer(self.body.ctypes.data, shape, dtype, "cpu", self)

    def check(self) -> None:
        assert (self.behind == SENTINEL).all()


def address(obj: object) -> int:
    if isinstance(obj, np.ndarray):
        return obj.ctypes.data
    return obj.data_ptr() if isinstance(obj, torch.Tensor) else obj.unsafe_buffer_pointer()


def make(library: str, dtype: str, shape: tuple[int, ...] = SHAPE) -> object:
    values = (np.arange(np.prod(shape)) % 7).reshape(shape)
    if library == "numpy":
        return values.astype(NUMPY_DTYPES[dtype])
    if library == "torch":
        return torch.from_numpy(values).to(getattr(torch, dtype))
    return jnp.asarray(values.astype(NUMPY_DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_in_is_the_callers_memory(library, dtype):
    obj = make(library, dtype)
    buffer = as_buffer(obj)
    assert (buffer.ptr, buffer.shape, buffer.dtype, buffer.device) == (address(obj), SHAPE, dtype, "cpu")
    assert buffer.readonly == (library == "jax")
    assert kind_of(obj) == library
    np.testing.assert_array_equal(as_numpy(buffer).astype(np.int64), np.arange(48).reshape(SHAPE) % 7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_out_is_the_buffers_memory(library, dtype):
    arena = Arena(dtype)
    out = to_kind(arena.buffer, library)
    assert kind_of(out) == library
    assert address(out) == arena.buffer.ptr
    again = as_buffer(out)
    assert (again.ptr, again.shape, again.dtype) == (arena.buffer.ptr, SHAPE, dtype)
    assert raw(again) == arena.body.tobytes()
    if library != "jax":  # writing through the result stays inside
        as_numpy(as_buffer(out, writable=True)).view(np.uint8)[...] = 1
        assert (arena.body == 1).all()
    arena.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_out_keeps_the_owner_and_lets_it_go(library, dtype):
    arena = Arena(dtype)
    alive = weakref.ref(arena)
    out = to_kind(arena.buffer, library)
    part = out if library == "jax" else out[1:]  # a slice of a JAX array is a copy
    del arena, out
    gc.collect()
    assert alive() is not None, "a slice of the result must keep the memory"
    del part
    gc.collect()
    assert alive() is None, "nothing may keep the memory after the last array is gone"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_round_trip_gives_the_array_itself_or_its_memory(library, dtype):
    obj = make(library, dtype)
    back = to_kind(as_buffer(obj), obj)
    assert back is obj


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(0, 16), (0,), (4, 0)])
def test_empty(library, dtype, shape):
    out = to_kind(Buffer(0, shape, dtype, "cpu"), library)
    again = as_buffer(out)
    assert (again.shape, again.dtype, kind_of(out)) == (shape, dtype, library)


@pytest.mark.parametrize(
    ("library", "obj"),
    [
        ("numpy", np.zeros((4, 6), np.float32)[:, ::2]),
        ("numpy", np.zeros((4, 6), np.float32).T),
        ("torch", torch.zeros(4, 6)[:, ::2]),
        ("torch", torch.zeros(4, 6).t()),
        ("torch", torch.zeros(1, 6).expand(4, 6)),
    ],
)
def test_what_would_need_a_copy_is_refused_with_shape_strides_and_fix(library, obj):
    strides = obj.stride() if library == "torch" else tuple(s // obj.itemsize for s in obj.strides)
    with pytest.raises(ContractError) as error:
        as_buffer(obj)
    text = str(error.value)
    assert str(tuple(obj.shape)) in text
    assert str(strides) in text
    assert "contiguous" in text.split("call")[1]


def test_a_misaligned_array_is_refused():
    with pytest.raises(ContractError, match="not aligned"):
        as_buffer(np.zeros(17, np.uint8)[1:].view(np.float32))


def test_axes_of_one_element_do_not_matter():
    assert as_buffer(torch.zeros(6, 1).t()).shape == (1, 6)
    assert as_buffer(np.zeros((6, 1), np.float32).T).shape == (1, 6)


def test_read_only_is_refused_where_hal_writes():
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    assert as_buffer(frozen).readonly
    for obj in (frozen, b"1234", jnp.zeros(4)):
        with pytest.raises(ContractError, match=r"read-only .* writable copy"):
            as_buffer(obj, writable=True)
    as_buffer(bytearray(b"1234"), writable=True)


def test_torch_of_read_only_memory_is_a_copy():
    arena = Arena("float32")
    frozen = Buffer(arena.buffer.ptr, SHAPE, "float32", "cpu", arena, readonly=True)
    out = to_kind(frozen, "torch")
    assert out.data_ptr() != frozen.ptr
    assert raw(as_buffer(out)) == raw(frozen)


def test_bytes_like():
    for obj in (b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), array.array("i", [1, 2])):
        buffer = as_buffer(obj)
        assert kind_of(obj) == "bytes"
        assert raw(buffer) == bytes(obj)
    assert as_buffer(array.array("i", [1, 2])).dtype == "int32"
    with pytest.raises(ContractError, match="contiguous"):
        as_buffer(memoryview(b"abcdef")[::2])


class Producer:
    """A stranger's array: only DLPack, of a chosen age."""

    def __init__(self, buffer: Buffer, versioned: bool) -> None:
        self.buffer, self.versioned = buffer, versioned

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, stream=None, **kwargs):
        if not self.versioned:
            if kwargs:
                raise TypeError("unexpected keyword max_version")
            return _dlpack.Exporter(self.buffer).__dlpack__()
        return _dlpack.Exporter(self.buffer).__dlpack__(**kwargs)


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dlpack_producer(dtype, versioned):
    arena = Arena(dtype)
    told = as_buffer(Producer(arena.buffer, versioned))
    assert (told.ptr, told.shape, told.dtype) == (arena.buffer.ptr, SHAPE, dtype)
    assert type(to_kind(told, Producer(arena.buffer, versioned))) is np.ndarray


def test_dlpack_carries_read_only():
    arena = Arena("bfloat16")
    frozen = Buffer(arena.buffer.ptr, SHAPE, "bfloat16", "cpu", arena, readonly=True)
    assert as_buffer(Producer(frozen, True)).readonly
    with pytest.raises(BufferError, match="read-only"):
        _dlpack.Exporter(frozen).__dlpack__()


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_an_unused_capsule_lets_go(version):
    arena = Arena("float32")
    alive = weakref.ref(arena)
    before = len(_dlpack._exports)
    capsule = _dlpack.Exporter(arena.buffer).__dlpack__(max_version=version)
    assert len(_dlpack._exports) == before + 1
    del arena
    assert alive() is not None
    del capsule
    gc.collect()
    assert alive() is None
    assert len(_dlpack._exports) == before


def test_dlpack_export_refuses_a_copy_and_another_device():
    exporter = _dlpack.Exporter(Arena("float32").buffer)
    for options in ({"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError, match="never copies"):
            exporter.__dlpack__(**options)


def test_numpy_takes_the_export():
    arena = Arena("float32")
    assert np.from_dlpack(_dlpack.Exporter(arena.buffer)).ctypes.data == arena.buffer.ptr


class Device:
    id = 3


class CudaArray:
    """Looks like CuPy's arrays: the interface names bfloat16 as raw bytes, the dtype names it properly."""

    def __init__(self, strides=None):
        self.dtype, self.device = NUMPY_DTYPES["bfloat16"], Device()
        data = (0x7000, False)
        self.__cuda_array_interface__ = {
            "data": data,
            "shape": (2, 8),
            "typestr": "<V2",
            "strides": strides,
            "version": 3,
        }


def test_cuda_array_interface_is_read_without_touching_the_memory():
    buffer = as_buffer(CudaArray())
    assert (buffer.ptr, buffer.shape, buffer.dtype, buffer.device) == (0x7000, (2, 8), "bfloat16", "cuda:3")
    assert as_buffer(CudaArray((16, 2))).shape == (2, 8)
    with pytest.raises(ContractError, match=r"strides \(16, 1\)"):
        as_buffer(CudaArray((32, 2)))
    with pytest.raises(ContractError, match="cuda:3"):
        as_numpy(buffer)
    assert to_kind(buffer, CudaArray()).__dlpack_device__() == (2, 3)


def test_what_is_no_array_is_refused():
    for obj in ([1.0, 2.0], 3.0, "abc", None):
        with pytest.raises(ContractError, match="is no array"):
            as_buffer(obj)
    for obj in (np.zeros(2, np.complex64), np.zeros(2, ">f4"), torch.zeros(2, dtype=torch.complex64)):
        with pytest.raises(ContractError, match="not one of HAL's"):
            as_buffer(obj)
    with pytest.raises(ContractError, match="to_dense"):
        as_buffer(torch.zeros(2, 2).to_sparse())


def test_a_gradient_is_not_lost_silently():
    x = torch.zeros(2, 2, requires_grad=True)
    with pytest.raises(ContractError, match=r"hal\.torch"):
        as_buffer(x)
    with torch.no_grad():
        assert as_buffer(x).ptr == x.data_ptr()


def test_a_tracer_is_refused():
    with pytest.raises(ContractError, match="tracer"):
        jax.jit(lambda x: as_buffer(x) and x)(jnp.zeros(4))


def test_dtype_names():
    given = ["bfloat16", torch.bfloat16, jnp.bfloat16, NUMPY_DTYPES["bfloat16"], make("jax", "bfloat16").dtype]
    assert {dtype_name(d) for d in given} == {"bfloat16"}
    assert dtype_name(np.float32) == "float32"
    with pytest.raises(ContractError, match="float4"):
        dtype_name("float4")


def test_a_jax_array_outliving_everything_does_not_crash_the_exit():
    code = (
        "import numpy as np, jax; from hal.arrays import as_buffer, to_kind\n"
        "a = np.zeros(64, np.float32); kept = to_kind(as_buffer(a), 'jax'); jax.kept = kept; print(kept.sum())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "0.0"), done.stderr
