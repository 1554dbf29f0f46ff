"""Programs that try to get the reward without solving the task. They must fail with all kinds of tests."""

from __future__ import annotations

from typing import Any

import pytest
from answered import answered

from afm.rewards.code_tests import CodeTests

pytestmark = pytest.mark.sandbox

SECRET = "quokka-4711-zebra"
CHECKER = f"import sys\nprint(int(open(sys.argv[3]).read().strip() == {SECRET!r}))"
KINDS: dict[str, Any] = {
    "stdin": {"stdin": ["a\n", "b\n"], "expected_output": [SECRET, SECRET]},
    "calls": {"fn_name": "f", "inputs": [["a"], ["b"]], "outputs": [SECRET, SECRET]},
    "asserts": {"test_list": [f"assert f('a') == {SECRET!r}", f"assert f('b') == {SECRET!r}"]},
    "method": {"functional": f"result = Solution().f('a')\nassert result == {SECRET!r}"},
    "string method": {"test_list": [f"assert f('a').startswith({SECRET!r})"]},
    "method's method": {"test_list": [f"assert Solution().f('a').split().count({SECRET!r}) == 1"]},
    "result's method": {"test_list": [f"result = f('a')\nassert result.count({SECRET!r}) == 1"]},
    "humaneval": {
        "entry_point": "f",
        "test": f"def check(candidate):\n    assert candidate('a') == {SECRET!r}",
    },
    "checker": {"inputs": ["a"], "outputs": [SECRET], "checker": CHECKER},
}

LOOK_EVERYWHERE = """
import gc, os, re, sys
PATTERN = re.compile('quok' + 'ka-[0-9]+-zebra')
def look():
    places = [repr(os.environ), repr(sys.argv)]
    for folder in ('/tmp', '/dev', '/dev/fd', '/proc/self/fd', '/proc/self', '/run', '.'):
        try:
            places += [open(os.path.join(folder, name), 'rb').read(1 << 22).decode('latin-1')
                       for name in os.listdir(folder) if name not in ('zero', 'random', 'urandom')]
        except Exception:
            pass
    for path in ('/dev/stdin', '/tmp/main.py', '/proc/self/environ', '/proc/1/environ', '/proc/1/cmdline'):
        try:
            places.append(open(path, 'rb').read(1 << 22).decode('latin-1'))
        except Exception:
            pass
    for fd in range(64):
        for how in (lambda: os.pread(fd, 1 << 22, 0), lambda: (os.set_blocking(fd, False), os.read(fd, 1 << 20))[1]):
            try:
                places.append(how().decode('latin-1'))
            except Exception:
                pass
    frame = sys._getframe()
    while frame is not None:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            try:
                places.append(repr(value)[:1 << 20])
            except Exception:
                pass
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, (dict, list, tuple, set)):
            try:
                places += [text for text in (thing.values() if isinstance(thing, dict) else thing)
                           if isinstance(text, (str, bytes))]
            except Exception:
                pass
    places = [place if isinstance(place, str) else place.decode('latin-1') for place in places]
    for place in places:
        found = PATTERN.search(place)
        if found:
            return found[0]
    return 'nothing'
def f(x):
    return look()
class Solution:
    f = staticmethod(f)
if __name__ == '__main__':
    print(look())
"""

