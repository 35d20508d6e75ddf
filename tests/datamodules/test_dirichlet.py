"""The Dirichlet partition against its definition, and where there is none."""

import numpy as np
import pytest
import torch

from datamodules.partition import dirichlet_partition, dirichlet_shares, iid_partition, partition_by_shares
from dfl_lightning.errors import UserError

LABELS = torch.arange(10).repeat_interleave(500)


def counts(parts: list[torch.Tensor]) -> np.ndarray:
    """How many samples of each label each node holds, [label, node]."""
    return np.stack([torch.bincount(LABELS[part], minlength=10).numpy() for part in parts], axis=1)


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan"), float("inf")])
def test_a_beta_that_is_no_parameter_is_refused(beta: float) -> None:
    for call in (lambda: dirichlet_shares(3, 4, beta, 0), lambda: dirichlet_partition(LABELS, 4, beta, 0)):
        with pytest.raises(UserError, match=f"beta is {beta}, but must be a number above 0"):
            call()


@pytest.mark.parametrize("beta", [1e15, 1.7e308])
def test_a_huge_beta_gives_equal_shares(beta: float) -> None:
    np.testing.assert_allclose(dirichlet_shares(4, 5, beta, 0), 0.2, atol=1e-5)


def test_a_tiny_beta_puts_each_label_on_one_node() -> None:
    shares = dirichlet_shares(200, 5, 1e-300, 0)
    np.testing.assert_array_equal(np.sort(shares, axis=1), [[0, 0, 0, 0, 1]] * 200)
    assert (shares.sum(0) > 20).all()  # each node is as likely


def test_node_i_holds_the_share_p_i_of_each_label() -> None:
    """n = 50 and beta = 0.5, as in the GAS paper; no node is far from its share, but for those that are filled up."""
    shares = dirichlet_shares(10, 50, 0.5, seed=1)
    without = counts(dirichlet_partition(LABELS, 50, 0.5, seed=1, minimum=0))
    assert np.abs(without - 500 * shares).max() <= 1.01
    filled = counts(dirichlet_partition(LABELS, 50, 0.5, seed=1, minimum=40))
    assert filled.sum(0).min() >= 40
    assert np.abs(filled - without).sum() <= 2 * np.maximum(40 - without.sum(0), 0).sum()


def test_labels_are_shared_out_independently_of_each_other() -> None:
    shares = dirichlet_shares(20_000, 3, 0.5, seed=0)
    assert abs(np.corrcoef(shares[:-1, 0], shares[1:, 0])[0, 1]) < 0.03


@pytest.mark.parametrize(("samples", "num_nodes", "minimum"), [(3, 4, 1), (39, 4, 10), (0, 1, 1)])
def test_more_nodes_than_samples_are_refused(samples: int, num_nodes: int, minimum: int) -> None:
    for call in (
        lambda: dirichlet_partition(LABELS[:samples], num_nodes, 0.5, 0, minimum),
        lambda: iid_partition(LABELS[:samples], num_nodes, 0, minimum),
    ):
        with pytest.raises(UserError, match=f"{num_nodes} nodes with at least {minimum} samples each"):
            call()


@pytest.mark.parametrize("beta", [1e-3, 0.5])
def test_it_ends_where_every_sample_is_needed(beta: float) -> None:
    parts = dirichlet_partition(LABELS, 500, beta, seed=0, minimum=10)
    assert [len(part) for part in parts] == [10] * 500


def test_a_label_without_shares_is_not_lost_in_silence() -> None:
    with pytest.raises(ValueError, match="between 0 and 8"):
        partition_by_shares(LABELS, np.full((9, 2), 0.5), 0)
