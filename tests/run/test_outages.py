"""Training over links that break: real processes whose connections take a path of the test."""

import io
import re
import threading
import time

import pytest
from msgspec.structs import replace

from machines import assert_same_weights
from proxy import Proxy
from thinwire.errors import StageError
from thinwire.report import PlainDisplay
from thinwire.run import peers as peers_module
from thinwire.run.coordinator import Coordinator
from thinwire.run.events import Said
from thinwire.run.protocol import Ready
from thinwire.train import train


@pytest.fixture
def detour(monkeypatch):
    """Has every stage dial the one below through a proxy, which `make` builds; those, by cut."""
    proxies: dict[int, Proxy] = {}

    def install(make):
        class Detoured(Coordinator):
            """Hears another address of each stage than the one where it listens."""

            def on(self, event, now):
                match event:
                    case Said(stage, Ready(address=address) as ready) if address:
                        proxies[stage] = make(stage, address)
                        event = Said(stage, replace(ready, address=proxies[stage].address))
                return super().on(event, now)

        monkeypatch.setattr(peers_module, "Coordinator", Detoured)
        return proxies

    yield install
    for proxy in proxies.values():
        proxy.close()


def test_a_run_whose_links_are_cut_is_the_same_bit_for_bit(make_settings, detour, tmp_path):
    """Three stages; cuts come in mid-step, at counts of bytes, and once a link falls silent."""
    changes = {"pipeline__stages": 3, "train__steps": 8, "train__eval_every": 4}
    smooth = make_settings(run__name="smooth", **changes)
    whole = train(smooth, PlainDisplay(io.StringIO()))
    once = sum(whole["bytes_sent"]["by_kind"].values()) // 2  # bytes over one of the two cuts
    cuts = {0: [once * part // 10 for part in (1, 2, 4, 5, 7)], 1: [once // 3]}

    silences: list[threading.Timer] = []

    def silence(data):
        """Once, for longer than keepalive takes to notice: the connections of then are given up."""
        if not silences and proxies[1].carried >= once // 2:
            silences.append(threading.Timer(12, proxies[1].speak))
            proxies[1].fall_silent()
            silences[0].start()
        return data

    taps = {0: lambda data: data, 1: silence}
    proxies = detour(lambda cut, address: Proxy(address, cuts[cut], taps[cut]))
    log = io.StringIO()
    rough = train(make_settings(run__name="rough", **changes), PlainDisplay(log))
    assert_same_weights(tmp_path / "smooth", tmp_path / "rough", 8)
    assert rough["valid_losses"] == whole["valid_losses"]
    sent, expected = (dict(run["bytes_sent"]["by_kind"]) for run in (rough, whole))
    # whoever leaves first says goodbye, and sometimes both do
    assert sent.pop("BYE") and expected.pop("BYE") and sent == expected
    assert [row["cut"] for row in rough["outages"]] == [0, 1]
    assert [row["count"] for row in rough["outages"]] == [5, 2]
    assert rough["outages"][1]["seconds"] > 1
    assert [row["count"] for row in whole["outages"]] == [0, 0]
    assert "the link between stages 1 and 2 is down: " in log.getvalue()
    assert re.search(r"the link between stages 1 and 2 is back after \d+\.\d s", log.getvalue())


def test_an_outage_beyond_the_limit_ends_the_run_and_names_the_link(make_settings, detour):
    proxies = detour(lambda cut, address: Proxy(address))

    def break_off():
        while 0 not in proxies or proxies[0].carried < 100_000:
            time.sleep(0.01)
        proxies[0].is_refusing = True
        proxies[0].cut()

    threading.Thread(target=break_off, daemon=True).start()
    settings = make_settings(train__steps=100_000, train__eval_every=0, link__outage=2.0)
    with pytest.raises(StageError, match=r"cut-0 is broken: the connection was down for 2 s: "):
        train(settings, PlainDisplay(io.StringIO()))


@pytest.mark.slow
def test_without_an_outage_allowed_a_run_ends_at_the_first_loss(make_settings, detour):
    detour(lambda cut, address: Proxy(address, [100_000]))
    settings = make_settings(train__steps=100_000, train__eval_every=0, link__outage=0.0)
    with pytest.raises(StageError, match=r"link cut-0 is broken: the other end is gone"):
        train(settings, PlainDisplay(io.StringIO()))
