"""``oasiskv top``: once, again and again, and what it does when a server comes and goes."""

import io
import os
import pty
import signal
import subprocess
import sys
from itertools import count

import pytest
from rich.console import Console

from oasiskv import cli
from oasiskv.top.command import Watch
from top.server import BODY, VLLM, giving, grown, serving


def top(monkeypatch, *arguments):
    """Run the command in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["oasiskv", "top", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


def shown(watch):
    out = io.StringIO()
    Console(file=out, width=100).print(watch.look())
    return " ".join(out.getvalue().split())


def test_once(monkeypatch, capsys):
    with serving(giving(BODY)) as address:
        assert top(monkeypatch, address, "--once") == 0
    out = capsys.readouterr().out
    assert "95.0 %" in out
    assert "tiny" in out


@pytest.mark.parametrize(
    ("body", "words"),
    [("<html></html>", "is no vLLM server"), (VLLM, "is vLLM without OasisKV")],
)
def test_once_of_another_server_is_one_line(monkeypatch, capsys, body, words):
    with serving(giving(body)) as address:
        assert top(monkeypatch, address, "--once") == 2
    out, err = capsys.readouterr()
    assert not out
    assert words in err
    assert len(err.splitlines()) == 1


def test_bad_usage(monkeypatch, capsys):
    assert top(monkeypatch, "file:///etc/passwd", "--once") == 2
    assert "no address" in capsys.readouterr().err
    assert top(monkeypatch, "localhost:1") == 2
    assert "--once" in capsys.readouterr().err


def test_a_server_that_goes_and_comes_back():
    answers = [giving("", 503), giving(BODY), giving(grown(BODY, 2)), giving("", 503), giving(BODY)]
    answers += [giving(grown(BODY, 2))]
    turn = count()
    with serving(lambda handler: answers[next(turn)](handler)) as address:
        watch = Watch(address)
        assert "status 503; asking again" in shown(watch)
        assert "95.0 %" in shown(watch)
        twice = shown(watch)
        assert twice.count("95.0 %") == 2
        assert "started again" not in twice
        last = shown(watch)
        assert "This is what it said last" in last
        assert last.count("95.0 %") == 1
        # Counters went down: what it says is compared with nothing.
        anew = shown(watch)
        assert anew.count("95.0 %") == 1
        assert "The server has started again" in anew
        assert shown(watch).count("95.0 %") == 2


def test_ctrl_c_ends_it_and_leaves_the_terminal_as_it_was():
    with serving(giving(BODY)) as address:
        ours, theirs = pty.openpty()
        run = f"run_top({address!r}, 2.0, False, Console())"
        # Not the whole command line, which takes a while to import.
        code = f"from oasiskv.top.command import run_top\nfrom rich.console import Console\n{run}"
        command = [sys.executable, "-c", code]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        seen = b""
        while b"prediction agreement" not in seen:
            seen += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        try:
            while part := os.read(ours, 4096):
                seen += part
        except OSError:
            # How a terminal says that nobody has it open any more.
            pass
        os.close(ours)
        assert process.wait(timeout=30) == 0
    assert b"Traceback" not in seen
    # The other screen, and back again; the cursor shown.
    assert seen.index(b"\x1b[?1049h") < seen.index(b"\x1b[?1049l")
    assert b"\x1b[?25h" in seen
