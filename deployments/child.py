"""One child process that ends when we are told to, and when we die without being told."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Child:
    """Context manager: the process runs in a session of its own, and SIGINT, SIGTERM and SIGHUP end it with SIGTERM.

    Our handlers stand before it starts, so that no signal is lost in between. On Linux the kernel sends it SIGTERM when
    we are killed. Use it in the main thread.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._told_to_stop = False
        self._started: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process; only inside the context."""
        assert self._started is not None
        return self._started

    def stop(self) -> None:
        """Ask it to end. SIGTERM whatever we got: a background `serve run` ignores SIGINT."""
        self._told_to_stop = True
        if self._started is not None:
            self._started.send_signal(signal.SIGTERM)

    def __enter__(self) -> "Child":
        # A hang-up that is ignored (nohup) stays ignored.
        taken = [
            each for each in _SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN
        ]
        self._previous = {each: signal.signal(each, self._on_signal) for each in taken}
        try:
            self._started = subprocess.Popen(
                self._command, env=self._environment, start_new_session=True, preexec_fn=_end_with_parent()
            )
        except BaseException:
            self._restore()
            raise
        if self._told_to_stop:
            self.stop()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if raised is not None and self.process.poll() is None:
            self.stop()
            self.process.wait()
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop()

    def _restore(self) -> None:
        for number, before in self._previous.items():
            signal.signal(number, before)


def _end_with_parent() -> Callable[[], None] | None:
    """What the child runs between fork and exec; everything it needs is looked up here, before the fork."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def ask_the_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask_the_kernel
