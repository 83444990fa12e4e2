from thinwire.lab.bench_link import goodput


def test_goodput_reports_both_directions_of_two_real_processes():
    rows = goodput(mbps=400, latency_ms=1, sizes=(1 << 16,), seconds=0.3)
    assert [(row.size, row.direction) for row in rows] == [(1 << 16, "there"), (1 << 16, "back")]
    for row in rows:
        assert row.mbps > 0
        assert row.ratio == row.mbps / 400
        assert row.cpu_s_per_gb > 0
        assert row.kernel_bytes > row.meter_bytes > 0


def test_without_a_rate_the_bare_transport_is_measured():
    there, back = goodput(mbps=0, latency_ms=0, sizes=(1 << 16,), seconds=0.2)
    assert there.mbps > 0 and back.mbps > 0
    assert there.ratio == back.ratio == 0
