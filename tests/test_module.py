"""Local training, the round inside a Trainer, and evaluation."""

from functools import partial
from math import isnan

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy

from callbacks.aggregators import BALANCE, DFedAvg, SketchGuard
from callbacks.attacks import DirectedDeviation, Gaussian, ScaledModel
from dfl_lightning import Attack, DFLModule, FullyConnected, Ring, RoundCallback, UserError
from dfl_lightning.data import NodeLoader
from dfl_lightning.replicas import Replicas

SETTINGS = [
    {},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"momentum": 0.9, "keep_optimizer": True},
    {"clip_norm": 0.5},
    {"optimizer": partial(torch.optim.Adam, lr=0.01), "lr": 0.05},
]


def bare_loop(module, data, make_network, rounds, norm=False):
    """What each node would do alone, without a Trainer, replicas or rows."""
    states = []
    for node in range(module.topology.num_nodes):
        replicas = Replicas(make_network, module.topology.num_nodes, module.init, 1)
        network = make_network()
        network.load_state_dict(dict(replicas.named_views(node)))
        make = module.make_optimizer or partial(
            torch.optim.SGD, lr=module.lr, momentum=module.momentum, weight_decay=module.weight_decay
        )
        optimizer = make(network.parameters())
        for index in range(rounds):
            if not module.keep_optimizer:
                optimizer = make(network.parameters())
            for batch in NodeLoader(data.nodes.train, data.batch_size, data.local_epochs, 1, lambda index=index: index):
                for other, images, labels in batch.per_node():
                    if other == node:
                        optimizer.zero_grad()
                        cross_entropy(network(images.float() / 255), labels).backward()
                        if module.clip_norm:
                            nn.utils.clip_grad_norm_(network.parameters(), module.clip_norm)
                        optimizer.step()
        states.append(network.state_dict())
    return states


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("init", ["shared", "independent"])
def test_nodes_train_exactly_as_a_bare_loop_does(fit, blobs, tiny_net, settings, norm, init):
    make = partial(tiny_net, norm=norm)
    data = blobs(batch_size=8, local_epochs=2)
    module = fit(module=DFLModule(make, Ring(4), **({"lr": 0.1} | settings), init=init), data=data)
    for node, state in enumerate(bare_loop(module, data, make, rounds=2)):
        for name, tensor in module.replicas.named_views(node):
            assert torch.equal(tensor, state[name]), (node, name)


def test_shared_replicas_start_equal_and_independent_ones_do_not(tiny_net):
    assert Replicas(tiny_net, 3, "shared", 1).rows.unique(dim=0).shape[0] == 1
    assert Replicas(tiny_net, 3, "independent", 1).rows.unique(dim=0).shape[0] == 3


def test_initialisation_depends_on_the_seed_and_leaves_the_global_generator_alone(tiny_net):
    before = torch.random.get_rng_state()
    first, second = Replicas(tiny_net, 2, "shared", 1), Replicas(tiny_net, 2, "shared", 2)
    assert torch.equal(before, torch.random.get_rng_state())
    assert not torch.equal(first.rows, second.rows)


def test_running_statistics_travel_and_counters_do_not(fit, tiny_net, blobs):
    make = partial(tiny_net, norm=True)
    module = fit(DFedAvg(), module=DFLModule(make, FullyConnected(4), lr=0.1), data=blobs(batch_size=8), max_epochs=1)
    views = [dict(module.replicas.named_views(node)) for node in range(4)]
    means = torch.stack([view["norm.running_mean"] for view in views])
    assert torch.allclose(means, means[0].expand_as(means))
    assert [int(view["norm.num_batches_tracked"]) for view in views] == [2, 2, 2, 3]  # nodes have 10 to 19 samples


def test_bf16_mixed_trains_each_node_on_its_own_weights(fit, tiny_net):
    """Autocast remembers casts by tensor, and one network serves all nodes."""
    together = fit(module=DFLModule(tiny_net, Ring(4), lr=0.1, init="independent"), precision="bf16-mixed")
    exact = fit(module=DFLModule(tiny_net, Ring(4), lr=0.1, init="independent"))
    assert together.replicas.rows.dtype == torch.float32
    assert not torch.equal(together.replicas.rows, exact.replicas.rows)
    assert torch.allclose(together.replicas.rows, exact.replicas.rows, atol=0.02)


