"""A server that samples clients: one model for all, made of their messages."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.aggregators import (
    BALANCE,
    GAS,
    RFA,
    Bucketing,
    Bulyan,
    DFedAvg,
    DnC,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
)
from callbacks.attacks import LIE, Dissensus, Gaussian, LabelFlip, Mimic, ScaledModel
from dfl_lightning import DFLModule, FullyConnected, Round, Server, UserError

CLAMP = {"on_invalid": "clamp"}
RULES = [
    DFedAvg(),
    Krum(**CLAMP),
    MultiKrum(**CLAMP),
    Bulyan(**CLAMP),
    Median(),
    TrimmedMean(**CLAMP),
    RFA(),
    DnC(c=1.0, **CLAMP),
    Bucketing(Median(), size=1, **CLAMP),
    GAS(MultiKrum(), num_splits=5, **CLAMP),
    GAS(Bucketing(TrimmedMean()), num_splits=7, **CLAMP),
]
names = [f"{type(rule).__name__} {i}" for i, rule in enumerate(RULES)]

pytestmark = pytest.mark.usefixtures("one_thread")


def served(tiny_net, clients=9, **options):
    return DFLModule(tiny_net, Server(clients, **options), lr=0.1)


@pytest.mark.parametrize("rule", RULES, ids=names)
def test_after_a_round_everybody_has_the_servers_model(rule, fit, tiny_net):
    module = fit(rule, LIE(fraction=0.2), module=served(tiny_net, clients_per_round=6))
    rows = module.replicas.rows
    assert rows.isfinite().all()
    assert torch.equal(rows, rows[:1].expand_as(rows))
    assert 0 <= module.history[-1]["ter/mean"] <= 1
    assert module.history[-1]["deviation/honest_mean"] >= 0
    assert module.history[-1]["accuracy/best"] == max(1 - row["ter/mean"] for row in module.history)


@pytest.mark.parametrize("rule", RULES, ids=names)
def test_the_servers_model_is_the_rule_applied_to_the_messages(rule):
    """An attacker's own model is not among them, even if the first client is an attacker."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(8, 40, generator=draw, dtype=torch.float64)
    byzantine = torch.tensor([True, False, False, True, False, False, False, False])
    complete = ~torch.eye(8, dtype=torch.bool)
    messages = torch.where(byzantine[:, None], -5 * rows, rows)
    want, _ = rule(messages, complete)  # on a graph where these are everybody's own models
    round = Round(rows.clone(), complete, byzantine, central=True, byzantine_share=0.0)
    ScaledModel(nodes=[0, 3]).on_attack(round)
    rule.on_aggregate(round)
    round.share_()
    torch.testing.assert_close(round._rows, want[:1].expand_as(want), rtol=1e-9, atol=1e-9)


def test_a_server_and_a_complete_graph_without_attackers_agree(fit, tiny_net):
    one = fit(DFedAvg(), module=served(tiny_net, 5), max_epochs=1)
    clients = one.replicas.rows[0].clone()
    other = fit(DFedAvg(), module=DFLModule(tiny_net, FullyConnected(5), lr=0.1), max_epochs=1)
    torch.testing.assert_close(other.replicas.rows[0], clients)


def test_clients_are_sampled_anew_in_every_round_by_the_seed():
    server = Server(30, ratio=0.25)
    assert server.num_nodes == 8  # a half is rounded up
    rounds = [server.sampled(1, index).tolist() for index in range(20)]
    assert rounds == [Server(30, 8).sampled(1, index).tolist() for index in range(20)]
    assert all(len(set(clients)) == 8 and clients == sorted(clients) for clients in rounds)
    assert len({tuple(clients) for clients in rounds}) > 15
    assert set().union(*rounds) == set(range(30))
    assert Server(3597, ratio=0.005).num_nodes == 18
    assert Server(75, ratio=0.1).num_nodes == 8


def test_a_client_trains_on_its_own_data_whatever_row_it_is_in(fit, tiny_net, blobs):
    module = fit(DFedAvg(), module=served(tiny_net, 9, clients_per_round=2), max_epochs=1)
    clients = module.topology.sampled(1, 0).tolist()
    assert clients != [0, 1]
    data = blobs().load(9, 1)
    assert module.table["client"] == clients
    assert module.table["train_samples"] == [len(data.train.indices[client]) for client in clients]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("rule", [rule for rule in RULES if type(rule) is not DFedAvg])
def test_broken_messages_do_not_reach_the_servers_model(rule, value):
    rows = torch.randn(9, 30, generator=torch.Generator().manual_seed(2))
    byzantine = torch.arange(9) < 2
    round = Round(rows.clone(), ~torch.eye(9, dtype=torch.bool), byzantine, central=True, byzantine_share=2 / 9)
    round.forge(byzantine, lambda block: torch.full_like(block.own[:2], value))
    rule.on_aggregate(round)
    round.share_()
    assert round._rows.isfinite().all()
    assert round._rows.abs().max() < 10


def test_when_no_message_is_sane_the_old_model_stays(fit, tiny_net):
    class Broken(Gaussian):
        def attack(self, round):
            round.forge(round.byzantine, lambda block: torch.full_like(block.own[round.byzantine], torch.nan))

    module = served(tiny_net, 4, clients_per_round=1)
    attack = Broken(nodes=[0, 1, 2])
    fit(Median(), attack, module=module, max_epochs=3)
    assert module.replicas.rows.isfinite().all()


