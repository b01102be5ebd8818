# SPDX-License-Identifier: Apache-2.0
"""Streams and CUDA graphs for bodies of tests that run on GPUs and on emulated ones.

Torch knows those of GPUs. Arrays of emulated GPUs lie in host memory, for which no framework has streams: the test
patches in :func:`caller_stream`, and what is asynchronous here goes by the emulated library.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_uint64
from typing import Any

import pytest
from hal_cuda import native, quick

import hal
from hal import expert_parallel

_here = threading.local()
"""``stream``: of the thread, while :meth:`EmulatedStream.current` is on."""


def caller_stream(*of_what: Any) -> int | None:
    """In place of the functions by which HAL asks frameworks."""
    stream: int | None = getattr(_here, "stream", None)
    return stream


@pytest.fixture
def caller_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """HAL's calls with arrays in host memory go to the stream that is current in their thread, if one is."""
    monkeypatch.setattr(expert_parallel, "current_stream", caller_stream)
    monkeypatch.setattr(quick, "_no_stream", caller_stream)


class EmulatedGraph:
    """What was captured. Its arrays are the caller's to keep."""

    def __init__(self, library: native.Library, stream: int) -> None:
        self._library, self._stream, self._graph = library, stream, 0

    def end(self) -> None:
        self._graph = self._library.value("emulator_end_capture", c_uint64, self._stream)

    def replay(self) -> None:
        self._library.emulator_launch_graph(self._graph, self._stream)

    def __del__(self) -> None:
        if self._graph:
            self._library.raw_emulator_destroy_graph(self._graph)


class EmulatedStream:
    """A stream of this rank's emulated GPU."""

    def __init__(self, comm: hal.Communicator) -> None:
        self._library, self._device = native.load_emulated(), comm.rank
        self.number = int(self._library.value("stream_create", c_uint64, self._device))

    def __del__(self) -> None:
        self._library.raw_stream_destroy(self._device, self.number)

    @contextmanager
    def current(self) -> Iterator[None]:
        _here.stream = self.number
        try:
            yield
        finally:
            _here.stream = None

    @contextmanager
    def capture(self) -> Iterator[EmulatedGraph]:
        """In the strictest mode, as torch.cuda.graph: nothing of the process may wait for the device meanwhile."""
        graph = EmulatedGraph(self._library, self.number)
        self._library.emulator_begin_capture(self.number, 0)
        try:
            with self.current():
                yield graph
        except BaseException:
            self._library.raw_emulator_end_capture(self.number, c_uint64())
            raise
        graph.end()

    def copy(self, to: Any, source: Any) -> None:
        """In the stream's order."""
        assert to.is_contiguous()
        assert source.is_contiguous()
        assert (to.dtype, to.shape) == (source.dtype, source.shape)
        self._library.copy(self._device, to.data_ptr(), source.data_ptr(), to.nbytes, self.number)

    def poison(self, tensor: Any) -> None:
        self._library.memset(self._device, tensor.data_ptr(), 0xEE, tensor.nbytes, self.number)

    def synchronize(self) -> None:
        self._library.stream_sync(self._device, self.number)


class TorchStream:
    """The same on a GPU."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.Stream()

    def current(self) -> Any:
        return self._torch.cuda.stream(self._stream)

    @contextmanager
    def capture(self) -> Iterator[TorchGraph]:
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self._stream):
            yield TorchGraph(graph, self)

    def copy(self, to: Any, source: Any) -> None:
        with self.current():
            to.copy_(source)

    def poison(self, tensor: Any) -> None:
        with self.current():
            tensor.view(self._torch.uint8).fill_(0xEE)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()


class TorchGraph:
    """What was captured, replayed on the stream on which it was."""

    def __init__(self, graph: Any, on: TorchStream) -> None:
        self._graph, self._on = graph, on

    def replay(self) -> None:
        with self._on.current():
            self._graph.replay()


def stream_of(comm: hal.Communicator) -> Any:
    """A new stream on this rank's device."""
    return EmulatedStream(comm) if comm.config.transport == "gin_emulated" else TorchStream()