def test_double_precision_works(fit):
    assert fit(BALANCE(), precision="64-true").replicas.rows.dtype == torch.float64


class Witness(RoundCallback):
    """Writes down the order of things."""

    needs_start = True

    def __init__(self):
        self.seen, self.starts, self.rows = [], [], []

    def on_attack(self, round):
        self.seen.append("attack")
        self.starts.append(round._start.clone())

    def on_aggregate(self, round):
        self.seen.append("aggregate")

    def on_round_end(self, round):
        self.seen.append("end")
        self.rows.append(round._rows.clone())

    def on_validation_start(self, trainer, pl_module):
        self.seen.append("validation")


def test_every_epoch_boundary_runs_the_phases_before_validation(fit):
    witness = Witness()
    fit(DFedAvg(), Gaussian(), witness)
    assert witness.seen == ["attack", "aggregate", "end", "validation"] * 2


def test_start_rows_are_those_of_the_rounds_start(fit):
    witness = Witness()
    fit(witness, DFedAvg())
    assert torch.equal(witness.starts[1], witness.rows[0])


class Order(Attack):
    def attack(self, round):
        round.metrics["attacked_before"] = float(round.accepted is None)
        round.forge(round.byzantine, lambda block: torch.full_like(block.own[round.byzantine], torch.nan))


@pytest.mark.parametrize("attack_first", [True, False])
def test_the_order_of_callbacks_does_not_matter(fit, attack_first):
    pair = [Order(fraction=0.25), BALANCE()]
    module = fit(*(pair if attack_first else pair[::-1]))
    assert module.history[0]["attacked_before"] == 1.0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("rule", [BALANCE, partial(SketchGuard, sketch_size=20)])
def test_poisonous_messages_never_reach_a_model(fit, value, rule):
    class Poison(Attack):
        def attack(self, round):
            round.forge(round.byzantine, lambda block: torch.full_like(block.own[round.byzantine], value))

    module = fit(Poison(nodes=[1, 3]), rule())  # in a ring of 4, nodes 0 and 2 hear nobody else
    assert module.replicas.rows.isfinite().all()
    alone = fit()
    assert torch.equal(module.replicas.rows[[0, 2]], alone.replicas.rows[[0, 2]])


def test_an_honest_node_that_diverges_is_reported_and_left_out(fit, blobs, tiny_net, caplog):
    class Breaks(RoundCallback):
        def on_train_start(self, trainer, pl_module):
            pl_module.replicas.rows[0] = torch.nan

    module = fit(Breaks(), BALANCE(), module=DFLModule(tiny_net, FullyConnected(4), lr=0.1))
    assert module.replicas.rows[0].isnan().all()
    assert module.replicas.rows[1:].isfinite().all()
    assert "Honest nodes [0]" in caplog.text
    assert module.table["ter"][0] == 1.0


def test_figures_are_of_honest_nodes_only(fit):
    module = fit(ScaledModel(nodes=[0, 1]), DFedAvg(), module=None)
    honest = module.table["ter"][2:]
    assert module.history[-1]["ter/mean"] == pytest.approx(sum(honest) / 2)
    assert module.history[-1]["ter/worst"] == max(honest)


def test_ter_is_the_share_of_wrong_predictions_on_the_own_held_out_data(fit, blobs):
    data = blobs(batch_size=8)
    module = fit(data=data)
    module.eval()
    for node, rows in enumerate(data.nodes.test.indices):
        logits = module.replicas.load(node)(data.nodes.test.images[rows].float() / 255)
        wrong = (logits.argmax(1) != data.nodes.test.labels[rows]).double().mean()
        assert module.table["ter"][node] == pytest.approx(wrong.item())


def test_union_evaluation_measures_every_node_on_everyones_held_out_data(fit, blobs):
    data = blobs(batch_size=8, evaluate_union=True)
    module = fit(data=data)
    module.eval()
    logits = module.replicas.load(2)(data.nodes.test.images.float() / 255)
    wrong = (logits.argmax(1) != data.nodes.test.labels).double().mean()
    assert module.table["ter_union"][2] == pytest.approx(wrong.item())
    assert "ter/union_mean" in module.history[-1]


