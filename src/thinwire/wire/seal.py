"""Signatures on what stages say to all: a stage that passes a message on cannot change it.

Links prove who the neighbour is. Tallies, verdicts and a moved basis go on from neighbour to
neighbour, so where peers need not trust each other, whoever made such a message signs it. On one
machine nobody does, and messages travel as they are.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.x509.oid import NameOID

from thinwire.errors import WireError
from thinwire.wire.frame import FrameKind
from thinwire.wire.tls import Identity

_HALF = 32  # bytes of each of the two numbers of a P-256 signature
SIGNATURE_BYTES = 2 * _HALF
_LENGTH = struct.Struct("<I")
SEAL_BYTES = _LENGTH.size + SIGNATURE_BYTES  # beside the content of a signed part
_ABOUT = struct.Struct("<32sQBQIH")  # run, epoch, kind, step, number, stage
_ALGORITHM = ec.ECDSA(hashes.SHA256())


class Seal:
    """No signatures: messages travel as they are."""

    def sign(self, kind: FrameKind, step: int, content: bytes, number: int = 0) -> bytes:
        """What this stage says, as it travels; parts of several stages may follow each other."""
        return content

    def check(
        self, stages: Iterable[int], kind: FrameKind, step: int, payload: bytes, number: int = 0
    ) -> bytes:
        """What these stages said, one after the other; WireError if one of them did not."""
        return payload


class KeySeal(Seal):
    """Each part has its length in front, and the signature of its stage behind.

    A signature covers the run, its epoch, the kind, step and number of the message, and the stage:
    it is worth nothing in another place.
    """

    def __init__(
        self,
        stage: int,
        key: ec.EllipticCurvePrivateKey,
        public_keys: Sequence[ec.EllipticCurvePublicKey],
        run: bytes,
        epoch: int,
    ) -> None:
        self._stage, self._key, self._public_keys = stage, key, public_keys
        self._run, self._epoch = hashlib.sha256(run).digest(), epoch

    @classmethod
    def of_seats(
        cls, identity: Identity, stage: int, epoch: int, names: Sequence[str], pems: Sequence[str]
    ) -> "KeySeal":
        """From the names and certificates of those who hold the stages, in order.

        WireError for a certificate that was not issued to its name by this run's authority.
        """
        authority = x509.load_pem_x509_certificate(identity.authority_pem.encode())
        key = serialization.load_pem_private_key(identity.key_pem.encode(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise WireError(f"identity {identity.name!r} has no P-256 key and cannot sign")
        public_keys = [
            _public_key(holder, name, pem, authority)
            for holder, (name, pem) in enumerate(zip(names, pems, strict=True))
        ]
        run = authority.public_bytes(serialization.Encoding.DER)
        return cls(stage, key, public_keys, run, epoch)

    def sign(self, kind: FrameKind, step: int, content: bytes, number: int = 0) -> bytes:
        about = self._about(self._stage, kind, step, number)
        numbers = decode_dss_signature(self._key.sign(about + content, _ALGORITHM))
        signature = b"".join(part.to_bytes(_HALF, "big") for part in numbers)
        return _LENGTH.pack(len(content)) + content + signature

    def check(
        self, stages: Iterable[int], kind: FrameKind, step: int, payload: bytes, number: int = 0
    ) -> bytes:
        contents, rest = [], payload
        for stage in stages:
            (length,) = _LENGTH.unpack_from(rest) if len(rest) >= _LENGTH.size else (0,)
            part, rest = _split(rest, _LENGTH.size + length + SIGNATURE_BYTES)
            content, signature = part[_LENGTH.size : -SIGNATURE_BYTES], part[-SIGNATURE_BYTES:]
            numbers = (int.from_bytes(signature[at : at + _HALF], "big") for at in (0, _HALF))
            about = self._about(stage, kind, step, number)
            try:
                self._public_keys[stage].verify(
                    encode_dss_signature(*numbers), about + content, _ALGORITHM
                )
            except InvalidSignature:
                raise WireError(f"stage {stage} has not signed this") from None
            contents.append(content)
        if rest:
            raise WireError(f"{len(rest)} bytes follow that nobody has signed")
        return b"".join(contents)

    def _about(self, stage: int, kind: FrameKind, step: int, number: int) -> bytes:
        return _ABOUT.pack(self._run, self._epoch, kind, step, number, stage)


def _split(payload: bytes, size: int) -> tuple[bytes, bytes]:
    if len(payload) < size:
        raise WireError("it ends before the signatures of all stages that it should come from")
    return payload[:size], payload[size:]


def _public_key(
    stage: int, name: str, pem: str, authority: x509.Certificate
) -> ec.EllipticCurvePublicKey:
    try:
        certificate = x509.load_pem_x509_certificate(pem.encode())
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise WireError(
            f"stage {stage} showed a certificate that this run's authority did not issue"
        ) from None
    shown = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or [n.value for n in shown] != [name]:
        raise WireError(f"stage {stage} showed a certificate that was not issued to {name!r}")
    return key
