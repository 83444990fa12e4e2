"""Invites as people use them, with a host and a peer that are processes of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest
from machines import Machines, machines  # noqa: F401
from thinwire.remote.opening import who_is_left_out

from thinwire.cli import main
from thinwire.remote.authority import AuthorityBook
from thinwire.remote.invite import Invite

UNREACHED, REFUSED = 5, 8


@pytest.fixture
def join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, str], tuple[object, str]]:
    """Try to join from another home, in this process; the exit code and what was said."""

    def attempt(text: str, home: str) -> tuple[object, str]:
        monkeypatch.setenv("THINWIRE_DATA", str(tmp_path / home))
        with pytest.raises(SystemExit) as end:
            main(["join", text, "--no-listen"])
        said = capsys.readouterr()
        return end.value.code, said.out + said.err

    return attempt


def test_whoever_has_no_good_invite_or_was_removed_stays_outside(
    machines: Machines,  # noqa: F811
    join: Callable[[str, str], tuple[object, str]],
    tmp_path: Path,
) -> None:
    machines.config(pipeline__stages=2)
    host = machines.host("--machines", 1)
    host.wait_for("only this machine can use the invite")
    assert "for the next 24 hours, one machine joins with" in host.text()
    line = machines.invite
    good = Invite.parse(line)
    book = AuthorityBook(tmp_path / "another run", "test")
    other = book.invite(good.addresses)  # it leads to this host, whose run is another

    attempts = [join(str(other), "dan")]
    assert attempts[-1][0] == UNREACHED
    assert f"run {other.run_id} is not known at this door" in attempts[-1][1]

    attempts.append(join(line[:60] + ("A" if line[60] != "A" else "B") + line[61:], "ben"))
    assert attempts[-1][0] == REFUSED
    assert "this invite cannot be used: it was altered or cut off" in attempts[-1][1]

    ana = machines.join("ana")
    ana.wait_for("enrolled as ana")
    attempts.append(join(line, "eve"))
    assert attempts[-1][0] == REFUSED
    assert "this invite was for one machine and has been used" in attempts[-1][1]

    main(["kick", "ana", str(machines.run_folder)])
    assert ana.wait() == REFUSED, ana.text()
    attempts.append(join(line, "ana/data"))  # with the key and the certificate that it has
    assert attempts[-1][0] == REFUSED, attempts[-1]
    assert "'ana'" in attempts[-1][1]

    said = [ana.text(), *(text for _, text in attempts)]
    assert not [text for text in said if good.secret in text or line in text]
    names = [peer.name for peer in AuthorityBook(machines.run_folder / "authority").peers()]
    assert names == ["ana"]


def test_an_address_without_a_port_has_that_of_the_door(
    machines: Machines,  # noqa: F811
) -> None:
    machines.config(pipeline__stages=2)
    machines.host("--address", "localhost", "--address", "[::1]:7000")
    first, second = Invite.parse(machines.invite).addresses
    name, _, port = first.rpartition(":")
    assert name == "localhost" and int(port) > 0 and second == "[::1]:7000"


def test_a_wrong_address_is_refused_before_anything_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["init", "run.toml"])
    with pytest.raises(SystemExit):
        main(["host", "run.toml", "--address", "no address"])
    said = capsys.readouterr()
    assert "--address no address: write a name or an address" in said.err
    assert "[data]" not in said.out and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("addresses", "relay", "said"),
    [
        (("127.0.0.1:7600",), "", "only this machine can use the invite: 127.0.0.1 is its own"),
        (("localhost:7600", "[::1]:7600"), "", "only this machine can use the invite"),
        (("127.0.0.1:7600", "192.168.1.5:7600"), "", "is an address of this network alone"),
        (("192.168.1.5:7600",), "relay.example:4617", ""),
        (("192.168.1.5:7600", "ana.example.org:7600"), "", ""),
        (("8.8.8.8:7600",), "", ""),
    ],
)
def test_a_host_says_whom_its_addresses_leave_out(
    addresses: tuple[str, ...], relay: str, said: str
) -> None:
    text = who_is_left_out(addresses, relay)
    assert said in text and bool(said) == bool(text)
    assert not text or ("--address" in text and "port 7600" in text and "--relay" in text)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--name", "Ben Bright", "--name Ben Bright: a name has lower-case letters"),
        ("--listen", "nowhere", "'nowhere' is not an address: write HOST:PORT"),
        ("--data", "gone", "--data gone: there is no such file or folder"),
    ],
)
def test_an_option_that_cannot_work_is_refused_before_the_host_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, said: str
) -> None:
    invite = AuthorityBook(tmp_path / "book", "test").invite(("127.0.0.1:1",))
    with pytest.raises(SystemExit):
        main(["join", str(invite), "--folder", str(tmp_path / "ben"), option, value])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "ben").exists()
