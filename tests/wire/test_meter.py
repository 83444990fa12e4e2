import json
import threading

from thinwire.wire import FrameKind, Meter


def test_counts_by_direction_and_kind():
    meter = Meter()
    meter.count_sent(FrameKind.FORWARD, 100)
    meter.count_sent(FrameKind.FORWARD, 50)
    meter.count_sent(FrameKind.BYE, 0)
    meter.count_received(FrameKind.BACKWARD, 7)
    assert meter.sent_bytes(FrameKind.FORWARD) == 150 + 2 * 64
    assert meter.sent_bytes(FrameKind.BACKWARD) == 0
    assert meter.sent_bytes() == 150 + 3 * 64
    assert meter.received_bytes() == meter.received_bytes(FrameKind.BACKWARD) == 7 + 64


def test_snapshot_is_json_and_does_not_follow_later_counts():
    meter = Meter()
    meter.count_sent(FrameKind.TALLY, 5)
    snapshot = meter.snapshot()
    meter.count_sent(FrameKind.TALLY, 5)
    assert json.loads(json.dumps(snapshot)) == {
        "sent": {
            "TALLY": {"frames": 1, "header_bytes": 64, "payload_bytes": 5},
            "total": {"frames": 1, "header_bytes": 64, "payload_bytes": 5},
        },
        "received": {"total": {"frames": 0, "header_bytes": 0, "payload_bytes": 0}},
    }


def test_no_count_is_lost_between_threads():
    meter = Meter()

    def count() -> None:
        for _ in range(2000):
            meter.count_sent(FrameKind.FORWARD, 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.snapshot()["sent"]["FORWARD"]["frames"] == 8000
    assert meter.sent_bytes() == 8000 * 65