def test_one_row_per_round_holds_every_figure(fit):
    module = fit(Gaussian(nodes=[0]), SketchGuard(sketch_size=10))
    assert [row["round"] for row in module.history] == [1, 2]
    keys = {"round", "ter/mean", "ter/worst", "ter/std", "loss/mean", "accuracy/best"}
    keys |= {"screening/accepted_honest", "screening/accepted_byzantine", "screening/verification_failed"}
    keys |= {"screening/sketch_error"}
    keys |= {"traffic/parameters", "traffic/bytes", "traffic/reduction"}
    keys |= {"time/training", "time/aggregation", "time/evaluation"}
    assert module.history[0].keys() == keys


def test_rounds_without_validation_are_recorded_too(fit):
    module = fit(DFedAvg(), check_val_every_n_epoch=2)
    assert ["ter/mean" in row for row in module.history] == [False, True]


def test_traffic_of_sketchguard_is_sketches_and_fetched_models(fit):
    module = fit(ScaledModel(nodes=[0]), SketchGuard(sketch_size=10), max_epochs=1)
    d, honest, byzantine = 51, module.table["accepted_honest"], module.table["accepted_byzantine"]
    assert honest == [2, 1, 2, 1]  # in a ring of 4, nodes 1 and 3 neighbour the attacker, which accepts both
    assert module.table["received_parameters"] == [20 + d * (h + b) for h, b in zip(honest, byzantine)]
    honest = sum(module.table["received_parameters"][1:])
    assert module.history[0]["traffic/parameters"] == honest / 3
    assert module.history[0]["traffic/reduction"] == 1 - honest / (d * 2 * 3)


def test_the_same_seed_gives_the_same_bits(fit):
    runs = [fit(Gaussian(), SketchGuard(sketch_size=10)) for _ in range(2)]
    assert torch.equal(runs[0].replicas.rows, runs[1].replicas.rows)
    first, second = ([{k: v for k, v in row.items() if "time" not in k} for row in run.history] for run in runs)
    assert first == second


def test_early_stopping_and_the_best_checkpoint_watch_ter(fit, tmp_path):
    best = ModelCheckpoint(tmp_path, monitor="ter/mean", filename="best")
    module = fit(EarlyStopping("ter/mean", patience=1), best, max_epochs=30, enable_checkpointing=True)
    assert len(module.history) < 30
    assert (tmp_path / "best.ckpt").is_file()
    assert float(best.best_model_score) == pytest.approx(min(row["ter/mean"] for row in module.history))


def test_a_disconnected_honest_subgraph_is_named(fit, caplog):
    fit(Gaussian(nodes=[0, 2]), BALANCE(), max_epochs=1)
    assert "[1]; [3]" in caplog.text


BAD_TRAINERS = [
    ({"max_steps": 5}, "max_steps"),
    ({"max_time": "00:01:00:00"}, "max_time"),
    ({"val_check_interval": 0.5}, "val_check_interval"),
    ({"val_check_interval": 1}, "val_check_interval"),
    ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
    ({"gradient_clip_val": 1.0}, "clip_norm"),
    ({"precision": "16-true"}, "precision"),
    ({"max_epochs": -1}, "max_epochs"),
    ({"overfit_batches": 1}, "overfit_batches"),
]


@pytest.mark.parametrize(("options", "named"), BAD_TRAINERS)
def test_trainer_options_that_cut_a_round_are_refused(fit, options, named):
    with pytest.raises(UserError, match=named):
        fit(**options)


@pytest.mark.parametrize("option", ["every_n_train_steps", "train_time_interval"])
def test_checkpoints_inside_a_round_are_refused(fit, option):
    from datetime import timedelta

    value = timedelta(seconds=1) if option == "train_time_interval" else 2
    with pytest.raises(UserError, match=option):
        fit(ModelCheckpoint(**{option: value}), enable_checkpointing=True)


