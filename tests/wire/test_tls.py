import dataclasses
import datetime
import json
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from wiring import MAX_MESSAGE

from thinwire.errors import ConfigError, WireError
from thinwire.wire import Authority, Identity, dial
from thinwire.wire.tls import (
    is_issued_by,
    key_fingerprint,
    names_in,
    new_key,
    public_key_fingerprint,
    signing_request,
)
from waiting import PATIENCE


def refusal(listener, identity, server_name="coordinator") -> str:
    """Dial a listener that does expect us; return why it failed."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(listener.accept, "peer", 1.2)
        with pytest.raises(WireError) as failure:
            dial(listener.address, "peer", identity, server_name, 1.0, MAX_MESSAGE)
        with pytest.raises(WireError, match="did not dial"):
            waiting.result()
    return str(failure.value)


def bare_call(channel: grpc.Channel) -> grpc.RpcError:
    open_stream = channel.stream_stream("/thinwire.Wire/Exchange")
    with channel, pytest.raises(grpc.RpcError) as failure:
        next(open_stream(iter(()), metadata=(("thinwire-name-bin", b"peer"),), timeout=PATIENCE))
    return failure.value


def test_a_client_of_another_authority_is_refused_by_the_server(authority, listener):
    stranger = Authority.create("another run").issue("peer")
    # It trusts the right authority, so only the server can object.
    stranger = dataclasses.replace(stranger, authority_pem=authority.issue("x").authority_pem)
    assert "was this identity issued by the same run?" in refusal(listener, stranger)


def test_a_server_of_another_authority_is_refused_by_the_client(listener):
    reason = refusal(listener, Authority.create("another run").issue("peer"))
    assert "a process of another run listens there" in reason


def test_a_client_checks_the_server_s_name(authority, listener):
    reason = refusal(listener, authority.issue("peer"), server_name="stage-0")
    assert "another process of this run listens there" in reason


def test_a_client_without_a_certificate_is_refused(authority, listener):
    roots = authority.issue("x").authority_pem.encode()
    channel = grpc.secure_channel(
        listener.address,
        grpc.ssl_channel_credentials(roots),
        options=[("grpc.ssl_target_name_override", "coordinator")],
    )
    assert bare_call(channel).code() == grpc.StatusCode.UNAVAILABLE


def test_a_client_without_tls_is_refused(listener):
    channel = grpc.insecure_channel(listener.address)
    assert bare_call(channel).code() == grpc.StatusCode.UNAVAILABLE


def test_the_certificate_says_what_it_should(authority):
    identity = authority.issue("stage-7")
    certificate = x509.load_pem_x509_certificate(identity.certificate_pem.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["stage-7"]
    assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
    assert certificate.public_key().curve.name == "secp256r1"
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca
    signer = x509.load_pem_x509_certificate(identity.authority_pem.encode())
    certificate.verify_directly_issued_by(signer)
    with pytest.raises(ValueError, match="does not match"):
        certificate.verify_directly_issued_by(
            x509.load_pem_x509_certificate(
                Authority.create("other").issue("x").authority_pem.encode()
            )
        )


def test_identities_survive_json_and_hide_their_key(authority):
    identity = authority.issue("stage-1")
    assert Identity.from_plain(json.loads(json.dumps(identity.to_plain()))) == identity
    assert "PRIVATE" in identity.key_pem
    assert "PRIVATE" not in repr(identity)
    assert authority.issue("stage-1").key_pem != identity.key_pem


@pytest.mark.parametrize("part", ["certificate_pem", "key_pem", "authority_pem"])
def test_a_damaged_identity_is_refused(authority, part):
    plain = authority.issue("stage-1").to_plain()
    plain[part] = plain[part][:60]
    with pytest.raises(WireError, match="'stage-1' is damaged"):
        Identity.from_plain(plain)


def test_an_identity_with_a_strange_key_is_refused(authority):
    with pytest.raises(ConfigError, match=r"identity\.colour"):
        Identity.from_plain({**authority.issue("a").to_plain(), "colour": "red"})


@pytest.mark.parametrize("name", ["", "Stage", "a b", "-a", "a-", "x" * 64, "host\0evil", "*"])
def test_names_that_no_certificate_should_carry_are_refused(authority, name):
    with pytest.raises(WireError, match="cannot name a process"):
        authority.issue(name)


@pytest.mark.parametrize("name", ["x" * 100, "漢" * 20, "é" * 60, "a" + "漢" * 66])
def test_any_name_of_a_run_names_an_authority(name: str) -> None:
    assert Authority.create(name).issue("stage-0").name == "stage-0"


def test_no_clock_locks_a_machine_out(authority: Authority) -> None:
    """Neither a host that was off for days nor a machine whose clock is years off."""
    now, years = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=3650)
    signed = authority.sign(signing_request(new_key()), "ada")
    for pem in (authority.certificate_pem, authority.issue("ben").certificate_pem, signed):
        certificate = x509.load_pem_x509_certificate(pem.encode())
        assert certificate.not_valid_before_utc < now - years
        assert certificate.not_valid_after_utc > now + years


def test_a_saved_authority_goes_on_signing(tmp_path: Path) -> None:
    path, key = tmp_path / "authority" / "authority.pem", new_key()
    first = Authority.create("tests")
    first.save(path)
    later = Authority.load(path)
    assert (later.fingerprint, later.run_id) == (first.fingerprint, first.fingerprint[:16])
    assert len(later.fingerprint) == 64
    certificate = x509.load_pem_x509_certificate(later.sign(signing_request(key), "ada").encode())
    authority = x509.load_pem_x509_certificate(first.certificate_pem.encode())
    assert is_issued_by(certificate, authority)
    assert names_in(certificate) == ["ada"] and names_in(authority) == []
    assert public_key_fingerprint(certificate) == key_fingerprint(key)
    assert not is_issued_by(
        certificate,
        x509.load_pem_x509_certificate(Authority.create("tests").certificate_pem.encode()),
    )


def test_only_requests_for_our_kind_of_key_are_signed(authority: Authority) -> None:
    name = x509.Name([])
    other = ec.generate_private_key(ec.SECP384R1())
    request = (
        x509.CertificateSigningRequestBuilder().subject_name(name).sign(other, hashes.SHA256())
    )
    pem = request.public_bytes(serialization.Encoding.PEM).decode()
    with pytest.raises(WireError, match="another kind than P-256"):
        authority.sign(pem, "ada")
    der = bytearray(
        x509.load_pem_x509_csr(signing_request(new_key()).encode()).public_bytes(
            serialization.Encoding.DER
        )
    )
    der[-1] ^= 1  # of the signature
    forged = ssl.DER_cert_to_PEM_cert(bytes(der)).replace("CERTIFICATE", "CERTIFICATE REQUEST")
    with pytest.raises(WireError, match="not signed by the key that it carries"):
        authority.sign(forged, "ada")
    with pytest.raises(WireError, match="cannot name a process"):
        authority.sign(signing_request(new_key()), "Ada")
