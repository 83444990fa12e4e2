"""Mutual TLS without any administration: each run makes its own certificate authority.

Where all peers are its own processes, the coordinator creates the authority in memory, issues one
identity per process, and forgets it with the run; no private key touches the disk. Peers on other
machines make their own keys and send signing requests; then the authority is kept for as long as
the run (remote/authority.py). An end trusts exactly those certificates that the run's authority
signed, and a dialer also checks the listener's name.
"""

import base64
import dataclasses
import datetime
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from thinwire.errors import WireError
from thinwire.folders import replace_private_file
from thinwire.typed import from_plain

# No clock decides who may: a machine that was off, or whose clock is wrong, is not locked out. Who
# may no longer is struck off the host's list, which is asked at every connection.
_VALID_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_VALID_TO = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
RUN_DIGITS = 16  # of an authority's fingerprint: enough to address a run by
_ALGORITHM = ec.ECDSA(hashes.SHA256())
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


Prover = Callable[[str], str]  # of a text: the authority's public key and its signature


@dataclass(frozen=True)
class Identity:
    """What one process shows to prove that it belongs to the run (all PEM text)."""

    name: str
    certificate_pem: str
    key_pem: str = field(repr=False)
    authority_pem: str

    @property
    def authority_fingerprint(self) -> str:
        """The fingerprint of the authority that it belongs to."""
        authority = x509.load_pem_x509_certificate(self.authority_pem.encode())
        return public_key_fingerprint(authority)

    @property
    def door_token(self) -> str:
        """What it shows at the host's door: only this peer and the run's authority can make it."""
        authority = x509.load_pem_x509_certificate(self.authority_pem.encode())
        return f"{self.name}.{_agreed(_own_key(self.key_pem), authority)}"

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
        self.certificate_pem = _pem(certificate)
        self.fingerprint = public_key_fingerprint(certificate)
        self.run_id = self.fingerprint[:RUN_DIGITS]

    @classmethod
    def create(cls, run_name: str) -> "Authority":
        """A fresh authority with a fresh P-256 key."""
        key = ec.generate_private_key(ec.SECP256R1())
        # A common name has at most 64 bytes, of which some letters take several.
        whole = f"thinwire run {run_name}".encode()[:64].decode(errors="ignore")
        name = _common_name(whole)
        builder = (
            _builder(name, name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
        )
        return cls(key, builder.sign(key, hashes.SHA256()))

    def save(self, path: Path) -> None:
        """Write key and certificate into one file that only this user can read."""
        replace_private_file(path, (_key_pem(self._key) + self.certificate_pem).encode())

    @classmethod
    def load(cls, path: Path) -> "Authority":
        """The authority that was saved there; refuses a file that holds none."""
        try:
            content = path.read_bytes()
            certificate = x509.load_pem_x509_certificate(content)
            key = serialization.load_pem_private_key(content, password=None)
        except (OSError, ValueError) as error:
            raise WireError(
                f"cannot read the authority of the run from {path}: {error}; restore the file, or "
                "start a new run"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or (
            key.public_key() != certificate.public_key()
        ):
            raise WireError(f"{path} is damaged: its key and its certificate are not a pair")
        return cls(key, certificate)

    def issue(self, name: str) -> Identity:
        """An identity called `name`, which is also the name that dialers check it by."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certify(key.public_key(), name)
        return Identity(name, certificate, _key_pem(key), self.certificate_pem)

    def sign(self, request_pem: str, name: str) -> str:
        """A certificate called `name` for the key of a signing request, as PEM.

        The name that the request asks for means nothing: whoever calls this decides it.
        """
        return self._certify(_requested_key(request_pem), name)

    def door_token(self, certificate_pem: str) -> str:
        """The token of a peer at the host's door (`Identity.door_token`), from its certificate."""
        certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
        return f"{names_in(certificate)[0]}.{_agreed(self._key, certificate)}"

    def prover(self) -> Prover:
        """Proves that this process holds the key of the run (`check_proven`)."""
        point = self._key.public_key().public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
        )

        def prove(text: str) -> str:
            return f"{_base64(point)} {_base64(self._key.sign(text.encode(), _ALGORITHM))}"

        return prove

    def _certify(self, key: ec.EllipticCurvePublicKey, name: str) -> str:
        if not is_name(name):
            raise WireError(
                f"{name!r} cannot name a process: use lower-case letters, digits and inner "
                'hyphens, at most 63, such as "stage-1"'
            )
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return _pem(
            _builder(_common_name(name), self._certificate.subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def check_proven(run: str, text: str, shown: str) -> None:
    """Refuse unless a prover of this run's authority showed this for the text."""
    try:
        point, signature = (base64.b64decode(part, validate=True) for part in shown.split(" "))
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
    except ValueError:
        raise WireError("the key or the signature of the authority cannot be read") from None
    if _fingerprint(key)[:RUN_DIGITS] != run:
        raise WireError(f"the key shown is not the one of the authority of run {run}")
    try:
        key.verify(signature, text.encode(), _ALGORITHM)
    except InvalidSignature:
        raise WireError(f"the authority of run {run} has not signed this request") from None


def is_name(text: str) -> bool:
    """Whether a certificate may carry this name."""
    return _NAME.fullmatch(text) is not None


def new_key() -> str:
    """A fresh private key, as PEM."""
    return _key_pem(ec.generate_private_key(ec.SECP256R1()))


def signing_request(key_pem: str) -> str:
    """Asks an authority for a certificate for this key, and proves that we have it; as PEM.

    It carries no name: the authority decides that (`Authority.sign`).
    """
    key = _own_key(key_pem)
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    request = builder.sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def key_fingerprint(key_pem: str) -> str:
    """The fingerprint of a private key's public half; ValueError if that text is no such key."""
    return _fingerprint(_own_key(key_pem).public_key())


def request_fingerprint(request_pem: str) -> str:
    """By which a key is known again: sha256 of the public key of a signing request, in hex."""
    return _fingerprint(_requested_key(request_pem))


def public_key_fingerprint(certificate: x509.Certificate) -> str:
    """sha256 of the public key that a certificate carries, in hex."""
    return _fingerprint(certificate.public_key())


def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether this authority signed the certificate itself."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def names_in(certificate: x509.Certificate) -> list[str]:
    """The names that dialers check a certificate by."""
    try:
        kind = x509.SubjectAlternativeName
        names = certificate.extensions.get_extension_for_class(kind).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return names.get_values_for_type(x509.DNSName)


def _fingerprint(key: Any) -> str:
    encoded = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(encoded).hexdigest()


def _agreed(own: ec.EllipticCurvePrivateKey, other: x509.Certificate) -> str:
    """A secret that the holders of two keys share, and nobody else knows (Diffie-Hellman)."""
    public = other.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise WireError("the certificate carries a key of another kind than P-256")
    secret = own.exchange(ec.ECDH(), public)
    return hashlib.sha256(b"thinwire door " + secret).hexdigest()[:32]


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _own_key(key_pem: str) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(key_pem.encode(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("a key of another kind than P-256")
    return key


def _requested_key(request_pem: str) -> ec.EllipticCurvePublicKey:
    try:
        request = x509.load_pem_x509_csr(request_pem.encode())
        key, is_proved = request.public_key(), request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm):
        raise WireError("the signing request cannot be read") from None
    if not is_proved:
        raise WireError("the signing request is not signed by the key that it carries")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise WireError("the signing request carries a key of another kind than P-256")
    return key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_TO)
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


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
