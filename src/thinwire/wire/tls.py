"""Mutual TLS without any administration: each run makes its own certificate authority.

The coordinator creates the authority in memory, issues one identity per process, and
forgets it with the run. Private keys never touch the disk. An end trusts exactly those
certificates that the run's authority signed, and a dialer also checks the listener's name.
"""

import dataclasses
import datetime
import re
from dataclasses import dataclass, field
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from thinwire.errors import WireError
from thinwire.typed import from_plain

_VALID_FOR = datetime.timedelta(days=30)
_CLOCK_SKEW = datetime.timedelta(days=1)
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Identity:
    """What one process shows to prove that it belongs to the run (all PEM text)."""

    name: str
    certificate_pem: str
    key_pem: str = field(repr=False)
    authority_pem: str

    def to_plain(self) -> dict[str, str]:
        """For handing to a process over a trusted pipe; contains the private key."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Identity":
        """The inverse of `to_plain`; refuses text that is not PEM, on which gRPC would abort."""
        identity = from_plain(cls, plain, "identity")
        try:
            x509.load_pem_x509_certificate(identity.certificate_pem.encode())
            x509.load_pem_x509_certificate(identity.authority_pem.encode())
            serialization.load_pem_private_key(identity.key_pem.encode(), password=None)
        except ValueError as error:
            raise WireError(f"identity {identity.name!r} is damaged: {error}") from None
        return identity


class Authority:
    """Signs the identities of one run."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate

    @classmethod
    def create(cls, run_name: str) -> "Authority":
        """A fresh authority with a fresh P-256 key, valid for thirty days."""
        key = ec.generate_private_key(ec.SECP256R1())
        # A common name has at most 64 bytes, of which some letters take several.
        whole = f"thinwire run {run_name}".encode()[:64].decode(errors="ignore")
        name = _common_name(whole)
        builder = (
            _builder(subject=name, issuer=name, key=key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
        )
        return cls(key, builder.sign(key, hashes.SHA256()))

    def issue(self, name: str) -> Identity:
        """An identity called `name`, which is also the name that dialers check it by."""
        if not _NAME.fullmatch(name):
            raise WireError(
                f"{name!r} cannot name a process: use lower-case letters, digits and inner "
                'hyphens, at most 63, such as "stage-1"'
            )
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(_common_name(name), self._certificate.subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        key_pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return Identity(name, _pem(certificate), key_pem.decode(), _pem(self._certificate))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALID_FOR)
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
