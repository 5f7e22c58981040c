"""Messages that are under way when a rank fails: nothing writes to freed memory, and MPI_Finalize survives."""

from __future__ import annotations

from faults.blocks import NONZERO, OPENING, PLAIN, Fault
from faults.fault import ANY

SETUP = """
import gc
class Slow:
    step = calls = 0
    def forward(self, x):
        Slow.calls += 1
        act()
        return x * 1.0, None
    def backward(self, dy, saved):
        return dy * 1.0
stages, columns = [Slow()], COLUMNS
x = np.full((4 * 64, columns), 7.0)
inputs, targets = x if rank == 0 else None, x if rank == last else None
loss = lambda y, t: (1.0, np.zeros_like(y))
"""
# rank 1 waits for micro-batch 1 when it hears of the failure of rank 2; the message comes later
LATE = """
def act():
    if Slow.step == 1:
        if rank == 0 and Slow.calls == 2: time.sleep(1.5)
        if rank == 2: fail()
pipeline = build()
pipeline.step(inputs, targets)
Slow.step, Slow.calls = 1, 0
try:
    pipeline.step(inputs, targets)
except errors.MpipipeError as error:
    del error
gc.collect()
mine = [np.zeros(64 * columns * 8 + 64, np.uint8) for _ in range(40)]
for each in mine: each.fill(0)
end = time.time() + 4
while time.time() < end:
    comm.Iprobe()
    time.sleep(0.001)
bad = sum(bool(each.any()) for each in mine)
print("CORRUPTED" if bad else "intact", flush=True)
time.sleep(2)
os._exit(0)
"""
UNDER_WAY = """
def act():
    if rank == 2 and Slow.calls == 11: fail()
pipeline = build()
for _ in range(3): pipeline.step(inputs, targets)
"""


def _script(body, columns) -> str:
    return OPENING + SETUP.replace("COLUMNS", str(columns)) + body


FAULTS = (
    Fault(
        "a late message",
        "memory",
        _script(LATE, 4096),
        ranks=(3,),
        modes=(PLAIN,),
        plain_code=ANY,
        prints=("intact",),
        never=("CORRUPTED",),
        clean=False,
        limit=30,
    ),
    Fault(
        "messages under way at the end",
        "memory",
        _script(UNDER_WAY, 4096),
        ranks=(4,),
        modes=(PLAIN,),
        code=NONZERO,
        says=("wet paint",),
        never=("ignal 11", "ignal: 11", "egmentation"),
        clean=False,
        repeat=12,
    ),
)
