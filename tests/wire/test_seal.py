"""Signatures on what stages say to all: each is worth something in its own place alone."""

import dataclasses
import itertools

import pytest

from thinwire.errors import WireError
from thinwire.wire import Authority, FrameKind, Identity, KeySeal, Seal
from thinwire.wire.seal import SIGNATURE_BYTES

NAMES = ["anna", "ben", "carla"]
KIND, STEP = FrameKind.TALLY, 7


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("test")


@pytest.fixture(scope="module")
def identities(authority: Authority) -> list[Identity]:
    return [authority.issue(name) for name in NAMES]


def seals_of(identities: list[Identity], epoch: int = 1) -> list[KeySeal]:
    pems = [identity.certificate_pem for identity in identities]
    return [
        KeySeal.of_seats(identity, stage, epoch, NAMES, pems)
        for stage, identity in enumerate(identities)
    ]


@pytest.fixture(scope="module")
def seals(identities: list[Identity]) -> list[KeySeal]:
    return seals_of(identities)


def test_what_several_stages_say_arrives(seals: list[KeySeal]) -> None:
    signed = [seal.sign(KIND, STEP, b"stage %d" % i) for i, seal in enumerate(seals)]
    assert seals[0].check(range(1, 3), KIND, STEP, signed[1] + signed[2]) == b"stage 1stage 2"
    assert seals[2].check([0], KIND, STEP, signed[0]) == b"stage 0"
    empty = seals[1].sign(KIND, STEP, b"")
    assert seals[0].check([1], KIND, STEP, empty) == b""


def test_without_keys_messages_travel_as_they_are() -> None:
    assert Seal().sign(KIND, STEP, b"bytes") == b"bytes"
    assert Seal().check(range(3), KIND, STEP, b"bytes") == b"bytes"


def test_every_byte_counts(seals: list[KeySeal]) -> None:
    signed = seals[1].sign(KIND, STEP, b"norms")
    for position, bit in itertools.product(range(len(signed)), (1, 128)):
        altered = bytearray(signed)
        altered[position] ^= bit
        with pytest.raises(WireError, match=r"stage 1 has not signed this|it ends before|follow"):
            seals[0].check([1], KIND, STEP, bytes(altered))


@pytest.mark.parametrize("cut", [0, 3, 4, 60, -1])
def test_a_part_that_is_cut_off_is_refused(cut: int, seals: list[KeySeal]) -> None:
    with pytest.raises(WireError, match="ends before the signatures of all stages"):
        seals[0].check([1], KIND, STEP, seals[1].sign(KIND, STEP, b"norms")[:cut])


def test_a_stage_can_neither_be_left_out_nor_added_nor_speak_for_another(
    seals: list[KeySeal],
) -> None:
    one, two = (seals[stage].sign(KIND, STEP, b"norms") for stage in (1, 2))
    for forged, words in [
        (one, "ends before"),
        (one + one, "stage 2 has not signed"),
        (two + one, "stage 1 has not signed"),
        (one + two + two, f"{4 + 5 + SIGNATURE_BYTES} bytes follow"),
    ]:
        with pytest.raises(WireError, match=words):
            seals[0].check(range(1, 3), KIND, STEP, forged)


def test_a_signature_holds_for_its_place_alone(identities: list[Identity]) -> None:
    ours, later = seals_of(identities), seals_of(identities, epoch=2)
    signed = ours[0].sign(FrameKind.VERDICT, STEP, b"commit")
    assert ours[1].check([0], FrameKind.VERDICT, STEP, signed)
    for seal, kind, step, number in [
        (ours[1], FrameKind.VALIDATED, STEP, 0),
        (ours[1], FrameKind.VERDICT, STEP + 1, 0),
        (ours[1], FrameKind.VERDICT, STEP, 1),
        (later[1], FrameKind.VERDICT, STEP, 0),
    ]:
        with pytest.raises(WireError, match="stage 0 has not signed"):
            seal.check([0], kind, step, signed, number)


def test_only_certificates_of_this_run_in_the_right_names_are_believed(
    authority: Authority, identities: list[Identity]
) -> None:
    pems = [identity.certificate_pem for identity in identities]
    stranger = Authority.create("test").issue("carla").certificate_pem
    for wrong, words in [
        ([*pems[:2], stranger], "stage 2 showed .* authority did not issue"),
        ([pems[0], pems[2], pems[1]], "stage 1 showed .* not issued to 'ben'"),
        ([*pems[:2], "no certificate"], "stage 2 showed .* did not issue"),
    ]:
        with pytest.raises(WireError, match=words):
            KeySeal.of_seats(identities[0], 0, 1, NAMES, wrong)
    again = dataclasses.replace(identities[0], certificate_pem=stranger)
    assert KeySeal.of_seats(again, 0, 1, NAMES, pems), "our own key is what counts"
