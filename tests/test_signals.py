"""Signals become requests, handlers come back, and a person in a hurry gets out."""

import os
import signal
import threading

import pytest

from rljax.signals import StopRequest, stop_requests


def handlers() -> tuple[object, object]:
    return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_becomes_a_request(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = handlers()
    with stop_requests() as stop:
        assert not stop()
        signal.raise_signal(number)
        assert stop()
        assert stop.signal is number
    assert handlers() == before
    assert f"{number.name}: saving and stopping; the same command continues" in capfd.readouterr().err


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    before = handlers()
    with stop_requests():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert handlers() == before


def test_a_second_sigterm_does_not() -> None:
    with stop_requests() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop()


def test_handlers_come_back_after_an_error() -> None:
    before = handlers()
    with pytest.raises(RuntimeError, match="broken"), stop_requests():
        raise RuntimeError("broken")
    assert handlers() == before


def test_a_closed_terminal_does_not_keep_it_from_stopping() -> None:
    kept = os.dup(2)
    os.close(2)
    try:
        with stop_requests() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop()
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_outside_the_main_thread_no_request_is_ever_made() -> None:
    before = handlers()
    found: list[StopRequest] = []

    def run() -> None:
        with stop_requests() as stop:
            found.append(stop)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not found[0]()
    assert handlers() == before
