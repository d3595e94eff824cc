"""Which methods are offered for a problem."""

from __future__ import annotations

import numpy as np
import pytest

import fedstrata as fs


def upper(x, y, s):
    return (y**2).sum()


def test_a_bilevel_problem():
    fits = fs.applicable(fs.Bilevel(upper, upper, same_samples=True))
    assert {"FedMSA", "FedNest", "SimFBO", "SOBA", "HypergradientDescent", "FedRZOBilevel"} <= set(fits.names)
    assert "LocalSGDA" not in fits.names
    assert "Hessian" in fits["FedMSA"].needs
    assert "values" in fits["FedRZOBilevel"].needs
    assert fits["FedMSA"].assumes == "a lower level strongly convex in y"
    with pytest.raises(KeyError, match="does not fit"):
        fits["FedAvg"]


def test_what_would_be_refused_is_left_out():
    """Exactly those that the list leaves out raise when they are given the problem."""
    boxed = fs.Bilevel(upper, upper, project_y=fs.sets.Box(-1, 1), same_samples=True)
    names = fs.applicable(boxed).names
    assert "FedMSA" not in names
    assert "FedRZOBilevel" in names
    data = fs.FederatedData.from_clients([{"a": np.ones(1)}])
    with pytest.raises(ValueError, match="y has a set"):
        fs.solve(boxed, fs.FedMSA(0.1, 0.1), data, np.ones(1), y0=np.ones(1), rounds=0)
    deep = fs.Composition([lambda x, s: x, lambda z, s: z, lambda z: z.sum()])
    assert "FedNest" not in fs.applicable(deep).names
    assert "FedMSA" in fs.applicable(deep).names


def test_conversions_open_further_methods():
    fits = fs.applicable(fs.Minimax(upper))
    assert fits["SimFBO"].via == "as_bilevel"
    assert fits["FedMSA"].via == ""
    assert fits["FedMSA"].needs == "gradients"


def test_server_data_is_named():
    problem = fs.Personalized(lambda x, s: x.sum(), lambda x, y: y.sum(), lambda x, y, s: y.sum())
    fits = fs.applicable(problem)
    assert fits.names == ["ZOHFL"]
    assert fits["ZOHFL"].data == "clients and server"


@pytest.mark.parametrize("name", sorted(fs.METHODS))
def test_every_method_is_found(name):
    """Each method fits some problem class that it says it solves, and says what it needs."""
    method = fs.METHODS[name]
    assert method.solves
    assert method.needs


def test_it_prints_a_table():
    lines = str(fs.applicable(fs.Minimax(upper))).splitlines()
    assert lines[0].split()[:3] == ["method", "needs", "assumes"]
    assert any(line.startswith("SimFBO (fs.as_bilevel)") for line in lines)


def test_it_takes_problems():
    with pytest.raises(TypeError, match="problem object"):
        fs.applicable(upper)


def test_what_is_revealed_depends_on_the_problem():
    """A mean of exponentials is taken from every client's reply, a plain mean from their sum."""

    def loss(x, s):
        return x @ x

    kl, chi2 = fs.applicable(fs.dro.kl(loss, 1.0)), fs.applicable(fs.dro.chi2(loss, 1.0))
    for name in ("FedDRO", "DSFedDRO", "GCIVR", "MBSGD"):
        assert (kl[name].reveals, chi2[name].reveals) == ("replies", "averages")
    assert kl["FedMSA"].reveals == "replies"
    assert chi2["FastDRO"].reveals == "replies"
    assert kl["FedDRO"].assumes == "smooth levels"
    cvar = fs.applicable(fs.dro.cvar(loss, 0.1))
    assert "kink" in cvar["FedDRO"].assumes
    assert cvar.names.index("CompositionalFedAvg") > cvar.names.index("FedNest")  # it is for comparison
