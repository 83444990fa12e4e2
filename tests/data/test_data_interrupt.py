import subprocess
import sys
import threading

import pytest

from thinwire.data.tokenizer import Abandoned, interruptible


def test_results_and_errors_come_back():
    assert interruptible(sum, [1, 2]) == 3
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda items: 1 // 0)


def test_work_is_not_in_the_thread_that_hears_signals():
    assert interruptible(lambda items: threading.get_ident()) != threading.get_ident()


@pytest.mark.parametrize(
    "send",
    ["os.kill(os.getpid(), signal.SIGINT)", "signal.pthread_kill(me, signal.SIGINT)"],
    ids=["to the process", "to the thread that computes"],
)
def test_what_never_ends_can_be_left(send):
    code = (
        "import os, signal, threading; from thinwire.data.tokenizer import interruptible\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def work(items):\n"
        f"    me = threading.get_ident(); {send}; threading.Event().wait()\n"
        "try: interruptible(work)\n"
        "except KeyboardInterrupt: print('left')\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (told.stdout, told.returncode) == ("left\n", 0)


def test_what_nobody_waits_for_gets_no_more_input():
    kept = []

    def work(items):
        kept.append(items)
        return next(items)

    assert interruptible(work, range(10)) == 0
    with pytest.raises(Abandoned):
        next(kept[0])
