"""Programs in which nothing is wrong must pass, without a word on stderr."""

from faults.blocks import good
from faults.fault import RUN

ALL = (1, 2, 3, 4)

FAULTS = (
    good("a training", "train()", ranks=ALL, by_all=("finished",), quick=(2, RUN)),
    good(
        "two threads with a pipeline each",
        """
comms, seen = [comm.Dup(), comm.Dup()], []
def work(own):
    try:
        with mpipipe.Pipeline([nn.Stage([nn.Linear(64, 64)], first=rank)], schedule, own, loss=loss) as pipeline:
            for _ in range(5): pipeline.step(inputs, targets)
    except BaseException as error:
        seen.append(error)
threads = [threading.Thread(target=work, args=(own,)) for own in comms]
for each in threads: each.start()
for each in threads: each.join()
if seen: raise seen[0]
print("finished")
""",
        by_all=("finished",),
        ranks=(1, 2, 4),
    ),
    good("a pipeline that is never closed", "pipeline = build()\npipeline.step(inputs, targets)", ranks=ALL),
    good("ranks that end one after another", "train()\ntime.sleep(rank)\nsys.exit(0)"),
)  # fmt: skip
