"""`fedstrata net kits`, `request`, `sign` and `revoke`: who belongs to a federation.

Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstrata.lab.experiments.net import messages, net

if TYPE_CHECKING:
    from fedstrata.engines.network.kits import Authority
    from fedstrata.lab.experiments.settings import Settings

__all__ = ["net"]  # with these commands in it
Folder = Annotated[Path, typer.Argument(help="The folder of `net init`.")]
By = Annotated[
    Path | None,
    typer.Option(
        "--authority", help="A folder with authority.pem and key.pem; default FOLDER/kits/authority."
    ),
]
Days = Annotated[int, typer.Option(min=1, max=7300, help="How long certificates are valid.")]
DAYS = 825


@net.command()
def kits(
    folder: Folder,
    add: Annotated[list[str] | None, typer.Option(help="A new site: its kit alone is made.")] = None,
    renew: Annotated[
        list[str] | None, typer.Option(help="A party (also 'server'): a new certificate for its key.")
    ] = None,
    server_only: Annotated[
        bool,
        typer.Option("--server-only", help="Sites make their keys themselves: `net request`, `net sign`."),
    ] = False,
    authority: By = None,
    days: Days = DAYS,
) -> None:
    """Make a certificate authority and a folder for each party; later, add sites and renew certificates."""
    with messages():
        from fedstrata.engines.network.kits import make_kit
        from fedstrata.engines.network.kits import renew as renewed
        from fedstrata.lab.experiments.settings import add_sites, settings_of

        experiment = folder / settings_of(folder).experiment
        if experiment.suffix in (".py", ".toml") and not experiment.is_file():
            raise ValueError(f"There is no {experiment}, which every party is to have: copy it there first.")
        settings, place = settings_of(folder), folder / "kits"
        if renew:
            issuer = _authority(folder, authority)
            for party in renew:
                renewed(issuer, place / party, settings.hosts, days)
                typer.echo(
                    f"{place / party / 'certificate.pem'}: put it in place of the party's own. A running "
                    "site or server reads it at the next connection; the old one stays valid."
                )
        elif add:
            issuer = _authority(folder, authority)
            add_sites(folder / "federation.toml", add)
            shutil.copy(folder / "federation.toml", place / "server")
            for party in () if server_only else add:
                make_kit(issuer, place / party, days=days)
                _accompany(folder, place / party, settings)
            given = "" if server_only else f"Give each site its own folder of {place}. "
            typer.echo(
                f"{given}Give the server the new federation.toml. A run keeps the sites with which it began: "
                "start a new one."
            )
        else:
            make_all(folder, days, authority, [] if server_only else settings.parties)
            typer.echo(
                f"{place}: give each party its own folder, by a way that others cannot read. "
                "authority/ signs certificates: keep it to yourself."
            )


def make_all(folder: Path, days: int, authority: Path | None, sites: list[str]) -> None:
    """The kits of the server and these sites."""
    from fedstrata.engines.network.kits import Authority, make
    from fedstrata.lab.experiments.settings import settings_of

    settings, place = settings_of(folder), folder / "kits"
    make(place, sites, settings.hosts, days, Authority(authority) if authority else None)
    for party in ("server", *sites):
        _accompany(folder, place / party, settings)


@net.command()
def request(
    kit: Annotated[Path, typer.Argument(help="A new folder at the site.")],
    name: Annotated[str, typer.Argument(help="The site's name in federation.toml.")],
) -> None:
    """At a site: make a key that never leaves it, and a request for `net sign`."""
    with messages():
        from fedstrata.engines.network.kits import request as requested

        file = requested(kit, name)
        typer.echo(
            f"{file}: send this file to whoever has the authority (`fedstrata net sign`), and copy what "
            f"comes back into {kit}. The key beside it stays here."
        )


@net.command()
def sign(
    folder: Folder,
    file: Annotated[Path, typer.Argument(help="A site's request.pem.")],
    authority: By = None,
    days: Days = DAYS,
) -> None:
    """Sign a site's request: its folder without a key, to be sent back."""
    with messages():
        from fedstrata.engines.network.kits import sign as signed
        from fedstrata.lab.experiments.settings import settings_of

        settings, issuer = settings_of(folder), _authority(folder, authority)
        made = signed(issuer, file, folder / "kits", settings.parties, days)
        _accompany(folder, made, settings)
        typer.echo(f"{made}: send its files back. They hold no secret.")


@net.command()
def revoke(
    folder: Folder,
    party: Annotated[str, typer.Argument(help="A site whose key is lost, or that has left.")],
    authority: By = None,
) -> None:
    """Refuse a site's certificates from its next message on, those to come excepted."""
    with messages():
        from fedstrata.engines.network.kits import revoke as revoked

        server = folder / "kits" / "server"
        number = revoked(_authority(folder, authority), server, party)
        typer.echo(
            f"{number} certificates of {party} are revoked. Copy {server / 'revoked'} into the server's kit, "
            "if that is elsewhere: a running server reads it at once."
        )


def _authority(folder: Path, given: Path | None) -> Authority:
    from fedstrata.engines.network.kits import Authority, KitError

    found = Authority(given or folder / "kits" / "authority")
    if found.expired:
        raise KitError(f"The certificate in {found.folder} has expired: make kits in a new folder.")
    return found


def _accompany(folder: Path, kit: Path, settings: Settings) -> None:
    """Put what every party has beside its certificate."""
    shutil.copy(folder / "federation.toml", kit)
    if (experiment := folder / settings.experiment).is_file():
        shutil.copy(experiment, kit)
