"""Chat templates at work, in a process of their own with bounded time and memory.

Jinja's sandbox keeps a template from everything but text, not from endless text. So one process
renders for this one: it reads a request on a line, a JSON object, and answers on a line. A template
that takes too much ends there, and most often that process with it. It is this file, run by its
path: it imports nothing else of this package, so that it starts in a tenth of a second.
"""

import atexit
import contextlib
import functools
import json
import resource
import signal
import subprocess
import sys
import threading
from datetime import date
from types import FrameType
from typing import Any

MOST_SECONDS = 10  # of computing, for one conversation
MOST_BYTES = 1 << 30  # of memory, with Python's own
MOST_TEXT = 16 << 20  # characters
TOO_MUCH = f"it takes more than {MOST_SECONDS} s, {MOST_BYTES >> 30} GiB or {MOST_TEXT} characters"
# Two of the characters that Unicode reserves for use inside of programs.
BEGIN, END = "\ufdd1", "\ufdd2"
# A corpus must not depend on the day on which it is prepared.
_TODAY = date(2024, 7, 26)
_LOOK_SECONDS = 0.05  # of computing, between two looks at the memory


class Renderer:
    """The process that renders, as it is seen from here: started when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, source: str, values: dict[str, Any]) -> dict[str, str]:
        """The `text` of a template with these values, or the `error` for which there is none."""
        request = json.dumps({"source": source, "values": values}, default=str).encode()
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    # -P: a file in the current folder must not pass for a module
                    [sys.executable, "-P", __file__, str(MOST_SECONDS)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the process that asks
                )
            asked, answers = self._process.stdin, self._process.stdout
            assert asked is not None and answers is not None
            answer = {"error": TOO_MUCH}
            try:
                asked.write(request + b"\n")
                asked.flush()
                answer = json.loads(answers.readline())
            except (OSError, ValueError):
                pass  # it has ended
            finally:  # also by Ctrl-C: this answer must not be taken for the next one
                if answer.get("error") == TOO_MUCH:
                    self.close()  # what was taken may not be given back
            return answer

    def close(self) -> None:
        """End the process; another one starts when it is needed."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


RENDERER = Renderer()
atexit.register(RENDERER.close)


def _limit_memory() -> None:
    """End a template that takes too much memory: by a limit, or by looking while it computes."""

    def look(number: int, frame: FrameType | None) -> None:
        # On Linux this peak would begin with that of whoever started the process.
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MOST_BYTES:
            raise MemoryError

    if sys.platform == "darwin":  # which does not know the limit
        signal.signal(signal.SIGVTALRM, look)
        signal.setitimer(signal.ITIMER_VIRTUAL, _LOOK_SECONDS, _LOOK_SECONDS)
    else:
        with contextlib.suppress(OSError, ValueError):  # there is a lower one
            resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(seconds: int) -> None:
    """Answer requests until the input ends; the system ends a process that computes too long."""
    _limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whoever started us may have ignored it
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        request = json.loads(line)
        answer = _answer(request["source"], request["values"])
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(source: str, values: dict[str, Any]) -> dict[str, str]:
    try:
        text = str(_compiled(source).render(**values))
        return {"text": text} if len(text) <= MOST_TEXT else {"error": TOO_MUCH}
    except MemoryError:
        return {"error": TOO_MUCH}
    except Exception as error:  # a template may stumble over anything
        return {"error": str(error)}


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    return _environment().from_string(source)


@functools.cache
def _environment() -> Any:
    """Jinja2 as chat templates expect it, which is as the `transformers` library sets it up."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """Puts marks around {% generation %} ... {% endgeneration %}."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("marked")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def marked(self, caller: Any) -> str:
            return BEGIN + caller() + END

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None, **_: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment


if __name__ == "__main__":
    main(int(sys.argv[1]))
