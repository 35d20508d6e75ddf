"""What moved over the network in a round."""

import torch

from dfl_lightning.round import Round


def received(round: Round) -> torch.Tensor:
    """Parameters that each node received in a round, long [N]."""
    return sum(round.received.values(), torch.zeros(round.num_nodes, dtype=torch.int64))


def traffic(round: Round, itemsize: int) -> dict[str, float]:
    """Parameters and bytes received per honest node, and what was saved against fetching every neighbour's model.

    The reduction is 1 - (received by honest nodes) / (d times their neighbours), 0 where nobody has neighbours. On a
    server it is what the server receives, from all clients of the round.

    Args:
        round: a round whose aggregator has counted what moved.
        itemsize: bytes of one parameter.
    """
    seen = round.observers
    senders = int((round.neighbours[seen].sum(1) + round.central).sum())
    moved, full = int(received(round)[seen].sum()), senders * round.num_parameters
    each = moved / int(seen.sum())
    return {
        "traffic/parameters": each,
        "traffic/bytes": each * itemsize,
        "traffic/reduction": 1 - moved / full if full else 0.0,
    }


def screening(round: Round) -> dict[str, float]:
    """Share of honest nodes' links to honest and to Byzantine neighbours that were accepted; no key without links."""
    rates = {}
    if round.accepted is not None:
        for name, senders in (("honest", ~round.byzantine), ("byzantine", round.byzantine)):
            links = round.neighbours & round.observers[:, None] & senders
            if links.any():
                rates[f"screening/accepted_{name}"] = int((round.accepted & links).sum()) / int(links.sum())
    return rates
