"""The file federation.toml: every entry is checked before anything is done with it."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.support.words import suggest
from fedstrata.support.writing import write_atomically

if TYPE_CHECKING:
    from fedstrata.engines.network import Policy

MOST_SITES = 10_000
LONGEST = 1e7  # seconds
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}")  # it becomes a folder and stands in logs
_SITES = re.compile(r"(?m)^(\s*sites\s*=\s*)\[[^\]]*\]")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True)
class Settings:
    """What a federation has agreed on.

    Attributes:
        listen, address: where the server listens, and what the sites dial.
        hosts: the server's names in its certificate.
        sites: their names; clients are numbered in this order.
        policy: what happens when a site does not answer.
        anew: whether a site that lost its state may join again.
        experiment: a name, or a file in the kit.
        message_bytes: the most that a message may have.
    """

    listen: str
    address: str
    hosts: list[str]
    sites: list[str]
    policy: Policy
    anew: bool = False
    experiment: str = "demo"
    message_bytes: int = 2**28


def settings_of(folder: Path) -> Settings:
    """The federation.toml in a folder.

    Raises:
        ValueError: where there is none, or an entry is missing, unknown or not what it should be.
    """
    file = folder / "federation.toml"
    if not file.is_file():
        raise ValueError(f"{folder} has no federation.toml; `fedstrata net init` and `net kits` make it.")
    try:
        return read(tomllib.loads(file.read_text("utf-8")))
    except ValueError as error:  # a mistake of TOML's too
        raise ValueError(f"{file}: {error}") from None


def add_sites(file: Path, names: Sequence[str]) -> None:
    """Put new sites at the end of those in a federation.toml, so that clients keep their numbers.

    Raises:
        ValueError: where the file has no list of sites in one place, or would not be valid.
    """
    text = file.read_text("utf-8")
    before = tomllib.loads(text).get("federation", {}).get("sites", [])
    changed, count = _SITES.subn(lambda found: found[1] + json.dumps([*before, *names]), text)
    if count != 1:
        raise ValueError(f"{file} does not have one line `sites = […]`: add {', '.join(names)} there.")
    read(tomllib.loads(changed))
    write_atomically(file, changed.encode())


def read(found: Mapping[str, Any]) -> Settings:
    """The settings in a file's contents.

    Raises:
        ValueError: see `settings_of`.
    """
    from fedstrata.engines.network import Policy

    _check_names("sections", found, ENTRIES)
    for section, entries in ENTRIES.items():
        own = found.get(section, {})
        if not isinstance(own, dict):
            raise ValueError(f"[{section}] must be a section, but is {own!r}.")
        _check_names(f"entries of [{section}]", own, entries)
        for name, value in own.items():
            words, good = entries[name]
            if not good(value):
                raise ValueError(f"[{section}] {name} must be {words}, but is {value!r}.")
    given = {**found.get("server", {}), **found.get("federation", {})}
    for name in ("listen", "address", "hosts", "sites"):
        if name not in given:
            raise ValueError(f"[{'federation' if name == 'sites' else 'server'}] needs {name}.")
    policy = dict(found.get("policy", {}))
    anew = policy.pop("anew", False)
    return Settings(**given, policy=Policy(**policy), anew=anew)


def _are_sites(names: Any) -> bool:
    if not isinstance(names, list) or not 1 <= len(names) <= MOST_SITES:
        return False
    words = all(isinstance(name, str) and _NAME.fullmatch(name) for name in names)
    return words and len(set(names)) == len(names) and not {"server", "authority"} & set(names)


def _check_names(what: str, found: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    if other := [name for name in found if name not in known]:
        raise ValueError(f"There is no {other[0]!r} among the {what}{suggest(other[0], list(known))}")


def _is_address(value: Any) -> bool:
    found = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    return found is not None and int(found[2]) < 2**16


def _is_number(low: float, high: float, whole: bool) -> Callable[[Any], bool]:
    def good(value: Any) -> bool:
        kinds = int if whole else int | float
        return isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high

    return good


def _seconds() -> tuple[str, Callable[[Any], bool]]:
    return f"seconds, more than 0 and at most {LONGEST:.0e}", _is_number(math.ulp(0.0), LONGEST, False)


_Entry = tuple[str, Callable[[Any], bool]]
ENTRIES: dict[str, dict[str, _Entry]] = {
    "server": {
        "listen": ("an address, host:port", _is_address),
        "address": ("an address, host:port", _is_address),
        "hosts": (
            "names of hosts",
            lambda v: isinstance(v, list) and bool(v) and all(isinstance(h, str) and h for h in v),
        ),
    },
    "federation": {
        "sites": (
            "different names of up to 60 letters, digits and hyphens, other than 'server' and 'authority'",
            _are_sites,
        ),
        "experiment": ("a name or a file", lambda v: isinstance(v, str) and bool(v)),
        # gRPC counts in 31 bits
        "message_bytes": ("a whole number from 65536 to 2147483647", _is_number(2**16, 2**31 - 1, True)),
    },
    "policy": {
        "missing": ("'wait' or 'drop'", lambda v: v in ("wait", "drop")),
        "after": _seconds(),
        "min_sites": (f"a whole number from 1 to {MOST_SITES}", _is_number(1, MOST_SITES, True)),
        "retries": ("a whole number from 0 to 1000", _is_number(0, 1000, True)),
        "first_timeout": _seconds(),
        "timeout": _seconds(),
        "anew": ("true or false", lambda v: isinstance(v, bool)),
    },
}
