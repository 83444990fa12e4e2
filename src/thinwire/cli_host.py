"""The commands of a run over several machines: host it, join it, ask it how it stands."""

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.arguments import AddCommand, add_config, add_device, add_init_from, number, overrides
from thinwire.errors import ConfigError, StageError, WireError
from thinwire.safe_stream import wait_for_no_reader

if TYPE_CHECKING:
    from thinwire.report import Display

WAY_ON = "to continue: start the same command again; peers have to join again too"


def add_host_commands(add: AddCommand) -> None:
    """Put the commands on the command line."""
    about = "train with stages on other people's machines; prints an invite"
    sub = add("host", host_command, about)
    add_config(sub)
    add_listen(sub, "0.0.0.0:0", "address and port that peers reach; port 0 = any free one")
    about = "address of this machine for the invite (port: that of --listen); may be repeated"
    sub.add_argument("--address", action="append", default=[], metavar="HOST[:PORT]", help=about)
    about = "the line that `relay` printed"
    sub.add_argument("--relay", default="", metavar="HOST:PORT/PASS", help=about)
    about = "stages that this machine holds itself (default: 0)"
    sub.add_argument("--stages-here", type=number(int, 0), default=0, metavar="N", help=about)
    about = "train with so many machines or more, also with several stages each (default: one each)"
    sub.add_argument("--peers", type=number(int, 1), default=0, metavar="N", help=about)
    about = "continue a run that `train` began; one that was hosted goes on without this"
    sub.add_argument("--resume", action="store_true", help=about)
    add_init_from(sub)
    about = "hours after which the invite admits nobody new (default: 24)"
    sub.add_argument("--invite-hours", type=number(float, above=0), default=24.0, help=about)
    about = "most that passes this host between peers, in all (default: 200 for each link)"
    sub.add_argument("--mbps", type=number(float, 0), default=0.0, help=about)
    about = "machines that the invite lets in (default: one for each stage of others, and 2 spares)"
    sub.add_argument("--machines", type=number(int, 1), default=0, metavar="N", help=about)
    add_web(sub, samples=True)

    sub = add("join", join_command, "take part in a run with the invite of its host")
    sub.add_argument("invite", help="the invite that the host printed; - reads it from the input")
    sub.add_argument("--name", default="", help="name of this peer (default: one is drawn)")
    about = "where this machine keeps its key and its part of the run (default: user's data)"
    sub.add_argument("--folder", type=Path, help=about)
    add_listen(sub, "0.0.0.0:0", "where peers may reach this machine directly, if they can")
    sub.add_argument("--no-listen", action="store_true", help="accept no connections from outside")
    add_device(sub)
    about = "CPU threads; 0 = as the run says, or all (default: 0)"
    sub.add_argument("--threads", type=number(int, 0), default=0, help=about)
    sub.add_argument("--tied", action="store_true", help=argparse.SUPPRESS)
    sub.add_argument("--data", type=Path, help="the run's data, if this machine has it")
    for name, what in (("valid-data", "validation data"), ("tokenizer", "tokenizer.json"),
                       ("template", "chat template")):  # fmt: skip
        about = f"with --data: the run's {what}, where its settings name a file"
        sub.add_argument(f"--{name}", type=Path, metavar="PATH", help=about)
    about = "codec plugin that a run may import here; may be repeated"
    sub.add_argument("--allow-plugin", action="append", default=[], metavar="NAME", help=about)
    add_web(sub)

    sub = add("watch", watch_command, "show runs in the browser, finished or under way")
    about = "folder of a run, or a copy of it; several are drawn over each other"
    sub.add_argument("folders", type=Path, nargs="+", metavar="RUN", help=about)
    about = "where to serve it (default: 127.0.0.1:4618, or the next port that is free)"
    sub.add_argument("--web", default="", metavar="HOST:PORT", help=about)

    about = "folder of the run, or on a peer that of `join --folder` (default: what is found)"
    sub = add("status", status_command, "show how a run stands that is under way on this machine")
    sub.add_argument("folder", type=Path, nargs="?", help=about)
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = add("doctor", doctor_command, "find out what would keep this machine out of a run")
    about = "also try the way to its host; - reads the invite from the input"
    sub.add_argument("invite", nargs="?", default="", help=about)
    sub.add_argument("--folder", type=Path, help="folder that `join` would be given")
    add_listen(sub, "0.0.0.0:0", "where to accept connections from outside; port 0 = any free one")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = add("kick", kick_command, "remove a peer from a run that this machine hosts")
    sub.add_argument("peer", help="name of the peer, as `thinwire status` shows it")
    about = "also remove all that came by the same invite"
    sub.add_argument("--by-invite", action="store_true", help=about)
    sub.add_argument("folder", type=Path, nargs="?", help="folder of the run (default: runs/*)")

    sub = add("invite", invite_command, "print another invite to a run that this machine hosts")
    about = "machines that it lets in (default: 1)"
    sub.add_argument("--machines", type=number(int, 1), default=1, metavar="N", help=about)
    sub.add_argument("folder", type=Path, nargs="?", help="folder of the run (default: runs/*)")

    sub = add("leave", leave_command, "leave a run that this machine joined, after this step")
    sub.add_argument("folder", type=Path, nargs="?", help="folder of `join --folder`")


def add_listen(sub: argparse.ArgumentParser, default: str, help: str) -> None:
    """Put the option on a command that accepts connections from outside."""

    def address(text: str) -> str:
        from thinwire.wire.sockets import split_address

        try:
            split_address(text)
        except WireError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    about = f"{help} (default: {default})"
    sub.add_argument("--listen", type=address, default=default, metavar="HOST:PORT", help=about)


