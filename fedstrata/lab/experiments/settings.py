"""The file federation.toml: every entry is checked before anything is done with it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedstrata.support.words import suggest
from fedstrata.support.writing import write_atomically

if TYPE_CHECKING:
    from fedstrata.engines.network import Policy

MOST_SITES = 10_000
LONGEST = 1e7  # seconds
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,59}$"  # it becomes a folder and stands in logs
_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|\d{1,4})"
ADDRESS = rf"^(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+):{_PORT}$"
Made = TypeVar("Made", bound=BaseModel)
_SITES = re.compile(r"(?m)^(\s*sites\s*=\s*)\[[^\]]*\]")


def _seconds(default: float) -> Any:
    words = f"seconds, more than 0 and at most {LONGEST:.0e}"
    return Field(default, description=words, gt=0, le=LONGEST, allow_inf_nan=False)


def whole(default: int | None, low: int, high: int) -> Any:
    """A field for a whole number within bounds."""
    return Field(default, description=f"a whole number from {low} to {high}", ge=low, le=high)


def _address() -> Any:
    return Field(description="an address, host:port", pattern=ADDRESS)


def _apart(names: list[str]) -> list[str]:
    if len(set(names)) < len(names) or {"server", "authority"} & set(names):
        raise ValueError
    return names


class Settings(BaseModel):
    """The settings of a federation; the description of a field says which values it takes.

    Attributes:
        listen, address: where the server listens, and what the sites dial.
        hosts: the server's names in its certificate.
        sites: their names; clients are numbered in this order.
        starters: people with kits, whom the sites' policies may let start runs.
        experiment: a name, or a file in the kit.
        message_bytes: the most that a message may have.
        missing, after, min_sites, retries, first_timeout, timeout: see `Policy`.
        anew: whether a site that lost its state may join again.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    listen: str = _address()
    address: str = _address()
    hosts: list[Annotated[str, Field(min_length=1)]] = Field(description="names of hosts", min_length=1)
    sites: Annotated[list[Annotated[str, Field(pattern=NAME)]], AfterValidator(_apart)] = Field(
        description="different names of up to 60 letters, digits and hyphens, not 'server' or 'authority'",
        min_length=1,
        max_length=MOST_SITES,
    )
    starters: list[Annotated[str, Field(pattern=NAME)]] = Field([], description="a list of names")
    experiment: str = Field("demo", description="a name or a file", min_length=1)
    message_bytes: int = whole(2**28, 2**16, 2**31 - 1)  # gRPC counts in 31 bits
    missing: Literal["wait", "drop"] = Field("wait", description="'wait' or 'drop'")
    after: float = _seconds(30.0)
    min_sites: int = whole(1, 1, MOST_SITES)
    retries: int = whole(3, 0, 1000)
    first_timeout: float = _seconds(600.0)
    timeout: float = _seconds(30.0)
    anew: bool = Field(False, description="true or false")

    @property
    def parties(self) -> list[str]:
        """Everybody who has a kit, apart from the server."""
        return list(dict.fromkeys([*self.sites, *self.starters]))

    @property
    def policy(self) -> Policy:
        """The policy for a site that does not answer."""
        from fedstrata.engines.network import Policy

        return Policy(**self.model_dump(include={*SECTIONS["policy"]} - {"anew"}))


SECTIONS = {
    "server": ("listen", "address", "hosts"),
    "federation": ("sites", "starters", "experiment", "message_bytes"),
    "policy": ("missing", "after", "min_sites", "retries", "first_timeout", "timeout", "anew"),
}


def settings_of(folder: Path) -> Settings:
    """The federation.toml in a folder.

    Raises:
        ValueError: if there is none, or an entry is missing, unknown or not what it should be.
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
        ValueError: if the file has no list of sites in one place, or would not be valid.
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
        ValueError: see `settings_of`; all mistakes at once.
    """
    wrong = [_unknown(name, "sections", SECTIONS) for name in found if name not in SECTIONS]
    given: dict[str, Any] = {}
    for section, names in SECTIONS.items():
        match found.get(section, {}):
            case dict() as own:
                given |= own
                what = f"entries of [{section}]"
                wrong += [_unknown(name, what, names) for name in own if name not in names]
            case other:
                wrong.append(f"[{section}] must be a section, but is {other!r}.")
    section_of = {name: f"[{section}] " for section, names in SECTIONS.items() for name in names}
    made = checked(Settings, given, wrong, section_of)
    if made.min_sites > len(made.sites):
        raise ValueError(f"[policy] min_sites is {made.min_sites}, but there are {len(made.sites)} sites.")
    return made


def checked(
    model: type[Made], given: Mapping[str, Any], wrong: Sequence[str] = (), where: Mapping[str, str] = {}
) -> Made:
    """A model of these entries.

    Args:
        model: what they are; the description of a field says what it must be.
        given: the entries.
        wrong: what was found to be wrong before.
        where: what is told before a field's name.

    Raises:
        ValueError: with all mistakes at once.
    """
    mistakes = dict.fromkeys(wrong)
    try:
        made = model.model_validate(given)
    except ValidationError as error:
        for each in error.errors():
            name = str(each["loc"][0])
            if each["type"] == "extra_forbidden":
                mistakes[_unknown(name, "entries", model.model_fields)] = None
            elif each["type"] == "missing":
                mistakes[f"{where.get(name, '')}needs {name}."] = None
            else:
                must = f"must be {model.model_fields[name].description}"
                mistakes[f"{where.get(name, '')}{name} {must}, but is {given[name]!r}."] = None
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return made


def _unknown(name: str, what: str, known: Iterable[str]) -> str:
    return f"There is no {name!r} among the {what}{suggest(name, list(known))}"
