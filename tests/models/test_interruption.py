"""Killed at any point, or two at once: the cache holds whole models and no litter."""

import signal
import subprocess
import sys

import pytest

# Modes: "half" stops in the middle of the build until stdin closes; "die N" kills itself instead
# of the N-th rename.
CHILD = """
import os, pathlib, signal, sys
from oasiskv.models.cache import ensure_folder

mode, count, recipe = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rename, renames = pathlib.Path.rename, 0

def dying_rename(self, target):
    global renames
    renames += 1
    if mode == "die" and renames == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)

def say(word):
    print(word, flush=True)

def build(folder, scratch):
    (folder / "config.json").write_text("{}")
    (scratch / "download").write_text("x")
    if mode == "half":
        say("half")
        sys.stdin.read()
    (folder / "weights").write_text(str(recipe))
    say("built")

pathlib.Path.rename = dying_rename
ensure_folder("tiny", recipe, build, need_bytes=0, on_wait=lambda: say("waiting"))
say("done")
"""


@pytest.fixture
def start(home):
    children = []

    def run(mode, count=0, recipe=1):
        command = [sys.executable, "-c", CHILD, mode, str(count), str(recipe)]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield run
    for child in children:
        child.kill()
        child.communicate()


def names(root):
    return sorted(path.name for path in root.iterdir())


def assert_whole(home, recipe=1):
    assert names(home) == [".lock", "tiny"]
    assert names(home / "tiny") == ["config.json", "oasiskv.json", "weights"]
    assert (home / "tiny" / "weights").read_text() == str(recipe)


def test_kill_in_the_middle_then_run_again(home, start):
    child = start("half")
    assert child.stdout.readline() == "half\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    litter = [name for name in names(home) if name.startswith(".work-")]
    assert len(litter) == 1
    assert "tiny" not in names(home)

    out, _ = start("plain").communicate()
    assert out == "built\ndone\n"
    assert_whole(home)


def test_ctrl_c_in_the_middle_leaves_nothing(home, start):
    child = start("half")
    assert child.stdout.readline() == "half\n"
    child.send_signal(signal.SIGINT)
    child.wait()
    assert names(home) == [".lock"]


@pytest.mark.parametrize("count", [1, 2])
def test_kill_while_a_newer_conversion_replaces_an_old_one(home, start, count):
    start("plain", recipe=1).communicate()
    child = start("die", count, recipe=2)
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    start("plain", recipe=2).communicate()
    assert_whole(home, recipe=2)


def test_two_at_once_build_once(home, start):
    first = start("half")
    assert first.stdout.readline() == "half\n"
    second = start("plain")
    assert second.stdout.readline() == "waiting\n"
    assert first.communicate()[0] == "built\ndone\n"
    assert second.communicate()[0] == "done\n"
    assert_whole(home)


def test_the_one_that_waited_builds_when_the_first_is_killed(home, start):
    first = start("half")
    assert first.stdout.readline() == "half\n"
    second = start("plain")
    assert second.stdout.readline() == "waiting\n"
    first.kill()
    assert second.communicate()[0] == "built\ndone\n"
    assert_whole(home)
