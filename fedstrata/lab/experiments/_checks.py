"""What is wrong with a TOML file: every name is known, every parameter too, and methods solve the problem."""

from __future__ import annotations

from fedstrata.lab.experiments._form import Compared, File, Posing, offered, options_of, partition_options
from fedstrata.lab.experiments._named import check_name, check_parameters, fields
from fedstrata.lab.experiments.catalogue import CATALOGUE, FORMS, Entry
from fedstrata.lab.experiments.data import LOADERS, NATURAL, PARTITIONS
from fedstrata.lab.experiments.errors import ExperimentError
from fedstrata.methods import METHODS
from fedstrata.models import MODELS
from fedstrata.models import options as model_options
from fedstrata.support.words import listed, suggest


def check(form: File) -> None:
    """Every name is known, every parameter too, and the methods can be made."""
    check_name("data", form.data, LOADERS)
    check_parameters("data", form.data, ["clients", "partition", "seed", *options_of(form.data.name)])
    for key, value in form.data.parameters.items():
        if key.endswith("_fraction") and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ExperimentError(f"data: {key} must be a number in [0, 1), but is {value!r}.")
    if form.data.name in NATURAL:
        for key in ("clients", "partition"):
            if key in form.data.model_fields_set:
                raise ExperimentError(f"data: {form.data.name} is divided by nature. Leave {key!r} out.")
    else:
        check_name("data.partition", form.data.partition, PARTITIONS)
        check_parameters("data.partition", form.data.partition, partition_options(form))
    _check_problem(form.problem)
    model, fitting = form.problem.model, form.problem.entry.models
    check_name("problem.model", model, MODELS)
    if fitting and model.name not in fitting:
        words = " or ".join(fitting)
        raise ExperimentError(
            f"problem.model: {form.problem.name} is not written for {model.name}; it takes {words}."
        )
    check_parameters("problem.model", form.problem.model, model_options(form.problem.model.name))
    check_parameters("problem", form.problem, ["model", *form.problem.entry.options])
    _check_needs(form)
    for method in form.methods:
        _check_method(method, form)
    known = offered(form)
    for metric in form.metrics or []:
        if metric not in known:
            always = ", ".join(form.problem.entry.measures_of(form.problem.parameters))
            raise ExperimentError(
                f"metrics: there is no {metric!r}{suggest(metric, known)} There are {', '.join(known)}, "
                f"and {always} always."
            )


def _check_problem(posing: Posing) -> None:
    classes = {solved.__name__.lower(): solved for cls in METHODS.values() for solved in cls.solves}
    if posing.name not in CATALOGUE and posing.name.lower() in classes:
        names = [name for name, e in CATALOGUE.items() if _may_be(e, (classes[posing.name.lower()],))]
        there = f"Problems of it are {', '.join(names)}." if names else "No problem here is of it."
        raise ExperimentError(f"problem: {posing.name} is a class of problems. {there}")
    check_name("problem", posing, [*CATALOGUE, *MODELS])


def _check_needs(form: File) -> None:
    """The data has the part that the problem is about."""
    posing = form.problem
    needed = posing.entry.needs(posing.parameters)
    if needed is None or form.data.parameters.get(needed) or needed in form.grid:
        return
    if needed not in options_of(form.data.name):
        raise ExperimentError(
            f"data: {posing.name} needs {needed}, which {form.data.name} has not. Take other data, such as "
            "digits."
        )
    whose = "validation samples" if needed == "valid_fraction" else "samples of the server's own"
    raise ExperimentError(f"data: {posing.name} needs {whose}: give {needed}, such as {needed} = 0.2.")


def _check_method(method: Compared, form: File) -> None:
    posing = form.problem
    kind = posing.entry.kind_of(posing.parameters)
    fitting = [name for name, cls in METHODS.items() if issubclass(kind, cls.solves)]
    if method.name in METHODS and method.name not in fitting:
        solves = METHODS[method.name].solves
        others = [name for name, entry in CATALOGUE.items() if _may_be(entry, solves)]
        for_those = f" Problems for it are {', '.join(others)}." if others else ""
        if posing.name in others:
            other = next(name for name, cls in FORMS.items() if issubclass(cls, solves))
            for_those = f' Give the problem form = "{other}" for it.'
        raise ExperimentError(
            f"methods: {method.name} does not solve a {kind.__name__}, which {posing.name} is, but "
            f"{listed([cls.__name__ for cls in solves])}.{for_those} Methods for this problem are "
            f"{', '.join(fitting)}."
        )
    if method.name not in METHODS:
        raise ExperimentError(
            f"methods: there is no {method.name!r}{suggest(method.name, list(METHODS))} "
            f"For this problem there are {', '.join(fitting)}."
        )
    known = fields(METHODS[method.name])
    check_parameters(method.name, method, ["label", *known])


def _may_be(entry: Entry, solves: tuple[type, ...]) -> bool:
    kinds = FORMS.values() if entry.kind is None else [entry.kind]
    return any(issubclass(kind, solves) for kind in kinds)
