# SPDX-License-Identifier: Apache-2.0
"""What kernels report in pinned memory, as HAL's errors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_uint64, c_void_p
from typing import Any

from hal.errors import ContractError, PeerTimeout
from hal_cuda import native
from hal_cuda.watch import Watch


class PeerRefused(ContractError):
    """Another rank's ids broke the contract: this rank's part of the round is to be done again with that rank's next."""


_REASONS = ("no answer", "it failed and said so", "it closed its communicator")


class Faults:
    """One record that the device writes and the host reads without asking the device. ``ranks``, and ``experts`` of
    ``all_experts``: the run's numbers of those that kernels number from 0."""

    def __init__(
        self,
        library: native.Library,
        device: int,
        watch: Watch,
        ranks: Sequence[int],
        experts: Sequence[int] = (),
        all_experts: int = 0,
    ) -> None:
        self._library, self._watch, self._ranks = library, watch, ranks
        self._experts, self._all_experts = experts, all_experts
        host, address = c_void_p(), c_uint64()
        size = ctypes.sizeof(native.Error)
        library.host_alloc(device, size, byref(host), byref(address))
        ctypes.memset(host, 0, size)
        self.host, self.address = host.value or 0, int(address.value)
        self.record: Any = native.Error.from_address(self.host)

    def check(self, timeout: float) -> None:
        """Raise what was reported since the last look. After a PeerTimeout the record stays: nothing goes on."""
        kind = self.record.kind
        if kind == 0:
            return
        record = self.record
        if kind == native.TIMEOUT:
            stamped = record.stage in native.STAMPED_STAGES
            raise PeerTimeout(
                self._ranks[record.rank] if record.rank >= 0 else record.rank,
                native.STAGES[record.stage],
                queue=record.queue,
                expected=record.expected >> 32 if stamped else record.expected,
                seen=record.seen >> 32 if stamped else record.seen,
                seconds=timeout if record.detail == 0 else 0.0,
                reason=self._watch.reason(record.rank) or _REASONS[record.detail],
            )
        copy = native.Error.from_buffer_copy(record)
        self.forget()
        copy.rank = self._ranks[copy.rank]
        if copy.detail == native.BAD_ID and copy.expert < native.LOST_TWICE + self._all_experts:
            copy.detail, copy.expert = native.BAD_DUPLICATE, copy.expert - native.LOST_TWICE
        elif copy.detail == native.BAD_DUPLICATE and copy.token >= 0:
            copy.expert = self._experts[copy.expert]
        raise _refusal(copy, self._all_experts)

    def forget(self) -> None:
        """The kernels may report again."""
        ctypes.memset(self.host, 0, ctypes.sizeof(native.Error))

    def close(self) -> None:
        if self.host:
            self._library.raw_host_free(self.host)
            self.host = 0


def _refusal(record: Any, experts: int) -> ContractError:
    if record.kind == native.MIXED_HANDLES:
        return ContractError(
            f"rank {record.rank} reuses a handle in this dispatch where this rank does not, or the reverse: either all "
            "ranks pass a handle or none does; nothing was sent"
        )
    if record.token < 0:
        return PeerRefused(
            f"rank {record.rank} gave ids that break the contract, so this dispatch moved nothing; its own error names them. "
            "Dispatch again, as that rank will"
        )
    if record.detail == native.BAD_DUPLICATE:
        return ContractError(
            f"token {record.token} names expert {record.expert} twice: merge them and add their weights, or set one to -1"
        )
    return ContractError(
        f"token {record.token} names expert {record.expert}, but expert ids are 0 … {experts - 1}, or -1 for no "
        "expert: these are global ids, so check the router, or num_experts"
    )
