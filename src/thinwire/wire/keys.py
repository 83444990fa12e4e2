"""Identity is a key: whoever takes part in a run has a P-256 key pair, known by its fingerprint.

There is no certificate authority. A listener signs a certificate itself, for TLS needs one; only
the key in it counts, and the dialer knows its fingerprint beforehand. Who may connect is what the
coordinator's list of members says at that moment (run/admission.py).
"""

import base64
import datetime
import hashlib
import os
import re
import ssl
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import BinaryIO

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from thinwire.errors import WireError

RUN_DIGITS = 16  # of the fingerprint of a run's host: enough to address the run by
_ECDSA = ec.ECDSA(hashes.SHA256())
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Identity:
    """Who a process is: its name in the run, its private key, and the public key of the host."""

    name: str
    key_pem: str = field(repr=False)
    host: str = ""  # of whoever leads the run: the coordinator

    @classmethod
    def create(cls, name: str, host: str = "") -> "Identity":
        """One with a fresh key."""
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return cls(name, pem.decode(), host)

    @cached_property
    def _key(self) -> ec.EllipticCurvePrivateKey:
        try:
            key = serialization.load_pem_private_key(self.key_pem.encode(), password=None)
        except (ValueError, TypeError) as error:
            raise WireError(f"the key of {self.name!r} is damaged: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp256r1":
            raise WireError(f"the key of {self.name!r} is of another kind than P-256")
        return key

    @cached_property
    def public(self) -> str:
        """The public key: 33 bytes, in base64."""
        return _text_of(self._key.public_key())

    @property
    def fingerprint(self) -> str:
        """By which others know this key."""
        return fingerprint_of(self.public)

    def prove(self, text: str) -> str:
        """The public key and its signature of a text (`proven_by`)."""
        return f"{self.public} {_base64(self._key.sign(text.encode(), _ECDSA))}"

    @property
    def door_token(self) -> str:
        """What it shows at the host's door: only this peer and the host can make it."""
        return self.token_with(self.name, self.host)

    def token_with(self, name: str, public: str) -> str:
        """The token of a peer of this name, by a secret that two keys share (Diffie-Hellman)."""
        secret = self._key.exchange(ec.ECDH(), _key_of(public))
        return f"{name}.{hashlib.sha256(b'thinwire door ' + secret).hexdigest()[:32]}"

    def listening_context(self) -> ssl.SSLContext:
        """TLS 1.3 for who listens, under a certificate for its key. The key touches no disk."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "thinwire")])
        certificate = (  # no clock decides who may: one that is wrong locks nobody out
            x509.CertificateBuilder(name, name, self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
            .not_valid_after(datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))
            .sign(self._key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # nobody resumes a session: each connection proves its keys
        # Python reads keys from files alone: these have no name.
        shown = certificate.public_bytes(serialization.Encoding.PEM)
        with _pipe_with(shown) as one, _pipe_with(self.key_pem.encode()) as other:
            context.load_cert_chain(f"/dev/fd/{one.fileno()}", f"/dev/fd/{other.fileno()}")
        return context


@cache
def dialing_context() -> ssl.SSLContext:
    """TLS 1.3 for who dials; it compares the key that it is shown by itself (`shown_key`)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def shown_key(certificate: bytes | None) -> str:
    """The public key in a certificate (DER); TLS has proven that the other end holds it."""
    try:
        key = x509.load_der_x509_certificate(certificate or b"").public_key()
    except ValueError:
        raise WireError("the other end shows a certificate that cannot be read") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise WireError("the other end shows a key of another kind than P-256")
    return _text_of(key)


def proven_by(text: str, shown: str) -> str:
    """The public key that has signed the text, as `Identity.prove` does; WireError if none has."""
    public, _, signature = shown.partition(" ")
    try:
        _key_of(public).verify(base64.b64decode(signature, validate=True), text.encode(), _ECDSA)
    except ValueError:
        raise WireError("the key or the signature shown cannot be read") from None
    except InvalidSignature:
        raise WireError("the key shown has not signed this request") from None
    return public


def fingerprint_of(public: str) -> str:
    """sha256 of a public key, in hex."""
    encoded = _key_of(public).public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(encoded).hexdigest()


def is_name(text: str) -> bool:
    """Whether a peer may have this name."""
    return _NAME.fullmatch(text) is not None


def _key_of(public: str) -> ec.EllipticCurvePublicKey:
    try:
        point = base64.b64decode(public, validate=True)
        return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
    except ValueError:
        raise WireError("a public key cannot be read") from None


def _text_of(key: ec.EllipticCurvePublicKey) -> str:
    form = serialization.PublicFormat.CompressedPoint
    return _base64(key.public_bytes(serialization.Encoding.X962, form))


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _pipe_with(content: bytes) -> BinaryIO:
    """The reading end of a pipe that holds all of a short content."""
    end, writing = os.pipe()
    with open(writing, "wb") as pipe:
        pipe.write(content)
    return open(end, "rb")
