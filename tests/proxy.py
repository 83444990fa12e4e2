"""A TCP path between a dialer and a listener on this machine that can fail in several ways."""

import contextlib
import socket
import threading


class Proxy:
    """Forwards connections to `target`, until it is told to cut them, fall silent or refuse.

    `cuts` are counts of bytes, over all connections and both ways, at which the connection of the
    moment is cut. `tap` sees all bytes, and what it returns is passed on instead.
    """

    def __init__(self, target, cuts=None, tap=lambda data: data):
        host, port = target.rsplit(":", 1)
        self._target = host, int(port)
        self._front = socket.create_server(("127.0.0.1", 0))
        self._tap = tap
        self.address = "{}:{}".format(*self._front.getsockname())
        self.connections = 0
        self.carried = 0
        self.is_refusing = False
        self._cuts = sorted(cuts or [])
        self._open: list[tuple[socket.socket, socket.socket]] = []
        self._may_speak = threading.Event()
        self._may_speak.set()
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self, leave_listener=False):
        """Close all connections at the dialers' ends and, unless told otherwise, the listener's."""
        with self._lock:
            pairs, self._open = self._open, []
        for pair in pairs:
            for end in pair[: 1 if leave_listener else 2]:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def fall_silent(self):
        """Keep all connections open and move nothing, also on new ones."""
        self._may_speak.clear()

    def speak(self):
        """Move bytes again."""
        self._may_speak.set()

    def close(self):
        self.is_refusing = True
        self.speak()
        self._front.close()
        self.cut()

    def _serve(self):
        with contextlib.suppress(OSError):  # closed when the test ends
            while True:
                dialer, _ = self._front.accept()
                if self.is_refusing:
                    dialer.close()
                    continue
                pair = dialer, socket.create_connection(self._target)
                with self._lock:
                    self.connections += 1
                    self._open.append(pair)
                for source, target in (pair, pair[::-1]):
                    threading.Thread(
                        target=self._forward, args=(source, target, pair), daemon=True
                    ).start()

    def _forward(self, source, target, pair):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                self._may_speak.wait()
                target.sendall(self._tap(data))
                with self._lock:
                    self.carried += len(data)
                    is_due = bool(self._cuts) and self.carried >= self._cuts[0]
                    self._cuts = self._cuts[is_due:]
                if is_due:
                    self.cut()
        with self._lock:
            was_cut = pair not in self._open
        if not was_cut:  # one end hung up: so does the path
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
