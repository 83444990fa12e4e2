import pytest

from thinwire_lab.bench_link import Path, alone, goodput


def test_goodput_reports_both_directions_of_two_real_processes():
    rows = goodput(Path(mbps=400, latency_ms=1), sizes=(1 << 16,), seconds=0.3)
    assert [(row["size"], row["direction"]) for row in rows] == [
        (1 << 16, "there"),
        (1 << 16, "back"),
    ]
    for row in rows:
        assert row["mbps"] > 0
        assert row["ratio"] == row["mbps"] / 400
        assert row["cpu_s_per_gb"] > 0
        assert row["kernel_bytes"] > row["meter_bytes"] > 0
        assert row["overhead"] == row["kernel_bytes"] / row["meter_bytes"] - 1


def test_a_single_frame_takes_what_the_model_says():
    path = Path(mbps=80, latency_ms=10)
    (taken,) = alone(path, sizes=(1 << 20,), times=3).values()
    assert path.seconds(1 << 20) == pytest.approx(0.010 + (64 + (1 << 20)) * 8 / 80e6)
    assert taken >= path.seconds(1 << 20)


def test_a_real_path_is_not_emulated_and_the_other_end_starts_where_it_is_told():
    path = Path(mbps=80, latency_ms=10, listen="127.0.0.2", other="env THERE=1", real=True)
    assert path.config.nic() is None
    (taken,) = alone(path, sizes=(1 << 10,), times=1).values()
    assert taken > 0