def add_web(sub: argparse.ArgumentParser, samples: bool = False) -> None:
    """Put the options on a command that is shown in the browser."""
    about = "where to serve the page (default: 127.0.0.1:4618, or the next free one); off = no page"
    sub.add_argument("--web", default="", metavar="HOST:PORT", help=about)
    if samples:
        about = "words that the model continues at each checkpoint, with `train` at validations too"
        sub.add_argument("--sample", default="", metavar="TEXT", help=about)


def host_command(options: argparse.Namespace) -> None:
    """Host a run to its end."""
    from thinwire.run.host import HostOptions, host
    from thinwire.run.relay import parse_relay
    from thinwire.settings import load_settings

    settings = load_settings(options.config, overrides(options), options.allow_plugins)
    relay = parse_relay(options.relay) if options.relay else None
    place = options.listen, tuple(options.address), relay, options.invite_hours * 3600
    stages = options.machines, options.stages_here, options.resume, options.mbps, options.peers
    chosen, name = HostOptions(*place, *stages), settings.run.name
    shown = {"web": options.web, "role": "host", "sample": options.sample}
    run_to_end(lambda display: host(settings, chosen, display), name, lambda: WAY_ON, **shown)


def run_to_end(
    run: Callable[["Display"], dict[str, Any]],
    name: str,
    way_on: Callable[[], str],
    shows_summary: bool = True,
    web: str = "off",
    role: str = "train",
    sample: str = "",
) -> dict[str, Any]:
    """Run with a display and a page around it; what ends it early says how it goes on."""
    from thinwire.report import open_display, print_summary
    from thinwire.web.follow import Followed

    wait_for_no_reader()
    try:
        with open_display(sys.stdout, name) as shown, Followed(shown, web, role, sample) as display:
            summary = run(display)
        if shows_summary:
            print_summary(summary)
        if summary.get("interrupted"):
            raise KeyboardInterrupt
    except (StageError, WireError, KeyboardInterrupt) as error:
        if way := way_on():
            error.add_note(way)
        raise
    return summary


def join_command(options: argparse.Namespace) -> None:
    """Take part in a run to its end, or until this machine leaves."""
    from thinwire.run.admission import Invite

    text = sys.stdin.readline() if options.invite == "-" else options.invite
    if options.tied:
        threading.Thread(target=_leave_with_input, daemon=True).start()
    invite = Invite.parse(text)  # before torch is loaded: a bad one is refused at once

    from thinwire.run.join import Terms, join

    paths = options.data, options.valid_data, options.tokenizer, options.template
    place = options.name, options.folder, "" if options.no_listen else options.listen
    terms = Terms(*place, options.device, options.threads, tuple(options.allow_plugin), *paths)
    web = "off" if options.tied else options.web  # a host's own peer is on the host's page

    def run(display: "Display") -> dict[str, Any]:
        display.phase("end", join(invite, terms, display))
        return {}

    run_to_end(run, invite.run_name, lambda: "", shows_summary=False, web=web, role="join")


def _leave_with_input() -> None:
    """End with the process that holds our input, whatever ends it."""
    sys.stdin.read()
    os._exit(3)


def watch_command(options: argparse.Namespace) -> None:
    """Serve the page of runs until Ctrl-C."""
    from thinwire.web.follow import watch

    watch(options.folders, options.web)


def status_command(options: argparse.Namespace) -> None:
    """Print how each run stands that is alive here."""
    from rich.console import Console

    from thinwire.run.alive import alive_reports
    from thinwire.run.status import status_table

    reports = alive_reports(options.folder)
    if options.json:
        plain = [report.to_plain() for report in reports]
        print(json.dumps(plain[0] if len(plain) == 1 else plain, indent=1))
        return
    for report in reports:
        Console(file=sys.stdout, highlight=False).print(status_table(report))


def doctor_command(options: argparse.Namespace) -> None:
    """Print what will go wrong on this machine, and the fix; exit code 1 if something blocks."""
    from thinwire.run.doctor import Findings, examine

    text = sys.stdin.readline() if options.invite == "-" else options.invite
    found = Findings(examine(text, options.folder, options.listen))
    print(json.dumps(found.to_plain(), indent=1) if options.json else found.text())
    if not options.invite and not options.json:
        print("With an invite (thinwire doctor INVITE) it also tries the way to the host.")
    if found.is_blocked:
        sys.exit(1)


def kick_command(options: argparse.Namespace) -> None:
    """Have the host remove a peer."""
    peer, folder = options.peer, options.folder
    if folder is not None and not folder.exists() and Path(peer).exists():
        raise ConfigError(f"the peer comes first: thinwire kick {folder} {peer}")
    _ask(folder, {"ask": "kick", "peer": peer, "by_invite": options.by_invite})


def invite_command(options: argparse.Namespace) -> None:
    """Have the host make another invite, to the same addresses and for as many hours."""
    _ask(options.folder, {"ask": "invite", "machines": options.machines})


def leave_command(options: argparse.Namespace) -> None:
    """Have the peer of this machine leave."""
    _ask(options.folder, {"ask": "leave"}, of_host=False)


def _ask(folder: Path | None, request: dict[str, Any], of_host: bool = True) -> None:
    from thinwire.run.alive import ask, folder_to_ask

    print(ask(folder_to_ask(folder, of_host), request)["text"])
