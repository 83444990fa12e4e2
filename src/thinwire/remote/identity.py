"""What a joining machine keeps of itself in its own folder: its key, and its certificate.

The key is made before the first enrolment and never leaves the machine. So a machine that enrols
again, because an answer was lost, is known to the host by its key.
"""

from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from thinwire.errors import ConfigError, ThinwireError, WireError
from thinwire.folders import replace_private_file
from thinwire.wire.tls import (
    Identity,
    is_issued_by,
    is_name,
    key_fingerprint,
    names_in,
    new_key,
    public_key_fingerprint,
)

_KEY, _CERTIFICATE = "key.pem", "certificate.pem"


def own_key(folder: Path) -> str:
    """The private key of this machine in the run of this folder, made if there is none yet."""
    path = folder / _KEY
    try:
        if not path.exists():
            replace_private_file(path, new_key().encode())
        key_pem = path.read_text()
        key_fingerprint(key_pem)
    except OSError as error:
        raise ConfigError(
            f"cannot keep this machine's key in {folder}: {error}; choose another --folder"
        ) from error
    except ValueError:
        raise ConfigError(
            f"{path} is damaged: remove it, and join with a new invite and another --name"
        ) from None
    return key_pem


def saved_identity(folder: Path) -> Identity | None:
    """Who this machine was here before; None if it never joined, or must enrol again."""
    path = folder / _CERTIFICATE
    try:
        own, authority = x509.load_pem_x509_certificates(path.read_bytes())
        pems = [c.public_bytes(Encoding.PEM).decode() for c in (own, authority)]
        return identity_of(pems[0], own_key(folder), pems[1])
    except (OSError, ValueError, ThinwireError):
        return None


def save_identity(folder: Path, identity: Identity) -> None:
    """Keep a certificate beside its key; the latest replaces the one before."""
    content = (identity.certificate_pem + identity.authority_pem).encode()
    try:
        replace_private_file(folder / _CERTIFICATE, content)
    except OSError as error:
        raise ConfigError(f"cannot write {folder / _CERTIFICATE}: {error}") from error


def identity_of(certificate_pem: str, key_pem: str, authority_pem: str) -> Identity:
    """The identity that a received certificate gives; refuses one that is not for this key."""
    try:
        own = x509.load_pem_x509_certificate(certificate_pem.encode())
        authority = x509.load_pem_x509_certificate(authority_pem.encode())
        is_ours = public_key_fingerprint(own) == key_fingerprint(key_pem)
        (name,) = names_in(own)
    except ValueError:
        raise WireError("the host's answer is not a certificate") from None
    if not is_ours or not is_issued_by(own, authority) or not is_name(name):
        raise WireError("the host's answer is a certificate for another key, or of another run")
    return Identity(name, certificate_pem, key_pem, authority_pem)
