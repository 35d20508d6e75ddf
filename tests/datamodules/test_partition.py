import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import Digits
from datamodules.partition import dirichlet_partition, dirichlet_shares, iid_partition, partition_by_shares
from dfl_lightning.errors import UserError

LABELS = torch.arange(10).repeat_interleave(100)


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=80),
    num_nodes=st.integers(1, 12),
    beta=st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 100.0]),
    minimum=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_every_sample_goes_to_one_node_and_every_node_has_enough(
    labels: list[int], num_nodes: int, beta: float, minimum: int, seed: int
) -> None:
    tensor = torch.tensor(labels)
    if len(labels) < num_nodes * minimum:
        with pytest.raises(UserError, match=f"{num_nodes * minimum} samples, but there are {len(labels)}"):
            dirichlet_partition(tensor, num_nodes, beta, seed, minimum)
        with pytest.raises(UserError):
            iid_partition(tensor, num_nodes, seed, minimum)
        return
    parts = dirichlet_partition(tensor, num_nodes, beta, seed, minimum)
    for some in (parts, iid_partition(tensor, num_nodes, seed, minimum)):
        assert len(some) == num_nodes
        assert sorted(torch.cat(some).tolist()) == list(range(len(labels)))
        assert min(len(part) for part in some) >= minimum
    assert [part.tolist() for part in dirichlet_partition(tensor, num_nodes, beta, seed, minimum)] == [
        part.tolist() for part in parts
    ]


def test_a_node_gets_its_share_of_each_label() -> None:
    shares = dirichlet_shares(10, 5, 0.5, seed=3)
    np.testing.assert_allclose(shares.sum(1), 1)
    parts = partition_by_shares(LABELS, shares, seed=3)
    counts = np.stack([torch.bincount(LABELS[part], minlength=10).numpy() for part in parts], axis=1)
    assert np.abs(counts - 100 * shares).max() <= 1.01


def test_the_expected_share_is_equal_and_beta_sets_the_spread() -> None:
    """Dir_n(beta) has mean 1/n and variance (1/n)(1 - 1/n) / (n beta + 1)."""
    for beta in (0.1, 1.0, 10.0):
        shares = dirichlet_shares(20_000, 4, beta, seed=0)
        np.testing.assert_allclose(shares.mean(0), 0.25, atol=0.01)
        np.testing.assert_allclose(shares.var(0), 0.25 * 0.75 / (4 * beta + 1), rtol=0.06)


def test_iid_parts_are_of_equal_size_and_mixed() -> None:
    parts = iid_partition(LABELS, 7, seed=0)
    assert {len(part) for part in parts} == {142, 143}
    assert all(torch.bincount(LABELS[part], minlength=10).min() >= 4 for part in parts)


@pytest.mark.parametrize("partition", ["dirichlet", "iid"])
def test_digits(partition: str) -> None:
    module = Digits(partition=partition, beta=0.3)  # type: ignore[arg-type]
    data, again, other = module.load(20, 1), module.load(20, 1), module.load(20, 2)
    assert data.train.images.shape == (1797, 1, 8, 8)
    assert data.train.images.dtype == torch.uint8
    assert data.train.images.max() == 255
    train, test = torch.cat(data.train.indices), torch.cat(data.test.indices)
    assert sorted(torch.cat([train, test]).tolist()) == list(range(1797))
    assert min(len(rows) for rows in data.train.indices) >= 10
    assert min(len(rows) for rows in data.test.indices) >= 1
    counts = torch.bincount(data.test.labels[test]).float()
    assert (counts / torch.bincount(data.train.labels).float() - 0.2).abs().max() < 0.01
    assert data.fingerprint() == again.fingerprint()
    assert data.fingerprint() != other.fingerprint()
    assert data.warning is None


def test_digits_are_held_out_in_the_mix_that_a_node_trains_on() -> None:
    data = Digits(beta=0.2, test_share=0.5).load(5, 0)
    for train, test in zip(data.train.indices, data.test.indices):
        mixes = [torch.bincount(data.train.labels[rows], minlength=10).float() for rows in (train, test)]
        assert (mixes[0] / mixes[0].sum() - mixes[1] / mixes[1].sum()).abs().max() < 0.05


def test_dirichlet_digits_differ_more_between_nodes_than_iid_ones() -> None:
    def spread(module: Digits) -> float:
        data = module.load(10, 0)
        mixes = [torch.bincount(data.train.labels[rows], minlength=10) / len(rows) for rows in data.train.indices]
        return torch.stack(mixes).std(0).mean().item()

    assert spread(Digits(beta=0.1)) > 2 * spread(Digits(beta=10)) > 2 * spread(Digits("iid")) * 0.9


def test_too_many_nodes_for_the_digits() -> None:
    with pytest.raises(UserError, match="200 nodes with at least 10 samples"):
        Digits().load(200, 0)
    assert len(Digits(min_samples=1).load(200, 0).train.indices) == 200


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("partition", "even"),
        ("beta", 0.0),
        ("beta", float("nan")),
        ("beta", float("inf")),
        ("test_share", 0.0),
        ("test_share", 1.0),
        ("min_samples", 0),
        ("batch_size", 0),
    ],
)
def test_a_wrong_option_is_refused(option: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"data\.{option} is '?{value}"):
        Digits(**{option: value})  # type: ignore[arg-type]
