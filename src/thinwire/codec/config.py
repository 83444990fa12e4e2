"""`[codec]`: how tensors become bytes, per direction and per cut."""

import importlib
import re
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.typed import option

PLAIN = ("fp32", "bf16", *(f"int{bits}" for bits in range(2, 9)))  # known without torch
_LEG = re.compile(r"(forward|backward)\s*=\s*((?:[^\s()+]|\([^()]*\)|\s*+\+\s*+)+)(?:\s+|$)")
_CUT = re.compile(rf"\s*(\d{{1,9}})\s*:\s*((?:{_LEG.pattern})+)")


class PluginError(ConfigError):
    """A module of `codec.plugins` cannot be imported here."""


@dataclass(frozen=True)
class CodecConfig:
    """`[codec]`: how tensors become bytes at the cut, chosen per direction."""

    forward: str = option(
        "bf16",
        "codec of activations: fp32, bf16, int2..int8, step(bits), topk(share), randk(share); "
        "append +ef, +ef-mixed, +ef21 or +aqsgd, and +zstd",
    )
    backward: str = option(
        "bf16", "codec of gradients: the same, and topk(shared), with the positions of forward"
    )
    rows: str = option(
        "int4", "boundary.anchor = embedding: codec of the embedding's rows and of their gradients"
    )
    cuts: list[str] = option(  # noqa: RUF009 -- option makes a fresh list each time
        [], 'exceptions for single cuts, counted from 0, such as "2: forward=int8 backward=bf16"'
    )
    plugins: list[str] = option(  # noqa: RUF009 -- as above
        [], "Python modules that register your own codecs; every process imports them"
    )
    memory_mb: int = option(
        1024,
        "+aqsgd: memory in MB for stored examples, per cut, direction and side",
        least=1,
        scope="machine",
    )

    def names(self, cut: int) -> tuple[str, str]:
        """The codecs of one cut, forward and backward."""
        chosen = self._overrides().get(cut, {})
        return chosen.get("forward", self.forward), chosen.get("backward", self.backward)

    def check(self, cuts: int) -> None:
        """Import the plugins, then refuse codecs that do not exist, of cuts that do not exist."""
        for name in self.plugins:
            try:
                importlib.import_module(name)
            except Exception as error:  # a plugin may stumble over anything
                raise PluginError(
                    f'codec.plugins: importing "{name}" failed: {type(error).__name__}: {error}. '
                    "Every stage imports it by this name: install it, or set PYTHONPATH to its "
                    "folder"
                ) from error
        if {self.forward, self.backward, self.rows} <= set(PLAIN) and not self.cuts:
            return  # known without torch
        from thinwire.codec.parse import build_codecs, parse_codec

        rows = parse_codec(self.rows, "codec.rows")
        if rows.remembers or rows.size_varies:
            raise ConfigError(
                f'codec.rows = "{self.rows}": other rows cross in every step, so their codec can '
                f"neither remember nor vary in size; use one of {', '.join(PLAIN)}"
            )

        build_codecs(self.forward, self.backward)
        for place, cut in enumerate(self._overrides(cuts)):
            build_codecs(*self.names(cut), where=f"codec.cuts[{place}]")

    def _overrides(self, cuts: int | None = None) -> dict[int, dict[str, str]]:
        """The names by leg of each cut that is listed; one that is not below `cuts` is refused."""
        found: dict[int, dict[str, str]] = {}
        for place, text in enumerate(self.cuts):
            where = f'codec.cuts[{place}] = "{text}"'
            matched = _CUT.fullmatch(text)
            legs = _LEG.findall(matched[2]) if matched else []
            if matched is None or len(dict(legs)) < len(legs):
                raise ConfigError(f'{where} must look like "0: forward=fp32 backward=bf16"')
            cut = int(matched[1])
            if cut in found:
                raise ConfigError(f"{where}: cut {cut} is listed twice")
            if cuts is not None and cut >= cuts:
                there = f"the cuts here are 0..{cuts - 1}" if cuts else "a single stage has no cut"
                raise ConfigError(f"{where}: {there}")
            found[cut] = dict(legs)
        return found