def test_two_aggregators_are_refused(fit):
    with pytest.raises(UserError, match="BALANCE, DFedAvg"):
        fit(BALANCE(), DFedAvg())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lr": 0.0}, "model.lr"),
        ({"momentum": -1.0}, "model.momentum"),
        ({"clip_norm": 0.0}, "model.clip_norm"),
        ({"optimizer": partial(torch.optim.Adam, lr=0.1), "momentum": 0.9}, "optimizer.init_args.momentum"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tiny_net, settings, named):
    with pytest.raises(UserError, match=named):
        DFLModule(tiny_net, Ring(3), **settings)


def test_a_network_that_does_not_fit_the_data_is_refused(fit):
    with pytest.raises(UserError, match=r"outputs of shape \[5\].*3 classes"):
        fit(module=DFLModule(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 5)), Ring(4)))
    with pytest.raises(UserError, match=r"images of shape \[1, 4, 4\]"):
        fit(module=DFLModule(lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 3)), Ring(4)))


def frozen():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (frozen, "no parameter to train"),
        (lambda: nn.Flatten(), "no parameter to train"),
        (lambda: nn.LazyLinear(3), "lazy"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).half(), "float16"),
    ],
)
def test_a_network_that_cannot_be_a_replica_is_refused(fit, make, named):
    with pytest.raises(UserError, match=named):
        fit(module=DFLModule(make, Ring(4)))


def test_a_mini_batch_of_one_sample_under_batchnorm_is_refused_by_node(fit, tiny_net, blobs):
    with pytest.raises(UserError, match="Node 0 has a mini-batch of one sample"):
        fit(module=DFLModule(partial(tiny_net, norm=True), Ring(4)), data=blobs(batch_size=9))


def test_a_rule_that_does_not_say_whom_it_accepted_is_refused():
    class Silent(DFedAvg):
        def aggregate(self, round):
            super().aggregate(round)

    with pytest.raises(TypeError, match=r"Silent\.aggregate must return .* bool \[3, 3\]"):
        Silent()(torch.zeros(3, 2))


def test_measuring_after_a_run_does_not_change_its_history(fit, blobs):
    data = blobs(batch_size=8)
    module = fit(data=data)
    last = dict(module.history[-1])
    module.replicas.rows.zero_()
    module.trainer.validate(module, data, verbose=False)
    assert module.history[-1] == last
    assert module.table["ter"] != [last["ter/mean"]] * 4


def test_a_module_and_data_used_again_follow_the_new_run(fit, blobs, tiny_net):
    data = blobs(batch_size=8)
    module = fit(data=data)
    again = fit(Gaussian(nodes=[1]), module=module, data=data)
    assert again.byzantine.tolist() == [False, True, False, False]
    assert [row["round"] for row in again.history] == [1, 2]
    wider = fit(module=DFLModule(tiny_net, Ring(5)), data=data)
    assert len(wider.table["train_samples"]) == 5


def test_the_loss_of_a_broken_honest_node_is_not_left_out(fit, tiny_net):
    class Breaks(RoundCallback):
        def on_train_start(self, trainer, pl_module):
            pl_module.replicas.rows[0] = torch.nan

    assert isnan(fit(Breaks(), BALANCE()).history[-1]["loss/mean"])


@pytest.mark.parametrize(
    "typo",
    [
        lambda: SketchGuard(fallback="nearst"),
        lambda: SketchGuard(verification="batchd"),
        lambda: BALANCE(gamma=float("inf")),
        lambda: DFedAvg(mixing="metropols"),
        lambda: DirectedDeviation(against="krm"),
        lambda: ScaledModel(factor=float("nan")),
        lambda: DFLModule(nn.Identity, Ring(3), init="sharde"),
        lambda: DFLModule(nn.Identity, Ring(3), lr=float("inf")),
    ],
)
def test_python_is_as_strict_as_the_command_line(typo):
    with pytest.raises(UserError, match="must be"):
        typo()


def test_a_sketch_larger_than_the_model_is_refused(fit):
    with pytest.raises(UserError, match="sketch_size is 52, but the whole model has 51"):
        fit(SketchGuard(sketch_size=52))


def test_a_single_node_trains_alone(fit):
    module = fit(BALANCE(), module=DFLModule(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), Ring(1), lr=0.1))
    assert module.history[-1]["traffic/parameters"] == 0