def test_a_server_resumes_to_the_bit(fit, tiny_net, tmp_path):
    def run(**options):
        return fit(
            MultiKrum(**CLAMP), Mimic(fraction=0.3, warmup=2), module=served(tiny_net, clients_per_round=5), **options
        )

    whole = run(max_epochs=4)
    keeper = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    fit(
        MultiKrum(**CLAMP),
        Mimic(fraction=0.3, warmup=2),
        keeper,
        module=served(tiny_net, clients_per_round=5),
        max_epochs=4,
        enable_checkpointing=True,
    )
    resumed = run(max_epochs=4, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert torch.equal(whole.replicas.rows, resumed.replicas.rows)
    assert [row["ter/mean"] for row in whole.history] == [row["ter/mean"] for row in resumed.history]


def test_the_learning_rate_follows_its_steps(fit, tiny_net):
    module = DFLModule(tiny_net, Server(4), lr=0.1, lr_steps={2: 0.01, 3: 0.001})
    rates = []

    class Watch(DFedAvg):
        def aggregate(self, round):
            rates.append(module.optimizers().optimizer.param_groups[0]["lr"])
            return super().aggregate(round)

    fit(Watch(), module=module, max_epochs=4)
    assert rates == [0.1, 0.01, 0.001, 0.001]


def test_traffic_is_what_the_server_receives(fit, tiny_net):
    module = fit(Median(), module=served(tiny_net, clients_per_round=6), max_epochs=1)
    assert module.history[0]["traffic/parameters"] == 6 * module.replicas.num_parameters
    assert module.history[0]["traffic/reduction"] == 0


def test_labels_are_flipped_for_the_sampled_byzantine_clients_alone(fit, tiny_net):
    plain = fit(Median(), module=served(tiny_net, clients_per_round=4), max_epochs=1)
    outside = [client for client in range(9) if client not in plain.topology.sampled(1, 0).tolist()]
    same = fit(Median(), LabelFlip(nodes=outside), module=served(tiny_net, clients_per_round=4), max_epochs=1)
    assert torch.equal(plain.replicas.rows, same.replicas.rows)
    inside = plain.topology.sampled(1, 0).tolist()[:3]
    other = fit(Median(), LabelFlip(nodes=inside), module=served(tiny_net, clients_per_round=4), max_epochs=1)
    assert not torch.equal(plain.replicas.rows, other.replicas.rows)


def test_the_sampled_number_of_attackers_is_known_only_if_asked_for():
    rows = torch.randn(10, 20)
    byzantine = torch.arange(10) < 4
    for fraction, assumed in ((None, 2), ("sampled", 4), (0.1, 1), (0.31, 4)):
        round = Round(rows, ~torch.eye(10, dtype=torch.bool), byzantine, central=True, byzantine_share=0.2)
        rule = TrimmedMean(byzantine_fraction=fraction)
        declared, usable = rule.declared(round, round.candidates)
        assert declared.tolist() == [assumed] * 10
        assert usable.all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clients": 0}, "topology.clients is 0"),
        ({"clients": 5, "clients_per_round": 6}, "6 of 5 clients"),
        ({"clients": 5, "clients_per_round": 0}, "0 of 5 clients"),
        ({"clients": 5, "ratio": 0.0}, "topology.ratio is 0.0"),
        ({"clients": 5, "ratio": 1.5}, "topology.ratio is 1.5"),
        ({"clients": 5, "ratio": 0.01}, "0 of 5 clients"),
        ({"clients": 5, "ratio": 0.5, "clients_per_round": 2}, "leave the other out"),
    ],
)
def test_impossible_samples_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        Server(**options)


@pytest.mark.parametrize(
    ("callbacks", "sentence"),
    [
        ([], "a server needs a rule"),
        ([BALANCE()], "aggregator is BALANCE, which compares with a node's own model"),
        ([Median(), Dissensus(fraction=0.3)], "attack is Dissensus"),
        ([Bulyan(), LIE(fraction=0.3)], "Bulyan needs n >= 4 f \\+ 3, but in round 1 the server has n = 5 models"),
        ([GAS(MultiKrum(), num_splits=10**6), LIE(nodes=[0])], "aggregator.num_splits is 1000000"),
    ],
)
def test_what_does_not_fit_a_server_is_refused_before_training(callbacks, sentence, fit, tiny_net):
    with pytest.raises(UserError, match=sentence):
        fit(*callbacks, module=served(tiny_net, clients_per_round=5))


def test_settings_that_a_server_has_no_use_for_are_refused(tiny_net, fit, blobs):
    with pytest.raises(UserError, match=r"model\.keep_optimizer is true"):
        DFLModule(tiny_net, Server(4), keep_optimizer=True)
    with pytest.raises(UserError, match=r"model\.init is independent"):
        DFLModule(tiny_net, Server(4), init="independent")
    with pytest.raises(UserError, match=r"data\.evaluate_union is true"):
        fit(Median(), module=served(tiny_net, 4), data=blobs(batch_size=8, evaluate_union=True))
