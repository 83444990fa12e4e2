"""The cases of the benchmark are runs that can be made, and its plain loop is timed."""

from thinwire_lab import bench


def test_every_case_can_be_run(tmp_path):
    for name, values in bench.CASES["slow_links"].items():
        settings = bench.settings_of(str(tmp_path), name, values)
        assert settings.pipeline.stages == 4 and settings.link.emulate
        assert (settings.link.mbps_up, settings.train.steps) == (80, 30)
    runtime = bench.settings_of(str(tmp_path), "plain", bench.CASES["runtime"])
    assert not runtime.link.emulate and runtime.train.steps == 6
