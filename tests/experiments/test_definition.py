"""Definitions: settings, changes and their types, what is refused."""

import pytest
from pydantic import ValidationError

from fedstrata.lab import Column, ExperimentError, TableSpec

from .conftest import make


def test_settings_are_the_grid_times_the_seeds(experiment):
    found = [(s.H, s.seed, s.gamma) for s in experiment.settings]
    assert found == [(1, 0, 0.5), (1, 1, 0.5), (2, 0, 0.5), (2, 1, 0.5)]
    assert experiment.settings[0].cell == {"H": 1}
    assert experiment.settings[0].words == "H=1"


def test_a_union_of_grids_has_each_cell_once():
    union = make(
        grid=[{"method": ["A"], "H": [1]}, {"method": ["A", "B"], "H": [1], "beta": [None, 3.0]}], seeds=1
    )
    assert [(s.method, s.H, s.beta) for s in union.settings] == [
        ("A", 1, None),
        ("A", 1, 3.0),
        ("B", 1, None),
        ("B", 1, 3.0),
    ]


def test_a_setting_says_what_it_has(experiment):
    with pytest.raises(AttributeError, match=r"no 'eta'; it has rounds, gamma, note, flag, empty, H"):
        _ = experiment.settings[0].eta


def test_change_replaces_parameters_and_grid_values(experiment):
    changed = experiment.change({"gamma": 1, "H": [5], "seeds": 1})
    (setting,) = changed.settings
    assert (setting.gamma, setting.H) == (1.0, 5)
    assert isinstance(setting.gamma, float)
    assert experiment.settings[0].gamma == 0.5


def test_participation_is_a_number_of_clients_or_a_fraction():
    e = make(parameters={"participation": 1.0}, quick={}).change({"participation": [1, 0.5], "H": 1})
    assert [repr(s.participation) for s in e.settings if s.seed == 0] == ["1", "0.5"]


def test_several_values_of_a_parameter_join_the_grid(experiment):
    changed = experiment.change({"gamma": [0.5, 1.0], "seeds": 1})
    assert [(s.cell["H"], s.cell["gamma"]) for s in changed.settings] == [
        (1, 0.5),
        (1, 1.0),
        (2, 0.5),
        (2, 1.0),
    ]


def test_methods_are_chosen_not_replaced():
    e = make(grid=[{"method": ["A"], "H": [1]}, {"method": ["B", "C"], "H": [1], "beta": [1.0]}], seeds=1)
    assert [s.method for s in e.change({"method": ["A", "C"]}).settings] == ["A", "C"]
    with pytest.raises(ExperimentError, match="no method 'D'; it has A, B, C"):
        e.change({"method": "D"})


def test_a_key_by_which_blocks_differ_chooses_among_them():
    e = make(grid=[{"problem": ["P"], "k": [1, 2]}, {"problem": ["Q", "R"], "k": [3]}])
    cells = [(s.problem, s.k) for s in e.change({"problem": ["Q", "P"], "seeds": 1}).settings]
    assert cells == [("P", 1), ("P", 2), ("Q", 3)]
    assert [s.k for s in e.change({"k": [9], "seeds": 1}).settings] == [9, 9, 9]  # a new value replaces


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gama": 1.0}, r"no 'gama'\. Did you mean 'gamma'\? It has rounds, gamma"),
        ({"rounds": 1.5}, "rounds must be a whole number"),
        ({"rounds": True}, "rounds must be a whole number"),
        ({"rounds": None}, "rounds must be a whole number"),
        ({"gamma": "big"}, "gamma must be a number"),
        ({"note": 3}, "note must be text"),
        ({"flag": 1}, "flag must be true or false"),
        ({"H": []}, "H needs at least one value"),
        ({"seeds": 0}, "seeds must be a whole number ≥ 1"),
    ],
)
def test_wrong_changes_say_what_is_wrong(experiment, change, message):
    with pytest.raises(ExperimentError, match=message):
        experiment.change(change)


def test_what_is_none_may_become_anything(experiment):
    assert experiment.change({"empty": 3}).parameters["empty"] == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "No Spaces"}, "pattern"),
        ({"build": None}, "callable"),
        ({"grid": {"H": []}}, "no value of 'H'"),
        ({"grid": {"gamma": [1.0]}}, "both parameters and in the grid"),
        ({"grid": {"seed": [1]}}, "'seed' cannot be the name"),
        ({"grid": {"items": [1]}}, "'items' cannot be the name"),
        ({"grid": {"H": [[1]]}}, "valid"),
        ({"quick": {"round": 1}}, r"quick: .*no 'round'\. Did you mean 'rounds'"),
        ({"fallback": {"gamma": "x"}}, "fallback: gamma must be a number"),
        ({"sedes": 3}, "Extra inputs"),
    ],
)
def test_wrong_definitions_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        make(**fields)


def test_a_table_needs_columns():
    with pytest.raises(ValidationError):
        make(table=TableSpec(()))
    assert make(table=TableSpec((Column("loss"),))).table.rows == ("label",)


@pytest.mark.parametrize(
    "changes",
    [{"seeds": 10**9}, {"grid": {"H": list(range(1000)), "eta": list(range(1000))}}],
    ids=["seeds", "grid"],
)
def test_more_settings_than_anybody_runs_are_refused_at_once(changes):
    with pytest.raises(ExperimentError, match="settings, more than 100,000"):
        _ = make(**changes).settings
