"""The order of a batch that NeMo-RL cuts by position: trajectories stay at home as far as shares allow."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from nemo_war.generation.nemo_rl.affinity import Row, order, shares

REPLICAS = st.integers(1, 6)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Row], int]:
    replicas = draw(REPLICAS)
    row = st.builds(
        Row,
        st.none() | st.integers(0, replicas - 1),
        st.integers(1, 1000),
        st.sampled_from(["a", "b", "c", "d"]),
    )
    return draw(st.lists(row, max_size=40)), replicas


def cut(rows: list[Row], replicas: int) -> list[list[int]]:
    """Rows of each replica."""
    sequence = iter(order(rows, replicas))
    return [[next(sequence) for _ in range(share)] for share in shares(len(rows), replicas)]


@given(st.integers(0, 100), REPLICAS)
def test_shares_are_rounded_up_until_nothing_is_left(rows: int, replicas: int) -> None:
    got = shares(rows, replicas)
    assert len(got) == replicas
    assert sum(got) == rows
    assert got == sorted(got, reverse=True)
    assert all(share in (got[0], 0) for share in got[: rows // max(1, got[0])])


@given(batches())
def test_every_row_is_there_once(made: tuple[list[Row], int]) -> None:
    rows, replicas = made
    assert sorted(order(rows, replicas)) == list(range(len(rows)))


@given(batches())
def test_a_row_leaves_its_home_only_where_longer_ones_take_all_of_its_room(
    made: tuple[list[Row], int],
) -> None:
    rows, replicas = made
    for number, indices in enumerate(cut(rows, replicas)):
        at_home = [rows[index] for index in indices if rows[index].home == number]
        wanted = [row for row in rows if row.home == number]
        assert len(at_home) == min(len(wanted), shares(len(rows), replicas)[number])
        gone = Counter(wanted) - Counter(at_home)
        assert all(row.tokens <= stayed.tokens for row in gone for stayed in at_home)


@given(batches())
def test_rows_of_a_replica_keep_their_order(made: tuple[list[Row], int]) -> None:
    assert all(indices == sorted(indices) for indices in cut(*made))


@given(st.integers(1, 5), st.integers(1, 8), REPLICAS)
def test_siblings_begin_together_as_far_as_shares_allow(groups: int, members: int, replicas: int) -> None:
    rows = [Row(None, 10, f"g{group}") for _ in range(members) for group in range(groups)]
    split = [{rows[index].group for index in indices} for indices in cut(rows, replicas)]
    homes = Counter(group for replica in split for group in replica)
    assert sum(homes.values()) - groups <= replicas - 1, (
        "each border between replicas splits one group at most"
    )


def test_new_siblings_go_where_there_is_room_for_all_of_them() -> None:
    at_home = [Row(0, 50, f"old{number}") for number in range(3)]
    rows = [*at_home, Row(1, 50, "old"), *(Row(None, 10, "new") for _ in range(4))]
    assert cut(rows, 2) == [[0, 1, 2, 7], [3, 4, 5, 6]]