DEFINE = "\ndef f(x): return attack(x)\nclass Solution:\n    def f(self, x): return attack(x)\nif __name__ == '__main__':\n    print(attack(input()))\n"
ANYTHING = """
class Anything(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __str__(self): return self
    def __repr__(self): return self
    def __bool__(self): return True
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
"""
FORGE = """
import json, os
def attack(x):
    frames = [{"case": n, "end": "ok", "status": 0, "out": "?", "values": [{"value": True}]} for n in (0, 1)]
    frames += [{"checks": ["", ""], "wanted": [], "trouble": ""}, {"checks": [], "wanted": [], "trouble": ""}]
    for fd in range(64):
        for frame in frames:
            try:
                os.set_blocking(fd, False)
                os.write(fd, (json.dumps(frame) + "\\n").encode())
            except OSError:
                pass
    os._exit(0)
"""
STOP = "stop the harness"  # costs the run's whole time
ATTACKS = {
    "look everywhere": LOOK_EVERYWHERE,
    "equals everything": ANYTHING + "def attack(x): return Anything()",
    "methods that agree": "class Agrees:\n    def startswith(self, *a): return True\n    def split(self): return self\n"
    "    def count(self, *a): return 1\ndef attack(x): return Agrees()",
    "a class that equals everything": ANYTHING.replace("(str)", "") + "def attack(x): return Anything()",
    "an object that is always equal": "class Same:\n    def __eq__(self, other): return True\n"
    "def attack(x): return Same()",
    "exit in the function": "import sys\ndef attack(x): sys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "exit on import": "raise SystemExit(0)",
    "raise what tests raise": "def attack(x): raise AssertionError",
    "no assertion errors": "import builtins\nbuiltins.AssertionError = ValueError\ndef attack(x): return x",
    "patched comparison": "import builtins, operator, json\nbuiltins.all = builtins.any = lambda *a: True\n"
    "operator.eq = lambda a, b: True\njson.dumps = lambda *a, **k: '[{\"value\": true}]'\ndef attack(x): return x",
    "forged results": FORGE,
    "kill the harness": "import os, signal\ndef attack(x):\n    os.kill(os.getppid(), 9)\n    return x",
    "kill everybody": "import os, signal\ndef attack(x):\n    os.kill(-1, 9)\n    return x",
    STOP: "import os, signal\ndef attack(x):\n    os.kill(os.getppid(), 19)\n    return x",
    "fork bomb": "import os\ndef attack(x):\n    while True:\n        try: os.fork()\n        except OSError: return x",
    "fill the disk": "def attack(x):\n    try:\n        with open('/tmp/x', 'wb') as file:\n"
    "            while True: file.write(b'0' * 65536)\n    except OSError: return x",
    "poisoned modules": "import os\ndef attack(x):\n    for name in ('json', 'ast', 'random', 're', 'numpy'):\n"
    "        open(f'/tmp/{name}.py', 'w').write('raise SystemExit(0)')\n    return x",
    "a thread that stays": "import threading, os\nthreading.Thread(target=lambda: os._exit(0)).start()\n"
    "def attack(x): return x",
    "print tests": "def attack(x): return 'OK passed True 1'\nprint('1')",
    "checks of its own": "def check(*a): pass\ndef assertEqual(*a): pass\ndef attack(x): return True",
    "a hole": "class _Hole: pass\ndef attack(x): return _Hole()",
    "endless data": "def attack(x):\n    while True: yield x",
    "data about data": "import os, json\ndef attack(x):\n    os.write(3, json.dumps([{'failed': ''}]).encode())\n    os._exit(0)",
    "objects as data": 'import os, json\ndef attack(x):\n    os.write(3, b\'[{"value": {"iterator": []}, "object": "x"}]\')\n    os._exit(0)',
}


@pytest.mark.parametrize(
    "attack", [pytest.param(STOP, marks=pytest.mark.slow), *(attack for attack in ATTACKS if attack != STOP)]
)
async def test_no_attack_pays(attack: str, training: CodeTests) -> None:
    body = ATTACKS[attack]
    program = body + DEFINE if "def attack" in body else body
    assert SECRET not in program
    for kind in ("stdin",) if attack == STOP else KINDS:
        part = await training.judge(answered("code", "lcbv5", program, KINDS[kind]))
        assert part.score == 0.0, (kind, part.evidence)


@pytest.mark.parametrize("kind", KINDS)
async def test_and_who_knows_the_answer_passes(kind: str, training: CodeTests) -> None:
    """Without this, the test above would prove nothing."""
    program = f"def attack(x): return {SECRET!r}{DEFINE}"
    part = await training.judge(answered("code", "lcbv5", program, KINDS[kind]))
    assert part.score == 1.0, part.evidence


async def test_the_look_around_finds_what_is_there(training: CodeTests) -> None:
    """The search of the first attack works: it finds a secret in its own input."""
    truth = {"stdin": [SECRET], "expected_output": [SECRET]}
    part = await training.judge(answered("code", "lcbv5", LOOK_EVERYWHERE, truth))
    assert part.score == 1.0, part.evidence
