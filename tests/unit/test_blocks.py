from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_war.routing import blocks
from nemo_war.routing.blocks import Chains, salt_of

SIZE = 4
SALT = salt_of(0, "")
TEXT = np.random.default_rng(0).integers(0, 1000, 400, dtype=np.int32)


def from_scratch(prompt: np.ndarray, salt: int = SALT) -> list[int]:
    return Chains(SIZE).extend("t", prompt, salt)[0].tolist()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every block that is hashed from here on."""
    lengths = []
    digest = blocks.xxh3_64_intdigest

    def counting(block: memoryview, seed: int) -> int:
        lengths.append(len(block))
        return digest(block, seed)

    monkeypatch.setattr(blocks, "xxh3_64_intdigest", counting)
    return lengths


prompts = st.lists(st.integers(0, 3), max_size=40)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("tu"), st.sampled_from([SALT, 7]), st.integers(0, 40), prompts)))
def test_whatever_came_before_the_chain_is_that_of_the_whole_prompt(turns):
    chains, last, given_out = Chains(SIZE), {"t": [], "u": []}, []
    for name, salt, kept, more in turns:
        last[name] = [*last[name][:kept], *more]
        prompt = np.array(last[name], np.int32)
        chain = chains.extend(name, prompt, salt)[0]
        assert chain.tolist() == from_scratch(prompt, salt)
        given_out.append((chain, chain.tolist()))
    assert all(chain.tolist() == before for chain, before in given_out)


def test_only_new_blocks_are_hashed(hashed):
    chains = Chains(SIZE)
    chains.extend("t", TEXT[:301], SALT)
    hashed.clear()
    assert len(chains.extend("t", TEXT[:315], SALT)[0]) == 78
    assert hashed == [SIZE] * 3


def test_a_block_is_named_together_with_all_that_precedes_it():
    twice = from_scratch(np.tile(TEXT[:SIZE], 2))
    assert twice[0] != twice[1]
    other = TEXT.copy()
    other[0] += 1
    assert not set(from_scratch(TEXT)) & set(from_scratch(other))


def test_epochs_and_variants_share_nothing():
    salts = [salt_of(0, ""), salt_of(1, ""), salt_of(0, "adapter"), salt_of(1, "adapter"), salt_of(11, "")]
    names = [set(from_scratch(TEXT, salt)) for salt in salts]
    assert len(set.union(*names)) == len(salts) * len(TEXT) // SIZE


@pytest.mark.parametrize("place", [0, 150, 399])
def test_a_single_edited_token_is_noticed_wherever_it_is(place):
    chains = Chains(SIZE)
    before = chains.extend("t", TEXT, SALT)[0].tolist()
    edited = TEXT.copy()
    edited[place] += 1
    after = chains.extend("t", np.concatenate([edited, TEXT]), SALT)[0].tolist()
    assert after == from_scratch(np.concatenate([edited, TEXT]))
    assert sum(a == b for a, b in zip(before, after, strict=False)) == place // SIZE


def test_other_integers_and_other_strides_name_the_same_blocks():
    assert from_scratch(TEXT.astype(np.int64)) == from_scratch(TEXT)
    assert from_scratch(np.repeat(TEXT, 2)[::2]) == from_scratch(TEXT)


def test_no_more_trajectories_are_remembered_than_may_be(hashed):
    chains = Chains(SIZE, max_trajectories=3)
    for number in range(100):
        chains.extend(f"t{number}", TEXT, SALT)
    assert len(chains) == 3
    hashed.clear()
    chains.extend("t97", TEXT, SALT)
    assert not hashed
    assert chains.extend("t0", TEXT, SALT)[0].tolist() == from_scratch(TEXT)
    assert hashed


def test_a_dropped_trajectory_is_forgotten():
    chains = Chains(SIZE)
    chains.extend("t", TEXT, SALT)
    chains.drop("t")
    chains.drop("unknown")
    assert len(chains) == 0
