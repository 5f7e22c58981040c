"""Programs in which nothing is wrong must pass, without a word on stderr."""

from __future__ import annotations

from faults.blocks import RUN, good, on

ALL = (1, 2, 3, 4)

FAULTS = (
    good("a training", "train()", ranks=ALL, by_all=("finished",), quick=(4, RUN)),
    good(
        "two pipelines in turn",
        """
with build() as a, build() as b:
    for _ in range(4):
        a.step(inputs, targets)
        b.evaluate(inputs, targets)
        b.step(inputs, targets)
print("finished")
""",
        by_all=("finished",),
        ranks=ALL,
    ),
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
    good(
        "messages of the user with the same tags",
        """
box, requests = np.zeros(20000), []
peer = (rank + 1) % size
for tag in range(20):
    requests.append(comm.Isend(np.full(20000, tag + 0.5), peer, tag))
train()
for tag in range(20):
    comm.Recv(box, (rank - 1) % size, tag)
    assert (box == tag + 0.5).all()
for each in requests: each.Wait()
""",
        ranks=(2, 4),
        by_all=("finished",),
    ),
    good(
        "a rank that is 4 s late for everything",
        on("last", "time.sleep(4)")
        + """
with mpipipe.Mesh(comm, pipe=size) as mesh: pass
ring()
optim.clip_by_global_norm(stages, 1.0, comm)
train()
""",
    ),
    good("a pipeline that is never closed", "pipeline = build()\npipeline.step(inputs, targets)", ranks=ALL),
    good(
        "ranks outside a communicator",
        """
part = comm.Split(0 if rank < 2 else 1, rank)
with mpipipe.Pipeline(stages, schedules.gpipe(part.size, 2), part, loss=loss) as pipeline:
    x = np.ones((1024, 64), np.float32)
    pipeline.step(x if part.rank == 0 else None, x if part.rank == part.size - 1 else None)
""",
        ranks=(3, 4),
    ),
    good("ranks that end one after another", "train()\ntime.sleep(rank)\nsys.exit(0)"),
    good(
        "refusals that the user catches",
        """
for _ in range(5):
    try:
        mpipipe.Pipeline(stages * 2 if rank == last else stages, schedule, comm, loss=loss)
    except errors.MpipipeError:
        pass
train()
""",
        by_all=("finished",),
        ranks=(1, 2, 4),
    ),
)
