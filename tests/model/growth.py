"""How much memory a process needs for something.

Measured is RssAnon of /proc/<pid>/status: what the process has allocated. VmRSS and its peak VmHWM also count the pages of
memory-mapped safetensors files, which belong to the page cache and go when something else needs the room. RssAnon has no
peak of its own, so another process reads it every half millisecond.
"""

import os
import subprocess
import sys

WATCH = """
import select, sys
def read():
    with open(f"/proc/{sys.argv[1]}/status") as file:
        return int(file.read().split("RssAnon:")[1].split()[0])
start = peak = read()
print(start, flush=True)
while not select.select([sys.stdin], [], [], 0.0005)[0]:
    peak = max(peak, read())
print(max(peak, read()) - start)
"""


class Growth:
    """MB that this process had at most more than at the start of the block."""

    def __enter__(self) -> "Growth":
        self._watch = subprocess.Popen(
            [sys.executable, "-S", "-c", WATCH, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._watch.stdout.readline()
        return self

    def __exit__(self, *_) -> None:
        self.mb = int(self._watch.communicate("\n")[0]) * 1024 / 1e6
