# SPDX-License-Identifier: Apache-2.0
"""Rounds of dispatch and combine whose results can be judged afterwards, whoever was lost in between: each rank's input is
known from its rank and the round alone, and each result says which ranks it went without."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from kernel_ranks import random_rows, random_tokens, same_bits

import hal
from hal import reference
from hal.config import ExpertParallelSpec, TopologyConfig
from hal.placing import fetched, placed


def spec_of(ranks: int, **settings: Any) -> ExpertParallelSpec:
    known = {"num_experts": 3 * ranks, "top_k": 3, "hidden": 16, "max_tokens": 8, "dtype": "float32"}
    return ExpertParallelSpec(**{**known, "combine_dtype": "float32", "on_peer_loss": "mask", **settings})


def inputs(spec: ExpertParallelSpec, ranks: int, number: int) -> Any:
    """Of all ranks in one round."""
    rng = np.random.default_rng([77, number])
    counts = rng.integers(0, spec.max_tokens + 1, ranks)
    return random_tokens(rng, spec, counts, none=0.1)


def expert_rows(rank: int, number: int, received: Any) -> Any:
    """What a rank's experts answer; each rank's is another."""
    return np.array(received) * np.float32(rank + 2) + np.float32(number)


PLANES = ("x", "topk_idx", "topk_weights", "tokens_per_expert", "expert_offsets")


def round_of(ep: hal.ExpertParallel, number: int, *, halves: bool = False, device: str = "cpu") -> dict[str, Any]:
    """One dispatch and its combine on this rank. With ``halves`` inputs are overwritten between the halves. The arrays are
    NumPy's, or torch's on ``device``."""

    tokens = inputs(ep.spec, ep.world_size, number)
    x, idx, weights = (placed(getattr(tokens, name)[ep.rank], device) for name in ("x", "topk_idx", "topk_weights"))
    if halves:
        sent = ep.dispatch_send(x, idx, weights)
        x[...], weights[...] = -1, -1
        out = ep.dispatch_recv(sent)
    else:
        out = ep.dispatch(x, idx, weights)
    got = {name: None if getattr(out, name) is None else np.array(fetched(getattr(out, name))) for name in PLANES}
    got["dispatch masked"] = out.masked_ranks
    rows = placed(expert_rows(ep.rank, number, fetched(out.x)), device)
    if halves:
        pending = ep.combine_send(rows, out.handle)
        rows[...] = -1
        got["y"] = np.array(fetched(ep.combine_recv(pending)))
    else:
        got["y"] = np.array(fetched(ep.combine(rows, out.handle)))
    got["combine masked"] = ep.masked_ranks
    return got


def judge(
    spec: ExpertParallelSpec,
    ranks: int,
    results: Mapping[int, Sequence[dict[str, Any]]],
    nodes: int = 1,
    slow: Collection[int] = (),
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every rank's every round against the reference, bit for bit, under the masks that the round states; the masks of the
    rounds of the rank that got furthest. All ranks must state the same masks for a round, and masks only grow. A ``slow``
    rank, which the others left out, may have ended its last call with the masks from before."""
    longest = max(results.values(), key=len)
    masks = [_masks(got) for got in longest]
    flat = [set(mask) for pair in masks for mask in pair]
    assert all(a <= b for a, b in pairwise(flat)), masks
    for number, common in enumerate(masks):
        for rank, rounds in results.items():
            if number >= len(rounds):
                continue
            where, stated = f"round {number}, rank {rank}", _masks(rounds[number])
            alone = rank in slow and number == len(rounds) - 1
            assert stated == common or alone, where
            want, y = _expected(spec, ranks, nodes, number, *stated)
            for name in PLANES:
                same_bits(f"{where} {name}", rounds[number][name], getattr(want[rank], name))
            same_bits(f"{where} y", rounds[number]["y"], y[rank])
    return masks


def _masks(got: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return got["dispatch masked"], got["combine masked"]


@cache
def _expected(
    spec: ExpertParallelSpec,
    ranks: int,
    nodes: int,
    number: int,
    at_dispatch: tuple[int, ...],
    at_combine: tuple[int, ...],
) -> tuple[list[reference.Dispatched], Any]:
    tokens = inputs(spec, ranks, number)
    want, handle = reference.dispatch(spec, tokens.x, tokens.topk_idx, tokens.topk_weights, masked=at_dispatch)
    rows = [expert_rows(rank, number, out.x) for rank, out in enumerate(want)]
    return want, reference.combine(rows, handle, topology=TopologyConfig(nodes), masked=at_combine)


class Record:
    """A rank's rounds in a file, round by round, so that a killed rank leaves what it had."""

    def __init__(self, folder: Path | str, rank: int) -> None:
        self._file = (Path(folder) / f"rounds-{rank}.pkl").open("wb", buffering=0)

    def add(self, got: dict[str, Any]) -> None:
        self._file.write(pickle.dumps(got))

    @staticmethod
    def read(folder: Path) -> dict[int, list[Any]]:
        return {int(path.stem.split("-")[1]): list(_rounds_in(path)) for path in folder.glob("rounds-*.pkl")}


def _rounds_in(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # killed while it wrote
                return


__all__ = ["Record", "inputs", "judge", "random_rows", "round_of", "spec_of"]
