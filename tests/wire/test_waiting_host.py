"""At a relay a host waits for its services, and nobody else can wait in its place."""

import pytest
from knocking import TOKEN, Service, ask, knock, line, until

from thinwire.wire import Authority, Door, Route, Standby
from thinwire.wire.preamble import proof_of, to_sign


@pytest.mark.parametrize(
    ("thief", "reason"),
    [
        ("without the key", "only the host of run {run} may wait for {run}/control: the request"),
        ("another key", "the key shown is not the one of the authority of run {run}"),
        ("another nonce", "the authority of run {run} has not signed this request"),
        ("another name", "the authority of run {run} has not signed this request"),
        ("another token", "the authority of run {run} has not signed this request"),
        ("another's signature", "the authority of run {run} has not signed this request"),
        ("no key", "the key or the signature of the authority cannot be read"),
        ("one word", "the request is not one of reach, wait or ping with a name and a proof"),
    ],
)
def test_only_the_holder_of_the_authority_waits_in_the_hosts_place(
    authority: Authority, service: Service, thief: str, reason: str
) -> None:
    """Whoever was invited knows the token, and that is not enough to take the host's calls."""
    run, prove, other = authority.run_id, authority.prover(), Authority.create("other").prover()
    name = f"{run}/control"
    with Door("127.0.0.1", 0) as relay:
        relay.admit_any(TOKEN)
        route = Route(relay.address, "relayed", TOKEN)
        with Standby(name, route, service.address, prover=prove) as standby:
            until(lambda: standby.waiting == 2)
            caller = knock(relay)
            nonce = line(caller).split(" ")[2]
            proof = proof_of(TOKEN, nonce, "wait", name)
            asked = to_sign(nonce, name, proof)
            key = prove(asked).partition(" ")[0]
            shown = {
                "without the key": "",
                "another key": " " + other(asked),
                "another nonce": " " + prove(to_sign("0" * 32, name, proof)),
                "another name": " " + prove(to_sign(nonce, f"{run}/enrol", proof)),
                "another token": " "
                + prove(to_sign(nonce, name, proof_of("x", nonce, "wait", name))),
                "another's signature": f" {key} {other(asked).partition(' ')[2]}",
                "no key": " AAAA ====",
                "one word": f" {key}",
            }[thief]
            caller.sendall(f"wait {name} - {proof}{shown}\n".encode())
            assert line(caller).startswith(f"no {reason.format(run=run)}")
            assert relay.traffic()[run].waiting == 2
            joining = ask(relay, "reach", name)
            assert line(joining) == "ok"
            with service.accept() as served:  # the real host
                joining.sendall(b"hello")
                assert served.recv(5) == b"hello"


@pytest.mark.parametrize("service_name", ["control", "enrol", "speed"])
def test_a_standby_without_the_authority_gets_no_calls(
    authority: Authority, service: Service, service_name: str
) -> None:
    name = f"{authority.run_id}/{service_name}"
    with Door("127.0.0.1", 0) as relay:
        relay.admit_any(TOKEN)
        with Standby(name, Route(relay.address, token=TOKEN), service.address) as thief:
            until(lambda: "lacks the signature of the run's authority" in thief.trouble)
            assert thief.waiting == 0
            assert "nobody waits for it" in line(ask(relay, "reach", name))


def test_a_signature_is_not_looked_at_before_the_token_is_right(authority: Authority) -> None:
    name = f"{authority.run_id}/control"
    with Door("127.0.0.1", 0) as relay:
        relay.admit_any(TOKEN)
        caller = knock(relay)
        nonce = line(caller).split(" ")[2]
        proof = proof_of("another", nonce, "wait", name)
        shown = authority.prover()(to_sign(nonce, name, proof))
        caller.sendall(f"wait {name} - {proof} {shown}\n".encode())
        assert "is not the right one" in line(caller)
        assert relay.traffic() == {}


def test_the_longest_name_of_a_service_leaves_room_for_its_proof(authority: Authority) -> None:
    name = f"{authority.run_id}/{'s' * 80}"
    with Door("127.0.0.1", 0) as relay:
        relay.admit_any(TOKEN)
        route = Route(relay.address, token=TOKEN)
        with Standby(name, route, "127.0.0.1:1", prover=authority.prover()) as standby:
            until(lambda: standby.waiting == 2)
