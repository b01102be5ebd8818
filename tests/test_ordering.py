# SPDX-License-Identifier: Apache-2.0
"""Profiles are data: complete, printable, sourced, and consistent with the contract."""

from __future__ import annotations

import itertools

import pytest

from hal.errors import ContractError
from hal.ordering import PROFILES, WORDS, Effect, Order, profile

NAMES = ["sc", "shm", "lsa", "gin", "gin-weak", "udma", "verbs-rc", "openshmem", "srd"]


def test_the_profiles_are_those_of_the_design() -> None:
    assert list(PROFILES) == NAMES


def test_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(ContractError, match=r"unknown ordering profile 'nvlink'; known: sc, .*srd"):
        profile("nvlink")


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_names_its_source_and_every_word_has_one_treatment(name: str) -> None:
    p = PROFILES[name]
    assert p.rules
    assert all(r.text and r.source for r in p.rules)
    assert not set(p.promoted) & set(p.built)
    assert {*p.promoted, *p.built, *p.promoted.values(), *p.costs} <= set(WORDS)
    text = p.describe()
    assert all(word in text for word in WORDS)
    assert all(r.source in text for r in p.rules)


@pytest.mark.parametrize("name", NAMES)
def test_strong_covers_relaxed_and_strong_as_the_contract_says(name: str) -> None:
    p = PROFILES[name]
    for earlier, effect in itertools.product((Order.RELAXED, Order.STRONG), Effect):
        assert p.must_precede(earlier, effect, Order.STRONG)


def test_what_udma_alone_leaves_open() -> None:
    udma = PROFILES["udma"]
    assert not udma.must_precede(Order.NONE, Effect.SIGNAL, Order.STRONG)
    assert not udma.must_precede(Order.STRONG, Effect.PUT, Order.RELAXED)
    assert PROFILES["gin"].must_precede(Order.NONE, Effect.SIGNAL, Order.STRONG), "gin does not tell NONE apart"
    assert udma.limits.max_put_bytes == 256 << 20
