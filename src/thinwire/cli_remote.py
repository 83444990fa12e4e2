"""The commands that ask a run over several machines, from the machine of its host or of a peer."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from thinwire.arguments import AddCommand, number
from thinwire.errors import ConfigError

_FOLDER = "folder of the run on its host, or of `join --folder` on a peer (default: what is found)"


def add_remote_commands(add: AddCommand) -> None:
    """Put the commands on the command line."""
    sub = add("status", status_command, "show how a run stands that is under way on this machine")
    sub.add_argument("folder", type=Path, nargs="?", help=_FOLDER)
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = add("doctor", doctor_command, "find out what would keep this machine out of a run")
    sub.add_argument(
        "invite",
        nargs="?",
        default="",
        help="also try the way to its host; - reads the invite from the input",
    )
    sub.add_argument("--folder", type=Path, help="folder that `join` would be given")
    sub.add_argument(
        "--listen",
        default="0.0.0.0:0",
        metavar="HOST:PORT",
        help="where to accept connections from outside (default: any free port)",
    )
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = add("kick", kick_command, "remove a peer from a run that this machine hosts")
    sub.add_argument("peer", help="name of the peer, as `thinwire status` shows it")
    sub.add_argument(
        "--by-invite", action="store_true", help="also remove all that came by the same invite"
    )
    sub.add_argument("folder", type=Path, nargs="?", help="folder of the run (default: runs/*)")

    sub = add("invite", invite_command, "print another invite to a run that this machine hosts")
    sub.add_argument(
        "--machines",
        type=number(int, 1),
        default=1,
        metavar="N",
        help="machines that it lets in (default: 1)",
    )
    sub.add_argument("folder", type=Path, nargs="?", help="folder of the run (default: runs/*)")

    sub = add("leave", leave_command, "leave a run that this machine joined, after this step")
    sub.add_argument("folder", type=Path, nargs="?", help="folder of `join --folder`")


def status_command(options: argparse.Namespace) -> None:
    """Print how each run stands that is alive here."""
    from thinwire.remote.alive import alive_reports
    from thinwire.remote.status import status_table

    reports = alive_reports(options.folder)
    if options.json:
        plain = [report.to_plain() for report in reports]
        print(json.dumps(plain[0] if len(plain) == 1 else plain, indent=1))
        return
    for report in reports:
        Console(file=sys.stdout, highlight=False).print(status_table(report))


def doctor_command(options: argparse.Namespace) -> None:
    """Print what will go wrong on this machine, and the fix; exit code 1 if something blocks."""
    from thinwire.remote.doctor import examine

    text = sys.stdin.readline() if options.invite == "-" else options.invite
    found = examine(text, options.folder, options.listen)
    print(json.dumps(found.to_plain(), indent=1) if options.json else found.text())
    if not options.invite and not options.json:
        print("With an invite (thinwire doctor INVITE) it also tries the way to the host.")
    if found.is_blocked:
        sys.exit(1)


def kick_command(options: argparse.Namespace) -> None:
    """Have the host remove a peer."""
    from thinwire.remote.alive import host_folder
    from thinwire.remote.control_socket import ask

    peer, folder = options.peer, options.folder
    if folder is not None and not folder.exists() and Path(peer).exists():
        raise ConfigError(f"the peer comes first: thinwire kick {folder} {peer}")
    request = {"ask": "kick", "peer": peer, "by_invite": options.by_invite}
    print(ask(host_folder(folder), request)["text"])


def invite_command(options: argparse.Namespace) -> None:
    """Have the host make another invite, to the same addresses and for as many hours."""
    from thinwire.remote.alive import host_folder
    from thinwire.remote.control_socket import ask

    request = {"ask": "invite", "machines": options.machines}
    print(ask(host_folder(options.folder), request)["text"])


def leave_command(options: argparse.Namespace) -> None:
    """Have the peer of this machine leave."""
    from thinwire.remote.alive import member_folder
    from thinwire.remote.control_socket import ask

    print(ask(member_folder(options.folder), {"ask": "leave"})["text"])
