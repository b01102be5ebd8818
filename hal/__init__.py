# SPDX-License-Identifier: Apache-2.0
"""HAL: mixture-of-experts dispatch and combine over NVIDIA and Ascend, with an executable ordering contract.

    with hal.connect(backend="host") as comm:
        ep = comm.expert_parallel(num_experts=256, top_k=8, hidden=7168, max_tokens=4096, dtype="bfloat16")
        out = ep.dispatch(x, topk_idx, topk_weights)
        y = ep.combine(expert(out.x), out.handle)

Everything below is imported when it is first used: ``import hal`` alone loads no framework, no Hydra and no engine.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Each public name and the module that defines it.
_HOMES = {
    "hal.launch": ("connect", "spawn"),
    "hal.communicator": ("Communicator", "Queue", "Team", "Window"),
    "hal.expert_parallel": ("Dispatched", "Event", "ExpertParallel", "Handle"),
    "hal.config": ("ExpertParallelSpec", "HalConfig", "TopologyConfig"),
    "hal.compose": ("load_config",),
    "hal.ordering": ("Order", "OrderingProfile", "QuietScope", "SignalOp"),
    "hal.errors": ("BackendUnavailable", "CapacityError", "ContractError", "HalError", "PeerTimeout", "RankMasked"),
    "hal.arrays": ("Buffer", "as_buffer", "to_kind"),
    "hal.versions": ("show_versions",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]  # noqa: PLE0604 (all of them are strings)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        if name in ("torch", "reference"):  # submodules that people reach for as attributes
            return importlib.import_module(f"hal.{name}")
        raise AttributeError(f"module 'hal' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from hal.arrays import Buffer as Buffer
    from hal.arrays import as_buffer as as_buffer
    from hal.arrays import to_kind as to_kind
    from hal.communicator import Communicator as Communicator
    from hal.communicator import Queue as Queue
    from hal.communicator import Team as Team
    from hal.communicator import Window as Window
    from hal.compose import load_config as load_config
    from hal.config import ExpertParallelSpec as ExpertParallelSpec
    from hal.config import HalConfig as HalConfig
    from hal.config import TopologyConfig as TopologyConfig
    from hal.errors import BackendUnavailable as BackendUnavailable
    from hal.errors import CapacityError as CapacityError
    from hal.errors import ContractError as ContractError
    from hal.errors import HalError as HalError
    from hal.errors import PeerTimeout as PeerTimeout
    from hal.errors import RankMasked as RankMasked
    from hal.expert_parallel import Dispatched as Dispatched
    from hal.expert_parallel import Event as Event
    from hal.expert_parallel import ExpertParallel as ExpertParallel
    from hal.expert_parallel import Handle as Handle
    from hal.launch import connect as connect
    from hal.launch import spawn as spawn
    from hal.ordering import Order as Order
    from hal.ordering import OrderingProfile as OrderingProfile
    from hal.ordering import QuietScope as QuietScope
    from hal.ordering import SignalOp as SignalOp
    from hal.versions import show_versions as show_versions
