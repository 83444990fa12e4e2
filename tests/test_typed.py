"""Plain data into dataclasses: everything that does not fit is refused, with its place."""

from dataclasses import asdict, dataclass, field

import pytest

from thinwire.errors import ConfigError
from thinwire.typed import from_plain, option, parse_literal


@dataclass(frozen=True)
class Engine:
    power: int = option(10, "horses")
    fuel: str = option("coal", "what it burns", ("coal", "wood"))
    gears: list[int] = option([1, 2], "teeth of each gear")  # noqa: RUF009
    label: str | None = option(None, "brass plate")


@dataclass(frozen=True)
class Train:
    speed: float = option(1.5, "metres per second")
    whistle: bool = option(True, "on curves")
    name: str = option("puff", "painted on the side")
    engine: Engine = field(default_factory=Engine)


@dataclass(frozen=True)
class Freight:
    cars: list[str] = option([], "what each carries")  # noqa: RUF009


VALUES = {"speed": 2.5, "whistle": False, "name": "huff",
          "engine": {"power": 3, "fuel": "wood", "gears": [4, 5, 6], "label": "no. 7"}}  # fmt: skip


def test_values_fill_the_dataclass_and_come_back_and_what_is_left_out_keeps_its_default():
    train = from_plain(Train, VALUES)
    assert train == Train(2.5, False, "huff", Engine(3, "wood", [4, 5, 6], "no. 7"))
    assert asdict(train) == VALUES
    assert from_plain(Train, asdict(train)) == train
    assert from_plain(Train, {}) == Train()
    assert from_plain(Train, {"engine": {"power": 3}}).engine == Engine(power=3)
    assert from_plain(Engine, {"label": None}).label is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engne": {}}, 'unknown section "engne"; did you mean "engine"'),
        ({"engine": {"powr": 1}}, 'unknown key "engine.powr"; did you mean "power"'),
        ({"engine": 3}, "engine must be a table of keys, got 3"),
        ({"engine": {"power": True}}, "engine.power must be an integer, got True"),
        ({"speed": True}, "speed must be a number, got True"),
        ({"whistle": 1}, "whistle must be true or false, got 1"),
        ({"speed": float("nan")}, "speed = nan must be a finite number"),
        ({"speed": 10**400}, r"speed must be a number, got 10+\.\.\. \(401 characters\)"),
        ({"engine": {"gears": [4, "5"]}}, r"engine.gears\[1\] must be an integer, got '5'"),
        ({"engine": {"fuel": "woof"}}, "engine.fuel = 'woof' .*; did you mean \"wood\""),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        from_plain(Train, values)


@pytest.mark.parametrize(
    ("cls", "key", "text", "value"),
    [(Engine, "power", "12", 12), (Train, "speed", "3e-4", 3e-4), (Train, "whistle", "true", True),
     (Train, "name", "a,b=c", "a,b=c"), (Engine, "gears", "1,2,3", [1, 2, 3]),
     (Engine, "gears", "[1, 2, 3]", [1, 2, 3]), (Engine, "gears", "", []),
     (Freight, "cars", "a=f(1,2), b", ["a=f(1,2)", "b"]),
     (Freight, "cars", "['a, b', \"c\"]", ["a, b", "c"])],
)  # fmt: skip
def test_text_is_read_as_the_type_of_its_key(cls, key, text, value):
    read = parse_literal(text, cls, key, f"here.{key}")
    assert read == value and type(read) is type(value)
    assert getattr(from_plain(cls, {key: read}), key) == value


@pytest.mark.parametrize(("cls", "key", "text", "message"), [
    (Engine, "power", "1.5", "here.power: cannot read '1.5' as an integer"),
    (Train, "speed", "fast", "here.speed: cannot read 'fast' as a number"),
    (Train, "whistle", "yes", "here.whistle: cannot read 'yes' as true or false"),
    (Freight, "cars", "[a]", "here.cars: cannot read '.a.' as a list of strings"),
    (Engine, "gers", "1", 'unknown key "here.gers"; did you mean "gears"'),
])  # fmt: skip
def test_text_of_another_type_is_refused(cls, key, text, message):
    with pytest.raises(ConfigError, match=message):
        parse_literal(text, cls, key, f"here.{key}")
